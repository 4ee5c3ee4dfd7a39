"""Pools of pinned host memory, which devices copy to and from asynchronously."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

SMALL_PIECE, PIECE = 1 << 16, 4 << 20
MOST_SMALL, MOST = 256, 32  # pieces kept: 16 and 128 MB


class Piece:
    """Pinned bytes on loan. Freed pieces return to the pool, and are reused once the device is done with them."""

    __slots__ = ("_shelf", "busy", "memory")

    def __init__(self, shelf: _Shelf, memory: Tensor) -> None:
        self.memory = memory
        self.busy: torch.Event | None = None  # after this event the device does not use it
        self._shelf = shelf

    def __del__(self) -> None:
        self._shelf.put_back(self.memory, self.busy)


class _Shelf:
    """A pool of pieces of one size."""

    def __init__(self, size: int, most: int) -> None:
        self._size = size
        self._most = most
        # guards all below; reentrant: a piece may be freed at any allocation under the lock
        self._lock = threading.RLock()
        self._free: list[tuple[Tensor, torch.Event | None]] = []
        self._made = 0

    def take(self, beyond: bool) -> Piece | None:
        with self._lock:
            for at, (memory, busy) in enumerate(self._free):
                if busy is None or busy.query():
                    del self._free[at]
                    return Piece(self, memory)
            if self._made >= self._most and not beyond:
                return None
            with torch.inference_mode(False):
                memory = torch.empty(self._size, dtype=torch.uint8, pin_memory=True)
            self._made += 1
            return Piece(self, memory)

    def put_back(self, memory: Tensor, busy: torch.Event | None) -> None:
        with self._lock:
            if self._made > self._most:  # torch keeps memory that the device still reads
                self._made -= 1
            else:
                self._free.append((memory, busy))


class Pinned:
    def __init__(self) -> None:
        self._small = _Shelf(SMALL_PIECE, MOST_SMALL)
        self._large = _Shelf(PIECE, MOST)

    def take(self, size: int, beyond: bool = False) -> Piece | None:
        """Return a piece for all or a part of `size`; if all are lent, None, or an additional piece if `beyond`."""
        return (self._small if size <= SMALL_PIECE else self._large).take(beyond)
