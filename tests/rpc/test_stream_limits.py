"""Tests of the limits on what a worker keeps for the streams of a reader: their number and their bytes."""

import asyncio
import contextlib
import gc
import operator
import pickle
import random
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from typing import Any

import pytest

from telegrad._core.membership.members import Identity
from telegrad._core.memory.blobs import Chunk
from telegrad._core.reactor.scheduler import WorkQueue
from telegrad._core.streams import ITEM, SendWindow
from telegrad._core.streams import producer as feeding
from telegrad._core.streams.generator_runs import Producer
from telegrad._core.streams.producer import Feed, Reader, Readers, Taken
from telegrad._core.transport import writer
from telegrad._core.wire.messages import CALL, Message
from telegrad._core.worker import current
from telegrad._core.worker.current import Worker
from telegrad.errors import CallCancelled, LimitReached, PeerError, ProtocolViolation
from telegrad.rpc import RRef, Stream, actor, rpc_stream, rpc_sync
from tests import links
from tests.cluster import PATIENCE, Three, agents, next_turn, wait_until
from tests.seeds import run_each

MOST = 5  # streams
KIB = 1 << 10
KEPT = 1 << 20  # bytes
SIZE = 100 * KIB
LARGEST = KEPT // 4
UNKNOWN = 1 << 20  # number of a stream that no reader has opened

yielded: Counter[str] = Counter()
closed: list[str] = []


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> Iterator[Three]:
    """Start a callee with low limits, and two callers."""
    monkeypatch.setattr(feeding, "MOST_STREAMS", MOST)
    monkeypatch.setattr(feeding, "MOST_KEPT", KEPT)
    yielded.clear()
    closed.clear()
    with agents(3) as (callee, caller, other):
        current.enter(caller)
        yield callee, caller, other
        current.enter(None)


def endless(name: str, item: Any = 0) -> Generator[Any, None, None]:
    try:
        while True:
            yielded[name] += 1
            yield bytes(item) if item else item
    finally:
        closed.append(name)


async def endless_async(name: str, item: Any = 0) -> AsyncIterator[Any]:
    with contextlib.closing(endless(name, item)) as items:
        for each in items:
            yield each


def numbered(count: int) -> Iterator[bytes]:
    for number in range(count):
        yield number.to_bytes(2, "big") + bytes(SIZE)


def reader_of(callee: Worker, caller: Worker) -> Reader | None:
    return callee.attached(Readers)._readers.get(caller.me.identity)


def waits_for_others(callee: Worker, caller: Worker) -> bool:
    reader = reader_of(callee, caller)
    return reader is not None and reader.kept >= KEPT and bool(reader.waiting)


def is_forgotten(callee: Worker, caller: Worker) -> bool:
    gc.collect()
    return reader_of(callee, caller) is None


@pytest.mark.parametrize("function", [endless, endless_async])
def test_the_streams_of_one_worker_are_limited(function: Any, three: Three) -> None:
    callee, caller, other = three
    kept = [rpc_stream("w0", function, (str(number),)) for number in range(MOST)]
    assert [next(each) for each in kept] == MOST * [0]
    refused: Stream[int] = rpc_stream("w0", function, ("refused",))
    with pytest.raises(LimitReached, match=r"from worker 'w0' was refused: 5 streams of worker 'w1' .*or close them"):
        next(refused)
    current.enter(other)
    with rpc_stream("w0", function, ("other",)) as stream:
        assert next(stream) == 0
    current.enter(caller)
    kept.pop().close()
    wait_until(lambda: "4" in closed)
    wait_until(lambda: (reader := reader_of(callee, caller)) is not None and reader._running < MOST)
    kept.append(rpc_stream("w0", function, ("again",)))
    assert next(kept[-1]) == 0
    assert "refused" not in yielded
    for each in kept:
        each.close()
    wait_until(lambda: is_forgotten(callee, caller))


