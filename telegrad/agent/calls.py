"""The calls of one worker to another: which are in flight, and what to do about their connection.

It decides, and does nothing: who uses it tells what happened and does what it answers. The connection is

    NONE        the next message has one made
    BEING_MADE  messages wait in the backlog, in order, and leave before any later one
    OPEN        messages leave at once
    CLOSED      for good: nothing leaves, nothing comes

A connection that ends is made again with the next message. Each one has a number; a call fails with the connection over
which it was sent, since it may have run, and with no other. Each call is taken out of the table once, by whoever finds
that it is over: an answer, its connection's end, its deadline, its caller who gives up, the end of all.

Of a call that is over before its answer came the callee is told (`tell`), over the same connection and behind the call:
any other end of it has been a word to the callee by itself. One that still waits for a connection does not leave at
all, unless it carries what the other side must hear of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum
from typing import Generic, Protocol, TypeVar

from telegrad.agent.deadlines import Deadlines

COMPANY = 16  # with more calls in flight, the next wait until so many leave together, or a moment


class State(Enum):
    NONE = "no connection"
    BEING_MADE = "a connection is being made"
    OPEN = "connected"
    CLOSED = "closed"


_NEXT = {
    (State.NONE, "wanted"): State.BEING_MADE,
    (State.BEING_MADE, "made"): State.OPEN,
    (State.BEING_MADE, "refused"): State.NONE,
    (State.OPEN, "ended"): State.NONE,
    (State.NONE, "closed"): State.CLOSED,
    (State.BEING_MADE, "closed"): State.CLOSED,
    (State.OPEN, "closed"): State.CLOSED,
}


class Instruction(Enum):
    """What to do with a message."""

    SEND = "send it over the connection that is open"
    SET_APART = "make it one that another thread may send later, and ask again"
    CONNECT = "have a connection made, over which it leaves"
    WAIT = "nothing: it leaves with the connection that is being made"
    DROP = "nothing: all is closed"


class Call(Protocol):
    """What is kept of a call."""

    id: int
    weight: int  # bytes of its tensors
    connection: int  # the number of the one over which it was sent; 0 before that
    timed: bool  # it is ended at its deadline
    unwanted: bool  # it was over before its answer came
    timeout: float
    deadline: float

    def __hash__(self) -> int: ...


C = TypeVar("C", bound=Call)
M = TypeVar("M")


class Calls(Generic[C, M]):
    """Those of one worker to one other."""

    def __init__(self, most_calls: int, most_bytes: int, carries: Callable[[M], bool]) -> None:
        """`carries`: whether a message holds what the other side must hear of."""
        self.state = State.NONE
        self.connection = 0  # the number of the last that was wanted
        self.in_flight: dict[int, C] = {}
        self._most_calls = most_calls
        self._most_bytes = most_bytes
        self._carries = carries
        self.begun = 0  # calls, so far: the number of each is its id
        self._weight = 0  # of those in flight
        self._backlog: list[tuple[C | None, M]] = []
        self._deadlines: Deadlines[C] = Deadlines()

    # Calls begin

    def begin(self, call: C, message: M) -> Instruction:
        """A call, to be sent with this message; not once all is closed."""
        assert self.state is not State.CLOSED
        self.begun += 1
        call.id = self.begun
        self.in_flight[call.id] = call
        self._weight += call.weight
        return self.send(call, message)

    def time(self, call: C) -> bool:
        """End a call at its deadline; whether that must be looked at earlier than the deadlines of others."""
        call.timed = True
        return self._deadlines.add(call, call.timeout, call.deadline)

    def send(self, call: C | None, message: M, is_apart: bool = False) -> Instruction:
        """A message shall leave: of a call that has begun, or one that has no answer.

        Also that of a call that is over, since it may carry what the other side must hear of.
        """
        state = self.state
        if state is State.CLOSED:
            return Instruction.DROP
        if state is State.OPEN:
            if call is not None:
                call.connection = self.connection
            return Instruction.SEND
        if not is_apart:
            return Instruction.SET_APART
        self._backlog.append((call, message))
        if state is State.BEING_MADE:
            return Instruction.WAIT
        self._go("wanted")
        self.connection += 1
        return Instruction.CONNECT

    def tell(self, call: C, word: M) -> Instruction:
        """A call that was taken out is not wanted any more, of which `word` tells the callee, once the call has left.

        Who sends the call looks at `unwanted` behind it, since that may have become so meanwhile.
        """
        call.unwanted = True
        if not call.connection or call.connection != self.connection or self.state in (State.NONE, State.CLOSED):
            return Instruction.DROP
        if self.state is State.OPEN:
            return Instruction.SEND
        self._backlog.append((None, word))
        return Instruction.WAIT

    def leaves_with_others(self, call: C) -> bool:
        """Whether a call for which nobody waits in place may be left to leave with the next ones."""
        return len(self.in_flight) > COMPANY and bool(call.id % COMPANY)

    def missed(self, connection: int) -> None:
        """That connection had ended before a message was written, which so may be sent again."""
        if self.state is State.OPEN and self.connection == connection:
            self._go("ended")

    # The connection

    def drain(self) -> list[tuple[C | None, M]]:
        """There is a connection: what to send over it next of the backlog; nothing once it is open, or closed."""
        if self.state is State.CLOSED:
            return []
        waited, self._backlog = self._backlog, []
        backlog = [each for each in waited if each[0] is None or not each[0].unwanted or self._carries(each[1])]
        if not backlog:
            self._go("made")
        for call, _ in backlog:
            if call is not None:
                call.connection = self.connection
        return backlog

    def refused(self, unsent: Iterable[tuple[C | None, M]] = (), keeps_messages: bool = False) -> list[C]:
        """None could be made, or it ended before `unsent`: the calls that waited for it, which fail.

        With `keeps_messages`, those that have no answer leave with the next one.
        """
        if self.state is State.CLOSED:
            return []
        self._go("refused")
        waited, self._backlog = [*unsent, *self._backlog], []
        if keeps_messages:
            self._backlog = [(call, message) for call, message in waited if call is None]
        return [call for call, _ in waited if call is not None and self.take(call.id) is not None]

    def ended(self, connection: int) -> list[C]:
        """That one has ended: the calls that were sent over it, which fail."""
        self.missed(connection)
        return self._take_all(lambda call: call.connection == connection)

    def close(self) -> list[C]:
        """Nothing is sent from here on: the calls that fail."""
        if self.state is not State.CLOSED:
            self._go("closed")
        self._backlog = []
        return self._take_all(lambda _: True)

    def _go(self, event: str) -> None:
        assert (self.state, event) in _NEXT, f"{self!r} is told that it is {event}"
        self.state = _NEXT[self.state, event]

    # Calls end

    def take(self, id_: int) -> C | None:
        """A call is over, or its caller gave up; None where that was so before."""
        call = self.in_flight.pop(id_, None)
        if call is not None:
            self._weight -= call.weight
            if call.timed:
                self._deadlines.remove(call, call.timeout)
        return call

    def expired(self, now: float) -> list[C]:
        """The calls that were timed and are out of time."""
        return [call for call in self._deadlines.due(now) if self.take(call.id) is not None]

    def next_deadline(self) -> float:
        return self._deadlines.next()

    def _take_all(self, which: Callable[[C], bool]) -> list[C]:
        return [call for call in list(self.in_flight.values()) if which(call) and self.take(call.id) is not None]

    # How full it is

    @property
    def crowded(self) -> bool:
        """Whether so much is in flight that nothing should be added."""
        return len(self.in_flight) >= self._most_calls or self._weight >= self._most_bytes

    def __repr__(self) -> str:
        waiting = f", {len(self._backlog)} messages wait for it" if self._backlog else ""
        return f"<Calls: {self.state.value}{waiting}; {len(self.in_flight)} in flight>"
