"""Messages to users: long waits, hints, and sanitized texts of other processes."""

from telegrad._core import progress
from telegrad._core.hints import did_you_mean, hint
from telegrad._core.progress import Wait, attended, make_room, spelled
from telegrad._core.safe_text import safe

__all__ = ["Wait", "attended", "did_you_mean", "hint", "make_room", "progress", "safe", "spelled"]