def test_the_pulls_of_a_refused_stream_are_answered(three: Three) -> None:
    """A faulty reader does not cancel them, and the callee would keep them."""
    _, caller, _ = three
    kept = [rpc_stream("w0", endless, (str(number),), window=1) for number in range(MOST)]
    assert [next(each) for each in kept] == MOST * [0]
    pulls = [caller.agent.call_async("w0", feeding.pull, (UNKNOWN, number, 0), None) for number in range(2)]
    refused = caller.agent.call_async("w0", Producer(endless, UNKNOWN, 1, False), ("refused",), None)
    with pytest.raises(LimitReached):
        refused.wait()
    pulls.append(caller.agent.call_async("w0", feeding.pull, (UNKNOWN, 2, 0), None))
    assert [pull.wait() for pull in pulls] == 3 * [[True]]
    for each in kept:
        each.close()


def test_a_stream_runs_a_single_function(three: Three) -> None:
    """A hostile reader begins more functions for a stream: all but one of them would wait for ever."""
    callee, caller, _ = three
    with rpc_stream("w0", endless, ("first",), window=1) as stream:
        assert next(stream) == 0
        producer = Producer(endless, stream._number, 1, False)
        calls = [caller.agent.call_async("w0", producer, (str(number),), None) for number in range(2 * MOST)]
        assert [call.wait() for call in calls] == 2 * MOST * [None]
    wait_until(lambda: is_forgotten(callee, caller))
    assert set(yielded) == {"first"}


def test_a_worker_cannot_read_or_acknowledge_the_streams_of_others(three: Three) -> None:
    callee, _, other = three
    with rpc_stream("w0", numbered, (4,), window=2) as stream:
        pulled = other.agent.call_async("w0", feeding.pull, (stream._number, 2, 2), None)
        other.agent.notify("w0", Taken(stream._number, 2), callee.agent.incarnation)
        assert [int.from_bytes(item[:2], "big") for item in stream] == [0, 1, 2, 3]
    assert not pulled.done()
    assert pulled.cancel()
    with pytest.raises(CallCancelled):
        pulled.wait()
    wait_until(lambda: is_forgotten(callee, other))


@pytest.mark.parametrize("function", [endless, endless_async])
def test_the_bytes_of_all_streams_of_a_worker_are_limited(function: Any, three: Three) -> None:
    callee, caller, other = three
    streams = [rpc_stream("w0", function, (str(number), SIZE)) for number in range(MOST)]
    wait_until(lambda: waits_for_others(callee, caller))
    reader = reader_of(callee, caller)
    assert reader is not None
    assert reader.kept <= KEPT + (MOST + 1) * (SIZE + ITEM)  # an item of each that ran
    del reader
    current.enter(other)
    assert rpc_sync("w0", operator.neg, (1,)) == -1
    with rpc_stream("w0", function, ("other", SIZE)) as stream:
        assert len(next(stream)) == SIZE
    current.enter(caller)
    for stream in streams:
        stream.close()
    wait_until(lambda: is_forgotten(callee, caller))
    assert set(closed) == set(yielded)


def test_a_reader_gets_all_items_while_other_streams_are_unread(three: Three) -> None:
    """The streams are read one after the other, and each has more bytes than the limit for all."""
    callee, caller, _ = three
    count = 4 * KEPT // SIZE  # of which the two pulls that each stream begins with can take half at most
    streams = [rpc_stream("w0", numbered, (count,)) for _ in range(MOST)]
    wait_until(lambda: waits_for_others(callee, caller))
    for stream in reversed(streams):
        assert [int.from_bytes(item[:2], "big") for item in stream] == [*range(count)]
    wait_until(lambda: is_forgotten(callee, caller))


def test_small_items_count_towards_the_limit_in_any_window(three: Three) -> None:
    callee, caller, _ = three
    with rpc_stream("w0", endless, ("small",), window=1 << 31):
        wait_until(lambda: waits_for_others(callee, caller))
        assert yielded["small"] < 4 * KEPT / ITEM  # two answers were sent before
    wait_until(lambda: is_forgotten(callee, caller))


async def endless_uncancelled(name: str, item: Any = 0) -> AsyncIterator[Any]:
    """Yield as `endless_async` does, and go on after the task is cancelled."""
    yielded[name] = 0
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.Event().wait()
    async for each in endless_async(name, item):
        yield each


