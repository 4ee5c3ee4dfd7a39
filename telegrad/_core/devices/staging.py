"""Copy memory between accelerators and the host in pieces of pinned memory, without waiting for a device.

When sending, a piece is copied while the previous one is sent; when receiving, while the next one is received.
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
from telegrad._core.threads import Background
from telegrad._core.wire.tensors import DeviceBlob, memory

SMALL_PIECE, PIECE = 1 << 16, 4 << 20
MOST_SMALL, MOST = 256, 32  # pieces kept: 16 and 128 MB


class Piece:
    """Pinned bytes on loan. Freed pieces return to the pool, and are reused once the device is done with them."""

    __slots__ = ("_shelf", "busy", "memory")

    def __init__(self, shelf: _Shelf, memory: Tensor) -> None:
        self.memory = memory
        self.busy: torch.Event | None = None  # after this event the device does not use it
        self._shelf = shelf

    def __del__(self) -> None:
        self._shelf.put_back(self.memory, self.busy)


class _Shelf:
    """A pool of pieces of one size."""

    def __init__(self, size: int, most: int) -> None:
        self._size = size
        self._most = most
        # guards all below; reentrant: a piece may be freed at any allocation under the lock
        self._lock = threading.RLock()
        self._free: list[tuple[Tensor, torch.Event | None]] = []
        self._made = 0

    def take(self, beyond: bool) -> Piece | None:
        with self._lock:
            for at, (memory, busy) in enumerate(self._free):
                if busy is None or busy.query():
                    del self._free[at]
                    return Piece(self, memory)
            if self._made >= self._most and not beyond:
                return None
            with torch.inference_mode(False):
                memory = torch.empty(self._size, dtype=torch.uint8, pin_memory=True)
            self._made += 1
            return Piece(self, memory)

    def put_back(self, memory: Tensor, busy: torch.Event | None) -> None:
        with self._lock:
            if self._made > self._most:  # torch keeps memory that the device still reads
                self._made -= 1
            else:
                self._free.append((memory, busy))


class Pinned:
    def __init__(self) -> None:
        self._small = _Shelf(SMALL_PIECE, MOST_SMALL)
        self._large = _Shelf(PIECE, MOST)

    def take(self, size: int, beyond: bool = False) -> Piece | None:
        """Return a piece for all or a part of `size`; if all are lent, None, or an additional piece if `beyond`."""
        return (self._small if size <= SMALL_PIECE else self._large).take(beyond)


AHEAD = 4  # pieces of one blob copied ahead of sending
FIRST_LOOK, LAST_LOOK = 2e-5, 1e-3  # seconds between checks for finished copies

log = logging.getLogger("telegrad")


class StagedCopy:
    """A copy of a blob from an accelerator into a connection."""

    def __init__(self, pinned: Pinned, stream: torch.Stream, bound: DeviceBlob) -> None:
        blob = bound.blob
        read_on(stream, bound)
        self.source = blob.device.index
        self._pinned = pinned
        self._stream = stream
        self._blob = blob
        self._copied = 0  # bytes copied or being copied
        self._pieces: deque[tuple[Piece, int, torch.Event]] = deque()
        # guards _copied and _pieces; the sender reads `over` without it, when no other thread copies
        self._lock = threading.RLock()
        self._copy()

    def _copy(self) -> None:
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
        """Return True if a piece can be sent, or if all were."""
        with self._lock:
            if not self._pieces:
                self._copy()
            return self._pieces[0][2].query() if self._pieces else self.over

    def next(self) -> tuple[memoryview, Piece] | None:
        """Return the next bytes to send and their piece; None if they are not copied yet or all were sent."""
        with self._lock:
            if not self.ready or not self._pieces:
                return None
            piece, count, _ = self._pieces.popleft()
            self._copy()
        return memory(piece.memory)[:count], piece


class Staging:
    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        self._pinned = Pinned()
        self._lock = threading.Condition()  # guards _watched and _closed
        self._watched: list[tuple[StagedCopy, Callable[[], None]]] = []
        self._closed = False
        self._thread = Background("telegrad-devices", self._look)

    # Sending

    def depart(self, bound: DeviceBlob) -> StagedCopy:
        """Begin to copy an accelerator's blob to the host, after the earlier work of this thread."""
        index = bound.blob.device.index
        self.streams.use(index)
        self._thread.want()
        return StagedCopy(self._pinned, self.streams.departures(index), bound)

    def watch(self, departure: StagedCopy, resume: Callable[[], None]) -> None:
        """Call `resume` once the next piece of `departure` is copied."""
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
        with contextlib.suppress(Exception):  # the device failed: the connection will get the error too
            if not departure.ready:
                return False
        try:
            resume()
        except Exception:
            log.exception("telegrad: resuming a send failed")
        return True

    # Receiving

    def receive_into(self, size: int, index: int) -> tuple[Arrived, Iterator[memoryview]]:
        """Return memory of an accelerator for data to be received, and an iterator of host buffers to receive it into.

        Each buffer must be filled before the next one is requested.
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
        self.streams.use(index)
        stream = self.streams.arrivals(index)
        with on(stream), torch.inference_mode(False), torch.no_grad():
            return Arrived(blob.to(device(index)), stream.record_event())

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._lock.notify()
