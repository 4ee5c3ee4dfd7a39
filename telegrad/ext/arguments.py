"""Checks of arguments: each converter returns the value, or raises InvalidArgument."""

from telegrad._core import checks
from telegrad._core.checks import count, flag, is_path, raise_invalid, seconds, short_repr

__all__ = ["checks", "count", "flag", "is_path", "raise_invalid", "seconds", "short_repr"]
