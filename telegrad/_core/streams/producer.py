"""The items of streams at the callee, and the pulls of their readers that ask for them.

A feed belongs to a reading worker and to the number that it has given the stream. The call that runs the function makes
it, or a pull does, if that arrives first. Both close it as they are cancelled: the reader has closed or dropped the
stream, or its connection has ended. The answer to the call leaves after that of the pull which tells that nothing comes
after it, so the feed is there until then.

The streams of a reader share limits (`Reader`). Above MOST_KEPT bytes of items that the reader has not asked for, its
functions wait, except one with a pull that waits for its item: that item leaves at once.
Such a pull that came over a connection which the reader does not read waits in the queue of that connection, as its
calls do, and so does the function. Each function that waits holds a thread, so no more than MOST_STREAMS begin.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from telegrad._core.agent.agent import Agent
from telegrad._core.agent.incoming import Incoming
from telegrad._core.agent.server import Later
from telegrad._core.calls.call_names import known_as
from telegrad._core.calls.cancelling import serving
from telegrad._core.calls.futures import Signal
from telegrad._core.membership.members import Identity
from telegrad._core.reactor.scheduler import WorkQueue
from telegrad._core.streams.flow_control import Answer, Supply
from telegrad._core.worker import current
from telegrad._core.worker.worker import Worker
from telegrad.errors import LimitReached

MOST_BYTES = 64 << 20  # that a function may be ahead of its reader; one item may have more
MOST_KEPT = 128 << 20  # bytes of one reader that have not left, in all of its streams
MOST_STREAMS = 256  # of one reader whose functions have begun and not ended


class Taken(NamedTuple):
    """To the callee: the reader has taken so many items of a stream by now."""

    number: int
    taken: int


class Pull(Signal):
    """One that waits, or has been answered."""

    __slots__ = ("answer", "feed", "queue")

    def __init__(self, feed: Feed, queue: WorkQueue) -> None:
        super().__init__()
        self.answer: list[Any] = []  # stored before it happens
        self.feed = feed
        self.queue = queue  # of the caller that pulls

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Have the server send the answer, now or as soon as it is there."""
        super().add_done_callback(callback)
        self.feed.will_be_sent()

    def wait(self) -> list[Any]:
        super().wait()
        return self.answer


class Ended(Signal):
    """Happens once the last item has left: how the function has ended."""

    __slots__ = ("value",)

    def __init__(self, value: Any = None) -> None:
        super().__init__()
        self.value = value

    def wait(self) -> Any:
        super().wait()
        return self.value


class Room(Signal):
    """Happens when a function that is too far ahead may go on."""

    __slots__ = ("about",)

    def __init__(self, reader: str) -> None:
        super().__init__()
        self.about = f"{reader}, which reads its stream, to take what it has yielded"


class Reader:
    """The streams of one reading worker, and the limits that they share."""

    def __init__(self, agent: Agent, who: Identity) -> None:
        self.agent = agent
        self.who = who
        self.name = who.name
        self.lock = threading.Lock()  # guards all below, and the state of this reader's feeds as they note it
        self.feeds: WeakValueDictionary[int, Feed] = WeakValueDictionary()  # by the numbers of their streams
        self.kept = 0  # bytes that have not left
        self.waiting: dict[Feed, None] = {}  # whose functions wait for less to be kept, in order
        self._running = 0  # functions

    def feed(self, number: int) -> Feed:
        """Return the feed of a stream, made by whatever comes first."""
        with self.lock:
            feed = self.feeds.get(number)
            if feed is None:
                feed = self.feeds[number] = Feed(self)
            return feed

    def begin(self) -> None:
        """A function begins.

        Raises:
            LimitReached: too many have not ended.
        """
        with self.lock:
            if self._running < MOST_STREAMS:
                self._running += 1
                return
        raise LimitReached(
            f"a stream from worker {self.agent.name!r} was refused: {MOST_STREAMS} streams of worker {self.name!r} are "
            "open there, and no more are kept for one worker. Read some to the end, or close them, before opening more"
        )

    def end(self) -> None:
        """A function has ended."""
        with self.lock:
            self._running -= 1


