"""Tests of the threads of a worker: their begin and end, the leader's turns, the timer, and the event loop."""

import asyncio
import errno
import gc
import itertools
import logging
import os
import random
import threading
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from queue import SimpleQueue
from time import monotonic, perf_counter
from typing import Any, NoReturn
from unittest.mock import Mock

import pytest

from telegrad._core.reactor import leader_threads
from telegrad._core.reactor import reactor as module
from telegrad._core.reactor.leader_threads import LONGEST_PAUSE, EventLoop, TimerThread
from telegrad._core.reactor.reactor import TURN, Reactor
from telegrad._core.reactor.scheduler import Work, WorkQueue
from telegrad._core.transport.poller import READ
from tests.cluster import PATIENCE, next_turn, wait_until


def reactor_of(slots: int = 1) -> Reactor:
    return Reactor(slots, 1, lambda: None, TimerThread(lambda _: 0.0))


@pytest.fixture
def reactor() -> Iterator[Reactor]:
    made = reactor_of()
    yield made
    made.close()


def test_a_reactor_may_be_closed_while_a_thread_is_about_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    start, late, closed = threading.Thread.start, threading.Event(), threading.Event()
    threads: list[threading.Thread] = []

    def start_late(thread: threading.Thread) -> None:
        threads.append(thread)
        late.set()
        assert closed.wait(PATIENCE)
        start(thread)

    reactor = reactor_of()
    starting = threading.Thread(target=reactor.start)
    monkeypatch.setattr(threading.Thread, "start", start_late)
    start(starting)
    assert late.wait(PATIENCE)
    reactor.close()
    closed.set()
    for thread in [starting, *threads]:
        thread.join(PATIENCE)
        assert not thread.is_alive()


