"""Messages for users: errors for invalid arguments, notes of long waits, hints, sanitized texts of other processes."""

from telegrad._core import checks
from telegrad._core.checks import count, flag, is_path, raise_invalid, seconds, short_repr
from telegrad._core.texts import (
    Wait,
    clear_line,
    did_you_mean,
    format_duration,
    hint,
    plural,
    report_in_background,
    safe,
    under_way,
)

__all__ = [
    "Wait", "checks", "clear_line", "count", "did_you_mean", "flag", "format_duration", "hint", "is_path", "plural",
    "raise_invalid", "report_in_background", "safe", "seconds", "short_repr", "under_way",
]  # fmt: skip
