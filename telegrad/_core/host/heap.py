"""Returns freed memory to the system.

The C allocator keeps freed memory. A worker that returns large results allocates and frees them on different threads,
between small objects that stay. glibc returns only memory that is free at the end of its heap. It kept 3.8 GB after 400
results of 10 MB, of which 0.3 GB were in use at a time. `malloc_trim` returns every free page; that takes about 15 ms
for 500 MB, during which other threads may wait for memory. Therefore it is called rarely, after the process has grown
by a large amount.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Callable

LOOK = 5.0  # seconds between two measurements
GROWN = 1 << 29  # bytes since the last trim, for a busy process
GROWN_AND_IDLE = 1 << 26  # the same, for a process whose size changed between two measurements by at most
CHANGED = 1 << 22  # bytes


def trimmer() -> Callable[[int], int] | None:
    """Return glibc's `malloc_trim`, or None with another allocator or where the size of a process cannot be read."""
    if sys.platform != "linux":
        return None
    found: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return found


def own_bytes() -> int:
    # Shared pages are not counted: memory files of tensors are not in the heap of the C allocator.
    with open("/proc/self/statm") as file:
        _, resident, shared, *_ = file.read().split()
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGESIZE")


_malloc_trim = trimmer()


class Heap:
    """Trims the heap of this process. Use it from one thread at a time."""

    def __init__(self, trim: Callable[[int], int] | None = _malloc_trim, size: Callable[[], int] = own_bytes) -> None:
        self._trim, self._size = trim, size
        self._least = self._last = 0  # bytes of the process: the least since the last trim, and at the last measurement
        self._due = 0.0

    def tick(self, now: float) -> None:
        """Trim the heap if the process has grown. Call it regularly."""
        if self._trim is None or now < self._due:
            return
        self._due = now + LOOK
        with contextlib.suppress(OSError):  # no descriptor is free to read the size
            size, last = self._size(), self._last
            limit = GROWN_AND_IDLE if abs(size - last) < CHANGED else GROWN
            if self._least and size - self._least > limit:
                self._trim(0)
                size = self._least = self._size()
            self._least = min(self._least or size, size)
            self._last = size
