"""Threads of this process, and where in the user's program they stand."""

from __future__ import annotations

import gc
import linecache
import os
import sys
import threading
from types import FrameType

from telegrad.ext.processes import in_child, renewed
from telegrad.reporting.account import Line

_OWN = os.path.dirname(os.path.dirname(__file__)) + os.sep
_STANDARD = os.path.dirname(os.__file__) + os.sep
_INSTALLED = tuple(f"{os.sep}{folder}{os.sep}" for folder in ("site-packages", "dist-packages"))
MOST_FRAMES = 60
SWITCH = sys.getswitchinterval()  # seconds, of the program
LONG = 10.0  # seconds of a switch interval
HANDOVER = 100  # steps in which the interpreter is handed over if that was asked for


_no_collection = renewed(threading.Lock())  # one at a time: guards that the garbage collector is off
_turned_off = False  # the collector, by the thread that holds the lock


@in_child
def _collect_again() -> None:
    """The thread that would turn the collector on again is not in a forked child."""
    global _turned_off
    if _turned_off:
        _turned_off = False
        gc.enable()
        sys.setswitchinterval(SWITCH)


def all_stacks() -> dict[int, list[FrameType]]:
    """The stack of each thread, the outermost frame first.

    The interpreter holds a lock of its own while it collects the innermost frames, which each new thread needs. Did the
    garbage collector run a finalizer there that lets others run, one that starts a thread would wait for that lock, and
    all others for it.

    The stacks are walked while no other thread runs: CPython 3.11 has crashed where `f_back` of a frame was read while
    the thread of that frame returned from it. A thread hands the interpreter over when another has waited for it for as
    long as the switch interval, which is set to longer than this takes.
    """
    global _turned_off
    with _no_collection:
        _turned_off, interval = gc.isenabled(), sys.getswitchinterval()
        gc.disable()
        sys.setswitchinterval(LONG)
        try:
            for _ in range(HANDOVER):  # to a thread that has asked before
                pass
            return {thread: _stack_of(frame) for thread, frame in sys._current_frames().items()}
        finally:
            sys.setswitchinterval(interval)
            if _turned_off:
                gc.enable()
            _turned_off = False


def _stack_of(frame: FrameType | None) -> list[FrameType]:
    found: list[FrameType] = []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found[::-1]


def line_of(frame: FrameType) -> Line:
    """The line that a frame is at."""
    file, number = frame.f_code.co_filename, frame.f_lineno
    text = linecache.getline(file, number).strip()
    return Line(file=_short(file), line=number, function=frame.f_code.co_name, text=text)


def user_line(frames: list[FrameType]) -> Line | None:
    """The innermost line that is neither of this package nor of a library, or else of what was installed."""
    for is_foreign in (is_library, _is_pythons):
        for frame in reversed(frames):
            if not is_foreign(frame.f_code.co_filename):
                return line_of(frame)
    return None


def stack_lines(frames: list[FrameType]) -> list[str]:
    """All of a stack, as text; of a very deep one the ends."""
    lines = [f"{_short(frame.f_code.co_filename)}:{frame.f_lineno} {frame.f_code.co_name}" for frame in frames]
    if len(lines) > MOST_FRAMES:
        left_out = len(lines) - MOST_FRAMES
        lines = [*lines[: MOST_FRAMES // 2], f"... {left_out} more ...", *lines[-MOST_FRAMES // 2 :]]
    return lines


def is_asleep(thread: threading.Thread) -> bool | None:
    """Whether the kernel has a thread asleep, where that is known."""
    try:
        with open(f"/proc/self/task/{thread.native_id}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "R"
    except (OSError, IndexError):
        return None


def is_users(frame: FrameType) -> bool:
    """Whether a frame is of the user's program."""
    return not is_library(frame.f_code.co_filename)


def _is_own(file: str) -> bool:
    return file.startswith((_OWN, "<frozen"))


def _is_installed(file: str) -> bool:
    return any(folder in file for folder in _INSTALLED)


def _is_pythons(file: str) -> bool:
    """Of Python itself, or of this package."""
    return _is_own(file) or (file.startswith(_STANDARD) and not _is_installed(file))


def is_library(file: str) -> bool:
    """Whether a file is of this package, of Python or of something that was installed."""
    return _is_pythons(file) or _is_installed(file)


def _short(file: str) -> str:
    """A path as the user knows it: from where the program was started, where it is there."""
    here = os.getcwd() + os.sep
    return file[len(here) :] if file.startswith(here) else file
