"""Who waits for long says for whom: on the terminal where a person waits, else in the log.

    with Wait("shutdown", text, missing) as wait:
        while not over():
            wait.look()
            changed.wait(wait.left)

A person waits where standard input and stderr are terminals and this process is in their foreground: not in one of
several workers that a script has started, a notebook, or under a scheduler. There it is said from the first second on,
in a line that is written anew each second and is gone once the wait is over. Elsewhere the log is told, after 5, 50,
500 ... seconds. `TELEGRAD_PROGRESS=0` has neither; nor is anything said where the logger `telegrad` lets no warnings
through.

The line stands below the one where the cursor is, which goes back to where it was: so what the program prints meanwhile
goes where it would have gone, and what it has begun to print in its own line stays.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from math import inf
from time import monotonic
from typing import TYPE_CHECKING

from telegrad._core.atfork import in_child, renewed

if TYPE_CHECKING:
    from typing import Self

LINE = 1.0  # seconds until the line is there, and between its changes
FIRST = 5.0  # seconds until the log is told
RARER = 10.0  # times as long until it is told again
VARIABLE = "TELEGRAD_PROGRESS"
COLUMNS = 80  # of a terminal that does not say

# What terminals do. The row below is made by going there and back, which scrolls at the end of the screen.
_REST = "\x1b[K"  # erase what follows in this row: where output has come between, that is the old line
_ROW_BELOW = "\x1bD\x1bM"
_SAVE, _RESTORE, _DOWN = "\x1b7", "\x1b8", "\x1b[B\r"

log = logging.getLogger("telegrad")


class Times:
    """When one who waits is to say so."""

    def __init__(self, begun: float, lined: bool) -> None:
        self.begun = begun
        self._line = LINE if lined else inf  # seconds from then, as the next
        self._log = FIRST

    def left(self, now: float) -> float:
        """Seconds until it is time."""
        return max(0.0, self.begun + min(self._line, self._log) - now)

    def due(self, now: float) -> tuple[bool, bool]:
        """Whether it is time for the line, and for the log; they have their next times then."""
        waited = now - self.begun
        line, logs = waited >= self._line, waited >= self._log
        if line:
            self._line = LINE * (waited // LINE + 1)
        if logs:
            self._log *= RARER
        return line, logs


class Wait:
    """One, of one thread. Inside of `with`, `under_way` has it."""

    def __init__(
        self,
        what: str,
        text: Callable[[], str],
        missing: Callable[[], Sequence[str]] = tuple,
        place: str = "",
        worker: str = "",
    ) -> None:
        """`what` is the function that waits, as users call it; `text` and `missing` may be called by any thread.

        They say for what it waits, for people, and for which workers: by name, or as "rank 2". `place` is that of the
        store, where it waits there; `worker` who waits, where it has a name.
        """
        self.what = what
        self.text = text
        self.missing = missing
        self.place = place
        self.worker = worker
        self.thread = threading.get_ident()
        self.begun = monotonic()
        self.lined = _a_person_waits()
        self._quiet = _is_silent()  # the log has it for the record only, since a line shows it or nothing is to
        self._lock = threading.Lock()  # guards _times, which `left` loads from without
        self._times = Times(self.begun, self.lined)

    @property
    def left(self) -> float:
        """Seconds until it is time to look again."""
        return self._times.left(monotonic())

    def look(self) -> None:
        """Say so, where it is time to."""
        now = monotonic()
        with self._lock:
            line, logs = self._times.due(now)
        waited = now - self.begun
        if line:
            self._quiet = _line.show(self, f"telegrad: waiting for {spelled(waited)}: {self.text()}")
        if logs:
            level = logging.INFO if self._quiet else logging.WARNING
            log.log(level, "telegrad: waiting for %.0f s now: %s", waited, self.text())

    def __enter__(self) -> Self:
        _under_way.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ValueError):  # this is a child that was forked meanwhile
            _under_way.remove(self)
        _line.clear(self)
        self.text, self.missing = str, tuple  # who waited may hold this: neither is to wait for the garbage collector

    def __repr__(self) -> str:
        return f"<Wait of {self.what}: {self.text()}>"


_under_way: list[Wait] = []  # no lock: `append`, `remove` and `copy` are single steps


def under_way() -> list[Wait]:
    """The waits of this process, in the order in which they began; by any thread."""
    return _under_way.copy()


@contextlib.contextmanager
def attended(wait: Wait) -> Iterator[Wait]:
    """As `with wait`, and a thread keeps the line up to date, where there is one: for who cannot look by itself."""
    with wait:
        if not wait.lined:
            yield wait
            return
        over = threading.Event()

        def attend() -> None:
            while not over.wait(wait.left):
                wait.look()

        thread = threading.Thread(target=attend, name="telegrad-progress", daemon=True)
        with contextlib.suppress(RuntimeError, MemoryError):  # there is no memory for it, or the interpreter ends
            thread.start()
        try:
            yield wait
        finally:
            over.set()
            if thread.is_alive():
                thread.join()


def make_room() -> None:
    """Before something else is printed: take the line away, which comes back in the next second."""
    _line.clear()


class _Line:
    """The one of this process."""

    def __init__(self) -> None:
        # Guards _of, and what is written. Reentrant, since a finalizer that logs may come between.
        self._lock = renewed(threading.RLock())
        self._of: Wait | None = None  # whose line is there

    def show(self, wait: Wait, text: str) -> bool:
        """Whether that could be done."""
        if not (log.isEnabledFor(logging.WARNING) and _in_foreground()):
            return False
        columns = os.get_terminal_size(sys.stderr.fileno()).columns or COLUMNS
        with self._lock:
            self._of = wait
            _write(f"{_REST}{_ROW_BELOW}{_SAVE}{_DOWN}{_cut(text, columns - 1)}{_REST}{_RESTORE}")
        return True

    def clear(self, wait: Wait | None = None) -> None:
        """Take it away, if it is that wait's."""
        if self._of is None:  # without the lock, for who logs
            return
        with self._lock:
            if self._of is not None and wait in (None, self._of):
                self._of = None
                _write(f"{_REST}{_SAVE}{_DOWN}{_REST}{_RESTORE}")


_line = _Line()


def _write(codes: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # the terminal has gone, or was closed
        sys.stderr.write(codes)
        sys.stderr.flush()


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: max(0, width - 3)] + "..."


def _a_person_waits() -> bool:
    if _is_silent() or os.environ.get("TERM", "dumb") == "dumb" or "ipykernel" in sys.modules:
        return False
    try:
        return sys.stdin.isatty() and sys.stderr.isatty()
    except (AttributeError, ValueError):  # there is none, or it is closed
        return False


def _is_silent() -> bool:
    return os.environ.get(VARIABLE) == "0"


def _in_foreground() -> bool:
    """Whether the terminal is this process's just now: a shell may have it in the background."""
    try:
        return os.tcgetpgrp(sys.stderr.fileno()) == os.getpgrp()
    except (OSError, ValueError, AttributeError):  # it is another's, was closed, or this system knows no such thing
        return False


def spelled(seconds: float) -> str:
    """For people."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole // 60 % 60} min"


def _before_a_record(_: logging.LogRecord) -> bool:
    make_room()
    return True


@in_child
def _forget_after_fork() -> None:
    """A forked child does not wait for what its parent waits for."""
    _line._of = None
    _under_way.clear()


log.addFilter(_before_a_record)
