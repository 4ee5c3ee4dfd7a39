"""Tests of a caller that sends without end: the others are served, and the costs of the callee are limited.

The flood is sent over the connection of a worker, past the limits that a caller sets itself.
"""

import operator
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

from telegrad._core.agent.incoming import Caller
from telegrad._core.memory.blobs import Chunk
from telegrad._core.pickling.exceptions import rebuild
from telegrad._core.transport import writer
from telegrad._core.wire.messages import CALL, CANCEL, FAILURE, NOTICE, PULSE, Message
from telegrad._core.worker.current import Worker
from telegrad.errors import LimitReached, PeerError
from tests import links
from tests.cluster import Three, agents, in_background, takes_less_than, wait_until
from tests.strangers.test_floods import latency

MOST = 800  # calls of one caller that may wait
KIB = 1 << 10
gate = threading.Event()
ran: list[int] = []


class Word(NamedTuple):
    """A control message."""

    number: int


def hold(number: int = 0) -> None:
    ran.append(number)
    gate.wait(30)


@pytest.fixture
def three() -> Iterator[Three]:
    """Yield the callee, the worker that floods it, and another caller."""
    gate.clear()
    ran.clear()
    with agents(3, num_worker_threads=4) as (callee, flooder, other):
        callee.agent._server.intake._most_calls = MOST
        for caller in (flooder, other):
            caller.agent.call("w0", operator.add, (1, 2), None)
        yield callee, flooder, other
        gate.set()
        wait_until(lambda: callee.agent._server.idle)


def caller_of(callee: Worker, name: str) -> Caller:
    return next(caller for caller in links.callers_of(callee) if caller.name == name)


def call(number: int, function: Callable[..., Any], *args: Any) -> Message:
    name = f"{function.__module__}:{function.__qualname__}".encode()
    return Message(CALL, 1_000_000 + number, head=name, body=pickle.dumps((args, {}), 5))


def is_held(callee: Worker, name: str) -> bool:
    return any(caller.name == name for caller in callee.agent._server.intake.stopped)