def test_closed_descriptors_of_a_worker_are_reported_in_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    raised: list[object] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    reactor = reactor_of()

    monkeypatch.setattr(reactor.poller, "poll", Mock(side_effect=OSError(errno.EBADF, os.strerror(errno.EBADF))))
    os.close(reactor.poller._waker.fileno())
    reactor.start()
    for thread in list(reactor._threads._threads.values()):
        thread.join(PATIENCE)
    reactor.close()
    assert (raised, caplog.text.count("has closed file descriptors of its worker")) == ([], 1)
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("seed", range(8))
def test_the_leader_soon_looks_at_all_connections_despite_long_works(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """The clock goes on only as works run, so that no other thread counts."""
    chance = random.Random(seed)
    longest = chance.choice([5e-6, 80e-6, 1e-3])
    now, looks, done = [0.0], [0.0], threading.Event()
    monkeypatch.setattr(module, "perf_counter", lambda: now[0])

    def take(seconds: float) -> None:
        now[0] += seconds

    reactor = reactor_of(4)
    look = reactor._polling.poll

    def poll(alone: bool) -> None:
        looks.append(now[0])
        look(alone)

    monkeypatch.setattr(reactor._polling, "poll", poll)
    queues = [WorkQueue() for _ in range(3)]
    for _ in range(500):
        for each in queues:  # before there is a thread
            reactor.submit(Work(take, chance.uniform(0, longest)), each)
    reactor.submit(Work(lambda _: done.set(), None), queues[0])
    try:
        reactor.start()
        assert done.wait(PATIENCE)
    finally:
        reactor.close()
    # One work begins at the last moment, which is noticed as the next one begins.
    assert max(later - earlier for earlier, later in itertools.pairwise(looks)) <= TURN + 2 * longest
    assert now[0] > 3 * longest


class Value:
    pass


@pytest.mark.parametrize("is_long", [False, True])
def test_arguments_of_a_call_are_freed_before_its_thread_runs_the_next(is_long: bool, reactor: Reactor) -> None:
    """Otherwise an unused value would be kept for as long as the next call runs."""
    begun, goes_on, runs, ends = (threading.Event() for _ in range(4))
    threads: list[int] = []

    def hold(_: Value) -> None:
        threads.append(threading.get_ident())
        begun.set()
        assert goes_on.wait(PATIENCE)

    def wait(_: None) -> None:
        threads.append(threading.get_ident())
        runs.set()
        assert ends.wait(PATIENCE)

    value = Value()
    kept, queue = weakref.ref(value), WorkQueue()
    reactor.start()
    reactor.submit(Work(hold, value, is_long), queue)
    del value
    assert begun.wait(PATIENCE)
    reactor.submit(Work(wait, None, is_long=True), queue)
    while not reactor._scheduler.waiting:  # until another thread leads and has found no slot
        reactor.watch(perf_counter() + 1)
    goes_on.set()
    assert runs.wait(PATIENCE)
    assert threads[0] == threads[1]
    assert kept() is None
    ends.set()


def test_the_timer_watches_a_thread_while_it_frees_arguments(reactor: Reactor) -> None:
    """The end of an argument may run user code."""
    since, freed = list[float](), threading.Event()

    class Ending:
        def __del__(self) -> None:
            since.append(reactor.here.own.since)
            freed.set()

    reactor.submit(Work(lambda _: None, Ending()), WorkQueue())
    reactor.start()
    assert freed.wait(PATIENCE)
    assert since[0] > 0


@pytest.mark.parametrize("takes", [1e-6, 1e-4, 1e-3])
def test_the_leader_soon_looks_at_all_connections_despite_a_busy_one(
    monkeypatch: pytest.MonkeyPatch, takes: float, reactor: Reactor
) -> None:
    """`takes`: seconds of each read, and of the work that it brings."""
    now, looks = [1.0], [1.0]
    monkeypatch.setattr(module, "perf_counter", lambda: now[0])

    class Busy:
        prompt = True

        def on_readable(self) -> bool:
            now[0] += takes
            return True

    def poll(_: float | None) -> list[tuple[Any, int]]:
        looks.append(now[0])
        return [(Busy(), READ)]

    monkeypatch.setattr(reactor.poller, "poll", poll)
    while len(looks) < 10:
        reactor._polling.poll(alone=True)
    assert max(later - sooner for sooner, later in itertools.pairwise(looks[1:])) <= TURN + 3 * takes


def test_work_may_be_submitted_on_a_thread_that_holds_the_lock(reactor: Reactor) -> None:
    """A finalizer does so if it makes a call while the collector runs under the lock."""
    queue, ran = WorkQueue(), threading.Semaphore(0)
    reactor.start()
    for each in (None, queue):
        with reactor._lock:
            reactor.submit(Work(lambda _: ran.release(), None), each)
        assert ran.acquire(timeout=PATIENCE)


def test_a_close_during_a_busy_poll_ends_the_leader(monkeypatch: pytest.MonkeyPatch) -> None:
    reactor = reactor_of()
    polling, closing = reactor._polling, threading.Event()
    spin = polling._spin

    def spin_into_the_close(start: float) -> Any:
        closing.set()
        wait_until(lambda: polling._closed)
        polling._recent = None
        return spin(start)

    monkeypatch.setattr(polling, "_spin", spin_into_the_close)
    polling._spins = True
    reactor.start()
    assert closing.wait(PATIENCE)
    reactor.close()
    wait_until(lambda: not reactor._threads._threads)


def test_works_begin_after_another_resumes_while_the_leader_sleeps(reactor: Reactor) -> None:
    """Two slots are then in use though one is allowed, and the works that wait for a slot are looked at anew."""
    queue = WorkQueue()
    answered, released, begun, ran = (threading.Event() for _ in range(4))

    def wait(_: object) -> None:
        with reactor.waiting():
            assert answered.wait(PATIENCE)

    def hold(_: object) -> None:
        begun.set()
        assert released.wait(PATIENCE)

    reactor.start()
    reactor.submit(Work(wait, None, is_long=True), queue)
    reactor.submit(Work(hold, None, is_long=True), queue)
    reactor.submit(Work(lambda _: ran.set(), None), queue)
    assert begun.wait(PATIENCE)
    wait_until(lambda: bool(reactor._scheduler.waiting) and reactor._polling.asleep)
    answered.set()
    wait_until(lambda: queue.held == 1 and len(reactor._threads._standby) == 1)
    released.set()
    assert ran.wait(PATIENCE)


def test_works_run_after_a_new_leader_could_not_start_while_the_old_one_fell_asleep(
    monkeypatch: pytest.MonkeyPatch, reactor: Reactor
) -> None:
    threads = reactor._threads
    begun, goes_on, ran = (threading.Event() for _ in range(3))

    def hold(_: object) -> None:
        begun.set()
        assert goes_on.wait(PATIENCE)

    def fail(_: object) -> NoReturn:
        goes_on.set()
        wait_until(lambda: stuck in threads._standby)
        raise RuntimeError("can't start new thread")

    reactor.start()
    reactor.submit(Work(hold, None))
    assert begun.wait(PATIENCE)
    stuck = threads.leader
    assert stuck is not None
    monkeypatch.setattr(threads, "_spawn", fail)
    threads.hand_over(stuck)
    reactor.submit(Work(lambda _: ran.set(), None))
    assert ran.wait(5.0)


def test_only_the_found_works_are_dropped(reactor: Reactor) -> None:
    """A work that begins and is freed meanwhile may leave its address to a new one, which nobody has looked at."""
    queue = WorkQueue()

    def drop_late(queue: WorkQueue, unwanted: Any) -> list[Work]:
        work, _ = reactor._scheduler.next(reactor._scheduler.ready)
        assert work is not None
        address = id(work)
        del work
        for _ in range(1000):
            reactor._scheduler.add(deque([(Work(print, None), queue)]))
            if id(queue.works[-1]) == address:
                break
        return drop(queue, unwanted)

    reactor.submit(Work(print, None), queue)
    with reactor._lock:
        drop = reactor._scheduler.drop
        reactor._scheduler.drop = drop_late
    assert reactor.drop(queue, lambda _: True) == []
    assert len(queue) > 0


@pytest.fixture
def broken_log() -> Iterator[None]:
    """Add a filter with a mistake to the log."""

    def fail(_: logging.LogRecord) -> bool:
        raise KeyError("a mistake of the program")

    logging.getLogger("telegrad").addFilter(fail)
    yield
    logging.getLogger("telegrad").removeFilter(fail)


@pytest.mark.usefixtures("broken_log")
def test_an_error_that_cannot_be_logged_does_not_end_the_leader(reactor: Reactor) -> None:
    ran = threading.Event()

    def fail(_: None) -> NoReturn:
        raise ValueError("boom")

    reactor.start()
    reactor.submit(Work(fail, None))
    reactor.submit(Work(lambda _: ran.set(), None))
    assert ran.wait(5.0)


# The timer's thread


def ticks_of(act: Callable[[TimerThread, float, int], float], count: int) -> list[float]:
    """Return the times of `count` ticks; `act` gets each tick with its number, and returns the time of the next."""
    ticks: list[float] = []
    enough = threading.Event()

    def tick(now: float) -> float:
        ticks.append(now)
        if len(ticks) == count:
            enough.set()
        return act(timer, now, len(ticks))

    timer = TimerThread(tick)
    timer.start(lambda _: 0.0)  # nothing happens, so that only the timer's own times wake it
    try:
        assert enough.wait(10)
    finally:
        timer.close()
    return ticks


@pytest.mark.parametrize("fails", ["nothing", "the tick", "the log, too"])
def test_a_time_requested_during_a_tick_is_kept(fails: str, request: pytest.FixtureRequest) -> None:
    if fails == "the log, too":
        request.getfixturevalue("broken_log")

    def act(timer: TimerThread, now: float, number: int) -> float:
        if number == 1:
            timer.wake_by(now + 0.05)
            if fails != "nothing":
                raise ValueError("boom")
        return now + 60

    first, second = ticks_of(act, 2)[:2]
    assert second - first < LONGEST_PAUSE / 2


def test_the_timer_ticks_at_the_time_that_the_tick_returned() -> None:
    start = monotonic()
    assert ticks_of(lambda timer, now, number: now + 0.05, 3)[2] - start >= 0.1


# The event loop, which keeps its tasks alive


class Waiting:
    """An object that holds the future that it awaits, and is held by no other."""

    def __init__(self) -> None:
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def wait(self, began: threading.Event, ended: list[BaseException]) -> None:
        began.set()
        try:
            await self.future
        except BaseException as error:
            ended.append(error)
            raise


def test_a_task_that_awaits_an_unreferenced_future_goes_on() -> None:
    loop, began, ended = EventLoop(lambda: None), threading.Event(), list[BaseException]()

    async def begin() -> None:
        await Waiting().wait(began, ended)

    loop.run(begin())
    assert began.wait(PATIENCE)
    gc.collect()
    looked = threading.Event()

    async def look() -> None:
        looked.set()

    loop.run(look())
    assert looked.wait(PATIENCE)
    assert ended == []
    loop.close()


async def leave(kind: type[BaseException]) -> None:
    raise kind


async def gathered(kind: type[BaseException]) -> None:
    await asyncio.gather(leave(kind), next_turn())


async def called_soon(kind: type[BaseException]) -> None:
    def raise_it() -> None:
        raise kind

    asyncio.get_running_loop().call_soon(raise_it)


async def stop(_: type[BaseException]) -> None:
    asyncio.get_running_loop().stop()


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
@pytest.mark.parametrize("act", [gathered, called_soon, stop])
def test_the_loop_goes_on_after_system_exit_or_an_interrupt_or_a_stop_in_a_task(
    act: Callable[[type[BaseException]], Coroutine[Any, Any, None]],
    kind: type[BaseException],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(leader_threads, "LAST_WORK", PATIENCE)
    loop, ended, thread = EventLoop(lambda: None), SimpleQueue[str](), list[threading.Thread]()

    async def run(what: Coroutine[Any, Any, None]) -> None:
        thread.append(threading.current_thread())
        try:
            await what
        except BaseException as error:
            ended.put(type(error).__name__)
        else:
            ended.put("")

    for _ in range(2):
        loop.run(run(act(kind)))
        assert ended.get(timeout=PATIENCE) == (kind.__name__ if act is gathered else "")
        loop.run(run(next_turn()))
        assert ended.get(timeout=PATIENCE) == ""
    loop.close()
    assert not thread[0].is_alive(), "the end of the program could interrupt the close of asyncio's loop"
    assert caplog.text.count("the event loop continues") == 2


def test_a_loop_that_was_closed_does_not_begin_again() -> None:
    loop = EventLoop(lambda: None)
    loop.close()
    with pytest.raises(RuntimeError, match="has left its group"):
        loop.run(leave(KeyError))
