"""What a stream's function has yielded, at the callee, and the pulls of its reader that ask for it.

The feed of a stream is the value of a reference that its reader holds. So the stream is closed when that reference
ends: the reader has closed or dropped it, or has died.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from telegrad.agent.agent import Agent
from telegrad.agent.futures import Signal
from telegrad.agent.naming import known_as
from telegrad.agent.server import Later
from telegrad.errors import RRefError
from telegrad.rpc import current
from telegrad.rpc.flow import Answer, Supply
from telegrad.rpc.values import opened
from telegrad.rref.box import Box
from telegrad.rref.letters import Id
from telegrad.rref.table import ReferenceTable

MOST_BYTES = 64 << 20  # that a function may be ahead of its reader; one item may have more


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

    __slots__ = ("answer",)

    def __init__(self) -> None:
        super().__init__()
        self.answer: list[Any] = []  # stored before it happens

    def wait(self) -> list[Any]:
        super().wait()
        return self.answer


class Room(Signal):
    """Happens when a function that is too far ahead may go on."""

    __slots__ = ("about",)

    def __init__(self, reader: str) -> None:
        super().__init__()
        self.about = f"{reader}, which reads its stream, to take what it has yielded"


class Feed:
    """Of one stream."""

    def __init__(self, reader: str, window: int) -> None:
        self.fed = False  # a call runs the function, or has run it
        self._reader = reader
        self._lock = threading.Lock()  # guards the supply, whose `may_go_on` and `closed` are peeked at; and _room
        self._supply: Supply[Pull] = Supply(window, MOST_BYTES)
        self._room: Room | None = None  # for which the function waits

    @property
    def closed(self) -> bool:
        return self._supply.closed

    def room(self) -> Room | None:
        """What happens when the function may go on; None where it may."""
        if self._supply.may_go_on:
            return None
        with self._lock:
            if self._supply.may_go_on:
                return None
            self._room = Room(self._reader)
            return self._room

    def put(self, item: Any, weight: int) -> None:
        self._act(self._supply.put, item, weight)

    def pull(self, number: int, taken: int) -> Pull:
        pull = Pull()
        self._act(self._supply.pull, number, taken, pull)
        return pull

    def take(self, taken: int) -> None:
        self._act(self._supply.take, taken)

    def end(self) -> None:
        self._act(self._supply.end)

    def close(self) -> None:
        self._act(self._supply.close)

    def _act(self, event: Callable[..., list[Answer]], *args: Any) -> None:
        room = None
        with self._lock:
            answers = event(*args)
            if self._room is not None and self._supply.may_go_on:
                room, self._room = self._room, None
        for to, items, over in answers:
            to.answer = [over, *items]
            to.set_result()
        if room is not None:
            room.set_result()

    def __repr__(self) -> str:
        return f"<Feed for {self._reader!r}: {self._supply!r}>"


class Held:
    """What the reader's reference stands for."""

    def __init__(self, feed: Feed) -> None:
        self.feed = feed

    def __del__(self) -> None:
        self.feed.close()


@known_as("the beginning of a stream")
def hold(reader: str, window: int) -> Held:
    return Held(Feed(reader, window))


@known_as("the next items of a stream")
def pull(maker: str, number: int, index: int, taken: int) -> Any:
    """All there is, as soon as anything is there: whether it is the end, and the items."""
    box = current.references().box((maker, number))
    if box.full:
        found = _feed_in(box).pull(index, taken)
        return found.answer if found.done() else Later(found, pull)
    coming = Pull()
    box.opening().add_done_callback(lambda _: _pull_later(box, index, taken, coming))
    return Later(coming, pull)


def _pull_later(box: Box, index: int, taken: int, coming: Pull) -> None:
    try:
        found = _feed_in(box).pull(index, taken)
    except Exception as error:
        coming.set_exception(error)
        return

    def pass_on(_: Any) -> None:
        coming.answer = found.answer
        coming.set_result()

    found.add_done_callback(pass_on)


def _feed_in(box: Box) -> Feed:
    held: Held = box.open()
    return held.feed


def feed_of(stream: Id) -> Feed | None:
    """That of a stream, once it is there; None where the reader has gone."""
    table = current.references()
    try:
        held: Held = opened(table.box(stream), table.agent)
    except RRefError:
        return None
    return held.feed


def serve(agent: Agent, references: ReferenceTable) -> None:
    """Have a worker feed streams."""

    def on_taken(_: Any, taken: Taken) -> None:
        feed = known(taken.maker, taken.number)
        if feed is not None:
            feed.take(taken.taken)

    def on_unfed(_: Any, unfed: Unfed) -> None:
        feed = known(unfed.maker, unfed.number)
        if feed is not None and not feed.fed:
            feed.end()

    def known(maker: str, number: int) -> Feed | None:
        box = references.known((maker, number))
        return _feed_in(box) if box is not None and box.full and not box.failure else None

    agent.on(Taken, on_taken)
    agent.on(Unfed, on_unfed)
    agent.run_at_once(pull)
