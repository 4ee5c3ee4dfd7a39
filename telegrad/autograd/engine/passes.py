"""The protocol of a backward pass across workers, as state machines, including the detection of its end.

The path of a gradient, from the loss to a leaf on another worker:

    forward    a tensor is sent       record.send: a `Send` keeps the edge at which its gradient will enter
               it arrives             record.receive: it gets a `Recv` node, which has its `Origin`
    backward   a pass begins          conductor.Conductor.begin: `Start` goes to the workers of the roots
               a worker has a task    mailbox, parts: one thread at a time runs the tasks of a context
               gradients flow         schedule: which nodes may run; engine: torch's engine runs them, or node_calls
               one reaches a leaf     gradients: it is accumulated in the context
               one reaches a `Recv`   record, engine, outbox: it is sent to the worker that sent the tensor
               it arrives there       parts, engine: a `Shipment` is a task; it enters at the edges of the `Send`
               the task is done       parts: a `Report` goes to the driver
               no task is left        conductor: the driver's `backward` returns

Gradients travel in shipments. Each message that gives a worker a task has a key. When the worker has done the task, it
reports to the driver, which began the pass. The report names the keys of the tasks that are done, and the keys and
recipients of the messages that the worker has sent meanwhile. For each key the driver counts how often it was sent,
minus how often it was done. While any task is pending, some key has a count other than zero: the task was sent by a
worker that has not yet reported the task that caused it, or that has reported it, and then it is counted. So when all
counts are zero, the pass is quiescent.

A quiescent worker may still hold gradients for nodes that wait for others. These never come if a sent tensor takes no
part in this pass. Then the driver starts a marking phase: from the waiting nodes, along the graph and across workers,
all sends that the nodes lead to are marked. When that phase is quiescent, too, all other sends are declared dead, and
the waiting nodes run. Every marked send will receive something, so this happens once at most. If no node waits, there
is no marking phase.

A pass can have a rider on the workers that it reaches: an optimizer that steps with all gradients of the context. A
worker has all of its gradients once none of its sends is open; no gradient waits there then. The rider runs at that
moment, and the next report has its result, so this costs no message. If a sent tensor is not used, or another pass of
the context has not ended, the worker cannot know, and does not run the rider. At the end of the pass the driver knows
where the rider ran, and the object that supplied it handles the other workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple, Protocol

Key = tuple[str, int]  # sender and a number

RUNNING, MARKING, BURYING, ENDED = "running", "marking", "burying", "ended"
NAMED = 5  # number of sends in the error about missing gradients
WITHOUT: Any = "without"  # used for a gradient: the pass has reached a tensor, but there is no gradient


class PassSpec(NamedTuple):
    """The identity and the options of a pass. Each of its messages carries them."""

    context: int
    driver: str
    number: int
    retain: bool  # keep the graph for another pass
    create: bool  # the gradients have a graph of their own
    fast: bool  # every send takes part
    roots: tuple[str, ...]  # the workers with roots
    rider: int = 0  # the number of the object that gets each worker's gradients, where it exists; 0: none
    request: bytes = b""  # argument for the rider
    captures: bool = False  # the driver captures gradients of its own tensors, and no gradient is accumulated
    autocast: bytes = b""  # autocast state of the driver at the start, see `call_context.described_autocast`

    def __str__(self) -> str:
        return f"pass {self.number} of {self.driver!r} in context {self.context}"


class Start(NamedTuple):
    """Begin at values of the receiving worker."""

    spec: PassSpec
    key: Key
    values: Sequence[Any]


class Shipment(NamedTuple):
    """Gradients of sent tensors: the number of each message, and for each of its tensors the gradient or `WITHOUT`.

    The entry is None for a tensor that the pass has not reached.
    """

    spec: PassSpec
    key: Key
    gradients: Sequence[tuple[int, Sequence[Any]]]


class Mark(NamedTuple):
    """Mark these sends as able to receive. Without sends, begin at the waiting nodes."""

    spec: PassSpec
    key: Key
    sends: Sequence[int]


class DeclareDead(NamedTuple):
    """Sends that were not marked will receive nothing."""

    spec: PassSpec
    key: Key


class Report(NamedTuple):
    """What a worker has done since its last report. Sent to the driver."""

    spec: PassSpec
    number: int
    done: Sequence[Key]
    sent: Sequence[tuple[Key, str]]  # and the recipients
    starved: bool  # gradients wait here
    waiting: Sequence[str]  # in a fast pass: descriptions of the sends that have received nothing
    rode: tuple[bool, Any] | None = None  # sent once: True and the rider's value, or False and its failure


class Failed(NamedTuple):
    """A worker could not do its part. Sent to the driver, which ends the pass."""

    spec: PassSpec
    failure: bytes


class Abandon(NamedTuple):
    """The pass has failed. The driver sends this to the workers, which drop the pass."""

    spec: PassSpec


Task = Start | Shipment | Mark | DeclareDead


class LeftOut(Exception):
    """A fast pass, whose caller guaranteed that every send takes part, left some out."""

    def __init__(self, waiting: Mapping[str, Sequence[str]]) -> None:
        self.waiting = waiting  # descriptions of sends, by workers


class Driver:
    """A pass as its driver sees it: the pending tasks of all workers, and the end."""

    def __init__(self, spec: PassSpec) -> None:
        self.spec = spec
        self.state = RUNNING
        self.workers: set[str] = set()  # workers that take part
        self.marked = 0  # number of marking phases
        self.rode: dict[str, tuple[bool, Any]] = {}  # by workers, the outcome of the rider where it ran
        self._balance: dict[Key, int] = {}
        self._asked: dict[Key, str] = {}  # of keys in the balance that were sent: the worker that has the task
        self._last: dict[str, Report] = {}
        self._keys = 0

    def __repr__(self) -> str:
        owing = ", ".join(sorted(set(self._asked.copy().values()))) or "nobody"
        return f"<Driver of {self.spec}: {self.state}, waits for {owing}>"

    @property
    def ended(self) -> bool:
        """Return True if the pass is over on all workers."""
        return self.state == ENDED

    @property
    def owing(self) -> set[str]:
        """Return the workers that have not reported all of their tasks."""
        return set(self._asked.values())

    def start(self, values: Iterable[tuple[str, Sequence[Any]]]) -> list[tuple[str, Task]]:
        """Return the messages that start the pass at values of the given workers."""
        return [self._ask(worker, Start, there) for worker, there in values]

    def report(self, worker: str, report: Report) -> list[tuple[str, Task]]:
        """Process a worker's report; return the next messages.

        Raises:
            LeftOut: no gradient came for some sends of a fast pass.
        """
        self.workers.add(worker)
        for key, asked in report.sent:
            self._sent(key, asked)
        for key in report.done:
            self._done(key)
        if report.rode is not None:
            self.rode[worker] = report.rode
        last = self._last.get(worker)
        if last is None or last.number < report.number:
            self._last[worker] = report
        return [] if self._balance else self._quiet()

    def _quiet(self) -> list[tuple[str, Task]]:
        starved = [worker for worker, last in self._last.items() if last.starved]
        if self.state == MARKING:
            self.state = BURYING
            return [self._ask(worker, DeclareDead) for worker in sorted(self.workers)]
        if self.spec.fast:
            waiting = {worker: last.waiting for worker, last in self._last.items() if last.waiting}
            if waiting or starved:
                raise LeftOut(waiting)
        if self.state == RUNNING and starved:
            self.state = MARKING
            self.marked += 1
            return [self._ask(worker, Mark, ()) for worker in starved]
        assert not starved, "after the question nothing waits"
        self.state = ENDED
        return []

    def _ask(self, worker: str, task: Any, *what: Any) -> tuple[str, Task]:
        self._keys += 1
        key = ("", self._keys)
        self._sent(key, worker)
        return worker, task(self.spec, key, *what)

    def _sent(self, key: Key, worker: str) -> None:
        self.workers.add(worker)
        if self._balance.pop(key, 0) == 0:
            self._balance[key] = 1
            self._asked[key] = worker

    def _done(self, key: Key) -> None:
        if self._balance.pop(key, 0) == 0:
            self._balance[key] = -1
        self._asked.pop(key, None)


class GraphRunner(Protocol):
    """Runs the graph of one worker in one pass. It is created once the worker's roots, if any, are known."""

    def start(self) -> None:
        """Run from this worker's roots."""

    def arrive(self, gradients: Sequence[tuple[int, Sequence[Any]]]) -> None:
        """Take gradients of sent tensors, and run the nodes that can run."""

    def mark(self, sends: Sequence[int]) -> Mapping[str, list[int]]:
        """Return the sends, by workers, that these sends lead to and that were not returned before.

        Without sends, start at the waiting nodes.
        """

    def bury(self) -> None:
        """Sends that were not marked will receive nothing: run the nodes that can run."""

    @property
    def starved(self) -> bool:
        """Return True if gradients wait for others."""

    @property
    def expects(self) -> bool:
        """Return True if a gradient may still come to a sent tensor or to a root."""

    @property
    def waiting(self) -> Iterable[str]:
        """Describe the sends that have received nothing."""


