"""Texts for users: hints, reports of long waits, and text from other processes made safe for terminals, logs and pages.

Terminals obey control characters, and bidirectional marks make a line look like another one. Function names, exception
texts, paths and host names from other processes can contain them. They are escaped once: where
`reporting/__init__.py` decodes an answer, and where a record enters the log.

Long waits are reported on the terminal if a person waits there, else in the log.

    with Wait("shutdown", text, missing) as wait:
        while not over():
            wait.look()
            changed.wait(wait.left)

A person is assumed to wait if standard input and stderr are terminals and this process is in their foreground. That
excludes one of several workers started by a script, notebooks, and jobs of a scheduler. On a terminal the report is a
line that appears after one second, is rewritten each second and is erased when the wait ends. Otherwise the wait is
logged after 5, 50, 500 ... seconds. `TELEGRAD_PROGRESS=0` disables both. Nothing is reported if the logger `telegrad`
does not pass warnings.

The line is below the cursor's, and the cursor returns to its position. So output of the program meanwhile appears where
it would have appeared, and a line that the program has begun to print stays.

`poll_intervals` paces waits that have to poll.
"""

from __future__ import annotations

import contextlib
import difflib
import logging
import os
import sys
import threading
import unicodedata
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import inf
from time import monotonic, sleep
from types import FrameType
from typing import Any, NamedTuple, Self

from telegrad._core.forks import in_child, renewed
from telegrad.errors import TelegradWarning

LINE = 1.0  # seconds until the line appears, and between its updates
FIRST = 5.0  # seconds until the first log record
RARER = 10.0  # factor between the times of log records
VARIABLE = "TELEGRAD_PROGRESS"
COLUMNS = 80  # of a terminal that does not report its width
FIRST_POLL, LONGEST_POLL = 5e-4, 5e-2  # seconds between two polls of a store
FEW = 64  # workers that may poll at that rate

# Terminal control codes. Going down and back up creates the row below, which scrolls at the end of the screen.
_REST = "\x1b[K"  # erase the rest of this row: if other output came between, the old line
_ROW_BELOW = "\x1bD\x1bM"
_SAVE, _RESTORE, _DOWN = "\x1b7", "\x1b8", "\x1b[B\r"

log = logging.getLogger("telegrad")


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


# Long waits


class Times:
    """The times at which a wait is to be reported."""

    def __init__(self, begun: float, lined: bool) -> None:
        self.begun = begun
        self._line = LINE if lined else inf  # seconds after `begun` of the next update; likewise _log
        self._log = FIRST

    def left(self, now: float) -> float:
        return max(0.0, self.begun + min(self._line, self._log) - now)

    def due(self, now: float) -> tuple[bool, bool]:
        """Return True for the line, and for the log, if its time has come; set its next time."""
        waited = now - self.begun
        line, logs = waited >= self._line, waited >= self._log
        if line:
            self._line = LINE * (waited // LINE + 1)
        if logs:
            self._log *= RARER
        return line, logs


class Wait:
    """A wait of one thread, listed in `under_way` inside of its `with`."""

    def __init__(
        self,
        what: str,
        text: Callable[[], str],
        missing: Callable[[], Sequence[str]] = tuple,
        place: str = "",
        worker: str = "",
        level: int = logging.WARNING,
    ) -> None:
        """`what` is the called function, or names the wait for a generation. Any thread may call `text` and `missing`.

        `text` says what it waits for, for people. `missing` names the workers that it waits for, by name or as "rank
        2". `place` is that of the store, if it waits for one. `worker` is the name of the waiting worker, if it has
        one. `level` is that of the log record, if no line shows the wait; INFO where a long wait is no sign of a fault.
        """
        self.what = what
        self.text = text
        self.missing = missing
        self.place = place
        self.worker = worker
        self.group = ""  # the id of the running group that the worker is to join, once it is known
        self.thread = threading.get_ident()
        self.begun = monotonic()
        self.lined = _a_person_waits()
        self._level = level
        self._quiet = _is_silent()  # log at INFO, because a line shows the wait or reports are disabled
        self._lock = threading.Lock()  # guards _times; `left` reads it without the lock
        self._times = Times(self.begun, self.lined)

    @property
    def left(self) -> float:
        return self._times.left(monotonic())

    def look(self) -> None:
        now = monotonic()
        with self._lock:
            line, logs = self._times.due(now)
        waited = now - self.begun
        if line:
            self._quiet = _line.show(self, f"telegrad: waiting for {format_duration(waited)}: {self.text()}")
        if logs:
            log.log(
                logging.INFO if self._quiet else self._level,
                "telegrad: waiting for %.0f s now: %s",
                waited,
                self.text(),
            )

    def __enter__(self) -> Self:
        _under_way.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ValueError):  # this process was forked during the wait
            _under_way.remove(self)
        _line.clear(self)
        self.text, self.missing = str, tuple  # the waiter may hold this object: free both without the garbage collector

    def __repr__(self) -> str:
        return f"<Wait of {self.what}: {self.text()}>"


