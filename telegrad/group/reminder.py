"""Who waits for long says for whom: in the log, where it is seen unless a program turns that off."""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import monotonic

FIRST = 5.0  # seconds
RARER = 10.0  # times as long until the next one

log = logging.getLogger("telegrad")


class Reminder:
    """To be looked at while somebody waits; after 5, 50, 500 ... seconds it logs what `text` says."""

    def __init__(self, text: Callable[[], str]) -> None:
        self._text = text
        self._start = monotonic()
        self._next = FIRST  # seconds from the start

    @property
    def left(self) -> float:
        """Seconds until the next one is due."""
        return max(0.0, self._start + self._next - monotonic())

    @property
    def waited(self) -> float:
        """Seconds since the start."""
        return monotonic() - self._start

    def look(self) -> None:
        if not self.left:
            waited = self.waited
            self._next = RARER * self._next
            log.warning("telegrad: waiting for %.0f s now: %s", waited, self._text())