class Readers:
    """Of one worker: those for which something is kept."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._lock = threading.Lock()  # guards that each is made once
        self._readers: WeakValueDictionary[Identity, Reader] = WeakValueDictionary()

    def of(self, who: Identity) -> Reader:
        with self._lock:
            reader = self._readers.get(who)
            if reader is None:
                reader = self._readers[who] = Reader(self._agent, who)
            return reader

    def close(self) -> None:
        """This worker leaves: have the functions end, which no thread would tell of the end of their connections."""
        with self._lock:
            readers = list(self._readers.values())
        for reader in readers:
            with reader.lock:
                feeds = list(reader.feeds.values())
            for feed in feeds:
                feed.close()


def current_call() -> Incoming:
    """Return the call that this thread or task serves."""
    call = serving.get()
    assert isinstance(call, Incoming)
    return call


def reader() -> Reader:
    """Return the `Reader` of the worker whose call this thread serves."""
    return current.here().attached(Readers).of(current_call().caller.identity)


class Feed:
    """Of one stream."""

    def __init__(self, reader: Reader) -> None:
        self._fed = False  # a call runs the function, or has run it
        self._reader = reader
        self._lock = reader.lock  # guards the supply and all below; some of the supply is peeked at
        self._supply: Supply[Pull] = Supply(1, MOST_BYTES)
        self._unsent = 0  # pulls that the server does not know yet
        self.on_end: Any = None  # called as a function on the event loop has ended
        self.drained = Signal()  # happens once the answers of all pulls are sent, and one has told that it is over
        self._room: Room | None = None  # for which the function waits
        self._is_queued = False  # it will look again when a connection is read that was not

    @property
    def closed(self) -> bool:
        return self._supply.closed

    def begin(self, window: int) -> bool:
        """Return True if a function may feed it: only one, since two would wait for one room."""
        with self._lock:
            first, self._fed = not self._fed, True
            if first:
                self._supply.window = window
        return first and not self.closed

    def room(self) -> Room | None:
        """What happens when the function may go on; None where it may."""
        if self._may_go_on():
            return None
        with self._lock:
            self._room = room = Room(self._reader.name)
            act = self._go_on()
        act()
        return room

    def _may_go_on(self) -> bool:
        supply = self._supply
        if not supply.may_go_on:
            return False
        pull = supply.awaited
        if pull is None:
            return self._reader.kept < MOST_KEPT or supply.closed
        return not pull.queue.is_held_up or supply.closed

    def _go_on(self) -> Callable[[], Any]:
        """With the lock held: return a callback, to be called without it, that lets the function go on now or later."""
        room, supply, waiting = self._room, self._supply, self._reader.waiting
        waiting.pop(self, None)
        if room is None or not supply.may_go_on:
            return _nothing
        if self._may_go_on():
            self._room = None
            return room.set_result
        pull = supply.awaited
        if pull is None:
            waiting[self] = None
        elif not self._is_queued:
            self._is_queued = True
            return partial(self._reader.agent.later, self._look, None, pull.queue)
        return _nothing

    def _look(self, _: Any) -> None:
        """A connection is read again."""
        with self._lock:
            self._is_queued = False
            act = self._go_on()
        act()

    def put(self, item: Any, weight: int) -> None:
        self._act(self._supply.put, item, weight)

    def pull(self, number: int, taken: int, queue: WorkQueue) -> Pull:
        pull = Pull(self, queue)
        with self._lock:
            self._unsent += 1
        self._act(self._supply.pull, number, taken, pull)
        return pull

    def will_be_sent(self) -> None:
        """The server knows a pull: its answer was sent, or will be as it is there."""
        with self._lock:
            self._unsent -= 1
        if self._supply.is_drained:
            self._tell_if_drained()

    def _tell_if_drained(self) -> None:
        with self._lock:
            drained = self._supply.is_drained and not self._unsent
        if drained and not self.drained.done():
            self.drained.set_result()

    def take(self, taken: int) -> None:
        self._act(self._supply.take, taken)

    def end(self) -> None:
        self._act(self._supply.end)

    def close(self) -> None:
        self._act(self._supply.close)

    def _act(self, event: Callable[..., list[Answer]], *args: Any) -> None:
        acts = []
        supply, reader = self._supply, self._reader
        with self._lock:
            before = supply.kept
            answers = event(*args)
            change = supply.kept - before
            reader.kept += change
            if self._room is not None:
                acts.append(self._go_on())
            if reader.waiting and reader.kept < MOST_KEPT:
                # One, which lets the next go on with its item: all at once would each yield one.
                acts.append(next(iter(reader.waiting))._go_on())
        for to, items, over in answers:
            to.answer = [over, *items]
            to.set_result()
        for act in acts:
            act()
        if supply.is_drained:
            self._tell_if_drained()

    def __repr__(self) -> str:
        return f"<Feed for {self._reader.name!r}: {self._supply!r}>"


def _nothing() -> None:
    pass


@known_as("the next items of a stream")
def pull(number: int, index: int, taken: int) -> Later:
    """Answer with all there is, as soon as anything is there: whether it is the end, and the items."""
    call = current_call()
    feed = reader().feed(number)
    call.stop = feed.close
    if call.cancelled:  # maybe before there was anything to stop
        feed.close()
    return Later(feed.pull(index, taken, call.caller.queue), pull)


def serve(worker: Worker) -> None:
    """Have a worker feed streams."""
    readers = worker.attached(Readers)

    def on_taken(sender: Identity, taken: Taken) -> None:
        feed = readers.of(sender).feeds.get(taken.number)
        if feed is not None:
            feed.take(taken.taken)

    worker.at_end.append(readers.close)
    worker.agent.on(Taken, on_taken)
    worker.agent.run_at_once(pull)
