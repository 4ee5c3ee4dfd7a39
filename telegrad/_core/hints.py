"""Warnings about likely mistakes of a program, once per line of it, and suggestions for misspelled words."""

from __future__ import annotations

import difflib
import sys
import warnings
from collections.abc import Iterable
from types import FrameType
from typing import NamedTuple

from telegrad.errors import TelegradWarning

_PASSED_OVER = ("telegrad", "torch", "threading")  # modules whose lines are not the user's

_said: set[tuple[str, ProgramLine]] = set()


class ProgramLine(NamedTuple):
    file: str
    number: int
    module: str


def users_line() -> ProgramLine:
    """Return the innermost line of the user's program on the stack."""
    inner = sys._getframe(1)
    frame: FrameType | None = inner
    while frame is not None and _module_of(frame).partition(".")[0] in _PASSED_OVER:
        frame = frame.f_back
    frame = frame or inner
    return ProgramLine(frame.f_code.co_filename, frame.f_lineno, _module_of(frame))


def hint(kind: str, text: str, line: ProgramLine | None = None) -> None:
    """Warn at `line`, by default the current line of the user's program, once for each kind of hint."""
    line = line or users_line()
    if (kind, line) not in _said:
        _said.add((kind, line))
        warnings.warn_explicit(text, TelegradWarning, *line)


def _module_of(frame: FrameType) -> str:
    return frame.f_globals.get("__name__") or ""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean ...?" with the known word most like `word`, or "" if none is similar."""
    close = difflib.get_close_matches(word, list(known), 1)
    return f"; did you mean {close[0]!r}?" if close else ""
