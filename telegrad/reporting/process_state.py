"""The state of this process: its threads, and the lines of the user's program that they execute; the latest events of
its workers, and what it has logged."""

import contextlib
import gc
import inspect
import itertools
import linecache
import logging
import os
import re
import sys
import threading
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import Any

from telegrad.ext.events import BACKWARD_PASS, CALLED, STEPPED, Event
from telegrad.ext.events import events as instruments
from telegrad.ext.host import in_child, renewed
from telegrad.reporting import LogLine, SourceLine

_OWN = os.path.dirname(os.path.dirname(__file__)) + os.sep
_STANDARD = os.path.dirname(os.__file__) + os.sep
_INSTALLED = tuple(f"{os.sep}{folder}{os.sep}" for folder in ("site-packages", "dist-packages"))
MOST_FRAMES = 60
_WITH = re.compile(r"(?:async )?with ([\w.\[\]'\"]+)(?: as \w+)?\s*[:,]")
_LOCKS = re.compile(r"\bwith ([\w.]+)|([\w.]+)\.acquire\(")
LONG = 10.0  # seconds, set during a walk so that no other thread runs
HANDOVER = 100  # iterations after which a pending request to release the interpreter has been served
LAST = 10_000  # number of events kept
LINES = 50  # log lines kept
LONGEST_LINE = 300  # characters
# A password or a key in a log line: after its name, in a URL, or a key of a group.
SECRET = re.compile(
    r"""((?:token|passw(?:or)?d|secret|api_?key|credential)s?["']?\s*[=:]\s*["']?|bearer\s+|tgk1-)[^\s"'&,;]+"""
    r"""|(://[^/\s:@]*:)[^\s/@]+(?=@)""",
    re.IGNORECASE,
)


_no_collection = renewed(threading.Lock())  # serializes walks, during which the garbage collector is off


class _Walk:
    """The settings of the program that a walk has changed, and that its end restores."""

    interval = 0.0  # the program's switch interval; 0: no walk is under way
    collects = False  # True if the garbage collector was on


@in_child
def _end_walk() -> None:
    """Restore the program's settings; also in a forked child, which lacks the thread that would do it."""
    if _Walk.interval:
        sys.setswitchinterval(_Walk.interval)
        if _Walk.collects:
            gc.enable()
        _Walk.interval = 0.0


def all_stacks() -> dict[int, list[FrameType]]:
    """Return the stack of each thread, outermost frame first.

    The interpreter holds an internal lock while it collects the innermost frames, and each new thread needs that lock.
    If the garbage collector ran a finalizer there that releases the interpreter, a thread that starts another one would
    wait for the lock, and all others for that thread. So the collector is turned off.

    The stacks are walked while no other thread runs: CPython 3.11 has crashed when `f_back` of a frame was read while
    the frame's thread returned from it. A thread releases the interpreter when another thread has waited for a switch
    interval. So the interval is set longer than the walk takes.
    """
    with _no_collection:
        # Stored before they are changed: a child that is forked in between restores them (`_end_walk`).
        _Walk.collects, _Walk.interval = gc.isenabled(), sys.getswitchinterval()
        gc.disable()
        sys.setswitchinterval(LONG)
        try:
            for _ in range(HANDOVER):  # release the interpreter to a thread that has already requested it
                pass
            return {thread: _stack_of(frame) for thread, frame in sys._current_frames().items()}
        finally:
            _end_walk()


def _stack_of(frame: FrameType | None) -> list[FrameType]:
    found: list[FrameType] = []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found[::-1]


def user_line(frames: list[FrameType]) -> SourceLine | None:
    """Return the innermost line that is not in a library, or else the innermost one not in Python or this package."""
    # A stack may have no frame of the program itself, only frames of installed packages. Then a line of these is shown.
    for is_foreign in (is_library, _is_pythons):
        for frame in reversed(frames):
            file, number = frame.f_code.co_filename, frame.f_lineno
            if not is_foreign(file):
                text = linecache.getline(file, number).strip()
                return SourceLine(file=_short(file), line=number, function=frame.f_code.co_name, text=text)
    return None


def _lines_until(frame: FrameType) -> list[str]:
    return linecache.getlines(frame.f_code.co_filename)[frame.f_code.co_firstlineno - 1 : frame.f_lineno]


def held(frames: list[FrameType]) -> list[str]:
    """Return the objects of the `with` statements around the current lines of the user's frames, by indentation."""
    found = []
    for frame in filter(is_users, frames):
        lines = _lines_until(frame)
        # From the current line upwards, each line with less indentation than all below it opens a block around it. The
        # current line itself is left out: a thread at a `with` does not hold the lock yet.
        depth = len(lines[-1]) if lines else 0
        for line in reversed(lines):
            text = line.lstrip()
            if text and len(line) - len(text) < depth:
                depth = len(line) - len(text)
                found += _WITH.findall(text) if line is not lines[-1] else []
    return found


def lockable(frames: list[FrameType]) -> dict[str, int]:
    """Return the identities of the objects that the user's functions lock up to their current lines, by their names."""
    found: dict[str, int] = {}
    for frame in filter(is_users, frames):
        for path in map("".join, _LOCKS.findall("".join(_lines_until(frame)))):
            first, *rest = path.split(".")
            thing = frame.f_locals.get(first, frame.f_globals.get(first))
            for name in rest:
                thing = inspect.getattr_static(thing, name, None)  # without code of the program
            if thing is not None:
                found[path] = id(thing)
    return found


