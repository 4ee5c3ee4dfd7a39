"""One worker's queue of tasks for the passes of one context, and its state in each pass."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence

from torch import Tensor

from telegrad._core.agent.agent import Agent
from telegrad.autograd.engine.captures import Capture
from telegrad.autograd.engine.engine import EngineRunner
from telegrad.autograd.engine.outbox import Outbox
from telegrad.autograd.engine.passes import Ledger, Participant, PassSpec, Task
from telegrad.autograd.engine.record import AutogradContext


class LocalPart:
    """This worker's part in one pass: its tasks and reports, its graph, and its outgoing gradients."""

    def __init__(
        self,
        agent: Agent,
        context: AutogradContext,
        spec: PassSpec,
        roots: Sequence[Tensor],
        short: bool,
        gathers: Callable[[Outbox], None],
        capture: Capture | None,
    ) -> None:
        """`short`: the part is expected to be short. `gathers` is for the outbox. Only the driver has a `capture`."""
        self.ledger = Ledger(spec, agent.name)
        self.outbox = Outbox(agent, context, self.ledger, short, gathers)
        runner = EngineRunner(context, spec, roots, self.outbox, agent.streams, capture)
        self.participant = Participant(self.ledger, runner)

    def __repr__(self) -> str:
        return f"<LocalPart: {self.participant}, {self.outbox}>"


class Mailbox:
    """The tasks of one context. One thread at a time runs them: the thread that adds a task to an idle mailbox starts.

    `parts` and `early` need no lock: each use is one atomic operation of a dict.
    """

    def __init__(self, context: AutogradContext) -> None:
        self.context = context
        self.parts: dict[PassSpec, LocalPart | None] = {}  # None: the pass has failed, and its messages are dropped
        self.early: dict[PassSpec, list[Task]] = {}  # tasks of passes whose roots are not available yet
        self._lock = threading.Lock()  # guards all fields below, except in `repr`, which only reads a length
        self._tasks: list[Task] = []
        self.busy = False  # a thread runs the tasks; may be read without the lock
        self._calls: queue.SimpleQueue[bool] | None = None  # see `call`

    def __repr__(self) -> str:
        state = "a thread is at it" if self.busy else "nobody is at it"
        parts = list(self.parts.copy().values())
        return f"<Mailbox of context {self.context.id}: {len(self._tasks)} tasks, {state}; {parts}>"

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

    def fail(self, spec: PassSpec) -> None:
        """Drop this worker's part in a failed pass, and all later messages for it."""
        self.parts[spec] = None
        self.early.pop(spec, None)