def test_calls_that_sleep_leave_a_slot_for_others(three: Three) -> None:
    callee, flooder, other = three
    for number in range(MOST // 2):
        links.link_to(flooder, "w0").send(call(number, hold, number))
    wait_until(lambda: len(ran) >= 4)
    with takes_less_than(10):  # the slots are not free for 30 s
        assert other.agent.call("w0", operator.add, (1, 2), None, timeout=20) == 3
    wait_until(lambda: len(caller_of(callee, "w1").queue) > 100)  # the calls are read little by little


def test_a_caller_with_too_many_calls_is_not_read_until_it_has_fewer(three: Three) -> None:
    callee, flooder, other = three
    count = 6 * MOST
    for number in range(count):
        links.link_to(flooder, "w0").send(call(number, hold, number))
    wait_until(lambda: is_held(callee, "w1"))
    assert latency(other, to="w0") < 1.0
    assert len(caller_of(callee, "w1").calls) < 2 * MOST
    assert not is_held(callee, "w2")
    before = links.link_to(flooder, "w0").taken
    flooder.agent._connections.peer("w0").connection.read_in_background()
    wait_until(lambda: links.link_to(flooder, "w0").taken > before)  # it sees that the callee lives
    gate.set()
    wait_until(lambda: len(ran) == count)
    assert sorted(ran) == list(range(count))
    wait_until(lambda: not is_held(callee, "w1"))
    assert flooder.agent.call("w0", operator.add, (1, 2), None) == 3


def test_cancellations_are_read_though_too_many_calls_wait(three: Three) -> None:
    callee, flooder, _ = three
    for number in range(MOST + 100):
        links.link_to(flooder, "w0").send(call(number, hold, number))
    wait_until(lambda: is_held(callee, "w1"))
    for number in range(MOST + 100):
        links.link_to(flooder, "w0").send(Message(CANCEL, 1_000_000 + number))
    wait_until(lambda: len(caller_of(callee, "w1").queue) < 100)
    wait_until(lambda: not is_held(callee, "w1"))


def test_far_too_many_calls_are_refused(three: Three) -> None:
    """Reading may go on for a while though no call ends."""
    callee = three[0]
    callee.agent._server.intake._most_calls = 20
    caller = caller_of(callee, "w1")
    answers: list[Message] = []

    class Elsewhere:
        is_congested = False

        def send(self, message: Message, later: bool = False) -> None:
            answers.append(message)

    calls = [call(number, hold, number) for number in range(60)]
    callee.agent._server.on_messages(caller, Elsewhere(), calls)  # type: ignore[arg-type]
    wait_until(lambda: len(answers) >= 20)
    assert all(answer.kind == FAILURE for answer in answers)
    with pytest.raises(LimitReached, match=r"worker 'w1'.* are not answered yet.*Wait for some"):
        raise rebuild(bytes(answers[0].body))
    assert len(caller.calls) == 40


def test_no_calls_begin_while_their_results_are_not_read(three: Three, monkeypatch: pytest.MonkeyPatch) -> None:
    callee, flooder, other = three
    monkeypatch.setattr(writer, "MOST_BYTES", 1024 * KIB)
    link = links.link_to(flooder, "w0")
    count, size = 200, 200 * KIB  # part of the frame; larger values travel in shared memory
    accepted = next(link for link in links.accepted(callee) if link.peer == "w1")
    with links.unread(link):
        for number in range(count):
            link.send(call(number, bytes, size))
        caller = caller_of(callee, "w1")
        wait_until(lambda: caller.queue.is_held_up)
        assert latency(other, to="w0") < 1.0
        assert caller.queue.is_held_up
        waiting = sum(len(chunk.data) for chunk in accepted._writer.outbox.copy() if isinstance(chunk, Chunk))
        assert waiting <= 1024 * KIB + 6 * size  # and the calls that ran as the limit was reached
        wait_until(lambda: len(caller.queue) > count / 2)
    link.reading.watch()
    flooder.agent.expect("w0")
    wait_until(lambda: not (caller.calls or caller.queue.is_held_up))


def test_a_number_that_is_used_twice_ends_the_connection(three: Three) -> None:
    _, flooder, other = three
    link = links.link_to(flooder, "w0")
    for _ in range(2):
        link.send(call(0, hold))
    flooder.agent.expect("w0")
    wait_until(lambda: link.closed)
    gate.set()
    assert latency(other, to="w0") < 1.0


def test_control_messages_do_not_delay_calls_of_others(three: Three) -> None:
    callee, flooder, other = three
    stop = threading.Event()
    callee.agent.on(Word, lambda *_: None)

    def flood() -> None:
        link = links.link_to(flooder, "w0")
        while not stop.is_set() and link.closed is None:
            for _ in range(100):
                link.send(Message(NOTICE, body=pickle.dumps(("Word", 1))))
                link.send(Message(PULSE, 1))
            wait_until(lambda: len(link._outbox) < 1000 or stop.is_set() or link.closed)

    with in_background(flood):
        try:
            wait_until(lambda: links.link_to(flooder, "w0").sent > 100_000)
            assert latency(other, to="w0") < 1.0
            assert len(caller_of(callee, "w1").control) < 2 * MOST
        finally:
            stop.set()


def test_the_calls_of_a_caller_that_has_gone_do_not_begin(three: Three) -> None:
    callee, flooder, other = three
    for number in range(MOST // 2):
        links.link_to(flooder, "w0").send(call(number, hold, number))
    wait_until(lambda: len(ran) >= 4)
    caller = caller_of(callee, "w1")
    wait_until(lambda: len(caller.queue) > MOST // 4)
    flooder.agent.close(PeerError("the end"))
    wait_until(lambda: not len(caller.queue))
    assert len(ran) < 20
    gate.set()
    wait_until(lambda: not caller.calls)
    assert len(ran) < 20
    assert latency(other, to="w0") < 1.0
