"""Logs failures of futures that the program never looked at."""

from __future__ import annotations

import logging
import sys
from time import monotonic
from typing import Any, NoReturn

from telegrad._core.pickling.exceptions import fresh
from telegrad.errors import CallCancelled, ShutDown

QUIET = 5.0  # seconds in which similar failures are not logged again: `collect_all` shows only one of several
REMEMBERED = 256

log = logging.getLogger("telegrad")

_seen: dict[tuple[str, str], float] = {}  # when the program or the log last saw such a failure


class UnretrievedError:
    """The failure of a future. Logged if the failure is dropped before it was `seen`."""

    __slots__ = ("_about", "kind", "seen", "text")

    def __init__(self, about: str, error: BaseException) -> None:
        """`about` describes the failed operation, as users know it."""
        self.seen: bool = isinstance(error, ShutDown | CallCancelled)  # the program itself asked for these
        self._about = about
        self.kind: str = type(error).__name__
        try:
            self.text: str = str(error)
        except Exception:
            self.text = "(its text could not be formatted)"

    def __repr__(self) -> str:
        return f"{self.kind} of {self._about}"

    def raise_fresh(self, error: Any) -> NoReturn:
        """Mark the failure as seen, and raise a fresh copy of the future's error."""
        self.seen = True
        self._note()
        raise fresh(error)

    def _note(self) -> bool:
        now, key = monotonic(), (self.kind, self._about.partition(" on worker ")[0])
        before = _seen.get(key, -QUIET)
        if len(_seen) >= REMEMBERED:
            _seen.clear()
        _seen[key] = now
        return now - before >= QUIET

    def __del__(self) -> None:
        if not self.seen and not sys.is_finalizing() and self._note():
            log.error(
                "telegrad: %s failed, and its error was never retrieved: wait for its future (or use its reference), "
                "or add a callback to the future\n%s: %s",
                *(self._about, self.kind, self.text),
            )
