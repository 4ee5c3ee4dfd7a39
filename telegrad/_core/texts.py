"""Texts for users: hints, and text from other processes made safe for terminals, logs and pages.

Terminals obey control characters, and bidirectional marks make a line look like another one. Function names, exception
texts, paths and host names from other processes can contain them. They are escaped once: where
`reporting/__init__.py` decodes an answer, and where a record enters the log.
"""

from __future__ import annotations

import contextlib
import difflib
import logging
import sys
import unicodedata
import warnings
from collections.abc import Iterable
from types import FrameType
from typing import Any, NamedTuple

from telegrad.errors import TelegradWarning


def safe(text: str, lines: bool = False) -> str:
    r"""Return `text` with each character that is neither printable nor a space escaped, such as "\x1b".

    Args:
        text: any text.
        lines: keep the ends of lines and tabs.
    """
    if text.isprintable():
        return text
    kept = "\n\t" if lines else ""
    return "".join(
        each
        if each.isprintable() or each in kept or unicodedata.category(each) == "Zs"
        else each.encode("unicode_escape").decode()
        for each in text
    )


class SafeRecords(logging.Filter):
    """Escape log records. Further lines of a value are indented, because they could look like records of their own."""

    def filter(self, record: logging.LogRecord) -> bool:
        with contextlib.suppress(Exception):  # of a value's own text: the handlers report it
            self._escape(record)
        return True

    @staticmethod
    def _escape(record: logging.LogRecord) -> None:
        if isinstance(record.args, tuple):
            args = tuple(map(_indented, record.args))
            if any(new is not old for new, old in zip(args, record.args, strict=True)):
                record.args = args
        text = record.getMessage()
        if not text.isprintable() and (escaped := safe(text, lines=True)) != text:
            record.msg, record.args = escaped, None
        if record.exc_info and not record.exc_text:
            text = _formatter.formatException(record.exc_info)
            if (escaped := safe(text, lines=True)) != text:
                record.exc_text = escaped  # otherwise the program's own formatter formats it


_formatter = logging.Formatter()


def _indented(value: object) -> object:
    if isinstance(value, str | BaseException):
        text = str(value)
        if "\n" in text:
            return text.replace("\n", "\n  ")
    return value


NOT_USERS = sys.stdlib_module_names | {"telegrad", "torch"}  # packages that are not the program's

_said: set[tuple[str, ProgramLine]] = set()


class ProgramLine(NamedTuple):
    file: str
    number: int
    module: str


def users_line() -> ProgramLine:
    """Return the innermost line of the user's program on the stack. If a pool runs no line of it, name its function."""
    inner = sys._getframe(1)
    frame: FrameType | None = inner
    run = None
    while frame is not None and _module_of(frame).partition(".")[0] in NOT_USERS:
        if _module_of(frame) == "concurrent.futures.thread" and "self" in frame.f_locals:
            item = frame.f_locals["self"]  # of a version of Python with one of these attributes
            run = getattr(item, "fn", None) or getattr(item, "task", (None,))[0]
        frame = frame.f_back
    if frame is None and run is not None:
        return ProgramLine(f"<{_name_of(run)}, in a thread pool>", 1, "")
    frame = frame or inner
    return ProgramLine(frame.f_code.co_filename, frame.f_lineno, _module_of(frame))


def _name_of(function: Any) -> str:
    known: Any = getattr(function, "_telegrad_known_as", None)
    name = known or getattr(function, "__qualname__", None) or type(function).__qualname__
    return safe(str(name))


def hint(kind: str, text: str, line: ProgramLine | None = None) -> None:
    """Warn at `line`, by default the current line of the user's program, once for each kind of hint."""
    line = line or users_line()
    if (kind, line) not in _said:
        _said.add((kind, line))
        warnings.warn_explicit(text, TelegradWarning, *line)


def _module_of(frame: FrameType) -> str:
    return frame.f_globals.get("__name__") or ""


def plural(count: int, one: str) -> str:
    """Return text such as "1 worker" and "2 workers"."""
    return f"{count:,} {one}{'' if count == 1 else 's'}"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean ...?" with the known word most like `word`, or "" if none is similar."""
    close = difflib.get_close_matches(word, list(known), 1)
    return f"; did you mean {close[0]!r}?" if close else ""
