"""Warm memory for large storages: kept, lent out as tensors, and taken back when the tensor dies.

Touching fresh memory costs ten times a copy (page faults), so what was touched once is used again.

    Arena        private memory, for what is received from a stream
    SharedPool   memory files that this worker fills and lends to workers of the same host, by passing the file
                 over a Unix socket; nothing is on the file system, so a killed worker leaves nothing behind
    SharedMaps   the other end: the mappings of the files that one peer lent

A tensor's death is noticed by a weak reference whose callback may run at any moment in any thread, so it only
appends to a deque.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from time import monotonic
from typing import Any

import torch
from torch import Tensor

from telegrad.errors import ProtocolViolation
from telegrad.wire.tensors import memory

WARM_FROM = 1 << 18  # smaller storages come from torch's own allocator
PARALLEL_FROM = 1 << 21  # below, waking torch's other threads costs more than their help is worth
KEEP = 10.0  # seconds that memory stays warm without use
SHARING = hasattr(os, "memfd_create") and hasattr(os, "eventfd")


def size_class(size: int) -> int:
    """`size` rounded up to one of four steps per doubling, so that near sizes reuse one another's memory."""
    step = max(mmap.PAGESIZE, 1 << max(0, size.bit_length() - 3))
    return -(-size // step) * step


class _Lease(weakref.ref[memoryview]):
    """Watches the buffer under a lent tensor."""

    __slots__ = ("token",)
    token: Any


class Lender:
    """Makes tensors over given memory and calls `ended(token)` when the last one over it is gone."""

    def __init__(self, ended: Callable[[Any], None]) -> None:
        self._ended = ended
        self._leases: dict[int, _Lease] = {}  # by their ids: a reference hashes what may be gone

    def lend(self, base: memoryview, size: int, token: Any) -> Tensor:
        buffer = base[:size]
        lease = _Lease(buffer, self._end)
        lease.token = token
        self._leases[id(lease)] = lease
        with torch.inference_mode(False):
            return torch.frombuffer(buffer, dtype=torch.uint8)

    def _end(self, lease: _Lease) -> None:
        self._leases.pop(id(lease), None)
        self._ended(lease.token)


class Arena:
    """Private memory to receive into."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()  # guards _free and _kept
        self._free: dict[int, list[tuple[float, memoryview]]] = {}
        self._kept = 0
        self._ended: deque[memoryview] = deque()
        self._lender = Lender(self._ended.append)

    def allocate(self, size: int) -> tuple[Tensor, memoryview]:
        """A tensor of `size` bytes and its memory; it goes back to the arena when the tensor dies."""
        if size < WARM_FROM:
            with torch.inference_mode(False):
                tensor = torch.empty(size, dtype=torch.uint8)
            return tensor, memory(tensor)
        capacity = size_class(size)
        with self._lock:
            self._collect()
            shelf = self._free.get(capacity)
            if shelf:
                base = shelf.pop()[1]
                self._kept -= capacity
            else:
                base = _anonymous(capacity)
        return self._lender.lend(base, size, base), base[:size]

    def trim(self, now: float) -> None:
        """Let go what nobody used for a while."""
        with self._lock:
            self._collect()
            for capacity, shelf in self._free.items():
                kept = [entry for entry in shelf if now - entry[0] < KEEP]
                self._kept -= capacity * (len(shelf) - len(kept))
                shelf[:] = kept

    def _collect(self) -> None:
        while self._ended:
            base = self._ended.popleft()
            if self._kept + len(base) <= self._limit:
                self._free.setdefault(len(base), []).append((monotonic(), base))
                self._kept += len(base)


def _anonymous(capacity: int) -> memoryview:
    region = mmap.mmap(-1, capacity)
    if hasattr(mmap, "MADV_HUGEPAGE") and capacity >= 1 << 22:
        with contextlib.suppress(OSError):  # a kernel without huge pages serves small ones
            region.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(region)


class Block:
    """One memory file of this worker."""

    __slots__ = ("capacity", "fd", "idle_since", "memory", "number")

    def __init__(self, number: int, capacity: int) -> None:
        import fcntl

        self.number = number
        self.capacity = capacity
        self.idle_since = 0.0
        self.fd = os.memfd_create("telegrad", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, capacity)
            # The receiver need not fear that the file shrinks under its tensor.
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            with torch.inference_mode(False):
                self.memory = torch.frombuffer(mmap.mmap(self.fd, capacity), dtype=torch.uint8)
        except BaseException:
            os.close(self.fd)
            raise

    def fill(self, blob: Tensor) -> None:
        if blob.numel() < PARALLEL_FROM:
            ctypes.memmove(self.memory.data_ptr(), blob.data_ptr(), blob.numel())
            return
        with torch.inference_mode(False), torch.no_grad():
            self.memory[: blob.numel()].copy_(blob)

    def close(self) -> None:
        os.close(self.fd)


class SharedPool:
    """The memory files that this worker lends, at most `limit` bytes of them."""

    def __init__(self, limit: int) -> None:
        self._limit = limit if SHARING else 0
        self._lock = threading.Lock()  # guards all below
        self._made = 0
        self._bytes = 0
        self._free: dict[int, list[Block]] = {}
        self._lent: dict[int, Block] = {}
        self._dropped: list[int] = []  # to be told to those who mapped them

    def take(self, size: int) -> Block | None:
        """A block of at least `size` bytes, or None where the bound is reached, or there is no memory for another."""
        capacity = size_class(size)
        with self._lock:
            shelf = self._free.get(capacity)
            if shelf:
                block = shelf.pop()
            elif self._make_room(capacity):
                self._made += 1
                try:
                    block = Block(self._made, capacity)
                except (OSError, MemoryError):
                    return None
                self._bytes += capacity
            else:
                return None
            self._lent[block.number] = block
            return block

    def give_back(self, numbers: Iterable[int]) -> None:
        """The receivers are done with these blocks."""
        with self._lock:
            for number in numbers:
                block = self._lent.pop(number, None)
                if block is not None:
                    block.idle_since = monotonic()
                    self._free.setdefault(block.capacity, []).append(block)

    def abandon(self, numbers: Iterable[int]) -> None:
        """Their receiver cannot tell any more when it is done: leave the memory to it."""
        with self._lock:
            for number in numbers:
                block = self._lent.pop(number, None)
                if block is not None:
                    self._dropped.append(number)  # others may have mapped it before
                    self._drop(block)

    def trim(self, now: float) -> list[int]:
        """Let go the blocks that nobody used for a while; the numbers of all that went since the last time."""
        with self._lock:
            for block in self._idle():
                if now - block.idle_since >= KEEP:
                    self._evict(block)
            dropped, self._dropped = self._dropped, []
            return dropped

    def close(self) -> None:
        with self._lock:
            for block in [*self._lent.values(), *self._idle()]:
                self._drop(block)
            self._lent.clear()
            self._free.clear()
            self._limit = 0

    @property
    def lent(self) -> int:
        return len(self._lent)

    def _idle(self) -> list[Block]:
        return sorted((b for shelf in self._free.values() for b in shelf), key=lambda b: b.idle_since)

    def _make_room(self, capacity: int) -> bool:
        if capacity > self._limit:
            return False
        for block in self._idle() if self._bytes + capacity > self._limit else ():
            self._evict(block)
            if self._bytes + capacity <= self._limit:
                break
        return self._bytes + capacity <= self._limit

    def _evict(self, block: Block) -> None:
        self._free[block.capacity].remove(block)
        self._dropped.append(block.number)
        self._drop(block)

    def _drop(self, block: Block) -> None:
        self._bytes -= block.capacity
        block.close()


class SharedMaps:
    """The memory files that one peer lent over one connection."""

    def __init__(self) -> None:
        self.arrived: deque[int] = deque()  # descriptors that came over the socket, not yet mapped
        self.released: deque[int] = deque()  # blocks whose tensors died here, to be told to the peer
        self._bases: dict[int, memoryview] = {}
        self._lender = Lender(self.released.append)

    def attach(self, number: int, size: int) -> Tensor:
        """The tensor that lies in block `number`; a block seen for the first time came with a descriptor."""
        base = self._bases.get(number)
        if base is None:
            if not self.arrived:
                raise ProtocolViolation(f"shared block {number} was named but never passed")
            base = self._bases[number] = _map(self.arrived.popleft())
        if size > len(base):
            raise ProtocolViolation(f"shared block {number} holds {len(base)} bytes, {size} were announced")
        return self._lender.lend(base, size, number)

    def retire(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._bases.pop(number, None)

    def close(self) -> None:
        while self.arrived:
            os.close(self.arrived.popleft())
        self._bases.clear()


def _map(fd: int) -> memoryview:
    try:
        return memoryview(mmap.mmap(fd, os.fstat(fd).st_size))
    finally:
        os.close(fd)
