"""Reuses the memory of large storages: it is lent out as tensors, and taken back when the tensor dies.

Writing to fresh memory costs ten times a copy (page faults), so memory that was written once is used again.

    ReceiveBufferPool  private memory for data that is received from a stream
    SharedBlockPool    memory files that this worker fills and lends to workers of the same host, by passing the file
                       over a Unix socket. No file has a name in the file system, so a killed worker leaves none
                       behind. Also common blocks, for tensors that one worker sends to many, and blocks of
                       accelerators, from which the other end copies (`staging`)

`blobs.SharedMaps` is the other end: the mappings of the blocks that one peer lends.

A file is lent to one peer at a time, which works on the same memory. A common one is lent to any number of peers at
once, with one Loan for each. They map it privately: when a process writes to a page, the kernel gives it a copy. It
holds one tensor of this worker for as long as the tensor lives; while it is lent, nothing may write to it.

The life of a block: made, or taken from the shelf; lent; given back, and on the shelf for KEEP seconds; retired, and
the peers that mapped it are notified. If the borrower of a block is lost, the block is not used again, since that
process may still read it. The end of a tensor may be reported under any lock, so it is only noted in a deque
(`lending`), which the next call that holds the pool's lock processes (`_collect`).
"""

import logging
import mmap
import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from math import inf
from time import monotonic
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from telegrad._core import processes
from telegrad._core.memory.lending import Lender, SharedLender
from telegrad._core.memory.staging import DeviceBlock, sharer
from telegrad._core.wire.messages import COMMON
from telegrad._core.wire.tensors import HOST, address_of, advise_huge, copy, memory, of_buffer

_F_SEAL_FUTURE_WRITE = 0x10  # `fcntl` has the name from Python 3.13 on


class Block:
    """A memory file. It may be `spoiled`: a peer may still read it but can no longer say when it is done."""

    __slots__ = ("address", "capacity", "fd", "is_common", "is_used", "loans", "memory", "number", "spoiled")
    device = HOST

    def __init__(self, number: int, capacity: int, is_common: bool = False) -> None:
        import fcntl

        self.number = number
        self.capacity = capacity
        self.is_common = is_common
        self.is_used = self.spoiled = False  # `is_used`: its tensor of this worker is alive
        self.loans = 0
        self.fd = os.memfd_create("telegrad", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, capacity)
            self.memory = memoryview(mmap.mmap(self.fd, capacity))
            # The receiver maps only files that cannot shrink: reading a page that was cut off would kill it. A common
            # file is also sealed against writing. That seal does not concern mappings that exist, so this worker has
            # made its own one before, and can still write.
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            try:
                fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, seals | (_F_SEAL_FUTURE_WRITE if is_common else 0))
            except OSError:  # this kernel does not have the last seal
                fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, seals)
        except BaseException:
            os.close(self.fd)
            raise
        self.address = address_of(self.memory)

    def fill(self, blob: Tensor) -> None:
        copy(self.address, blob.data_ptr(), blob.numel())

    def close(self) -> None:
        os.close(self.fd)


class Loan(NamedTuple):
    """The loan of a common block with a message."""

    number: int
    block: Block


MOST_LENT = 256  # blocks; above it, no accelerator blocks are lent
LEAST_ON_DEVICE = 1 << 16  # bytes of a block of an accelerator
WARM_FROM = 1 << 18  # smaller storages come from torch's allocator
SHARE_FROM = 1 << 16  # smaller blobs are sent through the socket even if memory is shared
KEEP = 10.0  # seconds that unused memory is kept
MOST_MAPS = 8  # read-only mappings of a peer's blocks that are kept
MOST_KEPT = 4 << 30  # bytes of unused private memory that are kept, whatever the limit for shared memory
SHARING = hasattr(os, "memfd_create") and hasattr(os, "eventfd")

log = logging.getLogger("telegrad")


