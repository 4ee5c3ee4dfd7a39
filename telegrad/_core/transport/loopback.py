"""The connection of a worker to itself; it passes messages by value, like all others."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from telegrad._core.devices.device_streams import copied
from telegrad._core.pickling.exceptions import fresh
from telegrad._core.wire.messages import Message
from telegrad._core.wire.tensors import DeviceBlob
from telegrad.errors import PeerError, PeerLost


class LoopEnd:
    """One end; it creates the other. Has the interface of `Link` that agents use.

    Nothing is read here: the sending thread delivers the message.
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
        """`arrive` processes, at the other end, messages sent at this one; `on_closed` is called when this closes."""
        self.peer = peer
        self.closed: PeerError | None = None
        self._arrive = arrive
        self._on_closed = on_closed
        self._other: LoopEnd = other or LoopEnd(peer, arrive_back, arrive, lambda *_: None, self)

    def send(self, message: Message, later: bool = False) -> bool:
        """Deliver a message now. `later` is ignored: there is no outbox."""
        if self.closed is not None:
            raise fresh(self.closed)
        blobs = [copied(blob) if isinstance(blob, DeviceBlob) else blob.clone() for blob in message.blobs]
        arrived = Message(message.kind, message.id, message.flags, message.head, message.meta, message.body, blobs)
        self._arrive(self._other, [arrived])
        return True

    def when_drained(self, act: Callable[[], None]) -> None:
        act()

    def close(self, reason: PeerError) -> None:
        for end in (self, self._other):
            if end.closed is None:
                end.closed = reason
                end._on_closed(end, reason)

    def fail(self, error: BaseException) -> None:
        """Close the connection because a message could not be sent (no memory, ...): no response will come."""
        self.close(PeerLost(f"a message of worker {self.peer!r} to itself failed ({error or type(error).__name__})"))
