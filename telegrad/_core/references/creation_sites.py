"""Places where references were created. Recorded in debug mode only, to list references that outlive their group."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Iterable

from telegrad._core.importing import PACKAGE

SHOWN = 20  # maximal number of places to log

log = logging.getLogger("telegrad")


def caller() -> str:
    """Return the first line outside of this package."""
    frame = sys._getframe()
    while frame.f_code.co_filename.startswith(PACKAGE) and frame.f_back is not None:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def warn_of_leaks(places: Iterable[str]) -> None:
    """List the references that outlive their group, by the places where they were created."""
    counts = Counter(places)
    if counts:
        listed = "\n  ".join(sorted(f"{count} made at {place}" for place, count in counts.items())[:SHOWN])
        log.warning("telegrad: %d references outlive their group:\n  %s", counts.total(), listed)