class Ledger:
    """The messages that a worker has sent in a pass and not yet reported to the driver."""

    def __init__(self, spec: PassSpec, name: str) -> None:
        self.spec = spec
        self.reached: set[str] = set()  # workers to which something was sent
        self._name = name
        self._sent: list[tuple[Key, str]] = []
        self._keys = 0

    def key(self, worker: str) -> Key:
        """Record that a message is sent to a worker now; return its key."""
        self.reached.add(worker)
        self._keys += 1
        key = self._name, self._keys
        self._sent.append((key, worker))
        return key

    def ship(self, worker: str, gradients: Sequence[tuple[int, Sequence[Any]]]) -> Shipment:
        """Record that gradients are sent to a worker now; return the shipment."""
        return Shipment(self.spec, self.key(worker), gradients)

    def take(self) -> list[tuple[Key, str]]:
        """Remove and return the messages sent since the last report."""
        sent, self._sent = self._sent, []
        return sent


class Participant:
    """A pass as each worker that takes part sees it: the worker does tasks, and reports."""

    def __init__(self, ledger: Ledger, runner: GraphRunner) -> None:
        self.spec = ledger.spec
        self._ledger = ledger
        self._runner = runner
        self._done: list[Key] = []
        self._reports = 0
        self._waits_to_ride = ledger.spec.rider != 0
        self._rode: tuple[bool, Any] | None = None  # to be reported

    def __repr__(self) -> str:
        state = "gradients wait here" if self._runner.starved else "nothing waits here"
        return f"<Participant in {self.spec}: {self._reports} reports, {state}>"

    def take(self, tasks: Sequence[Task]) -> list[tuple[str, Task]]:
        """Do tasks. Return the messages to send, except shipments, which leave during the call."""
        letters: list[tuple[str, Task]] = []
        arrived = [each for task in tasks if isinstance(task, Shipment) for each in task.gradients]
        for task in tasks:
            if isinstance(task, Start):
                self._runner.start()
            elif isinstance(task, Mark):
                for worker, sends in self._runner.mark(task.sends).items():
                    letters.append((worker, Mark(self.spec, self._ledger.key(worker), sends)))
            elif isinstance(task, DeclareDead):
                self._runner.bury()
        if arrived:
            self._runner.arrive(arrived)
        self._done += [task.key for task in tasks]
        return letters

    @property
    def through(self) -> bool:
        """Return True if no gradient can come to a leaf here any more in this pass."""
        return not self._runner.expects

    def may_ride(self, others: Iterable[Participant]) -> bool:
        """Return True if the rider may run, given this worker's `others` of the context. Then `ride` must follow."""
        return self._waits_to_ride and self.through and all(other.through for other in others)

    def ride(self, outcome: tuple[bool, Any]) -> None:
        """Record the outcome of the rider, which does not run again."""
        self._waits_to_ride = False
        self._rode = outcome

    def report(self) -> Report:
        """Return the report for the driver. All other messages must have been sent before."""
        done, self._done = self._done, []
        rode, self._rode = self._rode, None
        self._reports += 1
        waiting = [*islice(self._runner.waiting, NAMED)] if self.spec.fast else ()
        return Report(self.spec, self._reports, done, self._ledger.take(), self._runner.starved, waiting, rode)
