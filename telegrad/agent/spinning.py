"""How long to look again before sleeping, since waking from sleep takes as long."""

from __future__ import annotations

import os
from time import perf_counter

SPIN = 250e-6  # seconds
SOON = 400e-6  # worth it only where the last wait was shorter than this
DISTURBED = 50e-6  # where one look takes as long, another thread has the interpreter

_yield = getattr(os, "sched_yield", lambda: None)


class Spin:
    """One time of it."""

    __slots__ = ("_gives_way", "_last", "_until")

    def __init__(self, start: float, seconds: float = SPIN, gives_way: bool = False) -> None:
        """With `gives_way` it ends as soon as another thread of the process has something to do."""
        self._last = start
        self._until = start + seconds
        self._gives_way = gives_way

    def again(self) -> bool:
        """Whether to look again at once, after others could use the processor; False once it is time to sleep."""
        before, now = self._last, perf_counter()
        if now > self._until or (self._gives_way and now - before > DISTURBED):
            return False
        self._last = now
        _yield()
        return True