@pytest.mark.parametrize("function", [endless, endless_async, endless_uncancelled])
def test_functions_end_with_the_connection_of_their_reader(function: Any, three: Three) -> None:
    """This includes functions that wait, and functions that have not begun."""
    callee, caller, _ = three
    kept = [rpc_stream("w0", function, (str(number), SIZE)) for number in range(MOST)]
    wait_until(lambda: len(yielded) == MOST)
    if function is not endless_uncancelled:
        wait_until(lambda: waits_for_others(callee, caller))
    caller.agent.close(PeerError("the end"))
    wait_until(lambda: is_forgotten(callee, caller))
    wait_until(lambda: set(closed) == set(yielded))  # the loop closes what an async generator has left open
    wait_until(lambda: callee.agent.idle)
    del kept


@actor
class Tap:
    """Its first item comes at once, the others once the gate is open."""

    def __init__(self) -> None:
        self.began, self.gate = threading.Event(), threading.Event()

    def hold(self) -> int:
        self.began.set()
        assert self.gate.wait(PATIENCE)
        return 1

    def items(self) -> Iterator[int]:
        yield 1
        yield self.hold()

    async def items_later(self) -> AsyncIterator[int]:
        yield 1
        self.began.set()
        while not self.gate.is_set():
            await next_turn()
        yield 2


taps: list[Tap] = []


def tap() -> RRef[Tap]:
    return RRef(taps[0])


@pytest.mark.parametrize("end", ["close", "death"])
@pytest.mark.parametrize("state", ["at rest", "queued", "running", "finished"])
@pytest.mark.parametrize("method", ["items", "items_later"])
def test_an_actor_goes_on_after_the_end_of_a_stream(method: str, state: str, end: str, three: Three) -> None:
    callee, caller, other = three
    taps[:] = [Tap()]
    stream: Stream[int] = getattr(rpc_sync("w0", tap).rpc_stream(window=1), method)()
    wait_until(lambda: is_at_rest(callee, caller))
    current.enter(other)
    its = rpc_sync("w0", tap)
    held = [its.rpc_async().hold()] if state == "queued" else []
    if state == "finished":
        taps[0].gate.set()
        assert len(list(stream)) == 2
    elif state != "at rest":
        if held:
            assert taps[0].began.wait(PATIENCE)
        assert next(stream) == 1
        assert taps[0].began.wait(PATIENCE)
    if held:
        call_scheduler: Any = callee.agent._server.call_scheduler
        wait_until(lambda: any(queue._waiting for queue in call_scheduler._queues.values()))
    stream.close() if end == "close" else caller.agent.close(PeerError("the end"))
    wait_until(lambda: end == "close" or all(link.peer != "w1" for link in links.accepted(callee)))
    taps[0].gate.set()
    assert its.rpc_sync().hold() == 1
    wait_until(lambda: callee.agent.idle)


def test_no_items_are_made_for_a_connection_that_is_not_read(three: Three, monkeypatch: pytest.MonkeyPatch) -> None:
    callee, caller, other = three
    monkeypatch.setattr(writer, "MOST_BYTES", KEPT)
    stream: Stream[bytes] = rpc_stream("w0", endless, ("unread", SIZE), window=1 << 16)
    assert len(next(stream)) == SIZE
    link = links.link_to(caller, "w0")
    accepted = next(link for link in links.accepted(callee) if link.peer == "w1")
    queue: WorkQueue = accepted._on_messages.args[0].queue  # type: ignore[attr-defined]
    count = 2000
    with links.unread(link):
        for number in (*range(10, 10 + count), *range(10)):  # each of them claims that all items were read
            body = pickle.dumps(((stream._number, number, 10**9), {}), 5)
            link.send(Message(CALL, 1_000_000 + number, head=b"telegrad._core.streams.producer:pull", body=body))
        wait_until(lambda: queue.is_held_up)
        current.enter(other)
        assert rpc_sync("w0", operator.neg, (1,)) == -1
        current.enter(caller)
        wait_until(lambda: is_at_rest(callee, caller))
        waiting = sum(len(chunk.data) for chunk in accepted._writer.outbox.copy() if isinstance(chunk, Chunk))
        assert waiting < 3 * KEPT
        assert yielded["unread"] < count / 2  # the other pulls are in the buffers of the socket
    before = yielded["unread"]
    link.reading.watch()
    caller.agent.expect("w0")
    wait_until(lambda: yielded["unread"] > before + 100)
    stream.close()
    wait_until(lambda: "unread" in closed)


