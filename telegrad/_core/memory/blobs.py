"""Chooses how the memory of tensors is sent over one connection.

    host to host      between processes of one host, if large: in a lent memory file, which is the common block that
                      contains the tensor, or a file that it is copied into; otherwise in the stream
    device to device  between processes of one host: in a lent block of the device if they can share; otherwise as below
    all others        in pieces through page-locked host memory, in the stream

Very large tensors from host to host over TCP are sent in several streams (`lanes`).

The ends find out by trying if they can share device memory: with the first tensor that could be sent this way, the
sender offers a block. Tensors are sent in the stream until the other end has opened it, or if it cannot.
"""

import array
import errno
import mmap
import os
import socket
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from torch import Tensor

from telegrad._core import processes
from telegrad._core.memory.device_streams import Arrived, Streams
from telegrad._core.memory.extra_streams import ExtraStreams, dropped
from telegrad._core.memory.lending import SharedLender
from telegrad._core.memory.staging import DeviceBlock, OpenBlock, StagedCopy, Staging, open_block
from telegrad._core.memory.warm_memory import SHARE_FROM, Block, LastingMaps, Loan, ReceiveBufferPool, SharedBlockPool
from telegrad._core.wire.messages import COMMON, ENTRY, IN_STREAM, LEND, STRIPED, Message, Unreceived, encode
from telegrad._core.wire.tensors import HOST, Blob, DeviceBlob, memory
from telegrad.errors import ProtocolViolation

DESCRIPTORS_AT_ONCE = 64  # in one write
MOST_NEW = 512  # descriptors in one message; its further blobs are sent through the socket
MOST_UNNAMED = MOST_NEW + DESCRIPTORS_AT_ONCE  # those of a message, and of the read that ends it

ANCILLARY = socket.CMSG_SPACE(DESCRIPTORS_AT_ONCE * array.array("i").itemsize) if hasattr(socket, "CMSG_SPACE") else 0
# Plain numbers: the constants of `socket` are enumerations, whose operators take a microsecond each.
TRUNCATED = int(getattr(socket, "MSG_CTRUNC", 0))
CLOSE_ON_EXEC = int(getattr(socket, "MSG_CMSG_CLOEXEC", 0))  # child processes inherit none

# How both ends agree on lent blocks without further messages:
# - A worker never uses a number twice, so a late RELEASE or RETIRE cannot concern another block.
# - Except for common blocks, a block is lent to one peer at a time. A peer gets its descriptor, or its handle, with the
#   first loan. Descriptors arrive without numbers: they belong, in order, to the new numbers in the tables of frames.
# - A common block has a new number, and passes its descriptor, for each loan.
# - A loan ends by a RELEASE. If the connection ends first, the peer may still use the memory, so it is not lent again.


