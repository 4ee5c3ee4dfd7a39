"""Each call ends once, whatever happens around it; and variants of the machine that are wrong are found."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from telegrad.agent.calls import COMPANY, Calls, Instruction, State
from tests.sim.calls_world import Call, Machine, Sent, Word, World, carries

SEEDS = 3000
AT_NIGHT = 100_000


def run(seeds: range, make: type[Machine] = Calls) -> None:
    for seed in seeds:
        try:
            World(seed, make).run()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


def test_each_call_ends_once() -> None:
    run(range(SEEDS))


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_each_call_ends_once_in_many_worlds() -> None:
    run(range(SEEDS, SEEDS + AT_NIGHT))


class FailsWithAnyConnection(Calls[Call, Sent]):
    """A late word of the end of one connection fails the calls of the next one."""

    def ended(self, connection: int) -> list[Call]:
        waiting = [call for call, _ in self._backlog]
        self.missed(connection)
        return self._take_all(lambda call: call not in waiting)


class OpensTooEarly(Machine):
    """What comes later overtakes the backlog."""

    def drain(self) -> list[tuple[Call | None, Sent]]:
        drained = super().drain()
        if drained and self.state is State.BEING_MADE:
            self._go("made")
        return drained


class ForgetsTheBacklog(Machine):
    """Where no connection can be made, what waits for it goes on waiting."""

    def refused(self, unsent: object = (), keeps_messages: bool = False) -> list[Call]:
        self._backlog = []
        return super().refused()


class KeepsTheWeight(Machine):
    """Calls that run out of time leave their bytes behind."""

    def expired(self, now: float) -> list[Call]:
        return [call for call in self._deadlines.due(now) if self.in_flight.pop(call.id, None)]


class SendsAgain(Machine):
    """A call that was sent over a connection that ended is sent over the next one, too."""

    def ended(self, connection: int) -> list[Call]:
        self.missed(connection)
        if self.state is State.NONE:
            self._backlog += [(call, call) for call in self.in_flight.values() if call.connection == connection]
            return []
        return super().ended(connection)


class DropsWhatIsOver(Machine):
    """Of a call that ran out of time before there was a connection, the other side never hears."""

    def drain(self) -> list[tuple[Call | None, Sent]]:
        self._backlog = [(call, sent) for call, sent in self._backlog if call is None or call.id in self.in_flight]
        return super().drain()


class TellsOnlyOnceOpen(Machine):
    """Of calls that were handed to a connection that is still being made, the callee hears nothing."""

    def tell(self, call: Call, word: Sent) -> Instruction:
        instruction = super().tell(call, word)
        if instruction is Instruction.WAIT:
            self._backlog.pop()
        return instruction


class SendsWhatIsUnwanted(Machine):
    """What was cancelled before there was a connection runs all the same, until the callee hears of that."""

    def drain(self) -> list[tuple[Call | None, Sent]]:
        self._carries = lambda _: True
        return super().drain()


class ForgetsThatItIsUnwanted(Machine):
    """Who sends a call does not learn that it was cancelled meanwhile."""

    def tell(self, call: Call, word: Sent) -> Instruction:
        instruction = super().tell(call, word)
        call.unwanted = call.unwanted and instruction is not Instruction.DROP
        return instruction


WRONG = [
    FailsWithAnyConnection,
    OpensTooEarly,
    ForgetsTheBacklog,
    KeepsTheWeight,
    SendsAgain,
    DropsWhatIsOver,
    TellsOnlyOnceOpen,
    SendsWhatIsUnwanted,
    ForgetsThatItIsUnwanted,
]


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_is_found(wrong: type[Machine]) -> None:
    with pytest.raises(AssertionError, match="seed"):
        run(range(SEEDS), wrong)


# One by one


@pytest.fixture
def calls() -> Machine:
    return Calls(3, 100, carries)


@pytest.fixture
def begin(calls: Machine) -> Callable[..., Call]:
    def begun(**fields: float) -> Call:
        call = Call(0, 0, **fields)  # type: ignore[arg-type]
        calls.begin(call, call)
        return call

    return begun


def connect(calls: Machine) -> None:
    assert calls.send(None, Call(0, 0), is_apart=True) is Instruction.CONNECT
    while calls.drain():
        pass
    assert calls.state is State.OPEN


def test_what_another_thread_will_send_is_set_apart_first(calls: Machine, begin: Callable[..., Call]) -> None:
    call = begin()
    assert calls.send(call, call) is Instruction.SET_APART
    assert calls.state is State.NONE
    assert calls.send(call, call, is_apart=True) is Instruction.CONNECT
    assert calls.send(None, call, is_apart=True) is Instruction.WAIT
    assert calls.drain() == [(call, call), (None, call)]
    assert calls.drain() == []
    assert calls.send(begin(), call) is Instruction.SEND


def test_messages_without_answer_may_wait_for_the_next_one(calls: Machine, begin: Callable[..., Call]) -> None:
    call, notice = begin(), Call(0, 0)
    calls.send(call, call, is_apart=True)
    calls.send(None, notice, is_apart=True)
    assert calls.refused(keeps_messages=True) == [call]
    other = begin()
    assert calls.send(other, other, is_apart=True) is Instruction.CONNECT
    assert calls.drain() == [(None, notice), (other, other)]


def test_what_a_call_carries_is_sent_though_it_is_over(calls: Machine, begin: Callable[..., Call]) -> None:
    call = begin()
    assert calls.take(call.id) is call
    assert calls.take(call.id) is None
    assert calls.send(call, call, is_apart=True) is Instruction.CONNECT
    assert calls.drain() == [(call, call)]


def test_a_connection_that_was_missed_is_made_again(calls: Machine, begin: Callable[..., Call]) -> None:
    connect(calls)
    calls.missed(calls.connection - 1)
    assert calls.state is State.OPEN  # an older one
    calls.missed(calls.connection)
    call = begin()
    assert calls.send(call, call, is_apart=True) is Instruction.CONNECT
    assert calls.connection == 2
    assert calls.ended(1) == []


def test_nothing_leaves_once_all_is_closed(calls: Machine, begin: Callable[..., Call]) -> None:
    call = begin()
    calls.send(call, call, is_apart=True)
    assert calls.close() == [call]
    assert calls.close() == []
    assert calls.send(None, call) is Instruction.DROP
    assert calls.drain() == []
    assert calls.refused() == []
    assert calls.state is State.CLOSED


def test_the_callee_is_told_behind_the_call_and_over_its_connection(calls: Machine, begin: Callable[..., Call]) -> None:
    connect(calls)
    call = begin()
    assert calls.take(call.id) is call
    assert calls.tell(call, Word(call)) is Instruction.SEND
    assert call.unwanted
    calls.ended(calls.connection)
    assert calls.tell(call, Word(call)) is Instruction.DROP  # it knows
    other = begin()
    assert calls.send(other, other, is_apart=True) is Instruction.CONNECT
    assert calls.tell(call, Word(call)) is Instruction.DROP  # this is another
    assert calls.drain() == [(other, other)]
    word = Word(other)
    assert calls.tell(other, word) is Instruction.WAIT
    assert calls.drain() == [(None, word)]


def test_what_was_cancelled_before_it_left_stays_unless_it_carries_something(
    calls: Machine, begin: Callable[..., Call]
) -> None:
    light, laden = begin(), begin(carries=True)
    for call in (light, laden):
        calls.send(call, call, is_apart=True)
        assert calls.take(call.id) is call
        assert calls.tell(call, Word(call)) is Instruction.DROP
    assert calls.drain() == [(laden, laden)]  # and who sends it sees that it is not wanted
    assert calls.drain() == []
    assert calls.state is State.OPEN


def test_it_is_crowded_by_number_or_by_weight(calls: Machine, begin: Callable[..., Call]) -> None:
    few = [begin() for _ in range(3)]
    assert calls.crowded
    calls.take(few[0].id)
    assert not calls.crowded
    calls.take(few[1].id)
    heavy = begin(weight=100)
    assert calls.crowded
    calls.take(heavy.id)
    assert not calls.crowded


def test_of_many_calls_some_wait_for_company(begin: Callable[..., Call], calls: Machine) -> None:
    made = [begin() for _ in range(3 * COMPANY)]
    assert [calls.leaves_with_others(call) for call in made].count(False) == 3


def test_deadlines(calls: Machine, begin: Callable[..., Call]) -> None:
    first = begin(timeout=2.0, deadline=2.0)
    assert calls.time(first)
    assert not calls.time(begin(timeout=2.0, deadline=2.5))
    begin(timeout=1.0, deadline=1.0)
    assert calls.next_deadline() == 2.0
    assert calls.expired(1.9) == []
    assert calls.expired(2.1) == [first]
    assert calls.next_deadline() == 2.5


def test_its_state_can_be_seen(calls: Machine, begin: Callable[..., Call]) -> None:
    call = begin()
    calls.send(call, call, is_apart=True)
    assert repr(calls) == "<Calls: a connection is being made, 1 messages wait for it; 1 in flight>"
