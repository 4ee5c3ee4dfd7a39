"""Detects a silent worker: no check finds a sign of life for as long as the limit.

    HEARD   the last check found a sign of life; the next check is after a third of the limit
    QUIET   the last check found none; checks are more frequent, and the time counts from the first of them
    SILENT  quiet for as long as the limit

A late check proves nothing about the time before it: this worker itself did not run then, for example because a
terminal has stopped all workers together. The time counts from that check.
"""

from math import inf

WHILE_HEARD, WHILE_QUIET = 1 / 3, 1 / 20  # of the limit: the pause between checks
LATE = 1 / 2  # of the limit: this worker never chooses a longer pause


class Silence:
    """The silence of one worker, as far as this worker has checked."""

    def __init__(self, limit: float) -> None:
        """Initialise with `limit` in seconds; with 0, the worker is never silent."""
        self.limit = limit or inf
        self._quiet_since = inf
        self._looked = -inf

    def look(self, now: float, heard: bool) -> bool:
        """Record a check and return True if the worker is silent; `heard` says if there was a sign of life."""
        if heard:
            self._quiet_since = inf
        elif self._quiet_since == inf or now - self._looked > LATE * self.limit:
            self._quiet_since = now
        self._looked = now
        return now - self._quiet_since >= self.limit

    @property
    def pause(self) -> float:
        return self.limit * (WHILE_HEARD if self._quiet_since == inf else WHILE_QUIET)
