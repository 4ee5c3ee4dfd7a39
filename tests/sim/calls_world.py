"""A world of callers, connections and a callee around the machine of calls, in which anything may happen next.

Each actor is a generator; what it does between two yields happens at once, as under the lock, or in one write. A seed
decides who goes on. What must hold is checked as it happens, and once nothing is left to do.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf

from telegrad.agent.calls import Calls, Instruction, State

MOST = 40  # of everything


@dataclass(eq=False)
class Call:
    """One of a caller's; and what has become of it."""

    caller: int
    number: int
    timeout: float = 0.0
    deadline: float = inf
    weight: int = 0
    id: int = 0
    connection: int = 0
    timed: bool = False
    unwanted: bool = False
    carries: bool = False
    fates: list[str] = field(default_factory=list)
    runs: int = 0
    waited: bool = False  # for a connection, as it was cancelled
    heard: bool = False  # the callee has, that it is not wanted


@dataclass(eq=False)
class Word:
    """That a call is not wanted."""

    call: Call


Sent = Call | Word
Machine = Calls[Call, Sent]


def carries(sent: Sent) -> bool:
    return isinstance(sent, Call) and sent.carries


@dataclass(eq=False)
class Connection:
    number: int
    lives: bool = True
    arrived: list[Call] = field(default_factory=list)  # and not answered
    served: dict[int, Call] = field(default_factory=dict)  # all that came


