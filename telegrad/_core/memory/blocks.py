"""Memory files of this worker, which other processes of the host map.

A file is lent to one peer at a time, which works on the same memory. A common one is lent to any number of peers at
once, with one Loan for each. They map it privately: when a process writes to a page, the kernel gives it a copy. It
holds one tensor of this worker for as long as the tensor lives; while it is lent, nothing may write to it.
"""

from __future__ import annotations

import mmap
import os
from typing import NamedTuple

from torch import Tensor

from telegrad._core.wire.raw_memory import address_of, copy
from telegrad._core.wire.tensors import HOST

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
            # The file cannot shrink under the receiver's tensor.
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
    """One message's loan of a common block."""

    number: int
    block: Block
