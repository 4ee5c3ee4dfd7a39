"""Memory files of this worker, which other processes of the host map.

Block        lent to one peer at a time; its receiver works on that very memory
CommonBlock  lent to any number at once, each of which has a Loan of it; they map it privately, so that the kernel
             copies a page for whoever writes to it. It holds what one tensor of this worker holds, while that
             lives; where that is lent out, nothing may be written to it
"""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import NamedTuple

import torch
from torch import Tensor

from telegrad._core.wire.tensors import HOST

PARALLEL_FROM = 1 << 21  # below, waking torch's other threads costs more than their help is worth
_F_SEAL_FUTURE_WRITE = 0x10  # has a name from Python 3.13 on


class Block:
    """One that has one user at a time."""

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
    """One that has many readers."""

    __slots__ = ("address", "capacity", "fd", "idle_since", "is_used", "loans", "memory", "number", "spoiled")
    device = HOST

    def __init__(self, number: int, capacity: int) -> None:
        self.number = number
        self.capacity = capacity
        self.idle_since = 0.0
        self.is_used = False  # the tensor of this worker lives
        self.loans = 0
        self.spoiled = False  # somebody may read it who cannot tell any more when that is over
        self.fd, region = _make(capacity, _F_SEAL_FUTURE_WRITE)
        self.memory = memoryview(region)
        self.address = _over(region).data_ptr()

    def close(self) -> None:
        os.close(self.fd)


class Loan(NamedTuple):
    """What one message lends of a common block."""

    number: int
    block: CommonBlock


def _make(capacity: int, seals: int) -> tuple[int, mmap.mmap]:
    """A file, mapped; whoever maps it later is kept from what `seals` say, where the kernel knows them."""
    import fcntl

    fd = os.memfd_create("telegrad", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, capacity)
        region = mmap.mmap(fd, capacity)
        # The receiver need not fear that the file shrinks under its tensor.
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
