"""One worker's queue of tasks for the passes of one context."""

from __future__ import annotations

import queue
import threading

from telegrad.autograd.engine.passes import Task


class Mailbox:
    """The tasks of one context. One thread at a time runs them; a thread that adds one to an idle mailbox starts."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards all fields below
        self._tasks: list[Task] = []
        self.busy = False  # a thread runs the tasks; may be read without the lock
        self._calls: queue.SimpleQueue[bool] | None = None  # see `call`

    def put(self, task: Task, here: bool) -> bool:
        """Add a task. Return True if the caller must start a thread for it, or with `here` run it itself."""
        with self._lock:
            self._tasks.append(task)
            if self.busy:
                return False
            self.busy = True
            if self._calls is None or here:
                return True
            self._calls.put(True)
            return False

    def take(self) -> list[Task]:
        """Remove and return all tasks. If there are none, the calling thread is no longer responsible."""
        with self._lock:
            tasks, self._tasks = self._tasks, []
            self.busy = bool(tasks)
            return tasks

    def put_back(self, tasks: list[Task]) -> None:
        """Put tasks that were taken and not done before those that were added since."""
        with self._lock:
            self._tasks[:0] = tasks

    def call(self, calls: queue.SimpleQueue[bool] | None) -> None:
        """From now on wake the thread that waits on `calls`, by True, to run tasks. None ends this."""
        with self._lock:
            self._calls = calls
