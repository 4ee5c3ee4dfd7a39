"""The threads of a reactor. One thread leads and runs the loop; the others run long work or wait to lead."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from telegrad._core.reactor.scheduler import WorkQueue
from telegrad._core.threads import Thread, processor_time, program_has_ended

STANDBY = 16  # idle threads that are kept: creating one costs more than most calls

log = logging.getLogger("telegrad")


class ReactorThread:
    """The state of one thread. Only that thread writes it; it writes `since` = 0 and `counted` under the lock."""

    __slots__ = ("began", "counted", "since", "waited", "wakeup")

    def __init__(self) -> None:
        self.wakeup = threading.Lock()  # held while the thread waits for the lead; released to wake it
        self.wakeup.acquire()
        self.began = self.since = 0.0  # when its last work began, and when the work that it runs now began
        self.waited = 0.0  # when its current work first waited for something
        self.counted: WorkQueue | None = None  # the queue of the call that it runs


class LeaderThreads:
    """Passes the lead from thread to thread."""

    def __init__(
        self, lock: Any, entered: Callable[[], None], lead: Callable[[ReactorThread], None], ended: Callable[[], None]
    ) -> None:
        """`entered` is the first function called on each thread; a leading thread calls `lead`; the last thread calls
        `ended`.

        `lock` guards `leader`, `closed` and all fields below. It is not held during these calls.
        """
        self.lock = lock
        self.leader: ReactorThread | None = None  # a thread may check without the lock if it leads
        self.closed = False
        self._entered = entered
        self._lead = lead
        self._ended = ended
        self._standby: list[ReactorThread] = []
        self._threads: dict[ReactorThread, threading.Thread] = {}
        self._lacks_threads = False  # since the last one that could be started; the first failure is logged
        self.local = threading.local()

    def __len__(self) -> int:
        return len(self._threads)

    def start(self) -> None:
        with self.lock:
            leader = self.leader = ReactorThread()
        self._spawn(leader)

    def close(self, wake: Callable[[], None]) -> None:
        """End the threads; `wake` wakes the leader. A thread in user code ends after that code returns."""
        with self.lock:
            self.closed = True
            while self._standby:
                self._standby.pop().wakeup.release()
            threads = list(self._threads.values())
        wake()
        for thread in threads:
            if thread.is_alive() and thread is not threading.current_thread():  # an unstarted thread ends by itself
                thread.join(0.2)

    def here(self) -> ReactorThread | None:
        return getattr(self.local, "runner", None)

    def is_member(self) -> bool:
        return hasattr(self.local, "runner")

    def processor_time(self) -> float | None:
        """Return the processor time of the threads that run calls. Hold the lock, which keeps these threads alive."""
        return processor_time([thread for runner, thread in self._threads.items() if runner.counted is not None])

    def hand_over(self, runner: ReactorThread, since: float | None = None) -> None:
        """Pass the lead to another thread, if `runner` still leads (and still runs its work begun at `since`)."""
        with self.lock:
            if self.leader is not runner or self.closed or (since is not None and runner.since != since):
                return
            new = None
            if self._standby:
                self.leader = self._standby.pop()
                self.leader.wakeup.release()
            else:
                new = self.leader = ReactorThread()
        if new is None:
            return
        try:
            self._spawn(new)
            self._lacks_threads = False
        except (RuntimeError, MemoryError) as error:
            with self.lock:
                if self.leader is new:
                    self.leader = runner
            level = logging.DEBUG if program_has_ended() or self._lacks_threads else logging.WARNING
            self._lacks_threads = True
            log.log(level, "telegrad: %s; a busy thread remains the leader, and the timer tries again", error)

    def _spawn(self, runner: ReactorThread) -> None:
        thread = Thread(target=self._main, args=(runner,), name="telegrad-worker")
        with self.lock:
            self._threads[runner] = thread
        try:
            thread.start()
        except (RuntimeError, MemoryError):  # the process has no memory or no free thread
            with self.lock:
                del self._threads[runner]
            raise

    def _main(self, runner: ReactorThread) -> None:
        self.local.runner = runner
        try:
            self._entered()
            while not self.closed and (self.leader is runner or self._wait_for_lead(runner)):
                self._lead(runner)
        finally:
            with self.lock:
                del self._threads[runner]
                is_last = self.closed and not self._threads
            if is_last:
                self._ended()

    def _wait_for_lead(self, runner: ReactorThread) -> bool:
        """Wait for the lead; return False if the thread must end instead."""
        with self.lock:
            if self.leader is runner:
                return True
            if self.closed or len(self._standby) >= STANDBY:
                return False
            self._standby.append(runner)
        runner.wakeup.acquire()
        return not self.closed
