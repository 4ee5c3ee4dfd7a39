"""Accelerator memory that other processes of the host can open: the part that depends on the kind of device.

A block has two events. Its owner records `filled` after copying data in, and the reader's copy waits for it. The reader
then records `emptied`, and the owner's next copy waits for that. So neither process waits for the device, and the block
can be lent again as soon as the reader has released it.
"""

from __future__ import annotations

import os
import pickle
import secrets
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor

from telegrad._core.devices.device_streams import Arrived, Streams, device, kind, on, read_on
from telegrad._core.wire.tensors import DeviceBlob
from telegrad.errors import DeviceError

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


SHARERS: dict[str, Cuda] = {} if torch.version.hip else {"cuda": Cuda()}


def sharer() -> Cuda | None:
    """Return the way to share memory for this machine's accelerators, if they can share memory."""
    return SHARERS.get(kind() or "")


_SALT = secrets.token_hex(8)
_here: weakref.WeakValueDictionary[int, DeviceBlock] = weakref.WeakValueDictionary()  # blocks of this process


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
        if self._used:
            self._sharer.wait(emptied, index)
        current = torch.accelerator.current_stream(index)
        read_on(current, bound)
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
        both = {each: streams.arrivals(each) for each in (index, to)}
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
        block = _here[number]
        return OpenBlock(block.memory, block.events)
    shares = sharer()
    if shares is None:
        raise DeviceError("this worker's accelerators cannot share memory")
    return OpenBlock(*shares.open(exported))