class World:
    def __init__(self, seed: int, make: type[Machine] = Calls) -> None:
        self.chance = random.Random(seed)
        self.calls: Machine = make(MOST, 1000, carries)
        self.now = 0.0
        self.all: list[Call] = []
        self.arrivals: dict[int, list[int]] = {}  # by caller: the numbers of its calls, as they came
        self.connections: dict[int, Connection] = {}
        self.open: Connection | None = None  # as the rim holds it
        self.losses = 0  # that the layers above are told of
        self.actors: list[Iterator[None]] = [self.caller(number) for number in range(self.chance.randint(1, 4))]
        self.busy = len(self.actors)  # the callers, connectors and those who tell of a call, that have not ended
        self.actors += [self.network(), self.callee(), self.clock()]
        if self.chance.random() < 0.3:
            self.actors.append(self.closer())
        if self.chance.random() < 0.5:
            self.actors.append(self.canceller())

    def run(self) -> None:
        for _ in range(4000):
            if not self.busy and not self.calls.in_flight:
                break
            actor = self.chance.choice(self.actors)
            try:
                next(actor)
            except StopIteration:
                self.actors.remove(actor)
        else:
            raise AssertionError(f"calls wait for ever: {self.calls!r}, {self.busy} are busy")
        self.check_end()

    # Who calls

    def caller(self, number: int) -> Iterator[None]:
        for count in range(self.chance.randint(1, 6)):
            call = Call(number, count, weight=self.chance.choice([0, 100]), carries=self.chance.random() < 0.3)
            timed = self.chance.random() < 0.3
            if timed:
                call.timeout = self.chance.choice([1.0, 20.0])
                call.deadline = self.now + call.timeout
            if self.calls.state is State.CLOSED:
                break
            self.all.append(call)
            instruction = self.calls.begin(call, call)
            if timed:
                self.calls.time(call)
            yield from self.deliver(call, instruction, self.open)
            if call.unwanted:
                yield from self.tell(call)
            if self.chance.random() < 0.15 and self.calls.take(call.id) is not None:
                call.fates.append("given up")
                yield from self.tell(call)
            yield
        self.busy -= 1

    def canceller(self) -> Iterator[None]:
        """Another thread, that ends calls of all callers."""
        while True:
            yield
            if self.chance.random() < 0.2 and self.calls.in_flight:
                call = self.calls.take(self.chance.choice([*self.calls.in_flight]))
                assert call is not None
                call.fates.append("cancelled")
                self.begin_telling(call)

    def begin_telling(self, call: Call) -> None:
        self.busy += 1
        self.actors.append(self.teller(call))

    def teller(self, call: Call) -> Iterator[None]:
        yield
        yield from self.tell(call)
        self.busy -= 1

    def tell(self, call: Call) -> Iterator[None]:
        """As `OutgoingCalls._tell`."""
        word = Word(call)
        call.waited |= any(waiting is call for waiting, _ in self.calls._backlog)
        instruction, link = self.calls.tell(call, word), self.open
        yield
        if instruction is Instruction.SEND and link is not None:
            self.write(link, word)

    def deliver(self, call: Call, instruction: Instruction, link: Connection | None) -> Iterator[None]:
        """As `OutgoingCalls._follow`."""
        while instruction in (Instruction.SEND, Instruction.SET_APART):
            yield
            if instruction is Instruction.SEND:
                assert link is not None, "there is no connection to send it over"
                if self.write(link, call):
                    return
                yield
                if self.open is link:
                    self.open = None
                    self.calls.missed(self.calls.connection)
                yield
            instruction = self.calls.send(call, call, is_apart=instruction is Instruction.SET_APART)
            link = self.open
        if instruction is Instruction.CONNECT:
            self.busy += 1
            self.actors.append(self.connector(self.calls.connection))

    def write(self, link: Connection, call: Sent) -> bool:
        if not link.lives:
            return False
        if isinstance(call, Word):
            served = link.served.get(call.call.id)
            if served is not None:
                assert served.unwanted, "a call was ended that is wanted"
                served.heard = True
            return True
        link.served[call.id] = call
        call.runs += 1
        assert call.runs == 1, "a call was sent twice"
        order = self.arrivals.setdefault(call.caller, [])
        assert not order or order[-1] < call.number, "a later call came first"
        order.append(call.number)
        link.arrived.append(call)
        return True

    # The connection

    def connector(self, number: int) -> Iterator[None]:
        """As `OutgoingCalls._make_link`."""
        yield
        if self.chance.random() < 0.3:
            self.losses += 1
            self.fail(self.calls.refused(keeps_messages=self.chance.random() < 0.3), 0)
            self.busy -= 1
            return
        link = self.connections[number] = Connection(number)
        while True:
            yield
            backlog = self.calls.drain()
            if self.calls.state is State.OPEN:
                self.open = link
            if not backlog:
                break
            for at, (call, sent) in enumerate(backlog):
                yield
                written = self.write(link, sent)
                if call is not None and call.unwanted:
                    yield
                    written = written and self.write(link, Word(call))
                if not written:
                    yield
                    self.losses += 1
                    self.fail(self.calls.refused(backlog[at:]), 0)
                    self.busy -= 1
                    return
        yield
        if self.calls.state is State.CLOSED:
            link.lives = False
        elif not link.lives:
            self.end(link)
        self.busy -= 1

    def network(self) -> Iterator[None]:
        """Breaks connections; that is told later."""
        while True:
            yield
            living = [each for each in self.connections.values() if each.lives]
            if living and self.chance.random() < 0.1:
                broken = self.chance.choice(living)
                broken.lives = False
                for _ in range(self.chance.randint(0, 10)):
                    yield
                self.end(broken)

    def end(self, link: Connection) -> None:
        self.losses += 1
        if self.open is link:
            self.open = None
        self.fail(self.calls.ended(link.number), link.number)

    def callee(self) -> Iterator[None]:
        while True:
            yield
            waiting = [each for each in self.connections.values() if each.arrived and each.lives]
            if waiting:
                link = self.chance.choice(waiting)
                answered = link.arrived.pop(self.chance.randrange(len(link.arrived)))
                yield
                call = self.calls.take(answered.id) if link.lives else None
                if call is not None:
                    assert call is answered, "an answer went to another call"
                    call.fates.append("answered")

    def clock(self) -> Iterator[None]:
        while True:
            yield
            self.now += self.chance.choice([0.01, 0.5])
            assert self.calls.next_deadline() >= self.now - 1 or self.calls.in_flight, "a deadline of no call"
            for call in self.calls.expired(self.now):
                assert call.deadline <= self.now, "a call was ended before its time"
                call.fates.append("expired")
                self.begin_telling(call)

    def closer(self) -> Iterator[None]:
        for _ in range(self.chance.randint(0, 300)):
            yield
        self.losses += 1
        link, self.open = self.open, None
        failed = self.calls.close()
        for call in failed:
            call.fates.append("closed")
        if link is not None:
            link.lives = False

    def fail(self, failed: list[Call], number: int) -> None:
        for call in failed:
            call.fates.append("failed")
            if number:
                assert call.connection == number, "a call failed with a connection that did not carry it"

    # What must hold in the end

    def check_end(self) -> None:
        for call in self.all:
            assert len(call.fates) == 1, f"{call} ended {len(call.fates)} times: {call.fates}"
            assert call.runs or self.losses or call.waited, f"{call} was never sent, and nobody hears of that"
            if call.waited and not call.carries:
                assert not call.runs, f"{call} was sent, though it was cancelled before that"
            carriers = [link for link in self.connections.values() if link.lives and call.id in link.served]
            assert call.heard or not (call.unwanted and carriers), f"nobody told the callee of the end of {call}"
        assert not self.calls.in_flight
        assert self.calls._weight == 0, "what was taken was not given back"
        assert self.calls.next_deadline() == inf
        assert not any(call is not None for call, _ in self.calls._backlog), "calls are left in the backlog"
        told = [sent for _, sent in self.calls._backlog]
        assert self.calls.state is not State.OPEN or not told, "words are left in the backlog"
