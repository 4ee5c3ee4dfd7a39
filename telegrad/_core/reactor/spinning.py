"""How long a thread looks again before it sleeps."""

from __future__ import annotations

import os
from time import perf_counter

SPIN = 250e-6  # seconds
SOON = 400e-6  # worth it only where the last wait was shorter than this
DISTURBED = 50e-6  # where one look takes as long, another thread has the interpreter

_yield = getattr(os, "sched_yield", lambda: None)


class Spin:
    """Busy-wait before sleeping, because waking a thread that sleeps costs as much as the wait."""

    __slots__ = ("_gives_way", "_last", "_until")

    def __init__(self, start: float, seconds: float = SPIN, gives_way: bool = False) -> None:
        """With `gives_way`, end as soon as another thread of the process wants the interpreter."""
        self._last = start
        self._until = start + seconds
        self._gives_way = gives_way

    def again(self) -> bool:
        """Let other threads use the processor; return True to look again at once, False to sleep."""
        before, now = self._last, perf_counter()
        if now > self._until or (self._gives_way and now - before > DISTURBED):
            return False
        self._last = now
        _yield()
        return True
