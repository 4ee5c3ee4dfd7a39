"""What users get back: errors for invalid arguments, notes of long waits, hints, sanitized texts of other processes."""

from telegrad._core import checks, progress
from telegrad._core.checks import count, flag, is_path, raise_invalid, seconds, short_repr
from telegrad._core.progress import Wait, clear_line, format_duration, report_in_background
from telegrad._core.texts import did_you_mean, hint, plural, safe

__all__ = [
    "Wait", "checks", "clear_line", "count", "did_you_mean", "flag", "format_duration", "hint", "is_path", "plural",
    "progress", "raise_invalid", "report_in_background", "safe", "seconds", "short_repr",
]  # fmt: skip