def size_class(size: int) -> int:
    """Round `size` up to one of four steps per doubling: storages of similar size reuse one another's memory."""
    step = max(mmap.PAGESIZE, 1 << max(0, size.bit_length() - 3))
    return -(-size // step) * step


class LastingMaps:
    """Read-only mappings of a peer's common blocks, for later loans: to map pages takes as long as to copy them."""

    def __init__(self) -> None:
        self._maps: dict[Any, tuple[float, Tensor]] = {}  # by file, with the time of the last loan

    def of(self, fd: int) -> Tensor | None:
        """Return the bytes of a file, or None if they cannot be mapped."""
        file = os.fstat(fd)
        # The descriptor is new with each loan, so the file itself is compared. An inode number may be used again after
        # the end of its file; the time then differs.
        key = file.st_ino, file.st_ctime_ns, file.st_size
        memory = self._maps.pop(key, (0, None))[1]
        if memory is None:
            try:
                memory = of_buffer(memoryview(mmap.mmap(fd, file.st_size, access=mmap.ACCESS_READ)))
            except (OSError, MemoryError):
                return None
        self._maps[key] = monotonic(), memory
        for oldest in list(self._maps)[:-MOST_MAPS]:  # a list, made in one step: `trim` removes entries meanwhile
            self._maps.pop(oldest, None)
        return memory

    def trim(self, unused: float = KEEP) -> None:
        """Drop the mappings of blocks that were not lent for some seconds."""
        for key, (used, _) in self._maps.copy().items():
            if used <= monotonic() - unused:
                self._maps.pop(key, None)


class _FreeBlocks:
    """Unused memory by kind, of which the newest is used first, and the oldest is freed first."""

    def __init__(self) -> None:
        self._unused: dict[Any, deque[tuple[float, Any]]] = {}

    def put(self, kind: Any, memory: Any) -> None:
        self._unused.setdefault(kind, deque()).append((monotonic(), memory))

    def take(self, kind: Any) -> Any:
        """Return memory of a kind, or None if there is none."""
        unused = self._unused.get(kind)
        return unused.pop()[1] if unused else None

    def evict(self, before: float, fits: Callable[[Any], bool] = lambda _: True) -> Iterator[Any]:
        """Remove one by one the kinds of memory that fit and were not used since `before`, the oldest first."""
        while True:
            # Each deque is in order of time, so its first entry is its oldest.
            heads = (unused for unused in self._unused.values() if unused and fits(unused[0][1]))
            oldest = min(heads, key=lambda unused: unused[0][0], default=None)
            if oldest is None or oldest[0][0] > before:
                return
            yield oldest.popleft()[1]


class ReceiveBufferPool:
    """Private memory for received data."""

    def __init__(self, limit: int) -> None:
        self._limit = min(limit, MOST_KEPT)
        self._lock = threading.Lock()  # guards _shelf and _kept
        self._shelf = _FreeBlocks()
        self._kept = 0
        self._ended: deque[memoryview] = deque()
        self._lender = Lender(self._ended.append)

    def allocate(self, size: int) -> tuple[Tensor, memoryview]:
        """Return a tensor of `size` bytes and its memory, which the pool reuses when the tensor dies."""
        if size < WARM_FROM:
            tensor = _ordinary(size)
            return tensor, memory(tensor)
        capacity = size_class(size)
        with self._lock:
            self._collect()
            base = self._shelf.take(capacity)
            if base is None:
                base = memoryview(processes.private_memory(capacity))
                advise_huge(address_of(base), capacity)
            else:
                self._kept -= capacity
        # The lease keeps `base`, so that the whole mapping returns to the shelf after the death of the slice.
        return self._lender.lend(base, size, base), base[:size]

    def trim(self, now: float) -> None:
        """Free memory that was not used for KEEP seconds."""
        with self._lock:
            self._collect()
            self._kept -= sum(map(len, self._shelf.evict(now - KEEP)))

    def _collect(self) -> None:
        while self._ended:
            base = self._ended.popleft()
            if self._kept + len(base) <= self._limit:
                self._shelf.put(len(base), base)
                self._kept += len(base)


def _ordinary(size: int) -> Tensor:
    with torch.inference_mode(False):
        return torch.empty(size, dtype=torch.uint8, device="cpu")


AnyBlock = Block | DeviceBlock
B = TypeVar("B", Block, DeviceBlock)


class SharedBlockPool:
    """The blocks that this worker lends: at most `limit` bytes of memory files, and memory of accelerators.

    With a limit of 0, as for a worker that other workers reach by TCP only, common memory is ordinary memory.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit if SHARING else 0
        self._lock = threading.Lock()  # guards all below; `_lent` and `_common` are also read without it
        self._made = 0  # the last number given to a block or loan
        self._warned = False  # that the limit was reached
        self._bytes: Counter[int] = Counter()  # by device
        self.most_files, self._files = processes.files_to_lend(), 0  # memory files of the host
        self._shelf = _FreeBlocks()
        self._lent: dict[int, AnyBlock] = {}  # by number of the block, or of the loan of a common block
        self._common: dict[int, Block] = {}  # in use, by address
        # Common blocks whose tensor in this process has died, and ended loans to this worker itself.
        self._ended: deque[Block | int] = deque()
        self._lender = SharedLender(self._ended.append)
        self._dropped: list[int] = []  # the peers that mapped them must be notified

    def take(self, size: int) -> Block | None:
        """Return a memory file of at least `size` bytes, or None if the limit is reached or there is no memory."""
        return self._take_to_lend(HOST, size_class(size), self._limit, Block)

    def take_on(self, device: int, size: int) -> DeviceBlock | None:
        """Return a block of an accelerator, or None if it cannot share, its limit is reached or it has no memory."""
        shares = sharer()
        if shares is None or not self._limit or sum(number < COMMON for number in self._lent.copy()) >= MOST_LENT:
            return None
        capacity, make = size_class(max(size, LEAST_ON_DEVICE)), partial(DeviceBlock, index=device)
        return self._take_to_lend(device, capacity, shares.limit(device), make)

    def _take_to_lend(self, device: int, capacity: int, limit: int, make: Callable[[int, int], B]) -> B | None:
        with self._lock:
            block = self._take((device, capacity, False), limit, make)
            if block is not None:
                self._lent[block.number] = block
            return block

    def _take(self, kind: tuple[int, int, bool], limit: int, make: Callable[[int, int], B]) -> B | None:
        unused: B | None = self._shelf.take(kind)
        if unused is not None:
            return unused
        self._collect()
        device, capacity, _ = kind
        if not self._make_room(device, capacity, limit):
            return None
        self._made += 1
        try:
            block = make(self._made, capacity)
        except (OSError, MemoryError, torch.OutOfMemoryError):
            return None
        self._bytes[device] += capacity
        self._files += device == HOST
        return block

    def _make_room(self, device: int, capacity: int, limit: int) -> bool:
        """Drop unused blocks of a device until another one fits; return False if none will."""
        unused = self._shelf.evict(inf, lambda block: block.device == device)
        while capacity <= limit:
            if self._bytes[device] + capacity <= limit and (device != HOST or self._files < self.most_files):
                return True
            block = next(unused, None)
            if block is None:
                break
            self._retire(block)
        return False

    def give_back(self, numbers: Iterable[int]) -> None:
        """Take back blocks that their receivers no longer use."""
        with self._lock:
            for number in numbers:
                self._end_loan(number)

    def abandon(self, numbers: Iterable[int]) -> None:
        """Give up blocks whose receiver can no longer say when it is done; their memory is not reused."""
        with self._lock:
            for number in numbers:
                self._end_loan(number, spoiled=True)

    # Common blocks

    def common(self, size: int) -> Tensor:
        """Return `size` bytes of memory, from which tensors are lent to workers of this host without a copy.

        Each receiver's writes are private to it. The sender must not write to the memory after sending. The memory is
        reused once no tensor on any worker uses it. Small memory, or memory beyond the limit, is ordinary.
        """
        tensor = self.take_common(size) if size >= SHARE_FROM else None
        return _ordinary(size) if tensor is None else tensor

    def in_common(self, blob: Tensor) -> Tensor:
        """Return a copy in shared memory, for many workers of this host; return `blob` itself if there is no room."""
        copy = None if blob.data_ptr() in self._common else self.take_common(blob.numel())
        if copy is None:
            return blob
        with torch.inference_mode(False), torch.no_grad():
            return copy.copy_(blob)

    def take_common(self, size: int) -> Tensor | None:
        """Return a tensor of `size` bytes that can be lent without a copy, or None if the limit is reached."""
        capacity = size_class(size)
        with self._lock:
            self._collect()
            block = self._take((HOST, capacity, True), self._limit, partial(Block, is_common=True))
            if block is not None:
                block.is_used = True
                self._common[block.address] = block
            lent, limit = self._bytes[HOST], self._limit
            warns = block is None and 0 < limit < lent + capacity and not self._warned
            self._warned |= warns
        if warns:
            log.warning(
                "telegrad: %d bytes for other workers of this host do not fit into shared memory: %d of %d bytes are "
                "in use there. Each worker gets a copy of its own through a socket, which takes 20 times as long or "
                "more: raise the option shared_memory to at least %d (published weights need three times their size)",
                *(size, lent, limit, lent + capacity),
            )
        return None if block is None else self._lender.lend(block.memory, size, block)

    def lend(self, blob: Tensor) -> Loan | None:
        """Return a loan of the common block that begins with `blob`, or None if there is none."""
        if blob.data_ptr() not in self._common:
            return None
        with self._lock:
            block = self._common.get(blob.data_ptr())
            if block is None or blob.numel() > block.capacity:
                return None
            self._made += 1
            loan = Loan(COMMON | self._made, block)
            self._lent[loan.number] = block
            block.loans += 1
            return loan

    def private(self, blob: Tensor) -> Tensor:
        """Return the same bytes as a receiver gets them: a private view of common memory, a copy of other memory."""
        loan = self.lend(blob)
        if loan is None:
            return blob.clone()
        try:
            base = memoryview(mmap.mmap(loan.block.fd, loan.block.capacity, access=mmap.ACCESS_COPY))
        except BaseException:  # there is no memory, or no descriptor
            self.give_back([loan.number])
            raise
        return self._lender.lend(base, blob.numel(), loan.number)

    @staticmethod
    def lasting(lent: Tensor) -> Tensor:
        """Return the same bytes, mapped since earlier loans if possible; only until `lent` dies or is written to."""
        lasting: Tensor | None = vars(lent.untyped_storage()).get("lasting")
        return lent if lasting is None else lasting

    def _end_loan(self, number: int, spoiled: bool = False) -> None:
        block = self._lent.pop(number, None)
        if block is None:
            return
        if isinstance(block, Block) and block.is_common:
            block.loans -= 1
            block.spoiled |= spoiled
            self._let_go(block)
        elif spoiled:
            self._retire(block)  # other peers may have mapped it before
        else:
            self._shelf.put((block.device, block.capacity, False), block)

    def _collect(self) -> None:
        self._lender.tick()
        while self._ended:
            ended = self._ended.popleft()
            if isinstance(ended, Block):
                ended.is_used = False
                self._let_go(ended)
            else:
                self._end_loan(ended)

    def _let_go(self, block: Block) -> None:
        """Make a common block without users free, or drop it if a peer may still read it."""
        # A block that is not in `_common` has been let go before, or the pool is closed.
        if block.is_used or block.loans or self._common.pop(block.address, None) is None:
            return
        if block.spoiled:
            self._drop(block)
        else:
            self._shelf.put((HOST, block.capacity, True), block)

    # The end of blocks

    def trim(self, now: float) -> list[int]:
        """Drop the blocks that were not used for KEEP seconds; return all numbers dropped since the last call."""
        with self._lock:
            self._collect()
            for block in self._shelf.evict(now - KEEP):
                self._retire(block)
            dropped, self._dropped = self._dropped, []
            return dropped

    def close(self) -> None:
        with self._lock:
            for block in {*self._lent.values(), *self._common.values(), *self._shelf.evict(inf)}:
                self._drop(block)
            self._lent.clear()
            self._common.clear()
            self._limit = 0

    @property
    def lent(self) -> int:
        return len(self._lent)

    def _retire(self, block: AnyBlock) -> None:
        """Drop a block, and tell the peers that may have mapped it."""
        self._dropped.append(block.number)
        self._drop(block)

    def _drop(self, block: AnyBlock) -> None:
        self._bytes[block.device] -= block.capacity
        self._files -= block.device == HOST
        block.close()
