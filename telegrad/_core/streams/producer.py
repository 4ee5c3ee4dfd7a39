"""The callee's side of streams: their items, and the pulls of their readers.

A feed belongs to a reading worker and the number that this worker gave the stream. The call that runs the function
creates the feed, or a pull does that arrives first. Both close it when they are cancelled: the reader has closed or
dropped the stream, or its connection has ended. The answer to the call is sent after the answer to the pull that
reports the end of the stream: the reader cancels its pulls when the call fails, and would lose the last items if the
error came first. The feed lives until then.

The streams of a reader share limits (`Reader`). Above MOST_KEPT bytes of items that the reader has not requested, its
functions wait, except a function whose reader waits for an item, which is sent at once. If that pull arrived over a
connection that the reader does not read, the pull waits in the queue of that connection, as its calls do, and the
function waits, too. Each waiting function holds a thread, so at most MOST_STREAMS run.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from telegrad._core.agent.agent import Agent
from telegrad._core.agent.call_server import Deferred
from telegrad._core.agent.incoming import Incoming, Refused
from telegrad._core.calls.call_names import NEXT_ITEMS, known_as
from telegrad._core.calls.cancelling import serving
from telegrad._core.calls.futures import Signal
from telegrad._core.membership.members import Identity
from telegrad._core.reactor.scheduler import WorkQueue
from telegrad._core.streams import Answer, SendWindow
from telegrad._core.worker import current
from telegrad._core.worker.current import Worker
from telegrad.errors import LimitReached

MOST_BYTES = 64 << 20  # bytes that a function may be ahead of its reader; a single item may have more
MOST_KEPT = 128 << 20  # bytes not sent to one reader, in all of its streams
MOST_STREAMS = 256  # of one reader: functions that have started and not ended


class Taken(NamedTuple):
    """Notification to the callee: the reader has taken this many items of a stream so far."""

    number: int
    taken: int


class Pull(Signal):
    """A pull at the callee, waiting or answered."""

    __slots__ = ("feed", "queue")

    def __init__(self, feed: Feed, queue: WorkQueue) -> None:
        super().__init__()
        self.feed = feed
        self.queue = queue  # of the reader's connection

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Let the server send the answer, now or once it exists."""
        # A pull may be answered before the server knows of it: `pull` returns it, and the server adds this callback
        # then. Until then its answer cannot be sent, so the feed is not drained.
        super().add_done_callback(callback)
        self.feed.will_be_sent()


class Room(Signal):
    """Set when a function that was too far ahead may continue."""

    __slots__ = ("about", "awaited")

    def __init__(self, reader: str) -> None:
        super().__init__()
        self.awaited = [reader]  # workers, for reports
        self.about = f"{reader}, which reads its stream, to read the yielded items"


class Reader:
    """The streams of one reading worker, and their shared limits."""

    def __init__(self, agent: Agent, who: Identity) -> None:
        self.agent = agent
        self.name = who.name
        # Guards all fields below, and the state of this reader's feeds if they say so. It is one lock for all feeds,
        # since an item of one feed may let the function of another continue.
        self.lock = threading.Lock()
        # By the numbers of their streams. Weak: the calls and pulls of a stream keep its feed, and nothing else needs
        # it.
        self.feeds: WeakValueDictionary[int, Feed] = WeakValueDictionary()
        self.kept = 0  # bytes that were not sent
        self.waiting: dict[Feed, None] = {}  # feeds whose functions wait until less is kept, in order
        self._running = 0  # number of functions
        # Pulls of a refused stream that come later find its feed here, which has ended, and not a new one.
        self._refused: deque[Feed] = deque(maxlen=MOST_STREAMS)

    def feed(self, number: int) -> Feed:
        """Return the feed of a stream; create it on first use."""
        with self.lock:
            feed = self.feeds.get(number)
            if feed is None:
                feed = self.feeds[number] = Feed(self)
            return feed

    def begin(self, number: int) -> None:
        """Count the function of a stream, which starts; raise Refused if too many have not ended."""
        with self.lock:
            if self._running < MOST_STREAMS:
                self._running += 1
                return
        # No function will answer its pulls. They must not wait until the reader cancels them: it has the answer to the
        # call only later, and perhaps is faulty.
        feed = self.feed(number)
        if feed.begin(1):  # else another call of that number feeds it
            feed.end()
            with self.lock:
                self._refused.append(feed)
        raise Refused(
            LimitReached(
                f"a stream from worker {self.agent.name!r} was refused: {MOST_STREAMS} streams of worker {self.name!r} "
                "are open there, the limit for one worker. Read some to the end, or close them, before opening more"
            )
        )

    def end(self) -> None:
        with self.lock:
            self._running -= 1
            if not self._running:
                self._refused.clear()