class SharedMaps:
    """The mappings of the blocks that one peer lends over a Unix socket, on which their descriptors arrive."""

    def __init__(self, streams: Streams) -> None:
        self.arrived: deque[int] = deque()  # descriptors received over the socket, not yet mapped
        self.released: deque[int] = deque()  # blocks no longer used here; the peer must be notified
        self._streams = streams
        # Each mapping keeps a descriptor, so a peer could use up all descriptors of this process. A peer with the same
        # limit of open files has at most `files_to_lend` blocks. `_map_new` counts an exclusive block twice while a
        # tensor uses it: as mapped and as lent.
        self._most = 2 * processes.files_to_lend() + MOST_UNNAMED
        self._bases: dict[int, memoryview] = {}
        self._unmapped: dict[int, int] = {}  # descriptors of blocks not mapped for lack of memory, by number
        self._open: dict[int, OpenBlock] = {}
        self.lender = SharedLender(self.released.append)
        self.lasting = LastingMaps()

    def take_descriptors(self, ancillary: Iterable[tuple[int, int, bytes]], flags: int) -> None:
        """Keep the descriptors that a `recvmsg` brought until frames name their blocks.

        Raises:
            OSError: this process has no free descriptor. `close` closes those that arrived.
            ProtocolViolation: the peer sent more at once than a worker sends, or too many that no frame names. `close`
                closes those that arrived.
        """
        fds = array.array("i")
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
        self.arrived.extend(fds)
        if flags & TRUNCATED:  # the kernel left some out
            if len(fds) < DESCRIPTORS_AT_ONCE:  # the kernel had no numbers for the rest
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
            OSError, MemoryError: this process has no descriptor or no memory left to map it. Without memory, the block
                is returned to the peer, and is mapped when it is lent again.
        """
        base, lasting = (self._bases[number], None) if number in self._bases else self._map_new(number, size)
        if size > len(base):
            raise ProtocolViolation(f"shared block {number} holds {len(base)} bytes, {size} were announced")
        lent = self.lender.lend(base, size, number)
        # At the storage, since `unpack` makes other tensors on it and drops this one. torch keeps the Python object of
        # a storage, with its attributes, as long as the storage lives.
        vars(lent.untyped_storage())["lasting"] = lasting
        return lent

    def _map_new(self, number: int, size: int) -> tuple[memoryview, Tensor | None]:
        fd = self._unmapped.pop(number, None)
        if fd is None:
            if len(self._bases) + len(self._unmapped) + len(self.lender._leases) >= self._most:
                raise ProtocolViolation(f"more than {self._most} blocks of shared memory are mapped here")
            if not self.arrived:
                raise ProtocolViolation(f"shared block {number} was named but never passed")
            fd = self.arrived.popleft()
        try:
            base = _map(fd, number, size)
            lasting = self.lasting.of(fd) if number & COMMON else None
        except (OSError, MemoryError) as error:
            if processes.out_of_memory(error):
                self.released.append(number)
                if not number & COMMON:  # the peer passes the descriptor only once
                    self._unmapped[number] = fd
            raise
        finally:
            if number not in self._unmapped:
                os.close(fd)
        if not number & COMMON:
            self._bases[number] = base
        return base, lasting

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
        # The block is released before the device has copied it. `take` has queued the copy, and behind it the event
        # `emptied`, and the owner's next copy into the block waits for that event.
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
        self.lasting.trim(0)
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
        if processes.out_of_files(error) or processes.out_of_memory(error):
            raise
        fault = f"it cannot be mapped: {error}"
    raise ProtocolViolation(f"shared block {number} is refused: {fault}")


class MemorySources(NamedTuple):
    """The sources of memory for blobs."""

    arena: ReceiveBufferPool
    pool: SharedBlockPool | None  # if both ends are on one host
    staging: Staging


class Chunk(NamedTuple):
    """One buffer to send. Descriptors are sent with its first byte; `keeper` owns the memory."""

    data: bytes | memoryview
    fds: tuple[int, ...] = ()
    keeper: Any = None


class Prepared(NamedTuple):
    """A blob to send: a lent block that contains it, or the data for the stream."""

    size: int
    device: int
    block: Block | DeviceBlock | Loan | None
    streamed: Tensor | StagedCopy | None


class Outgoing:
    """The blobs that are sent on one connection.

    `prepare`, `passes_descriptor`, `rollback` and `reclaim` may be called from any thread; all other methods only under
    the connection's lock.
    """

    def __init__(self, stores: MemorySources, lanes: ExtraStreams) -> None:
        self._lanes = lanes
        self._pool = stores.pool
        self._staging = stores.staging
        self._known: set[int] = set()  # blocks that the peer has mapped or opened
        self._lent: set[int] = set()  # blocks that the peer uses now
        self.way = ""  # of tensors on accelerators, to be logged
        self._trial: DeviceBlock | None = None
        self._shares_devices: bool | None = None if stores.pool is not None else False  # None: not known yet

    def prepare(self, blob: Blob, shares: bool = True) -> Prepared:
        """Choose how to send a blob, and copy it into a block if it is sent in one. `shares` permits memory files."""
        if isinstance(blob, DeviceBlob):
            return self._prepare_bound(blob, shares)
        size, pool = blob.numel(), self._pool
        # One peer gets at most half of the files: other peers and common blocks need some. Blocks of a message that is
        # being prepared do not count yet.
        if pool is None or size < SHARE_FROM or not shares or len(self._lent) >= pool.most_files // 2:
            return Prepared(size, HOST, None, blob)
        loan = pool.lend(blob)
        if loan is not None:
            return Prepared(size, HOST, loan, None)
        block = pool.take(size)
        if block is None:
            return Prepared(size, HOST, None, blob)
        return self._filled(block, blob, HOST)

    def passes_descriptor(self, prepared: Prepared) -> bool:
        """Return True if a descriptor must be sent; also for a block that a concurrent message passes."""
        block = prepared.block
        return isinstance(block, Loan) or (isinstance(block, Block) and block.number not in self._known)

    def _prepare_bound(self, bound: DeviceBlob, may_share: bool) -> Prepared:
        blob, size = bound.blob, bound.numel()
        if blob.is_cpu:
            return self.prepare(blob, may_share)._replace(device=bound.device)
        shares = bound.device != HOST and self._shares_devices
        block = self._pool.take_on(blob.device.index, size) if self._pool is not None and shares and size else None
        if block is None:
            return Prepared(size, bound.device, None, self._staging.depart(bound) if size else None)
        return self._filled(block, bound, bound.device)

    def _filled(self, block: Any, blob: Blob, device: int) -> Prepared:
        try:
            block.fill(blob)
        except BaseException:
            self.reclaim([block.number])
            raise
        return Prepared(blob.numel(), device, block, None)

    def commit(self, prepared: list[Prepared]) -> tuple[bytes, list[int], list[Chunk], list[Chunk | StagedCopy]]:
        """Return the table of a frame, its descriptors, and the chunks to send before and after it."""
        table, fds, before = b"", [], []
        behind: list[Chunk | StagedCopy] = []
        for size, device, block, streamed in prepared:
            # `serve` also notes that lanes are wanted. Until they are ready, such a tensor is sent in this stream.
            striped = device == HOST and block is None and self._lanes.serve(size)
            table += ENTRY.pack(STRIPED if striped else IN_STREAM if block is None else block.number, size, device)
            if isinstance(streamed, StagedCopy):
                behind.append(streamed)
            elif size and streamed is not None:
                whole = memory(streamed)
                behind.append(Chunk(self._lanes.carry(whole, streamed) if striped else whole, (), streamed))
            if block is not None:
                self._lent.add(block.number)
                if isinstance(block, Loan):
                    fds.append(block.block.fd)
                elif block.number not in self._known:
                    self._known.add(block.number)
                    if isinstance(block, Block):
                        fds.append(block.fd)
                    else:
                        # The peer must open the block before it reads the frame that uses it.
                        before.append(Chunk(encode(Message(LEND, block.number, body=block.handle()))))
            elif isinstance(streamed, StagedCopy) and self._shares_devices is None:
                before.extend(self._offer(streamed.source))
        return table, fds, before, behind

    def _offer(self, index: int) -> Iterator[Chunk]:
        # Until the peer has answered, no second block is offered, and tensors are sent in the stream.
        self._shares_devices = False
        try:
            block = self._pool.take_on(index, 1) if self._pool is not None else None
            if block is not None:
                self._trial = block
                self._lent.add(block.number)
                self._known.add(block.number)
                yield Chunk(encode(Message(LEND, block.number, body=block.handle())))
        except RuntimeError as error:
            self.opened(str(error))

    def opened(self, fault: str) -> None:
        """Process the peer's answer to the offered block; an empty `fault` means that the peer opened it."""
        block, self._trial = self._trial, None
        if block is not None:
            self._lent.discard(block.number)
            self.reclaim([block.number])
        self._shares_devices = not fault
        self.way = f"through the host ({fault})" if fault else "from device to device"

    def rollback(self, prepared: Iterable[Prepared]) -> None:
        """Take back the blocks of blobs that were not sent."""
        # `commit` has passed on the others, which may be in the outbox. The peer returns them, or they are given up
        # with the connection.
        self.reclaim([each.block.number for each in prepared if each.block and each.block.number not in self._lent])

    def returned(self, numbers: Iterable[int]) -> list[int]:
        """Record that the peer returned blocks; return those that were lent to it, for `reclaim`."""
        # A number that was not lent to this peer is ignored: a peer must not free a block that another one uses.
        found = self._lent.intersection(numbers)
        self._lent -= found
        return list(found)

    def reclaim(self, numbers: list[int]) -> None:
        if self._pool is not None:
            self._pool.give_back(numbers)

    def forget(self, numbers: Iterable[int]) -> list[int]:
        """Record that this worker dropped blocks; return those that the peer has mapped or opened."""
        known = [number for number in numbers if number in self._known]
        self._known.difference_update(known)
        return known

    def abandon(self) -> None:
        """Give up the lent blocks, because the connection has ended."""
        if self._pool is not None:
            self._pool.abandon(self._lent)


