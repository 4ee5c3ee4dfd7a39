"""Tests of back-pressure: callers that are faster than their callee wait, and no call is lost."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from telegrad._core.agent.agent import Agent
from telegrad._core.agent.peer import BATCH
from telegrad._core.worker import current
from telegrad._core.worker.current import Worker
from telegrad.rpc import Future, functions, remote, rpc_async, rpc_sync
from tests.cluster import PATIENCE, agents_here, group, in_background, in_threads, wait_until

FEW = 50
MANY = 500

gate = threading.Event()
lock = threading.Lock()  # guards arrived and meeting
arrived: list[int] = []


def hold(number: int, *_: object) -> int:
    assert gate.wait(PATIENCE)
    with lock:
        arrived.append(number)
    return number


def relay(to: str, number: int) -> int:
    return rpc_async(to, hold, (number,)).wait()


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    gate.clear()
    arrived.clear()
    yield
    gate.set()


@pytest.fixture(params=["auto", "tcp"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Worker, Worker]]:
    with agents_here(2, transport=request.param) as (a, b):
        for worker in (a, b):
            limit(worker.agent, most_calls=FEW)
        yield a, b


def limit(agent: Agent, **limits: Any) -> None:
    """Set the limits of calls in flight to workers that were not called yet."""
    agent._connections.settings = agent._connections.settings._replace(**limits)


def in_flight(worker: Worker) -> int:
    return sum(len(each.calls.in_flight) for each in worker.agent._connections._peers.values())


def crowd(caller: Worker, begin: Callable[[int], Future[Any]]) -> list[Any]:
    """Begin many calls; return their results, which come once the gate is open."""
    current.enter(caller)
    return [future.wait() for future in [begin(number) for number in range(MANY)]]


def open_when_full(caller: Worker, full: int) -> None:
    wait_until(lambda: in_flight(caller) >= full)
    assert not gate.wait(0.1)  # more calls would have begun by now
    assert in_flight(caller) <= full
    gate.set()


BEGINS: dict[str, Callable[[int], Future[Any]]] = {
    "another": lambda number: rpc_async("w1", hold, (number,)),
    "itself": lambda number: rpc_async("w0", hold, (number,)),
    "references": lambda number: remote("w1", hold, (number,)).future(),
}


@pytest.mark.parametrize("kind", BEGINS)
def test_calls_wait_for_room(pair: tuple[Worker, Worker], kind: str) -> None:
    caller = pair[0]
    found, _ = in_threads(lambda: crowd(caller, BEGINS[kind]), lambda: open_when_full(caller, FEW))
    assert found == ([None] * MANY if kind == "references" else list(range(MANY)))
    assert sorted(arrived) == list(range(MANY))


def test_tensors_wait_for_room(pair: tuple[Worker, Worker]) -> None:
    caller = pair[0]
    x = torch.zeros(1 << 16)
    limit(caller.agent, most_calls=MANY, most_bytes=10 * x.nbytes)
    found, _ = in_threads(
        lambda: crowd(caller, lambda number: rpc_async("w1", hold, (number, x))), lambda: open_when_full(caller, 10)
    )
    assert found == list(range(MANY))


def test_calls_of_a_callback_do_not_wait_for_room(pair: tuple[Worker, Worker]) -> None:
    """The thread that runs callbacks may be needed for the answers that make room."""
    gate.set()
    futures: list[Future[Any]] = []
    done = threading.Event()

    def more(_: object) -> None:
        futures.extend(rpc_async("w1", hold, (number,)) for number in range(MANY))
        done.set()

    rpc_async("w1", int).then(more)
    assert done.wait(PATIENCE)
    assert [future.wait() for future in futures] == list(range(MANY))


def test_nested_calls_in_both_directions(pair: tuple[Worker, Worker]) -> None:
    caller, callee = pair
    gate.set()
    both = in_threads(
        lambda: crowd(caller, lambda number: rpc_async("w1", relay, ("w0", number))),
        lambda: crowd(callee, lambda number: rpc_async("w0", relay, ("w1", number))),
    )
    assert both == [list(range(MANY))] * 2


def test_synchronous_calls_do_not_wait(pair: tuple[Worker, Worker]) -> None:
    caller = pair[0]
    with in_background(crowd, caller, lambda number: rpc_async("w1", hold, (number,))):
        wait_until(lambda: in_flight(caller) >= FEW)
        gate.set()
        assert rpc_sync("w1", torch.add, (torch.ones(1), 1)) == 2


def test_callers_that_wait_for_room_fail_when_their_callee_dies() -> None:
    with group(2) as workers:
        workers[0].begin(fire_at_one_that_dies)
        assert workers[0].end() == "PeerLost"


def fire_at_one_that_dies() -> str:
    limit(current.agent(), most_calls=FEW)
    victim = rpc_sync("worker1", os.getpid)
    futures = [rpc_async("worker1", hold, (number,)) for number in range(FEW)]
    threading.Timer(0.2, os.kill, (victim, signal.SIGKILL)).start()
    try:
        while True:
            rpc_async("worker1", hold, (0,))
            if futures[0].done():
                futures[0].wait()
    except Exception as error:
        return type(error).__name__


counted = 0


def count(_: int) -> None:
    global counted
    counted += 1


def resident() -> float:
    """Return the resident megabytes of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def how_many() -> tuple[int, float]:
    return counted, resident()


