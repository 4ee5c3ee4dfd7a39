"""Messages to users: long waits, hints, and sanitized texts of other processes."""

from telegrad._core import texts as progress
from telegrad._core.texts import (
    Wait,
    clear_line,
    did_you_mean,
    format_duration,
    hint,
    plural,
    report_in_background,
    safe,
)

__all__ = [
    "Wait", "clear_line", "did_you_mean", "format_duration", "hint", "plural", "progress", "report_in_background",
    "safe",
]  # fmt: skip
