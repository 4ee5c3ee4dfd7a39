"""Events of a worker, for recorders."""

from telegrad._core import events
from telegrad._core.events import (
    CALLED,
    CONNECTED,
    FREED,
    JOINED,
    LEFT,
    LOST,
    MADE,
    NOTED,
    PASSED,
    RAN,
    STAGED,
    STEPPED,
    TOOK_PART,
    Event,
)

__all__ = [
    "CALLED",
    "CONNECTED",
    "FREED",
    "JOINED",
    "LEFT",
    "LOST",
    "MADE",
    "NOTED",
    "PASSED",
    "RAN",
    "STAGED",
    "STEPPED",
    "TOOK_PART",
    "Event",
    "events",
]
