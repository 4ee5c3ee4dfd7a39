"""Page-locked memory of the host, from and to which devices copy without waiting; kept, and lent out in pieces."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

SMALL_PIECE, PIECE = 1 << 16, 4 << 20
MOST_SMALL, MOST = 256, 32  # pieces that are kept: 16 and 128 MB


class Piece:
    """Some bytes on loan. It goes back when nobody holds it, and is lent again once the device is done with it."""

    __slots__ = ("_shelf", "busy", "memory")

    def __init__(self, shelf: _Shelf, memory: Tensor) -> None:
        self.memory = memory
        self.busy: torch.Event | None = None  # after which the device needs it no longer
        self._shelf = shelf

    def __del__(self) -> None:
        self._shelf.put_back(self.memory, self.busy)


class _Shelf:
    """Pieces of one size."""

    def __init__(self, size: int, most: int) -> None:
        self._size = size
        self._most = most
        self._lock = threading.RLock()  # guards all below; a piece may end wherever this thread allocates
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
            if self._made > self._most:  # torch keeps what the device still reads
                self._made -= 1
            else:
                self._free.append((memory, busy))


class Pinned:
    """The pieces of one worker."""

    def __init__(self) -> None:
        self._small = _Shelf(SMALL_PIECE, MOST_SMALL)
        self._large = _Shelf(PIECE, MOST)

    def take(self, size: int, beyond: bool = False) -> Piece | None:
        """A piece for as much of `size` as fits; None where all are lent, unless one `beyond` their number shall be."""
        return (self._small if size <= SMALL_PIECE else self._large).take(beyond)
