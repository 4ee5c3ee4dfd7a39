"""Tests of agents whose threads pause at the edges of the locks, at random, so that rare orders come up."""

import contextlib
import operator
import queue
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from telegrad._core.calls.cancelling import cancelled
from telegrad._core.worker.current import Worker
from telegrad.errors import CallCancelled, LeftEarly, PeerError, PeerLost
from tests.cluster import PATIENCE, agents, in_threads, pause, wait_until
from tests.links import callers_of
from tests.locks import CheckedLock

SEEDS = 2
CALLS = 60  # of each thread


@pytest.fixture(params=range(SEEDS))
def chance(request: pytest.FixtureRequest) -> Iterator[random.Random]:
    """Let threads pause for a moment at one edge of three."""
    chance = random.Random(request.param)

    def hold_up() -> None:
        if chance.random() < 0.3:
            time.sleep(chance.random() * 5e-4)

    CheckedLock.at_edge = staticmethod(hold_up)
    yield chance
    CheckedLock.at_edge = None


def in_place(caller: Worker, offset: int) -> int:
    """Check that each call gives its own value or fails with its connection; return how many failed."""
    failed = 0
    for number in range(offset, offset + CALLS):
        try:
            assert caller.agent.call("w1", operator.add, (number, 1), None) == number + 1
        except PeerError:
            failed += 1
    return failed


def at_once(caller: Worker, offset: int) -> int:
    numbers = range(offset, offset + CALLS)
    futures = [caller.agent.call_async("w1", operator.add, (number, 1), None) for number in numbers]
    failed = 0
    for number, future in zip(numbers, futures, strict=True):
        try:
            assert future.wait() == number + 1
        except PeerError:
            failed += 1
    return failed


def left_alone(caller: Worker, offset: int) -> int:
    """Call without a thread that waits in place, so that the leader reads; return how many failed."""
    numbers = range(offset, offset + CALLS)
    futures = [caller.agent.call_async("w1", operator.add, (number, 1), None) for number in numbers]
    done = threading.Semaphore(0)
    for future in futures:
        future.add_done_callback(lambda _: done.release())
    for _ in futures:
        assert done.acquire(timeout=30)
    return sum(isinstance(_error_of(future), PeerError) for future in futures)


def _error_of(future: object) -> BaseException | None:
    try:
        future.value()  # type: ignore[attr-defined]
    except BaseException as error:
        return error
    return None


WAYS = (in_place, at_once, left_alone)


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_cancelled_calls_end_and_no_others(transport: str, chance: random.Random) -> None:
    with agents(2, transport=transport) as (a, b):

        def call(offset: int) -> int:
            made = {}
            for number in range(offset, offset + CALLS):
                made[number] = a.agent.call_async("w1", watch if number % 2 else operator.neg, (number,), None)
            ended = {n for n, future in made.items() if (n % 2 or chance.random() < 0.5) and future.cancel()}
            for number, future in made.items():
                if number in ended:
                    with pytest.raises(CallCancelled):
                        future.wait()
                else:
                    assert not number % 2
                    assert future.wait() == -number
            return len(ended)

        assert sum(in_threads(*(lambda at=at: call(1000 * at) for at in range(3)))) >= 3 * CALLS // 2
        # Calls that were cancelled at once may still be on their way.
        wait_until(lambda: a.agent.idle and b.agent.idle and not any(caller.calls for caller in callers_of(b)))


def watch(number: int) -> None:
    wait_until(cancelled)


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_every_call_ends(transport: str, chance: random.Random) -> None:
    with agents(2, transport=transport) as (a, _):
        jobs = [lambda way=way, at=at: way(a, 1000 * at) for at, way in enumerate(2 * WAYS)]
        assert in_threads(*jobs) == [0] * len(jobs)
        assert a.agent.idle


def test_every_call_ends_while_connections_break(chance: random.Random) -> None:
    with agents(2) as (a, _):
        over = threading.Event()

        def cut() -> int:
            cuts = 0
            while not over.wait(chance.random() * 0.02):
                link = a.agent._connections.peer("w1").link
                if link is not None:
                    link.close(PeerLost("cut by the test"))
                    cuts += 1
            return cuts

        def call() -> int:
            try:
                return sum(in_threads(*(lambda way=way, at=at: way(a, 1000 * at) for at, way in enumerate(WAYS))))
            finally:
                over.set()

        cuts, failed = in_threads(cut, call)
        assert cuts > 0
        assert failed < len(WAYS) * CALLS
        assert a.agent.idle


@pytest.mark.parametrize("amid", ["before the connections end", "as they end"])
def test_a_worker_that_connects_to_one_that_leaves_early_learns_why(amid: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with agents(2) as (a, b):
        connections = b.agent._connections
        ending = b.agent.layers.references if amid.startswith("before") else connections.listener
        accept, close, came = connections.listener._accepted, ending.close, queue.SimpleQueue[Any]()
        monkeypatch.setattr(connections.listener, "_accepted", lambda *stranger: came.put(stranger))
        monkeypatch.setattr(ending, "close", lambda *reason: (accept(*came.get(timeout=PATIENCE)), close(*reason)))
        call = a.agent.call_async("w1", operator.add, (1, 2), None)
        b.end("an exception")
        with pytest.raises(LeftEarly, match="an exception"):
            call.wait()


def test_a_connection_that_is_accepted_as_its_worker_is_put_out_of_the_group_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with agents(2) as (a, b):
        connections = b.agent._connections
        make = connections._link

        def make_late(*given: Any) -> Any:
            link = make(*given)
            connections.cut(a.agent.me.identity, PeerLost("put out by the test"))
            return link

        monkeypatch.setattr(connections, "_link", make_late)
        with pytest.raises(PeerError):
            a.agent.call("w1", operator.add, (1, 2), None)
        wait_until(lambda: not connections._accepted)


def test_every_call_ends_when_the_agent_closes(chance: random.Random) -> None:
    with agents(2) as (a, _):
        begun = threading.Semaphore(0)

        def call(at: int) -> None:
            begun.release()
            with contextlib.suppress(PeerError):  # the calls could not even begin
                WAYS[at](a, 1000 * at)

        def close() -> None:
            for _ in WAYS:
                begun.acquire()
            pause(chance.random() * 0.05)
            a.agent.close()

        in_threads(close, *(lambda at=at: call(at) for at in range(len(WAYS))))
        assert a.agent.idle
