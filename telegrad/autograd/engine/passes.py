"""A backward pass across workers, as state machines: what the workers say to each other, and how it is known to end.

The way of a gradient, from the loss to a leaf on another worker:

    forward    a tensor leaves        record.send: the edge where its gradient will come in is kept as a `Send`
               it arrives             record.receive: it hangs on a `Recv` node, which knows its `Origin`
    backward   a pass begins          conductor.Conductor.begin: `Start` goes to the workers where roots are
               a worker has a task    mailbox, parts: one thread at a time does what there is to do for a context
               gradients flow         schedule says what may run; engine has torch's engine run it, or byhand
               one comes to a leaf    gradients: it is added up in the context
               one comes to a `Recv`  record, engine, outbox: it leaves for the worker where the tensor came from
               it arrives there       parts, engine: a `Shipment` is a task; it enters where the `Send` says
               the task is done       parts: a `Report` goes to the driver
               all is quiet           conductor: the driver's `backward` returns

Gradients travel in shipments. Each message that asks a worker for something has a key; when the worker has done it, it
reports to the driver, who began the pass, which keys it has done and which it has sent to whom meanwhile. The driver
keeps for each key how often it was sent less how often it was done. While anything is under way, some key does not
cancel out: what is under way was sent by a worker that has not reported yet what made it do so, or has, and then is
counted. So when all keys cancel out, all is quiet.

Quiet, a worker may still hold gradients for nodes that wait for others which will never come, since what was sent plays
no part in this pass. Then the driver has it marked, from those nodes along the graph and across workers, which sends
are led to; when that is quiet, too, all other sends are declared dead, and the waiting nodes run. What was marked
will receive something, so this happens once at most. Nothing is asked where nothing waits.

A pass can have a rider on the workers that it comes to: an optimizer that shall step with all gradients of the context.
A worker has all of its own once no send of it is open; nothing waits there then. So the rider has its turn, and the
next report tells what became of it: this costs no message. A worker cannot know where something that it sent is not
used, or another pass of the context is not through, and leaves the rider alone. By the end of the pass the driver knows
where the rider had its turn, and whoever gave it to the pass sees to the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple, Protocol

Key = tuple[str, int]  # who sent it, and a number

RUNNING, MARKING, BURYING, ENDED = "running", "marking", "burying", "ended"
NAMED = 5  # sends, in the error that tells of the missing ones
WITHOUT: Any = "without"  # in the place of a gradient: the pass has come to a tensor, but there is no gradient


class PassSpec(NamedTuple):
    """Which pass this is, and of what kind; it names the pass in each of its messages."""

    context: int
    driver: str
    number: int
    retain: bool  # the graph can be run through again
    create: bool  # the gradients have a graph of their own
    fast: bool  # every send takes part
    roots: tuple[str, ...]  # the workers where it begins
    rider: int = 0  # what wants the gradients of each worker, where there is something under that number; 0: nothing
    request: bytes = b""  # what the rider shall do
    captures: bool = False  # the driver wants gradients of tensors of its own, and no other shall be added up
    autocast: bytes = b""  # in which the driver has begun it, as `agent.scene` describes it

    def __str__(self) -> str:
        return f"pass {self.number} of {self.driver!r} in context {self.context}"


class Start(NamedTuple):
    """Begin at values that live there, on the worker that is told."""

    spec: PassSpec
    key: Key
    values: Sequence[Any]


class Shipment(NamedTuple):
    """Gradients of tensors that were sent: of each message its number, and for each of its tensors one, or `WITHOUT`.

    None where the pass has not come to a tensor.
    """

    spec: PassSpec
    key: Key
    gradients: Sequence[tuple[int, Sequence[Any]]]


class Mark(NamedTuple):
    """These sends can still receive; without any: begin with what waits."""

    spec: PassSpec
    key: Key
    sends: Sequence[int]


class Bury(NamedTuple):
    """Sends that were not marked will not receive anything."""

    spec: PassSpec
    key: Key


class Report(NamedTuple):
    """What a worker has done since its last report: it goes to the driver."""

    spec: PassSpec
    number: int
    done: Sequence[Key]
    sent: Sequence[tuple[Key, str]]  # and to whom
    starved: bool  # something waits here
    waiting: Sequence[str]  # in a fast pass: what has not received, in words
    rode: tuple[bool, Any] | None = None  # once: whether the rider did it, and its value or failure


class Failed(NamedTuple):
    """A worker could not do its part: it goes to the driver, who ends the pass."""

    spec: PassSpec
    failure: bytes


class Abandon(NamedTuple):
    """The pass has failed: the driver has a worker forget it."""

    spec: PassSpec


Task = Start | Shipment | Mark | Bury


class LeftOut(Exception):
    """A fast pass, whose caller said that every send takes part, left some out."""

    def __init__(self, waiting: Mapping[str, Sequence[str]]) -> None:
        self.waiting = waiting  # by workers, in words


class Driver:
    """A pass as the worker knows it that has begun it: who has what to do, and whether all is done."""

    def __init__(self, spec: PassSpec) -> None:
        self.spec = spec
        self.state = RUNNING
        self.workers: set[str] = set()  # that take part
        self.marked = 0  # times that the question was asked
        self.rode: dict[str, tuple[bool, Any]] = {}  # by workers, what became of the rider where it had its turn
        self._balance: dict[Key, int] = {}
        self._asked: dict[Key, str] = {}  # of the sent ones in the balance, who has to do it
        self._last: dict[str, Report] = {}
        self._keys = 0

    def __repr__(self) -> str:
        owing = ", ".join(sorted(set(self._asked.copy().values()))) or "nobody"
        return f"<Driver of {self.spec}: {self.state}, waits for {owing}>"

    @property
    def ended(self) -> bool:
        """Whether the pass is over on all workers."""
        return self.state == ENDED

    @property
    def owing(self) -> set[str]:
        """Workers that have something to do and have not reported it."""
        return set(self._asked.values())

    def start(self, values: Iterable[tuple[str, Sequence[Any]]]) -> list[tuple[str, Task]]:
        """Have workers begin at values of theirs."""
        return [self._ask(worker, Start, there) for worker, there in values]

    def report(self, worker: str, report: Report) -> list[tuple[str, Task]]:
        """A worker has reported: what to send now.

        Raises:
            LeftOut: sends of a fast pass have not received.
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
            return [self._ask(worker, Bury) for worker in sorted(self.workers)]
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
    """What runs the graph of one worker in one pass. It is made once its roots are known, if it has any."""

    def start(self) -> None:
        """Run from the roots, which live here."""

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
    def expects(self) -> bool:
        """Whether it is not known of all that was sent, and of the roots, that nothing comes there any more."""

    @property
    def waiting(self) -> Iterable[str]:
        """What was sent and has not received."""


