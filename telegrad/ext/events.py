"""Events of a worker, for recorders."""

from telegrad._core import events
from telegrad._core.events import (
    BACKWARD_PASS,
    BACKWARD_TASKS,
    CALLED,
    CONNECTED,
    FREED,
    JOINED,
    LEFT,
    LOST,
    MADE,
    NOTED,
    RAN,
    STAGED,
    STEPPED,
    Event,
)

__all__ = [
    "BACKWARD_PASS", "BACKWARD_TASKS", "CALLED", "CONNECTED", "FREED", "JOINED", "LEFT", "LOST", "MADE", "NOTED",
    "RAN", "STAGED", "STEPPED", "Event", "events",
]  # fmt: skip
