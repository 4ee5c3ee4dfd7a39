"""The protocol of a backward pass across workers, as state machines, including the detection of its end.

Gradients travel in shipments. Each message that gives a worker a task has a key. When the worker has done the task, it
reports to the driver, which began the pass. The report names the keys of the tasks that are done, and the keys and
recipients of the messages that the worker has sent meanwhile. For each key the driver counts how often it was sent,
minus how often it was done. While any task is pending, some key has a count other than zero: the task was sent by a
worker that has not yet reported the task that caused it, or that has reported it, and then it is counted. So when all
counts are zero, the pass is quiescent.

A report costs a message of its own only where a worker sends no gradients. Otherwise it travels with the last of them.
Their receiver adds it to its own report, unless it is the driver. So a pass along a chain of workers costs one message
for each hop, and one report. A worker whose task takes longer than a moment sends the reports that it has to the
driver at once, which then knows the workers that have tasks.

A quiescent worker may still hold gradients for nodes that wait for others. These never come if a sent tensor takes no
part in this pass. Then the driver starts a marking phase: from the waiting nodes, along the graph and across workers,
all sends that the nodes lead to are marked. When that phase is quiescent, too, all other sends are declared dead, and
the waiting nodes run. Every marked send will receive something, so this happens once at most. If no node waits, there
is no marking phase.

A pass can have a fused step on the workers that it reaches: an optimizer that steps with all gradients of the context.
A worker has all of its gradients once none of its sends is open; no gradient waits there then. The step runs at that
moment, and the next report has its result, so this costs no message. If a sent tensor is not used, or another pass of
the context has not ended, the worker cannot know, and does not run the step. At the end of the pass the driver knows
where the step ran, and the object that supplied it handles the other workers.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from telegrad.errors import UnusedSends

Key = tuple[str, int]  # sender and a number

RUNNING, MARKING, BURYING, ENDED = "running", "marking", "burying", "ended"
NAMED = 5  # number of sends in the error about missing gradients
WITHOUT: Any = "without"  # used for a gradient: the pass has reached a tensor, but there is no gradient
NOWHERE = -1  # index among the tensors of a shipment that represents WITHOUT


class PassSpec(NamedTuple):
    """The identity and the options of a pass. Each of its messages carries them."""

    context: int
    driver: str
    number: int
    retain: bool  # keep the graph for another pass
    create: bool  # the gradients have a graph of their own
    fast: bool  # every send takes part
    roots: tuple[str, ...]  # the workers with roots
    step_id: int = 0  # the number of the object that gets each worker's gradients, where it exists; 0: none
    request: bytes = b""  # argument for the step
    captures: bool = False  # the driver captures gradients of its own tensors, and no gradient is accumulated
    autocast: bytes = b""  # autocast state of the driver at the start, see `call_context.described_autocast`


class Start(NamedTuple):
    """Begin at values of the receiving worker."""

    spec: PassSpec
    key: Key
    values: Sequence[Any]


class PackedShipment(NamedTuple):
    """Gradients of sent tensors: the number of each message, and for each of its tensors an index into `tensors`.

    The index is None for a tensor that the pass has not reached, and NOWHERE if there is no gradient.
    """

    spec: PassSpec  # a plain tuple on the wire
    key: Key
    gradients: Sequence[tuple[int, Sequence[int | None]]]
    reports: Sequence[tuple[Any, ...]] = ()  # PassReports for the driver, without their spec
    tensors: Sequence[Any] = ()

    def unpacked(self) -> list[tuple[int, list[Any]]]:
        """Return for each message its number, and for each of its tensors the gradient, `WITHOUT` or None."""
        tensors = (*self.tensors, WITHOUT)  # index NOWHERE is the last one
        found: list[tuple[int, list[Any]]] = []
        for number, places in self.gradients:
            found.append((number, [None if place is None else tensors[place] for place in places]))
        return found


class Mark(NamedTuple):
    """Mark these sends as able to receive. Without sends, begin at the waiting nodes."""

    spec: PassSpec
    key: Key
    sends: Sequence[int]


class DeclareDead(NamedTuple):
    """Sends that were not marked will receive nothing."""

    spec: PassSpec
    key: Key


class PassReport(NamedTuple):
    """The tasks that a worker has done, and the messages that it has sent, since its last report; for the driver."""

    spec: PassSpec
    worker: str
    number: int
    done: Sequence[Key]
    sent: Sequence[tuple[Key, str]]  # and the recipients
    starved: bool  # gradients wait here
    waiting: Sequence[str]  # in a fast pass: descriptions of the sends that have received nothing
    stepped: tuple[bool, Any] | None = None  # sent once: True and the step's value, or False and its failure


class Failed(NamedTuple):
    """A worker could not do its part. Sent to the driver, which ends the pass."""

    spec: PassSpec
    failure: bytes


class Abandon(NamedTuple):
    """The pass has failed. The driver sends this to the workers, which drop the pass."""

    spec: PassSpec


Task = Start | PackedShipment | Mark | DeclareDead


StepResults = Mapping[str, tuple[bool, Any]]  # by workers: True and a value, or False and the description of an error


class FusedStep(NamedTuple):
    """An optimizer step that is fused with a pass. Workers pass `request` to the object with the number `step_id`."""

    step_id: int  # 0: no step
    request: bytes
    end: Callable[[StepResults], None]  # completes the step after the pass, given the outcome of each worker's part


class Driver:
    """A pass as its driver sees it: the pending tasks of all workers, and the end."""

    def __init__(self, spec: PassSpec) -> None:
        self.spec = spec
        self.state = RUNNING
        self.workers: set[str] = set()  # workers that take part
        self.marked = 0  # number of marking phases
        self.stepped: dict[str, tuple[bool, Any]] = {}  # by workers, the outcome of the fused step where it ran
        # By keys: 1 if the task was sent and is not done, -1 if it is done and its sender has not reported yet, since
        # reports of different workers overtake each other. A key whose count is 0 is removed: no entry, no task.
        self._balance: dict[Key, int] = {}
        self._asked: dict[Key, str] = {}  # of keys in the balance that were sent: the worker that has the task
        # The reports with the highest numbers. A worker's reports may overtake each other, too: one comes directly, and
        # an earlier one with gradients, by way of other workers.
        self._last: dict[str, PassReport] = {}
        self._keys = 0

    @property
    def owing(self) -> list[str]:
        """Return the workers that have not reported all of their tasks. The copy is atomic."""
        return sorted(set(self._asked.copy().values()))

    def start(self, values: Iterable[tuple[str, Sequence[Any]]]) -> list[tuple[str, Task]]:
        """Return the messages that start the pass at values of the given workers."""
        tasks: list[tuple[str, Task]] = []
        for worker, there in values:
            tasks.append(self._ask(worker, Start, there))
        return tasks

    def report(self, report: PassReport) -> list[tuple[str, Task]]:
        """Process a report; return the next messages; raise UnusedSends if some sends of a fast pass got none."""
        worker, balance = report.worker, self._balance
        self.workers.add(worker)
        for key, asked in report.sent:
            self.workers.add(asked)
            if balance.pop(key, 0) == 0:
                balance[key] = 1
                self._asked[key] = asked
        for key in report.done:
            if balance.pop(key, 0) == 0:
                balance[key] = -1
            self._asked.pop(key, None)
        if report.stepped is not None:
            self.stepped[worker] = report.stepped
        last = self._last.get(worker)
        if last is None or last.number < report.number:
            self._last[worker] = report
        return [] if balance else self._quiet()

    def _quiet(self) -> list[tuple[str, Task]]:
        starved = [worker for worker, last in self._last.items() if last.starved]
        # All workers get DeclareDead, also those where nothing waits: any worker may have unmarked sends that are open.
        if self.state == MARKING:
            self.state = BURYING
            return [self._ask(worker, DeclareDead) for worker in sorted(self.workers)]
        # In fast mode a worker with open sends names them, so a pass that has missed one cannot end unnoticed.
        if self.spec.fast:
            waiting = {worker: last.waiting for worker, last in self._last.items() if last.waiting}
            if waiting or starved:
                lines = [f"\n  on worker {worker!r}: {'; '.join(sends)}" for worker, sends in waiting.items()]
                raise UnusedSends(
                    "mode='fast' requires that every sent tensor takes part in the backward pass, but no gradient "
                    f"arrived for{''.join(lines)}\nUse mode='smart', which costs nothing if all take part"
                )
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
        self.workers.add(worker)
        self._balance[key] = 1  # its task is not sent yet, so no worker can have reported it
        self._asked[key] = worker
        return worker, task(self.spec, key, *what)
