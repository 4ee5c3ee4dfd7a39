"""The connection of a worker to itself: messages pass by value, as over any other."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from telegrad._core.devices.device_streams import copied
from telegrad._core.pickling.exceptions import fresh
from telegrad._core.wire.messages import Message
from telegrad._core.wire.tensors import Bound
from telegrad.errors import PeerError, PeerLost


class LoopEnd:
    """One end, which makes the other. Has the surface of `Link` that agents use.

    There is nothing to read here: who sends a message delivers it.
    """

    is_congested = False

    def __init__(
        self,
        peer: str,
        arrive: Callable[[LoopEnd, Iterable[Message]], None],
        arrive_back: Callable[[LoopEnd, Iterable[Message]], None],
        on_closed: Callable[[LoopEnd, PeerError], None],
        other: LoopEnd | None = None,
    ) -> None:
        """`arrive` takes, at the other end, what is sent at this one; `on_closed` is told of the end of this one."""
        self.peer = peer
        self.closed: PeerError | None = None
        self._arrive = arrive
        self._on_closed = on_closed
        self._other: LoopEnd = other or LoopEnd(peer, arrive_back, arrive, lambda *_: None, self)

    def send(self, message: Message, later: bool = False) -> bool:
        """Deliver a message; there is no `later`, and no outbox."""
        if self.closed is not None:
            raise fresh(self.closed)
        blobs = [copied(blob) if isinstance(blob, Bound) else blob.clone() for blob in message.blobs]
        arrived = Message(message.kind, message.id, message.flags, message.head, message.meta, message.body, blobs)
        self._arrive(self._other, [arrived])
        return True

    def release(self) -> None:
        """Nothing is lent."""

    def retire(self, numbers: list[int]) -> None:
        """Nothing is lent."""

    def when_drained(self, act: Callable[[], None]) -> None:
        """Nothing waits to be sent."""
        act()

    def close(self, reason: PeerError) -> None:
        for end in (self, self._other):
            if end.closed is None:
                end.closed = reason
                end._on_closed(end, reason)

    def fail(self, error: BaseException) -> None:
        """Something could not be sent, for want of memory or the like: nobody shall wait for it."""
        self.close(PeerLost(f"a message of worker {self.peer!r} to itself failed ({error or type(error).__name__})"))
