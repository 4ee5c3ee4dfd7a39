"""Carries memory between accelerators and the host, in pieces, without waiting for a device.

On its way out a piece is copied while the one before it is sent; on its way in, while the next one is received.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from telegrad._core.devices.device_streams import Arrived, Streams, device, on, read_on
from telegrad._core.devices.pinned import PIECE, Piece, Pinned
from telegrad._core.threads import Background
from telegrad._core.wire.tensors import Bound, memory

AHEAD = 4  # pieces of one blob that are copied before they are sent
FIRST_LOOK, LAST_LOOK = 2e-5, 1e-3  # seconds between looks whether a device has copied

log = logging.getLogger("telegrad")


class StagedCopy:
    """A blob on its way from an accelerator into a connection."""

    def __init__(self, pinned: Pinned, stream: torch.Stream, bound: Bound) -> None:
        blob = bound.blob
        read_on(stream, bound)
        self.source = blob.device.index
        self._pinned = pinned
        self._stream = stream
        self._blob = blob
        self._copied = 0  # or about to be
        self._pieces: deque[tuple[Piece, int, torch.Event]] = deque()
        self._lock = threading.RLock()  # guards the two; who sends asks `over` without, while nobody else copies
        self._copy()

    def _copy(self) -> None:
        """Have as much copied as there is room for."""
        total = self._blob.numel()
        while self._copied < total and len(self._pieces) < AHEAD:
            piece = self._pinned.take(total - self._copied)
            if piece is None:
                return
            count = min(piece.memory.numel(), total - self._copied)
            with on(self._stream), torch.inference_mode(False), torch.no_grad():
                piece.memory[:count].copy_(self._blob[self._copied : self._copied + count], non_blocking=True)
                piece.busy = self._stream.record_event()
            self._pieces.append((piece, count, piece.busy))
            self._copied += count

    @property
    def over(self) -> bool:
        return not self._pieces and self._copied == self._blob.numel()

    @property
    def ready(self) -> bool:
        """Whether there is something to be sent, or nothing any more."""
        with self._lock:
            if not self._pieces:
                self._copy()
            return self._pieces[0][2].query() if self._pieces else self.over

    def next(self) -> tuple[memoryview, Piece] | None:
        """The next bytes to be sent, and what owns them; None where they are not there yet, or it is over."""
        with self._lock:
            if not self.ready or not self._pieces:
                return None
            piece, count, _ = self._pieces.popleft()
            self._copy()
        return memory(piece.memory)[:count], piece


class Staging:
    """Of one worker."""

    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        self._pinned = Pinned()
        self._lock = threading.Condition()  # guards _watched and _closed
        self._watched: list[tuple[StagedCopy, Callable[[], None]]] = []
        self._closed = False
        self._thread = Background("telegrad-devices", self._look)

    # Out

    def depart(self, bound: Bound) -> StagedCopy:
        """Begin to copy a blob of an accelerator to the host; after what this thread has asked for until now."""
        index = bound.blob.device.index
        self.streams.use(index)
        self._thread.want()
        return StagedCopy(self._pinned, self.streams.departures(index), bound)

    def watch(self, departure: StagedCopy, resume: Callable[[], None]) -> None:
        """Call `resume` once the next piece of `departure` is there."""
        with self._lock:
            self._watched.append((departure, resume))
            self._lock.notify()

    def _look(self) -> None:
        pause = FIRST_LOOK
        while True:
            with self._lock:
                if self._closed:
                    return
                if not self._watched:
                    self._lock.wait()
                    pause = FIRST_LOOK
                    continue
                watched, self._watched = self._watched, []
            late = [entry for entry in watched if not self._resumed(*entry)]
            with self._lock:
                self._watched += late
                pause = FIRST_LOOK if len(late) < len(watched) else min(1.5 * pause, LAST_LOOK)
                self._lock.wait(pause)

    def _resumed(self, departure: StagedCopy, resume: Callable[[], None]) -> bool:
        with contextlib.suppress(Exception):  # a device that failed: the connection meets it again
            if not departure.ready:
                return False
        try:
            resume()
        except Exception:
            log.exception("telegrad: sending on failed")
        return True

    # In

    def receive_into(self, size: int, index: int) -> tuple[Arrived, Iterator[memoryview]]:
        """Memory of an accelerator for what will be received, and one by one the places to receive it into.

        Whoever asks for the next place has filled the one before.
        """
        self.streams.use(index)
        stream = self.streams.arrivals(index)
        with on(stream), torch.inference_mode(False):
            blob = torch.empty(size, dtype=torch.uint8, device=device(index))
        arrived = Arrived(blob)
        return arrived, self._places(arrived, stream)

    def _places(self, arrived: Arrived, stream: torch.Stream) -> Iterator[memoryview]:
        at, size = 0, arrived.blob.numel()
        while at < size:
            piece = self._pinned.take(size - at, beyond=True)
            assert piece is not None
            count = min(PIECE, size - at, piece.memory.numel())
            yield memory(piece.memory)[:count]
            with on(stream), torch.inference_mode(False), torch.no_grad():
                arrived.blob[at : at + count].copy_(piece.memory[:count], non_blocking=True)
                piece.busy = arrived.event = stream.record_event()
            at += count

    def put(self, blob: Tensor, index: int) -> Arrived:
        """Bytes of the host on an accelerator."""
        self.streams.use(index)
        stream = self.streams.arrivals(index)
        with on(stream), torch.inference_mode(False), torch.no_grad():
            return Arrived(blob.to(device(index)), stream.record_event())

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._lock.notify()
