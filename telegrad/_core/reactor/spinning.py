"""The duration of a busy wait before a thread sleeps."""

from __future__ import annotations

import os
from time import perf_counter

SPIN = 250e-6  # seconds
SOON = 400e-6  # busy waiting pays off only if the last wait was shorter
DISTURBED = 50e-6  # a loop that takes this long shows that another thread has the interpreter

_yield = getattr(os, "sched_yield", lambda: None)


class Spin:
    """Busy-wait before sleeping, because waking a sleeping thread costs as much as the wait."""

    __slots__ = ("_gives_way", "_last", "_until")

    def __init__(self, start: float, seconds: float = SPIN, gives_way: bool = False) -> None:
        """With `gives_way`, end as soon as another thread of the process wants the interpreter."""
        self._last = start
        self._until = start + seconds
        self._gives_way = gives_way

    def again(self) -> bool:
        """Yield the processor to other threads; return True to poll again, False to sleep."""
        before, now = self._last, perf_counter()
        if now > self._until or (self._gives_way and now - before > DISTURBED):
            return False
        self._last = now
        _yield()
        return True
