"""The memory of accelerators in transit: copied through the host, or shared with other processes of the host.

Through the host it is copied in pieces of pinned memory, without waiting for a device. When sending, a piece is copied
while the previous one is sent; when receiving, while the next one is received.

A shared block has two events. Its owner records `filled` after copying data in, and the reader's copy waits for it. The
reader then records `emptied`, and the owner's next copy waits for that. So neither process waits for the device, and
the block can be lent again as soon as the reader has released it.
"""

import contextlib
import logging
import os
import pickle
import secrets
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from telegrad._core.memory.device_streams import Arrived, Streams, device, kind, on, read_on
from telegrad._core.threads import Background
from telegrad._core.wire.tensors import DeviceBlob, memory
from telegrad.errors import DeviceError

SMALL_PIECE, PIECE = 1 << 16, 4 << 20
MOST = {SMALL_PIECE: 256, PIECE: 32}  # pieces kept: 16 and 128 MB


class Piece:
    """Pinned bytes on loan. Freed pieces return to the pool, and are reused once the device is done with them."""

    __slots__ = ("_pool", "busy", "memory")

    def __init__(self, pool: "Pinned", memory: Tensor) -> None:
        self.memory = memory
        self.busy: torch.Event | None = None  # after this event the device does not use it
        self._pool = pool

    def __del__(self) -> None:
        self._pool.put_back(self.memory, self.busy)


class Pinned:
    """A pool of pieces of two sizes."""

    def __init__(self) -> None:
        # Guards all below. Reentrant, because any allocation under the lock may run the garbage collector, which may
        # free a piece: `put_back` then runs within `take`. It only appends to _free, so it does not disturb the loop
        # there.
        self._lock = threading.RLock()
        self._free: dict[int, list[tuple[Tensor, torch.Event | None]]] = {size: [] for size in MOST}
        self._made = dict.fromkeys(MOST, 0)
        self._most = MOST  # for `put_back`: the global may be gone when the interpreter ends

    def take(self, size: int, beyond: bool = False) -> Piece | None:
        """Return a piece for all or a part of `size`; if all are lent, None, or an additional piece if `beyond`."""
        size = SMALL_PIECE if size <= SMALL_PIECE else PIECE
        with self._lock:
            free = self._free[size]
            for at, (memory, busy) in enumerate(free):
                if busy is None or busy.query():
                    del free[at]
                    return Piece(self, memory)
            if self._made[size] >= MOST[size] and not beyond:
                return None
            with torch.inference_mode(False):
                memory = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
            self._made[size] += 1
            return Piece(self, memory)

    def put_back(self, memory: Tensor, busy: torch.Event | None) -> None:
        size = memory.numel()
        with self._lock:
            # An additional piece is dropped. torch frees page-locked memory only after the copies that use it.
            if self._made[size] > self._most[size]:
                self._made[size] -= 1
            else:
                self._free[size].append((memory, busy))


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
        return StagedCopy(self._pinned, self.streams.stream("departures", index), bound)

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
                # `resume` takes the lock of a connection, under which `watch` is called. So the entries are taken out,
                # and examined without this lock.
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
        stream = self.streams.stream("arrivals", index)
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
                # The last piece leaves the event for the whole blob, because the copies run on one stream. The frame is
                # not given out before.
                piece.busy = arrived.event = stream.record_event()
            at += count

    def put(self, blob: Tensor, index: int) -> Arrived:
        self.streams.use(index)
        stream = self.streams.stream("arrivals", index)
        with on(stream), torch.inference_mode(False), torch.no_grad():
            return Arrived(blob.to(device(index)), stream.record_event())

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._lock.notify()


PART = 16  # 1/16 of a device's memory may be lent


