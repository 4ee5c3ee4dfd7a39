"""The mappings of the shared memory that a peer lends over one connection, and which of them are still in use."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from collections import deque
from collections.abc import Iterable

from torch import Tensor

from telegrad._core.devices.device_sharing import OpenBlock, open_block
from telegrad._core.devices.device_streams import Arrived, Streams
from telegrad._core.host import resources
from telegrad._core.memory.fd_passing import DESCRIPTORS_AT_ONCE, MOST_UNNAMED
from telegrad._core.memory.warm_memory import Lender
from telegrad._core.wire.messages import COMMON
from telegrad.errors import ProtocolViolation


class SharedMaps:
    def __init__(self, streams: Streams) -> None:
        self.arrived: deque[int] = deque()  # descriptors received over the socket, not yet mapped
        self.released: deque[int] = deque()  # blocks no longer used here; the peer must be notified
        self._streams = streams
        self._most = 2 * resources.files_to_lend() + MOST_UNNAMED  # blocks: each mapping keeps a descriptor
        self._bases: dict[int, memoryview] = {}
        self._unmapped: dict[int, int] = {}  # descriptors of blocks not mapped for lack of memory, by number
        self._open: dict[int, OpenBlock] = {}
        self._lender = Lender(self.released.append)

    def take_descriptors(self, fds: Iterable[int], complete: bool) -> None:
        """Keep the descriptors that arrived with a read until frames name their blocks.

        Args:
            fds: the descriptors; this object owns them from now on.
            complete: False if the kernel left some out.

        Raises:
            OSError: this process has no free descriptor. `close` closes those that arrived.
            ProtocolViolation: the peer sent more at once than a worker sends, or too many that no frame names. `close`
                closes those that arrived.
        """
        known = len(self.arrived)
        self.arrived.extend(fds)
        if not complete:
            if len(self.arrived) - known < DESCRIPTORS_AT_ONCE:  # the kernel had no numbers for the rest
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            raise ProtocolViolation(
                f"descriptors of shared memory were lost in transit: more than {DESCRIPTORS_AT_ONCE} arrived at once"
            )
        if len(self.arrived) > MOST_UNNAMED:
            raise ProtocolViolation(f"more than {MOST_UNNAMED} descriptors arrived without a frame that names them")

    def attach(self, number: int, size: int) -> Tensor:
        """Return the tensor that lies in block `number`.

        A block that is new here arrived with a descriptor. Each loan of a common block arrives with one.

        Raises:
            ProtocolViolation: the block does not exist, is smaller than `size`, or is not memory that may be mapped.
            OSError: this process has no descriptor or no memory left to map it. Without memory, the block is returned
                to the peer, and is mapped when it is lent again.
            MemoryError: no memory is left, as with `OSError`.
        """
        base = self._bases.get(number)
        if base is None:
            base = self._map_new(number, size)
        if size > len(base):
            raise ProtocolViolation(f"shared block {number} holds {len(base)} bytes, {size} were announced")
        return self._lender.lend(base, size, number)

    def _map_new(self, number: int, size: int) -> memoryview:
        fd = self._unmapped.pop(number, None)
        if fd is None:
            if len(self._bases) + len(self._unmapped) + len(self._lender._leases) >= self._most:
                raise ProtocolViolation(f"more than {self._most} blocks of shared memory are mapped here")
            if not self.arrived:
                raise ProtocolViolation(f"shared block {number} was named but never passed")
            fd = self.arrived.popleft()
        try:
            base = _map(fd, number, size)
        except (OSError, MemoryError) as error:
            if resources.out_of_memory(error):
                self.released.append(number)
                if not number & COMMON:  # the peer passes the descriptor only once
                    self._unmapped[number] = fd
            raise
        finally:
            if number not in self._unmapped:
                os.close(fd)
        if not number & COMMON:
            self._bases[number] = base
        return base

    def take_released(self) -> list[int]:
        """Return and clear the numbers of blocks that are no longer used and that the peer must be notified of."""
        numbers: list[int] = []
        with contextlib.suppress(IndexError):
            while True:
                numbers.append(self.released.popleft())
        return numbers

    def open(self, number: int, handle: bytes) -> None:
        """Open a block of an accelerator that the peer will lend; raises if it cannot be opened here."""
        self._open[number] = open_block(handle)

    def take(self, number: int, size: int, device: int) -> Arrived | None:
        """Copy `size` bytes from a block of an accelerator; return None if `number` is not such a block."""
        block = self._open.get(number)
        if block is None:
            return None
        if size > block.memory.numel():
            raise ProtocolViolation(f"block {number} holds {block.memory.numel()} bytes, {size} were announced")
        try:
            return block.take(size, device, self._streams)
        finally:
            self.released.append(number)

    def retire(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._bases.pop(number, None)
            if number in self._unmapped:
                os.close(self._unmapped.pop(number))
            if number in self._open:
                self._close(number)

    def close(self) -> None:
        while self.arrived:
            os.close(self.arrived.popleft())
        while self._unmapped:
            os.close(self._unmapped.popitem()[1])
        self._bases.clear()
        for number in list(self._open):
            self._close(number)

    def _close(self, number: int) -> None:
        with self._streams.aside():  # torch waits for the current stream, on which copies are made, before it unmaps
            del self._open[number]


def _map(fd: int, number: int, size: int) -> memoryview:
    """Map the memory file of block `number`.

    Reading a page that a file no longer has kills the process (SIGBUS). So only a file that is sealed against shrinking
    is mapped; the kernel enforces the seal. A file of huge pages is refused, because the host may run out of them.

    Raises:
        ProtocolViolation: it is not a memory file, may shrink, is smaller than `size`, or cannot be mapped.
        OSError: this process has no memory left, or no descriptor: `mmap` keeps one of its own.
        MemoryError: this process has no memory left.
    """
    import fcntl

    try:
        is_sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
        has_huge_pages = os.fstatvfs(fd).f_bsize != mmap.PAGESIZE
        capacity = os.fstat(fd).st_size  # read after the seals: from then on it can only grow
        if is_sealed and not has_huge_pages and capacity >= size:
            access = mmap.ACCESS_COPY if number & COMMON else mmap.ACCESS_WRITE
            return memoryview(mmap.mmap(fd, capacity, access=access))
        if capacity < size:
            fault = f"it holds {capacity} bytes, {size} were announced"
        else:
            fault = "it has huge pages" if has_huge_pages else "it is not sealed, so it may shrink as it is read"
    except (OSError, ValueError, OverflowError, MemoryError) as error:
        if resources.out_of_files(error) or resources.out_of_memory(error):
            raise
        fault = f"it cannot be mapped: {error}"
    raise ProtocolViolation(f"shared block {number} is refused: {fault}")