def is_at_rest(callee: Worker, caller: Worker) -> bool:
    """Return True if the functions of a reader's streams wait."""
    reader = reader_of(callee, caller)
    feeds = [each for each in gc.get_objects() if type(each) is Feed and getattr(each, "_reader", 0) is reader]
    return bool(feeds) and all(each._room is not None for each in feeds)


def test_a_callee_that_sends_more_than_was_asked_for_is_refused(three: Three, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Feed, "room", lambda feed: None)  # its functions never wait
    stream: Stream[int] = rpc_stream("w0", range, (10**6,), window=4)
    with pytest.raises(ProtocolViolation, match=r"at most 4 may be unread"):
        for _ in stream:
            pass


# The account alone, in random orders of events


class Turns:
    """A stub of an agent that keeps the functions that wait for a caller's queue."""

    name = "w0"

    def __init__(self) -> None:
        self.waiting: list[tuple[Callable[[Any], None], WorkQueue]] = []

    def later(self, act: Callable[[Any], None], _: Any, queue: WorkQueue) -> None:
        self.waiting.append((act, queue))

    def run(self) -> None:
        for each in [each for each in self.waiting if not each[1].is_held_up]:
            self.waiting.remove(each)
            each[0](None)


def lawfully_waits(feed: Feed, reader: Reader) -> bool:
    supply: SendWindow[Any] = feed._supply
    if not supply.may_go_on:
        return True
    pull = supply.awaited
    return reader.kept >= KEPT if pull is None else pull.queue.is_held_up


class Account:
    """Streams of one reader over two connections, and functions that yield as `Producer` does."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.turns = rng, Turns()
        self.reader = Reader(self.turns, Identity("w1", 1, "b"))  # type: ignore[arg-type]
        self.queues = [WorkQueue(), WorkQueue()]
        self.feeds = [self.reader.feed(number) for number in range(6)]
        assert all(feed.begin(rng.randint(1, 9)) for feed in self.feeds)
        self.rooms: dict[Feed, Any] = {}
        self.pulls: Counter[Feed] = Counter()
        self.events = [self.produce] * 4 + [self.pull, self.take, self.hold_up, self.close]

    def produce(self, feed: Feed) -> None:
        """Yield at most one item, and none while the function waits."""
        room = self.rooms.get(feed)
        if feed.closed or (room is not None and not room.done()):
            return
        room = self.rooms[feed] = feed.room()
        if room is None:
            feed.put(None, self.rng.randint(0, LARGEST))

    def pull(self, feed: Feed) -> None:
        pull = feed.pull(self.pulls[feed], self.rng.randint(0, 1000), self.rng.choice(self.queues))
        self.pulls[feed] += 1
        pull.add_done_callback(lambda _: self.check_not_drained(feed))

    def check_not_drained(self, feed: Feed) -> None:
        """Check that a pull is answered before the call of the function."""
        assert not feed.drained.done() or feed.closed

    def take(self, feed: Feed) -> None:
        feed.take(self.rng.randint(0, 1000))

    def hold_up(self, _: Feed) -> None:
        self.rng.choice(self.queues).is_held_up = self.rng.random() < 0.5
        self.turns.run()

    def close(self, feed: Feed) -> None:
        if self.rng.random() < 0.1:
            feed.close()

    def run(self) -> None:
        for _ in range(200):
            self.rng.choice(self.events)(self.rng.choice(self.feeds))
            assert self.reader.kept == sum(each._supply.kept for each in self.feeds)
            assert self.reader.kept < KEPT + LARGEST + ITEM
        for _ in range(300):  # all go on as far as they may
            self.turns.run()
            for feed in self.feeds:
                self.produce(feed)
        for feed in self.feeds:
            assert feed.closed or lawfully_waits(feed, self.reader)
        for feed in self.feeds:
            feed.close()
            assert self.rooms.get(feed) is None or self.rooms[feed].done()
            assert feed.drained.done()
        assert not self.reader.kept
        assert not self.reader.waiting


def test_the_limit_of_bytes_holds_in_any_order_of_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeding, "MOST_KEPT", KEPT)
    run_each(range(300), lambda seed: Account(random.Random(seed)).run())
