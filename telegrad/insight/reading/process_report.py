"""Inspect a process of this host that does not answer, from outside."""

from __future__ import annotations

import os
import re
import signal
import stat
import time
from typing import NamedTuple

from telegrad.ext.processes import STOPPED, state_of, stopped
from telegrad.reporting.stacks import is_library

WATCH = 0.1  # seconds over which CPU use is measured
WRITING = 0.5  # maximum seconds for a process to write its stacks
LARGEST = 1 << 18  # maximum bytes of stacks that are read
LONGEST_LINE = 1000  # characters; longer lines are skipped
_STACKS = "/memfd:stacks-of-telegrad (deleted)"
# Innermost files of waiting threads.
_WAITING = ("threading.py", "connection.py", "selectors.py", "socket.py", "queue.py")
_FRAME = re.compile(r'File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)')


class ProcessState(NamedTuple):
    state: str  # for users
    stacks: str  # of all threads, as Python's faulthandler writes them; empty if unavailable


def inspect(pid: int, stacks: int) -> ProcessState:
    """Inspect a process for WATCH seconds. `stacks` is its descriptor of the file for its stacks, or -1."""
    first = state_of(pid)
    if first is None:
        return ProcessState("its process has ended", "")
    state, used = first
    if state in STOPPED:
        return ProcessState(stopped(pid), "")
    if state == "Z":
        return ProcessState("its process has ended, and its parent has not waited for it", "")
    written = _stacks_of(pid, stacks) if stacks >= 0 else ""
    time.sleep(WATCH)
    later = state_of(pid)
    if later is None:
        return ProcessState("its process has ended", written)
    does = "is busy" if later[1] - used >= WATCH / 2 * os.sysconf("SC_CLK_TCK") else "sleeps"
    where = _where(written)
    return ProcessState(f"its process ({pid}) {does}, and one of its threads holds the interpreter{where}", written)


def _where(stacks: str) -> str:
    """Return the line of the user's program of a thread that does not wait, and so may hold the interpreter."""
    for thread in stacks.split("\n\n"):
        lines = (line for line in thread.splitlines() if len(line) <= LONGEST_LINE)
        frames = [match.groupdict() for line in lines if (match := _FRAME.search(line))]  # innermost first
        own = [frame for frame in frames if not is_library(frame["file"])]
        if own and not frames[0]["file"].endswith(_WAITING):
            return ", at {file}:{line} in {function}".format(**own[0])
    return ""


def _stacks_of(pid: int, descriptor: int) -> str:
    """Make a process write its stacks; return them, or "" if it fails. This works while its interpreter is held."""
    path = f"/proc/{pid}/fd/{descriptor}"
    try:
        found = os.stat(path)
        if os.readlink(path) != _STACKS or not stat.S_ISREG(found.st_mode):
            return ""  # the program no longer handles this signal with Telegrad
        before = found.st_size
        os.kill(pid, signal.SIGUSR2)
        until = time.monotonic() + WRITING
        size, seen = before, -1
        while time.monotonic() < until and (size == before or size != seen):
            seen = size
            time.sleep(0.01)
            size = os.stat(path).st_size
        with open(path, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:
            file.seek(before)
            return file.read(LARGEST).decode(errors="replace")
    except OSError:
        return ""
