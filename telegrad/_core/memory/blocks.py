"""Memory files of this worker, which other processes of the host map.

Block        lent to one peer at a time; the receiver works on the same memory
CommonBlock  lent to any number of peers at once, with one Loan for each. They map it privately: when a process writes
             to a page, the kernel gives it a copy. It holds one tensor of this worker for as long as the tensor
             lives; while it is lent, nothing may write to it
"""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import NamedTuple

import torch
from torch import Tensor

from telegrad._core.wire.tensors import HOST

PARALLEL_FROM = 1 << 21  # for smaller blobs, waking torch's other threads costs more than they save
_F_SEAL_FUTURE_WRITE = 0x10  # `fcntl` has the name from Python 3.13 on


class Block:
    """A memory file with one user at a time."""

    __slots__ = ("capacity", "fd", "idle_since", "memory", "number")
    device = HOST

    def __init__(self, number: int, capacity: int) -> None:
        self.number = number
        self.capacity = capacity
        self.idle_since = 0.0
        self.fd, region = _make(capacity, 0)
        self.memory = _over(region)

    def fill(self, blob: Tensor) -> None:
        if blob.numel() < PARALLEL_FROM:
            ctypes.memmove(self.memory.data_ptr(), blob.data_ptr(), blob.numel())
            return
        with torch.inference_mode(False), torch.no_grad():
            self.memory[: blob.numel()].copy_(blob)

    def close(self) -> None:
        os.close(self.fd)


class CommonBlock:
    """A memory file with many readers."""

    __slots__ = ("address", "capacity", "fd", "idle_since", "is_used", "loans", "memory", "number", "spoiled")
    device = HOST

    def __init__(self, number: int, capacity: int) -> None:
        self.number = number
        self.capacity = capacity
        self.idle_since = 0.0
        self.is_used = False  # the tensor of this worker is alive
        self.loans = 0
        self.spoiled = False  # a peer may still read it but can no longer say when it is done
        self.fd, region = _make(capacity, _F_SEAL_FUTURE_WRITE)
        self.memory = memoryview(region)
        self.address = _over(region).data_ptr()

    def close(self) -> None:
        os.close(self.fd)


class Loan(NamedTuple):
    """One message's loan of a common block."""

    number: int
    block: CommonBlock


def _make(capacity: int, seals: int) -> tuple[int, mmap.mmap]:
    """Create and map a file, with `seals` for later mappings if the kernel supports them."""
    import fcntl

    fd = os.memfd_create("telegrad", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, capacity)
        region = mmap.mmap(fd, capacity)
        # The file cannot shrink under the receiver's tensor.
        fixed = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        try:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fixed | seals)
        except OSError:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fixed)
    except BaseException:
        os.close(fd)
        raise
    return fd, region


def _over(region: mmap.mmap) -> Tensor:
    with torch.inference_mode(False):
        return torch.frombuffer(region, dtype=torch.uint8)
