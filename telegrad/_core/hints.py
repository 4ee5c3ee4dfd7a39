"""What a program most likely did not mean, said as a warning, once for each of its lines; and what a word did mean."""

from __future__ import annotations

import difflib
import sys
import warnings
from collections.abc import Iterable
from types import FrameType
from typing import NamedTuple

from telegrad.errors import TelegradWarning

_PASSED_OVER = ("telegrad", "torch", "threading")  # whose lines are not the user's

_said: set[tuple[str, Line]] = set()


class Line(NamedTuple):
    """One of the program."""

    file: str
    number: int
    module: str


def users_line() -> Line:
    """The line of the program that led here."""
    inner = sys._getframe(1)
    frame: FrameType | None = inner
    while frame is not None and _module_of(frame).partition(".")[0] in _PASSED_OVER:
        frame = frame.f_back
    frame = frame or inner
    return Line(frame.f_code.co_filename, frame.f_lineno, _module_of(frame))


def hint(kind: str, text: str, line: Line | None = None) -> None:
    """Warn at a line of the program, or at that which led here; once for each kind of hint."""
    line = line or users_line()
    if (kind, line) not in _said:
        _said.add((kind, line))
        warnings.warn_explicit(text, TelegradWarning, *line)


def _module_of(frame: FrameType) -> str:
    return frame.f_globals.get("__name__") or ""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The question that ends a sentence about a word that is none of those; "" where none is like it."""
    close = difflib.get_close_matches(word, list(known), 1)
    return f"; did you mean {close[0]!r}?" if close else ""
