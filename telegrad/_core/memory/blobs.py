"""Chooses how the memory of tensors is sent over one connection.

    host to host      between processes of one host, if large: in a lent memory file, which is the common block that
                      contains the tensor, or a file that it is copied into; otherwise in the stream
    device to device  between processes of one host: in a lent block of the device if they can share; otherwise as below
    all others        in pieces through page-locked host memory, in the stream

Very large tensors from host to host over TCP are sent in several streams (`lanes`).

The ends find out by trying if they can share device memory: with the first tensor that could be sent this way, the
sender offers a block. Tensors are sent in the stream until the other end has opened it, or if it cannot.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from torch import Tensor

from telegrad._core.devices.device_sharing import DeviceBlock
from telegrad._core.devices.device_streams import Arrived
from telegrad._core.devices.staging import StagedCopy, Staging
from telegrad._core.host import resources
from telegrad._core.memory.blocks import Block, Loan
from telegrad._core.memory.extra_streams import ExtraStreams, dropped
from telegrad._core.memory.mappings import SharedMaps
from telegrad._core.memory.warm_memory import ReceiveBufferPool, SharedBlockPool
from telegrad._core.wire.messages import ENTRY, IN_STREAM, LEND, STRIPED, Message, Unreceived, encode
from telegrad._core.wire.tensors import HOST, Blob, DeviceBlob, memory
from telegrad.errors import ProtocolViolation

SHARE_FROM = 1 << 16  # smaller blobs are sent through the socket even if memory is shared

log = logging.getLogger("telegrad")


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

    def __init__(self, peer: str, stores: MemorySources, lanes: ExtraStreams) -> None:
        self._peer = peer
        self._lanes = lanes
        self._pool = stores.pool
        self._staging = stores.staging
        self._known: set[int] = set()  # blocks that the peer has mapped or opened
        self._lent: set[int] = set()  # blocks that the peer uses now
        self._trial: DeviceBlock | None = None
        self._shares_devices: bool | None = None if stores.pool is not None else False  # None: not known yet

    def prepare(self, blob: Blob, shares: bool = True) -> Prepared:
        """Choose how to send a blob, and copy it into a block if it is sent in one. `shares` permits memory files."""
        if isinstance(blob, DeviceBlob):
            return self._prepare_bound(blob, shares)
        size, pool = blob.numel(), self._pool
        # One peer gets at most half of the files: other peers and common blocks need some.
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
                        before.append(Chunk(encode(Message(LEND, block.number, body=block.handle()))))
            elif isinstance(streamed, StagedCopy) and self._shares_devices is None:
                before.extend(self._offer(streamed.source))
        return table, fds, before, behind

    def _offer(self, index: int) -> Iterator[Chunk]:
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
        way = f"through the host ({fault})" if fault else "from device to device"
        log.info("telegrad: tensors on accelerators go to worker %r %s", self._peer, way)

    def rollback(self, prepared: Iterable[Prepared]) -> None:
        """Take back the blocks of blobs that were not sent."""
        self.reclaim([each.block.number for each in prepared if each.block and each.block.number not in self._lent])

    def returned(self, numbers: Iterable[int]) -> list[int]:
        """Record that the peer returned blocks; return those that were lent to it, for `reclaim`."""
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
    if not resources.out_of_memory(error):
        raise error
    return Unreceived(size, str(error) or type(error).__name__)