class Ledger:
    """What a worker has sent in a pass, so that its next report tells the driver of it."""

    def __init__(self, spec: PassSpec, name: str) -> None:
        self.spec = spec
        self.reached: set[str] = set()  # workers to whom something was sent
        self._name = name
        self._sent: list[tuple[Key, str]] = []
        self._keys = 0

    def key(self, worker: str) -> Key:
        """Take note of something that is sent to a worker now; its key."""
        self.reached.add(worker)
        self._keys += 1
        key = self._name, self._keys
        self._sent.append((key, worker))
        return key

    def ship(self, worker: str, gradients: Sequence[tuple[int, Sequence[Any]]]) -> Shipment:
        """Take note of gradients that leave for a worker now; what takes them there."""
        return Shipment(self.spec, self.key(worker), gradients)

    def take(self) -> list[tuple[Key, str]]:
        """What was sent since the last time, for a report."""
        sent, self._sent = self._sent, []
        return sent


class Participant:
    """A pass as each worker knows it that takes part: it does its tasks, and reports."""

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
        """Do what has come: what to send besides the shipments, which leave meanwhile."""
        letters: list[tuple[str, Task]] = []
        arrived = [each for task in tasks if isinstance(task, Shipment) for each in task.gradients]
        for task in tasks:
            if isinstance(task, Start):
                self._runner.start()
            elif isinstance(task, Mark):
                for worker, sends in self._runner.mark(task.sends).items():
                    letters.append((worker, Mark(self.spec, self._ledger.key(worker), sends)))
            elif isinstance(task, Bury):
                self._runner.bury()
        if arrived:
            self._runner.arrive(arrived)
        self._done += [task.key for task in tasks]
        return letters

    @property
    def through(self) -> bool:
        """Whether no gradient can come to a leaf here any more in this pass."""
        return not self._runner.expects

    def may_ride(self, others: Iterable[Participant]) -> bool:
        """Whether the rider's turn has come, given this worker's `others` of the context; then `ride` must follow."""
        return self._waits_to_ride and self.through and all(other.through for other in others)

    def ride(self, outcome: tuple[bool, Any]) -> None:
        """The rider has had its turn, and has none again."""
        self._waits_to_ride = False
        self._rode = outcome

    def report(self) -> Report:
        """What the driver has to know, after everything that was to be sent was."""
        done, self._done = self._done, []
        rode, self._rode = self._rode, None
        self._reports += 1
        waiting = [*islice(self._runner.waiting, NAMED)] if self.spec.fast else ()
        return Report(self.spec, self._reports, done, self._ledger.take(), self._runner.starved, waiting, rode)