class IncomingBlob:
    """The blobs that are received on one connection. Only the reader thread uses it."""

    def __init__(self, stores: MemorySources, lanes: ExtraStreams) -> None:
        self._arena = stores.arena
        self._staging = stores.staging
        self._lanes = lanes
        self.maps = SharedMaps(stores.staging.streams)
        self.attached = 0  # bytes received in blocks
        self._tried = False

    def allocate(
        self, size: int, device: int, striped: bool
    ) -> tuple[Tensor | Arrived | Unreceived, Iterator[memoryview]]:
        """Return the memory for a blob in the stream. If there is none, the bytes are received and discarded."""
        try:
            if device != HOST and not striped:
                return self._staging.receive_into(size, device)
            blob, place = self._arena.allocate(size)
        except Exception as error:
            return _unreceived(size, error), self._lanes.drop(size) if striped else dropped(size)
        if striped:
            place = self._lanes.carry(place, blob)
        else:
            # The end that opened the connection makes the lanes of both directions, so it notes large tensors that it
            # receives.
            self._lanes.serve(size)
            self._lanes.make_wanted()
        return blob, iter((place,))

    def attach(self, number: int, size: int, device: int) -> Tensor | Arrived | Unreceived:
        """Return a blob that lies in a block lent by the peer. Without memory to use it, the block is returned."""
        self.attached += size
        try:
            arrived = self.maps.take(number, size, device)
            if arrived is not None:
                return arrived
            blob = self.maps.attach(number, size)
            return blob if device == HOST else self._staging.put(blob, device)
        except Exception as error:
            return _unreceived(size, error)

    def open(self, number: int, handle: bytes) -> str | None:
        """Open a block of the peer's accelerator. For the first block, return the reason of a failure, or ""."""
        first, self._tried = not self._tried, True
        try:
            self.maps.open(number, handle)
        except Exception as error:
            if not first:
                raise ProtocolViolation(f"block {number} cannot be opened, though the first could: {error}") from error
            return str(error).partition("\n")[0] or type(error).__name__
        return "" if first else None


def _unreceived(size: int, error: Exception) -> Unreceived:
    """Return the placeholder of a blob without memory. Re-raise `error` if it has another cause."""
    if not processes.out_of_memory(error):
        raise error
    return Unreceived(size, str(error) or type(error).__name__)