class Readers:
    """The readers of one worker, as long as something refers to them."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._lock = threading.Lock()  # ensures that each is created once
        self._readers: WeakValueDictionary[Identity, Reader] = WeakValueDictionary()

    def of(self, who: Identity) -> Reader:
        with self._lock:
            reader = self._readers.get(who)
            if reader is None:
                reader = self._readers[who] = Reader(self._agent, who)
            return reader

    def close(self) -> None:
        """End the functions when this worker leaves: no thread would report the end of their connections."""
        with self._lock:
            readers = list(self._readers.values())
        for reader in readers:
            with reader.lock:
                feeds = list(reader.feeds.values())
            for feed in feeds:
                feed.leave()


def current_call() -> Incoming:
    """Return the call that this thread or task serves."""
    call = serving.get()
    assert isinstance(call, Incoming)
    return call


def reader() -> Reader:
    """Return the `Reader` of the worker whose call this thread serves."""
    return current.here().attached(Readers).of(current_call().caller.identity)


class Feed:
    """The items and pulls of one stream."""

    def __init__(self, reader: Reader) -> None:
        self._fed = False  # a call runs the function, or has run it
        self._reader = reader
        self._lock = reader.lock  # guards the supply and all below; some fields of the supply are read without it
        # The window is known once the call has come (`begin`): a pull may create the feed before.
        self._supply: SendWindow[Pull] = SendWindow(1, MOST_BYTES)
        self._unsent = 0  # pulls that the server does not know so far
        self.on_end: Any = None  # called when a function on the event loop has ended
        self.drained = Signal()  # set once all pulls are answered, and one answer has reported the end
        self._room: Room | None = None  # the function waits for this
        self._is_queued = False  # `_look` will run when a connection is read again

    @property
    def closed(self) -> bool:
        return self._supply.closed

    def begin(self, window: int) -> bool:
        """Return True if a function may feed the stream: only one, since two would wait for the same room."""
        with self._lock:
            first, self._fed = not self._fed, True
            if first:
                self._supply.window = window
        return first and not self.closed

    def room(self) -> Room | None:
        """Return None if the function may continue; otherwise a signal that is set when it may."""
        # The check without the lock is the usual case. If it fails, `_go_on` checks again after `_room` was stored, so
        # room that another thread has made in between is not missed.
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
        """With the lock held: return a callback that lets the function continue, now or later; call it unlocked."""
        room, supply, waiting = self._room, self._supply, self._reader.waiting
        # Also the feed that is continued leaves `waiting`; one that must wait again goes to the end.
        waiting.pop(self, None)
        if room is None or not supply.may_go_on:
            return _nothing
        if self._may_go_on():
            self._room = None
            return room.set_result
        # The own window has room, so one of two limits holds. No pull waits and too much is kept for this reader:
        # `_act` continues this feed once less is kept. Or the reader does not read the connection of the pull: continue
        # when that queue is served again.
        pull = supply.awaited
        if pull is None:
            waiting[self] = None
        elif not self._is_queued:
            self._is_queued = True
            return partial(self._reader.agent.later, self._look, None, pull.queue)
        return _nothing

    def _look(self, _: Any) -> None:
        """Check again, since a connection is read again."""
        with self._lock:
            self._is_queued = False
            act = self._go_on()
        act()

    def pull(self, number: int, taken: int, queue: WorkQueue) -> Pull:
        pull = Pull(self, queue)
        # Before the pull is added: this may answer it at once and end the stream, and the feed must not be drained
        # before the server has sent that answer (`Pull.add_done_callback`).
        with self._lock:
            self._unsent += 1
        self._act(self._supply.pull, number, taken, pull)
        return pull

    def put(self, item: Any, weight: int) -> None:
        self._act(self._supply.put, item, weight)

    def will_be_sent(self) -> None:
        """Record that the server knows a pull, and has sent its answer or will."""
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

    def leave(self) -> None:
        self._act(self._supply.leave)

    def _act(self, event: Callable[..., list[Answer]], *args: Any) -> None:
        # The state changes under the lock; signals are set after it, since their callbacks send answers and run
        # functions. Answers come before the check whether the feed is drained, which lets the call be answered.
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
                # One feed, which lets the next continue after its item: all at once would each yield one.
                acts.append(next(iter(reader.waiting))._go_on())
        for to, items, over in answers:
            to.set_result([over, *items])
        for act in acts:
            act()
        if supply.is_drained:
            self._tell_if_drained()


def _nothing() -> None:
    pass


@known_as(f"{NEXT_ITEMS} a stream")
def pull(number: int, index: int, taken: int) -> Deferred:
    """Answer once items are available, with all of them and whether they are the last."""
    call = current_call()
    feed = reader().feed(number)
    # Stored first, then checked: the thread that cancels does the reverse (`_core/calls/cancelling.py`).
    call.stop = feed.close
    if call.cancelled:  # perhaps before there was anything to stop
        feed.close()
    return Deferred(feed.pull(index, taken, call.caller.queue), pull)


def serve(worker: Worker) -> None:
    readers = worker.attached(Readers)

    def on_taken(sender: Identity, taken: Taken) -> None:
        # Not `feed`, which would create one: the stream may have ended meanwhile.
        feed = readers.of(sender).feeds.get(taken.number)
        if feed is not None:
            feed.take(taken.taken)

    worker.at_end.append(readers.close)
    worker.agent.on(Taken, on_taken)
    worker.agent.run_at_once(pull)
