"""Gives freed memory back to the system where the allocator of C keeps it.

A worker that returns large results allocates and frees them on different threads, between small objects that stay.
glibc hands back only what is free at the end of its heap: it kept 3.8 GB after 400 results of 10 MB, of which 0.3 GB
were in use at a time. `malloc_trim` hands back every free page; that takes about 15 ms for 500 MB, in which other
threads may wait for memory. So it is called where the process has grown by much, and seldom.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Callable

LOOK = 5.0  # seconds between two looks
GROWN = 1 << 29  # bytes since the last trim, of a process at work
GROWN_AND_IDLE = 1 << 26  # the same, of one whose size has not changed between two looks by more than
CHANGED = 1 << 22  # bytes


def trimmer() -> Callable[[int], int] | None:
    """Return glibc's `malloc_trim`; None where another library allocates, or the size of a process cannot be read."""
    if sys.platform != "linux":
        return None
    found: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return found


def own_bytes() -> int:
    """Return how much memory this process has to itself: neither files nor memory that is shared."""
    with open("/proc/self/statm") as file:
        _, resident, shared, *_ = file.read().split()
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGESIZE")


_malloc_trim = trimmer()


class Heap:
    """Trims the heap of this process. One thread at a time."""

    def __init__(self, trim: Callable[[int], int] | None = _malloc_trim, size: Callable[[], int] = own_bytes) -> None:
        self._trim, self._size = trim, size
        self._least = self._last = 0  # bytes of the process: the least since the last trim, and at the last look
        self._due = 0.0

    def tick(self, now: float) -> None:
        """Trim, where the process has grown; called now and then."""
        if self._trim is None or now < self._due:
            return
        self._due = now + LOOK
        with contextlib.suppress(OSError):  # no descriptor is left to read the size with
            size, last = self._size(), self._last
            limit = GROWN_AND_IDLE if abs(size - last) < CHANGED else GROWN
            if self._least and size - self._least > limit:
                self._trim(0)
                size = self._least = self._size()
            self._least = min(self._least or size, size)
            self._last = size
