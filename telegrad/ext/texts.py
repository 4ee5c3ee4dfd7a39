"""Messages to users: long waits, hints, and sanitized texts of other processes."""

from telegrad._core import progress
from telegrad._core.progress import Wait, clear_line, format_duration, report_in_background
from telegrad._core.texts import did_you_mean, hint, plural, safe

__all__ = [
    "Wait", "clear_line", "did_you_mean", "format_duration", "hint", "plural", "progress", "report_in_background",
    "safe",
]  # fmt: skip