class Cuda:
    """Sharing by CUDA IPC handles for memory and events, as torch shares storages.

    Events are recorded and awaited on the current stream of a device.
    """

    def limit(self, index: int) -> int:
        """Return how many bytes of the device may be lent."""
        return int(torch.cuda.mem_get_info(index)[1]) // PART

    def export(self, block: Tensor, events: tuple[Any, Any]) -> tuple[Any, ...]:
        """Return the data that another process needs to open a block and its events."""
        index = block.device.index
        with torch.cuda.device(index):
            handles = [event.ipc_handle() for event in events]
        _, *shared = block.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
        return _card(index), shared, handles

    def open(self, exported: tuple[Any, ...]) -> tuple[Tensor, tuple[Any, Any]]:
        """Open a block exported by another process; raise if this process cannot access it."""
        card, shared, handles = exported
        index = next((here for here in range(torch.cuda.device_count()) if _card(here) == card), None)
        if index is None:
            raise DeviceError(f"the GPU {card} is not visible to this worker (CUDA_VISIBLE_DEVICES)")
        with torch.cuda.device(index):
            storage = torch.UntypedStorage._new_shared_cuda(index, *shared)
            block = torch.empty(0, dtype=torch.uint8, device=device(index)).set_(storage)
            attach: Any = torch.cuda.Event.from_ipc_handle
            return block, (attach(device(index), handles[0]), attach(device(index), handles[1]))

    def event(self, index: int) -> Any:
        return torch.cuda.Event(interprocess=True)  # type: ignore[no-untyped-call]

    def record(self, event: Any, index: int) -> None:
        event.record(torch.cuda.current_stream(index))

    def wait(self, event: Any, index: int) -> None:
        event.wait(torch.cuda.current_stream(index))


def _card(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


# A build of torch for ROCm calls its devices "cuda", too.
SHARERS: dict[str, Cuda] = {} if torch.version.hip else {"cuda": Cuda()}


def sharer() -> Cuda | None:
    """Return the way to share memory for this machine's accelerators, if they can share memory."""
    return SHARERS.get(kind() or "")


_SALT = secrets.token_hex(8)
_here: "weakref.WeakValueDictionary[int, DeviceBlock]" = weakref.WeakValueDictionary()  # blocks of this process


def _process() -> str:
    return f"{_SALT}:{os.getpid()}"  # a forked child has its parent's salt


class DeviceBlock:
    """A block of this worker that is lent to others."""

    def __init__(self, number: int, capacity: int, index: int) -> None:
        shares = sharer()
        assert shares is not None
        self.number = number
        self.capacity = capacity
        self.device = index
        self._sharer = shares
        self._used = False
        with torch.inference_mode(False):
            self.memory = torch.empty(capacity, dtype=torch.uint8, device=device(index))
        self.events = shares.event(index), shares.event(index)
        _here[id(self)] = self

    def fill(self, bound: DeviceBlob) -> None:
        """Copy a blob in, after the earlier work of this thread and after the last use of the block."""
        index, (filled, emptied) = self.device, self.events
        # The last reader has recorded `emptied` before it released the block, so the event that this waits for is that
        # of its copy.
        if self._used:
            self._sharer.wait(emptied, index)
        current = torch.accelerator.current_stream(index)
        read_on(current, bound)
        # The block may have been allocated on another stream, and may be dropped while this copy is queued.
        self.memory.record_stream(current)
        with torch.inference_mode(False), torch.no_grad():
            self.memory[: bound.numel()].copy_(bound.blob, non_blocking=True)
        self._sharer.record(filled, index)
        self._used = True

    def handle(self) -> bytes:
        """Return the data to open the block. The owner cannot open its own export, and finds the block by id."""
        return pickle.dumps((_process(), id(self), self._sharer.export(self.memory, self.events)), 5)

    def close(self) -> None:
        """Do nothing: torch frees the memory, unless a process still has it open."""


class OpenBlock(NamedTuple):
    memory: Tensor
    events: tuple[Any, Any]

    def take(self, size: int, to: int, streams: Streams) -> Arrived:
        """Return a copy of its first `size` bytes on the device `to`."""
        shares = sharer()
        assert shares is not None
        index, (filled, emptied) = self.memory.device.index, self.events
        both = {each: streams.stream("arrivals", each) for each in (index, to)}
        with on(*both.values()), torch.inference_mode(False), torch.no_grad():
            shares.wait(filled, index)
            # needed if the owner is in this process; else closing the block waits
            self.memory.record_stream(both[index])
            blob = torch.empty(size, dtype=torch.uint8, device=device(to))
            blob.copy_(self.memory[:size], non_blocking=True)
            shares.record(emptied, index)
            return Arrived(blob, both[to].record_event())


def open_block(handle: bytes) -> OpenBlock:
    """Open the block that another worker exported; raise if this process cannot access it."""
    process, number, exported = pickle.loads(handle)
    if process == _process():
        # Both ends are in this process. CUDA does not open a handle in the process that exported it.
        block = _here[number]
        return OpenBlock(block.memory, block.events)
    shares = sharer()
    if shares is None:
        raise DeviceError("this worker's accelerators cannot share memory")
    return OpenBlock(*shares.open(exported))