def fire_a_million() -> tuple[float, float]:
    before, (_, before_there) = resident(), rpc_sync("worker1", how_many)
    peak, last = 0.0, None
    for number in range(1_000_000):
        last = rpc_async("worker1", count, (number,))
        if number % 50_000 == 0:
            peak = max(peak, resident())
    last.wait()
    while (found := rpc_sync("worker1", how_many))[0] < 1_000_000:
        pass
    return peak - before, found[1] - before_there


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="memory is read from /proc")
def test_a_million_calls_without_waiting() -> None:
    with group(2) as workers:
        here, there = workers[0].run(fire_a_million, patience=500)
    assert here < 300
    assert there < 300


# Many calls at once are sent in batches, and all of them are sent


ALL = 3 * BATCH - 1  # so that the last batch is not full

meeting: list[torch.futures.Future[int]] = []


@functions.async_execution
def meet(number: int) -> torch.futures.Future[int]:
    """Return a future that completes with the number of calls once all have arrived, in any order."""
    own: torch.futures.Future[int] = torch.futures.Future()
    with lock:
        meeting.append(own)
        complete = len(meeting) == ALL
    if complete:
        for future in meeting:
            future.set_result(len(meeting))
    return own


@pytest.fixture
def caller() -> Iterator[Worker]:
    meeting.clear()
    with agents_here(2) as (a, _):
        yield a


@pytest.mark.parametrize("begin", [rpc_async, lambda *call: remote(*call).future()], ids=["rpc_async", "remote"])
def test_the_last_of_many_calls_is_sent_before_any_answer(caller: Worker, begin: Callable[..., Future[Any]]) -> None:
    ended = threading.Semaphore(0)
    futures = [begin("w1", meet, (number,)) for number in range(ALL)]
    for future in futures:
        future.add_done_callback(lambda _: ended.release())
    for _ in futures:
        assert ended.acquire(timeout=PATIENCE)


def test_waiting_for_a_call_sends_the_earlier_calls_too(caller: Worker) -> None:
    futures = [rpc_async("w1", meet, (number,)) for number in range(ALL - 1)]
    last = rpc_async("w1", meet, (ALL - 1,))
    assert (last.wait(), {future.wait() for future in futures}) == (ALL, {ALL})


@pytest.mark.parametrize("fails", [False, True])
def test_a_chain_of_callbacks_may_be_longer_than_the_recursion_limit(fails: bool) -> None:
    """They also run in order, if another chain begins at each link."""
    ran: list[int] = []

    def link(number: int, done: torch.futures.Future[int]) -> int:
        ran.append(number)
        return done.wait() + 1

    head: Future[int] = Future()
    last, ends = head, []
    for number in range(2 * sys.getrecursionlimit()):
        ends.append(last.then(lambda done: done.wait()))
        last = last.then(partial(link, number))
    if fails:
        head.set_exception(ValueError("boom"))  # type: ignore[arg-type]
        for each in (last, *ends):
            with pytest.raises(ValueError, match="boom"):
                each.wait()
    else:
        head.set_result(0)
        assert last.wait() == len(ran)
        assert [each.wait() for each in ends] == [*range(len(ran))]
    assert ran == sorted(ran)