def stack_lines(frames: list[FrameType]) -> list[str]:
    """Return a stack as text; a very deep stack is cut in the middle."""
    lines = [f"{_short(frame.f_code.co_filename)}:{frame.f_lineno} {frame.f_code.co_name}" for frame in frames]
    if len(lines) > MOST_FRAMES:
        lines = [*lines[: MOST_FRAMES // 2], f"... {len(lines) - MOST_FRAMES} more ...", *lines[-MOST_FRAMES // 2 :]]
    return lines


def is_asleep(thread: threading.Thread) -> bool | None:
    """Return True if the kernel has a thread asleep; None if unknown."""
    try:
        with open(f"/proc/self/task/{thread.native_id}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "R"
    except (OSError, IndexError):
        return None


def is_users(frame: FrameType) -> bool:
    """Return True if a frame belongs to the user's program."""
    return not is_library(frame.f_code.co_filename)


def _is_installed(file: str) -> bool:
    return any(folder in file for folder in _INSTALLED)


def _is_pythons(file: str) -> bool:
    """Return True for a file of Python itself or of this package."""
    return file.startswith((_OWN, "<frozen")) or (file.startswith(_STANDARD) and not _is_installed(file))


def is_library(file: str) -> bool:
    """Return True for a file of this package, of Python or of an installed package."""
    return _is_pythons(file) or _is_installed(file)


def _short(file: str) -> str:
    """Return a path relative to the current directory, if it is below it."""
    here = os.getcwd() + os.sep
    return file[len(here) :] if file.startswith(here) else file


# Events and log


class Recorder:
    """The recorder of all workers of a process; most processes have one worker."""

    def __init__(self) -> None:
        # The bound method `append` itself is the listener. Without others, an event costs one call of a C function,
        # which is atomic in the interpreter. `events.remove` finds it again, since two bound methods of one deque are
        # equal. Readers copy the ring in one step, because a deque must not change while it is iterated over.
        self._ring: deque[Event] = deque(maxlen=LAST)
        self._lock = renewed(threading.Lock())  # guards _users
        self._users = 0

    def begin(self) -> None:
        """Start recording for one more worker."""
        with self._lock:
            self._users += 1
            if self._users == 1:
                instruments.add(self._ring.append)

    def end(self) -> None:
        """Stop recording for one worker; recorded events stay."""
        with self._lock:
            self._users -= 1
            if not self._users:
                instruments.remove(self._ring.append)

    def forget(self) -> None:
        """Drop the parent's events in a forked child, which has none of its workers."""
        self._users = 0
        self._ring.clear()
        instruments.remove(self._ring.append)

    def events(self, after: float = 0.0) -> list[Event]:
        """Return the events that ended after that time of `perf_counter`, in the order in which they ended."""
        return [event for event in self._ring.copy() if event[2] > after]

    def last_own(self) -> float:
        """Return the end of the last event that this worker itself began; 0 if none is recorded."""
        own = (CALLED, BACKWARD_PASS, STEPPED)
        return next((event[2] for event in reversed(self._ring.copy()) if event[0] in own), 0.0)


class RecordedLog:
    """The latest warnings and errors that this process has logged since the first query of a worker's state.

    A handler would change what the program prints: then `basicConfig` does nothing, and warnings without a handler do
    not appear. So this wraps the factory of records, and keeps no record, since that would keep its arguments alive.
    """

    def __init__(self) -> None:
        self._ring: deque[tuple[int, float, str, str, str]] = deque(maxlen=LINES)
        self._lock = renewed(threading.Lock())  # guards _make
        self._make: Callable[..., logging.LogRecord] | None = None  # the program's own factory
        self._numbers = itertools.count(1)

    def lines(self, now: float) -> list[LogLine]:
        """Return the latest lines, oldest first; those before the first call were not recorded."""
        with self._lock:
            # In this order: `_noted` reads `_make` without the lock as soon as it is installed.
            if self._make is None:
                self._make = logging.getLogRecordFactory()
                logging.setLogRecordFactory(self._noted)
        return [
            LogLine(number=number, age=max(0.0, now - when), level=level, logger=name, text=text)
            for number, when, level, name, text in self._ring.copy()
        ]

    def _noted(self, *args: Any, **kwargs: Any) -> logging.LogRecord:
        assert self._make is not None
        record = self._make(*args, **kwargs)
        with contextlib.suppress(Exception):  # such as a text that cannot be formatted, which its handler reports
            if record.levelno >= logging.WARNING:
                # Cut before the search, which would take long in a text of megabytes, and again after it. The first cut
                # leaves more, so that it does not cut a secret that is shown.
                text = SECRET.sub(r"\1\2***", record.getMessage()[: 2 * LONGEST_LINE])
                if len(text) > LONGEST_LINE:
                    text = f"{text[:LONGEST_LINE]}..."
                self._ring.append((next(self._numbers), record.created, record.levelname, record.name, text))
        return record


recorder = Recorder()
log_lines = RecordedLog()
in_child(recorder.forget)
