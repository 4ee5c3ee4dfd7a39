"""What a program most likely did not mean, said as a warning: once for each of its lines."""

from __future__ import annotations

import sys
import warnings
from types import FrameType

from telegrad.errors import TelegradWarning

_PASSED_OVER = ("telegrad", "torch")  # packages whose lines are not the user's

_said: set[tuple[str, str, int]] = set()


def hint(kind: str, text: str) -> None:
    """Warn at the line of the program that led here, once for each kind of hint."""
    frame = _users_frame(sys._getframe(1))
    line = kind, frame.f_code.co_filename, frame.f_lineno
    if line not in _said:
        _said.add(line)
        module = frame.f_globals.get("__name__")
        warnings.warn_explicit(text, TelegradWarning, *line[1:], module=module)


def _users_frame(frame: FrameType) -> FrameType:
    outer: FrameType | None = frame
    while outer is not None:
        if outer.f_globals.get("__name__", "").partition(".")[0] not in _PASSED_OVER:
            return outer
        outer = outer.f_back
    return frame