_under_way: list[Wait] = []  # no lock: `append`, `remove` and `copy` are atomic


def under_way() -> list[Wait]:
    """Return the waits of this process, in the order of their begin. May be called by any thread."""
    return _under_way.copy()


@contextlib.contextmanager
def report_in_background(wait: Wait) -> Iterator[Wait]:
    """Act as `with wait`, and update its line, if any, from a thread: for waits that cannot call `look` themselves."""
    with wait:
        if not wait.lined:
            yield wait
            return
        over = threading.Event()

        def attend() -> None:
            while not over.wait(wait.left):
                wait.look()

        thread = threading.Thread(target=attend, name="telegrad-progress", daemon=True)
        with contextlib.suppress(RuntimeError, MemoryError):  # no memory for a thread, or the interpreter ends
            thread.start()
        try:
            yield wait
        finally:
            # Before the wait ends: otherwise the thread could write the line after it was erased. The thread is not
            # alive if it could not be started.
            over.set()
            if thread.is_alive():
                thread.join()


def clear_line() -> None:
    """Erase the line before other output; it appears again within a second."""
    _line.clear()


class _StatusLine:
    def __init__(self) -> None:
        # Guards _of and the output. Reentrant, since a finalizer that logs may run while it is held.
        self._lock = renewed(threading.RLock())
        self._of: Wait | None = None  # the wait that the line shows

    def show(self, wait: Wait, text: str) -> bool:
        """Show `text` below the cursor; return False if the terminal is not usable."""
        if not (log.isEnabledFor(logging.WARNING) and _in_foreground()):
            return False
        width = (os.get_terminal_size(sys.stderr.fileno()).columns or COLUMNS) - 1
        text = text if len(text) <= width else text[: max(0, width - 3)] + "..."
        with self._lock:
            self._of = wait
            _write(f"{_REST}{_ROW_BELOW}{_SAVE}{_DOWN}{text}{_REST}{_RESTORE}")
        return True

    def clear(self, wait: Wait | None = None) -> None:
        """Erase the line, if it shows that wait, or any wait for None."""
        if self._of is None:  # without the lock: each log record checks this
            return
        with self._lock:
            if self._of is not None and wait in (None, self._of):
                self._of = None
                _write(f"{_REST}{_SAVE}{_DOWN}{_REST}{_RESTORE}")


_line = _StatusLine()


def _write(codes: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # the terminal has disconnected, or stderr was closed
        sys.stderr.write(codes)
        sys.stderr.flush()


def _a_person_waits() -> bool:
    if _is_silent() or os.environ.get("TERM", "dumb") == "dumb" or "ipykernel" in sys.modules:
        return False
    try:
        return sys.stdin.isatty() and sys.stderr.isatty()
    except (AttributeError, ValueError):  # no such stream, or it is closed
        return False


def _is_silent() -> bool:
    return os.environ.get(VARIABLE) == "0"


def _in_foreground() -> bool:
    """Return True if this process is in the foreground of the terminal: a shell may have moved it to the background."""
    try:
        return os.tcgetpgrp(sys.stderr.fileno()) == os.getpgrp()
    # the terminal of another session, closed, or no job control on this system
    except (OSError, ValueError, AttributeError):
        return False


def format_duration(seconds: float) -> str:
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole // 60 % 60} min"


@in_child
def _forget_after_fork() -> None:
    """Remove the parent's waits in a forked child."""
    _line._of = None
    _under_way.clear()


def _before_a_record(_: logging.LogRecord) -> bool:
    clear_line()
    return True


# A filter runs before the handlers, so the line is erased before one of them writes the record to the terminal.
log.addFilter(_before_a_record)


def poll_intervals(until: float, waiting: int = 1) -> Iterator[float]:
    """Pace the polling of a store, fast at first; yield the seconds left, at least once.

    With many waiting workers, each polls more rarely: otherwise they would keep the store and all processors busy.
    """
    # From FEW workers on, all of them together poll as often as FEW do.
    pause, longest = FIRST_POLL, LONGEST_POLL * max(1, waiting / FEW)
    while True:
        yield until - monotonic()
        left = until - monotonic()
        if left <= 0:
            return
        sleep(min(pause, left))
        pause = min(1.5 * pause, longest)
