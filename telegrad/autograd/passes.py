"""A backward pass across workers, as state machines: what the workers say to each other, and how it is known to end.

Gradients travel from worker to worker in shipments. Each message that asks a worker for something has a key; when the
worker has done it, it reports to the driver, who began the pass, which keys it has done and which it has sent to whom
meanwhile. The driver keeps for each key how often it was sent less how often it was done. While anything is under way,
some key does not cancel out: what is under way was sent by a worker that has not reported yet what made it do so, or
has, and then is counted. So when all keys cancel out, all is quiet.

Quiet, a worker may still hold gradients for nodes that wait for others which will never come, since what was sent plays
no part in this pass. Then the driver has it marked, from those nodes along the graph and across workers, which sends
are led to; when that is quiet, too, all other sends are declared dead, and the waiting nodes run. What was marked
will receive something, so this happens once at most. Nothing is asked where nothing waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple, Protocol

Key = tuple[str, int]  # who sent it, and a number

RUNNING, MARKING, BURYING, ENDED = "running", "marking", "burying", "ended"
NAMED = 5  # sends, in the error that tells of the missing ones
WITHOUT: Any = "without"  # in the place of a gradient: the pass has come to a tensor, but there is no gradient


class Order(NamedTuple):
    """What a pass is; it travels with each of its messages."""

    context: int
    driver: str
    number: int
    retain: bool  # the graph can be run through again
    create: bool  # the gradients have a graph of their own
    fast: bool  # every send takes part
    roots: Sequence[str]  # the workers where it begins


class Start(NamedTuple):
    """Begin at values that live there."""

    order: Order
    key: Key
    values: Sequence[Any]


class Shipment(NamedTuple):
    """Gradients of tensors that were sent: of each message its number, and for each of its tensors one, or `WITHOUT`.

    None where the pass has not come to a tensor.
    """

    order: Order
    key: Key
    gradients: Sequence[tuple[int, Sequence[Any]]]


class Mark(NamedTuple):
    """These sends can still receive; without any: begin with what waits."""

    order: Order
    key: Key
    sends: Sequence[int]


class Bury(NamedTuple):
    """Sends that were not marked will not receive anything."""

    order: Order
    key: Key


class Report(NamedTuple):
    """What a worker has done since its last one."""

    order: Order
    number: int
    done: Sequence[Key]
    sent: Sequence[tuple[Key, str]]  # and to whom
    starved: bool  # something waits here
    waiting: Sequence[str]  # in a fast pass: what has not received, in words


class Failed(NamedTuple):
    """A worker could not do its part."""

    order: Order
    failure: bytes


class Abandon(NamedTuple):
    """The pass has failed: forget it."""

    order: Order


Task = Start | Shipment | Mark | Bury


class Missing(Exception):
    """A pass that should use every send did not."""

    def __init__(self, waiting: Mapping[str, Sequence[str]]) -> None:
        self.waiting = waiting


class Driver:
    """The side of who began the pass."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.state = RUNNING
        self.workers: set[str] = set()  # that take part
        self.marked = 0  # times that the question was asked
        self._balance: dict[Key, int] = {}
        self._asked: dict[Key, str] = {}  # of the sent ones in the balance, who has to do it
        self._last: dict[str, Report] = {}
        self._keys = 0

    @property
    def ended(self) -> bool:
        return self.state == ENDED

    @property
    def owing(self) -> set[str]:
        """Workers that have something to do."""
        return set(self._asked.values())

    def start(self, values: Iterable[tuple[str, Sequence[Any]]]) -> list[tuple[str, Task]]:
        """Have workers begin at values of theirs."""
        return [self._ask(worker, Start, there) for worker, there in values]

    def report(self, worker: str, report: Report) -> list[tuple[str, Task]]:
        """A worker has reported: what to send now.

        Raises:
            Missing: sends of a fast pass have not received.
        """
        self.workers.add(worker)
        for key, asked in report.sent:
            self._sent(key, asked)
        for key in report.done:
            self._done(key)
        last = self._last.get(worker)
        if last is None or last.number < report.number:
            self._last[worker] = report
        return [] if self._balance else self._quiet()

    def _quiet(self) -> list[tuple[str, Task]]:
        starved = [worker for worker, last in self._last.items() if last.starved]
        if self.state == MARKING:
            self.state = BURYING
            return [self._ask(worker, Bury) for worker in sorted(self.workers)]
        if self.order.fast:
            waiting = {worker: last.waiting for worker, last in self._last.items() if last.waiting}
            if waiting or starved:
                raise Missing(waiting)
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
        return worker, task(self.order, key, *what)

    def _sent(self, key: Key, worker: str) -> None:
        self.workers.add(worker)
        if self._balance.pop(key, 0) == 0:
            self._balance[key] = 1
            self._asked[key] = worker

    def _done(self, key: Key) -> None:
        if self._balance.pop(key, 0) == 0:
            self._balance[key] = -1
        self._asked.pop(key, None)


class Local(Protocol):
    """The graph of one worker."""

    def start(self, roots: Sequence[Any]) -> None:
        """Run from values that live here."""

    def arrive(self, gradients: Sequence[tuple[int, Sequence[Any]]]) -> None:
        """Gradients of what was sent have come: run what can run."""

    def mark(self, sends: Sequence[int]) -> Mapping[str, list[int]]:
        """Which sends of which workers these, or without any what waits here, lead to and were not named before."""

    def bury(self) -> None:
        """Sends that were not marked will receive nothing: run what can run."""

    @property
    def starved(self) -> bool:
        """Whether gradients wait for others."""

    @property
    def waiting(self) -> Iterable[str]:
        """What was sent and has not received."""


class Ledger:
    """What a worker has sent in a pass and not reported yet."""

    def __init__(self, order: Order, name: str) -> None:
        self.order = order
        self._name = name
        self._sent: list[tuple[Key, str]] = []
        self._keys = 0

    def key(self, worker: str) -> Key:
        """For something that is sent to a worker now."""
        self._keys += 1
        key = self._name, self._keys
        self._sent.append((key, worker))
        return key

    def ship(self, worker: str, gradients: Sequence[tuple[int, Sequence[Any]]]) -> Shipment:
        """Gradients for a worker have become ready."""
        return Shipment(self.order, self.key(worker), gradients)

    def take(self) -> list[tuple[Key, str]]:
        sent, self._sent = self._sent, []
        return sent


class Participant:
    """The part of one worker."""

    def __init__(self, ledger: Ledger, local: Local) -> None:
        self.order = ledger.order
        self._ledger = ledger
        self._local = local
        self._done: list[Key] = []
        self._reports = 0

    def take(self, tasks: Sequence[Task]) -> list[tuple[str, Task]]:
        """Do what has come: what to send besides the shipments, which leave meanwhile."""
        letters: list[tuple[str, Task]] = []
        arrived = [each for task in tasks if isinstance(task, Shipment) for each in task.gradients]
        for task in tasks:
            if isinstance(task, Start):
                self._local.start(task.values)
            elif isinstance(task, Mark):
                for worker, sends in self._local.mark(task.sends).items():
                    letters.append((worker, Mark(self.order, self._ledger.key(worker), sends)))
            elif isinstance(task, Bury):
                self._local.bury()
        if arrived:
            self._local.arrive(arrived)
        self._done += [task.key for task in tasks]
        return letters

    def report(self) -> Report:
        """What the driver has to know, after everything that was to be sent was."""
        done, self._done = self._done, []
        self._reports += 1
        waiting = [*islice(self._local.waiting, NAMED)] if self.order.fast else ()
        return Report(self.order, self._reports, done, self._ledger.take(), self._local.starved, waiting)
