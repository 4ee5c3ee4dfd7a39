"""What one worker has to do for the passes of one context, and what it has for each: its part in that pass."""

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
    """This worker's part in one pass: what it has to do and to say, its graph, and the gradients that leave."""

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
        """`short`: it will not take long; `gathers` is for the outbox; `capture` is there on the driver alone."""
        self.ledger = Ledger(spec, agent.name)
        self.outbox = Outbox(agent, context, self.ledger, short, gathers)
        runner = EngineRunner(context, spec, roots, self.outbox, agent.streams, capture)
        self.participant = Participant(self.ledger, runner)

    def __repr__(self) -> str:
        return f"<LocalPart: {self.participant}, {self.outbox}>"


class Mailbox:
    """The tasks of one context, done by one thread at a time: whoever puts one in and finds nobody at it.

    `parts` and `early` need no lock: each use is one operation of a dict, and those are atomic.
    """

    def __init__(self, context: AutogradContext) -> None:
        self.context = context
        self.parts: dict[PassSpec, LocalPart | None] = {}  # None: the pass has failed, and what comes for it is dropped
        self.early: dict[PassSpec, list[Task]] = {}  # what came for passes whose roots are not there yet
        self._lock = threading.Lock()  # guards all below, but for `repr`, which only takes a length
        self._tasks: list[Task] = []
        self.busy = False  # a thread is at it; who only looks takes no lock
        self._calls: queue.SimpleQueue[bool] | None = None  # of a thread that is to be at it; see `call`

    def __repr__(self) -> str:
        state = "a thread is at it" if self.busy else "nobody is at it"
        parts = list(self.parts.copy().values())
        return f"<Mailbox of context {self.context.id}: {len(self._tasks)} tasks, {state}; {parts}>"

    def put(self, task: Task, here: bool) -> bool:
        """Add a task; whether the caller must see to it that somebody is at it. `here`: then it does so itself."""
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
        """What there is to do, for the thread that is at it; without any, it is at it no longer."""
        with self._lock:
            tasks, self._tasks = self._tasks, []
            self.busy = bool(tasks)
            return tasks

    def put_back(self, tasks: list[Task]) -> None:
        """Put tasks that were taken and not done in front of those that have come since."""
        with self._lock:
            self._tasks[:0] = tasks

    def call(self, calls: queue.SimpleQueue[bool] | None) -> None:
        """From now on have the thread that waits for `calls` do what comes: True calls it. None ends that."""
        with self._lock:
            self._calls = calls

    def fail(self, spec: PassSpec) -> None:
        """A pass has failed: drop this worker's part, and whatever still comes for it."""
        self.parts[spec] = None
        self.early.pop(spec, None)
