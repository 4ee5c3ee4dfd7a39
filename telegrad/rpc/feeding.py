"""What a stream's function has yielded, at the callee, and the pulls of its reader that ask for it.

The feed of a stream is the value of a reference that its reader holds. So the stream is closed when that reference
ends: the reader has closed or dropped it, or has died.

A reader's streams share limits (`Reader`). Above MOST_KEPT bytes of items that it has not asked for, its functions
wait, except one with a pull that waits for its item: that item leaves at once.
Such a pull that came over a connection which the reader does not read waits in the queue of that connection, as its
calls do, and so does the function. Each function that waits holds a thread, so no more than MOST_STREAMS begin.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from telegrad.agent.agent import Agent
from telegrad.agent.cancelling import serving
from telegrad.agent.entrance import Caller, Incoming
from telegrad.agent.futures import Signal
from telegrad.agent.naming import known_as
from telegrad.agent.scheduler import WorkQueue
from telegrad.agent.server import Later
from telegrad.errors import LimitReached, PeerLost, RRefError, RRefLost
from telegrad.group.members import Identity
from telegrad.rpc import current
from telegrad.rpc.flow import Answer, Supply
from telegrad.rpc.values import opened
from telegrad.rref.letters import Id
from telegrad.rref.table import ReferenceTable

MOST_BYTES = 64 << 20  # that a function may be ahead of its reader; one item may have more
MOST_KEPT = 128 << 20  # bytes of one reader that have not left, in all of its streams
MOST_STREAMS = 256  # of one reader whose functions have begun and not ended


class Taken(NamedTuple):
    """To the callee: the reader has taken so many items of a stream by now."""

    maker: str
    number: int
    taken: int


class Unfed(NamedTuple):
    """To the callee: the call that should have run the function has failed."""

    maker: str
    number: int


class Pull(Signal):
    """One that waits, or has been answered."""

    __slots__ = ("answer", "queue")

    def __init__(self, queue: WorkQueue) -> None:
        super().__init__()
        self.answer: list[Any] = []  # stored before it happens
        self.queue = queue  # of the caller that pulls

    def wait(self) -> list[Any]:
        super().wait()
        return self.answer


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
        # Guards all below, and the state of this reader's feeds as they note it. Reentrant, since the garbage collector
        # may free a `Held` at any line, and so close another feed.
        self.lock = threading.RLock()
        self.kept = 0  # bytes that have not left
        self.waiting: dict[Feed, None] = {}  # whose functions wait for less to be kept, in order
        self._running = 0  # functions

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

    def __init__(self, reader: Reader, window: int) -> None:
        self._fed = False  # a call runs the function, or has run it
        self._reader = reader
        self._lock = reader.lock  # guards the supply and all below; some of the supply is peeked at
        self._supply: Supply[Pull] = Supply(window, MOST_BYTES)
        self._room: Room | None = None  # for which the function waits
        self._is_queued = False  # it will look again when a connection is read that was not

    @property
    def closed(self) -> bool:
        return self._supply.closed

    @property
    def reader(self) -> Identity:
        return self._reader.who

    def begin(self) -> bool:
        """Whether a function may feed it: one, and not where the reader has gone. Two would wait for one room."""
        with self._lock:
            first, self._fed = not self._fed, True
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

    def unfed(self) -> None:
        """The call that should run the function has failed; as `end`, unless it has begun."""
        if not self._fed:
            self.end()

    def put(self, item: Any, weight: int) -> None:
        self._act(self._supply.put, item, weight)

    def pull(self, number: int, taken: int, queue: WorkQueue) -> Pull:
        pull = Pull(queue)
        self._act(self._supply.pull, number, taken, pull)
        return pull

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

    def __repr__(self) -> str:
        return f"<Feed for {self._reader.name!r}: {self._supply!r}>"


def _nothing() -> None:
    pass


class Held:
    """What the reader's reference stands for."""

    def __init__(self, feed: Feed) -> None:
        self.feed = feed

    def __del__(self) -> None:
        self.feed.close()


@known_as("the beginning of a stream")
def hold(_: str, window: int) -> Held:
    return Held(Feed(reader(), window))


@known_as("the next items of a stream")
def pull(maker: str, number: int, index: int, taken: int) -> Any:
    """All there is, as soon as anything is there: whether it is the end, and the items.

    Raises:
        PeerLost: the stream was open while a connection between the two workers broke.
    """
    caller, references = current_call().caller, current.references()
    try:
        box = references.box((maker, number))
        if box.full:
            found = _feed_in(box.open(), caller.identity).pull(index, taken, caller.queue)
            return found.answer if found.done() else Later(found, pull)
    except RRefLost:
        raise _lost(caller, references) from None
    coming = Pull(caller.queue)

    def pull_later(_: Any) -> None:
        try:
            found = _feed_in(box.open(), caller.identity).pull(index, taken, coming.queue)
        except Exception as error:
            coming.set_exception(_lost(caller, references) if isinstance(error, RRefLost) else error)
        else:
            found.add_done_callback(partial(_pass_on, coming))

    box.opening().add_done_callback(pull_later)
    return Later(coming, pull)


def _pass_on(coming: Pull, found: Pull) -> None:
    coming.answer = found.answer
    coming.set_result()


def _lost(reader: Caller, references: ReferenceTable) -> PeerLost:
    """Return the error of a pull whose feed has gone; readers know of no reference."""
    return PeerLost(
        f"the stream that worker {reader.name!r} reads from worker {references.agent.name!r} was lost: a connection "
        "between the two broke while it was open, or its reader was taken for dead. If that worker still lives, begin "
        "the stream anew"
    )


def _feed_in(value: Any, reader: Identity) -> Feed:
    """Return the feed that a reference of a reader stands for.

    Raises:
        RRefLost: it is that of another reader, or no feed.
    """
    feed: Feed | None = value.feed if isinstance(value, Held) else None
    if feed is None or feed.reader != reader:
        raise RRefLost(f"worker {reader.name!r} reads no stream by this reference")
    return feed


def feed_of(stream: Id) -> Feed | None:
    """That of a stream which the caller reads, once it is there; None where the reader has gone."""
    table = current.references()
    try:
        return _feed_in(opened(table.box(stream), table.agent), current_call().caller.identity)
    except RRefError:
        return None


def serve(agent: Agent, references: ReferenceTable) -> None:
    """Have a worker feed streams."""

    def on_taken(sender: Identity, taken: Taken) -> None:
        feed = known(sender, taken.maker, taken.number)
        if feed is not None:
            feed.take(taken.taken)

    def on_unfed(sender: Identity, unfed: Unfed) -> None:
        feed = known(sender, unfed.maker, unfed.number)
        if feed is not None:
            feed.unfed()

    def known(sender: Identity, maker: str, number: int) -> Feed | None:
        box = references.known((maker, number))
        with suppress(RRefLost):
            return _feed_in(box.open(), sender) if box is not None and box.full and not box.failure else None
        return None

    agent.on(Taken, on_taken)
    agent.on(Unfed, on_unfed)
    agent.run_at_once(pull)
