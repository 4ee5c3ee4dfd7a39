"""The connection of a worker to itself: frames pass by value, as over any other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from telegrad.devices.streams import copied
from telegrad.errors import PeerError, PeerLost
from telegrad.wire.failures import fresh
from telegrad.wire.messages import Frame
from telegrad.wire.tensors import Blob, Bound


class LoopEnd:
    """One end; what it sends arrives at `other`. Has the surface of `Link` that agents use."""

    other: LoopEnd

    def __init__(
        self,
        peer: str,
        on_frames: Callable[[LoopEnd, Iterable[Frame]], None],
        on_closed: Callable[[LoopEnd, PeerError], None],
    ) -> None:
        self.peer = peer
        self.reading = threading.Lock()
        self.reading.acquire()  # there is nothing to read: frames are delivered by the sender
        self.closed: PeerError | None = None
        self._on_frames = on_frames
        self._on_closed = on_closed

    def send(
        self,
        kind: int,
        id: int = 0,  # noqa: A002
        *,
        flags: int = 0,
        head: bytes = b"",
        meta: bytes = b"",
        body: bytes = b"",
        blobs: Iterable[Blob] = (),
        later: bool = False,
    ) -> None:
        """Deliver a frame; there is no `later`."""
        if self.closed is not None:
            raise fresh(self.closed)
        frame = Frame(
            kind,
            flags,
            id,
            head,
            meta,
            body,
            [copied(blob) if isinstance(blob, Bound) else blob.clone() for blob in blobs],
        )
        self.other._on_frames(self.other, [frame])

    def release(self) -> None:
        """Nothing is lent."""

    def retire(self, numbers: list[int]) -> None:
        """Nothing is lent."""

    def close(self, reason: PeerError) -> None:
        for end in (self, self.other):
            if end.closed is None:
                end.closed = reason
                end._on_closed(end, reason)

    def fail(self, error: BaseException) -> None:
        """Something could not be sent, for want of memory or the like: nobody shall wait for it."""
        self.close(PeerLost(f"a message of worker {self.peer!r} to itself failed ({error or type(error).__name__})"))


def loop(caller: LoopEnd, callee: LoopEnd) -> None:
    """Join two ends."""
    caller.other, callee.other = callee, caller
