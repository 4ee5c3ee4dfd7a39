"""When a worker is silent: where every look at it finds no sign of life, for as long as its limit says.

    HEARD   it gave a sign of life at the last look; the next is in a third of the limit
    QUIET   it gave none; there are more looks then, and the time runs from the first of them
    SILENT  as long as the limit

A look that comes late says nothing of the time before it: this worker did not run itself then, as when a terminal has
stopped all of them together. So the time runs anew from there.
"""

from __future__ import annotations

from math import inf

WHILE_HEARD, WHILE_QUIET = 1 / 3, 1 / 20  # of the limit: the pause between looks
LATE = 1 / 2  # of the limit: a longer pause is none that this worker has chosen


class Silence:
    """That of one worker, as far as this one has looked."""

    def __init__(self, limit: float) -> None:
        """`limit` in seconds; 0 for none: it is never silent then."""
        self._limit = limit or inf
        self._quiet_since = inf
        self._looked = -inf

    def look(self, now: float, heard: bool) -> bool:
        """Whether it is silent, after a look that has found a sign of life or none."""
        if heard:
            self._quiet_since = inf
        elif self._quiet_since == inf or now - self._looked > LATE * self._limit:
            self._quiet_since = now
        self._looked = now
        return now - self._quiet_since >= self._limit

    @property
    def pause(self) -> float:
        """Seconds until the next look."""
        return self._limit * (WHILE_HEARD if self._quiet_since == inf else WHILE_QUIET)

    def __repr__(self) -> str:
        return f"<Silence: {'heard' if self._quiet_since == inf else 'quiet'} at the last look>"
