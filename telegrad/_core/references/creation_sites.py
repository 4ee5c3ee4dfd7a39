"""Places where references were created. Recorded in debug mode only, to list references that outlive their group."""

from __future__ import annotations

import logging
import sys

from telegrad._core.importing import PACKAGE
from telegrad._core.pickling.remote_text import debugging
from telegrad._core.references.control_messages import Id

SHOWN = 20  # maximal number of places to log

log = logging.getLogger("telegrad")


class Origins:
    """Records places, if the environment enables debugging."""

    def __init__(self) -> None:
        self._places: dict[Id, str] | None = {} if debugging() else None

    def note(self, ref: Id) -> None:
        if self._places is not None:
            self._places.setdefault(ref, _caller())

    def forget(self, ref: Id) -> None:
        if self._places is not None:
            self._places.pop(ref, None)

    def of(self, ref: Id) -> str:
        """Return the place, or ""."""
        return (self._places or {}).get(ref, "")

    def warn_of_leaks(self, refs: list[Id]) -> None:
        if self._places is None or not refs:
            return
        places = [self.of(ref) for ref in refs]
        listed = "\n  ".join(sorted(f"{places.count(place)} made at {place}" for place in set(places))[:SHOWN])
        log.warning("telegrad: %d references outlive their group:\n  %s", len(refs), listed)


def _caller() -> str:
    """Return the first line outside of this package."""
    frame = sys._getframe()
    while frame.f_code.co_filename.startswith(PACKAGE) and frame.f_back is not None:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
