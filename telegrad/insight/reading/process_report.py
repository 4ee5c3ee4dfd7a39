"""The state of a process of this host that does not answer, as far as it can be seen from outside."""

from __future__ import annotations

import os
import re
import signal
import stat
import time
from typing import NamedTuple

from telegrad.ext.processes import STOPPED, state_of, stopped
from telegrad.reporting.stacks import is_library

WATCH = 0.1  # seconds of which the use of the processor is seen
WRITING = 0.5  # seconds at most for a process to write its stacks
LARGEST = 1 << 18  # bytes of written stacks that are read
LONGEST_LINE = 1000  # characters of a line of them that is looked at
_STACKS = "/memfd:stacks-of-telegrad (deleted)"
_WAITING = ("threading.py", "connection.py", "selectors.py", "socket.py", "queue.py")  # innermost where a thread waits
_FRAME = re.compile(r'File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)')


class ProcessState(NamedTuple):
    state: str  # in words
    stacks: str  # of all threads, as Python's faulthandler writes them; empty where that could not be had


def inspect(pid: int, stacks: int) -> ProcessState:
    """Watch a process for a moment; `stacks` is its descriptor of the file to which it writes its stacks, or -1."""
    first = state_of(pid)
    if first is None:
        return ProcessState("its process has ended", "")
    state, used = first
    if state in STOPPED:
        return ProcessState(stopped(pid), "")
    if state == "Z":
        return ProcessState("its process has ended, and its parent has not noticed", "")
    written = _stacks_of(pid, stacks) if stacks >= 0 else ""
    time.sleep(WATCH)
    later = state_of(pid)
    if later is None:
        return ProcessState("its process has ended", written)
    does = "is busy" if later[1] - used >= WATCH / 2 * os.sysconf("SC_CLK_TCK") else "sleeps"
    where = _where(written)
    return ProcessState(f"its process ({pid}) {does}, and one of its threads holds the interpreter{where}", written)


def _where(stacks: str) -> str:
    """Return the line of the program where a thread stands that waits for nothing, and so may hold the interpreter."""
    for thread in stacks.split("\n\n"):
        lines = (line for line in thread.splitlines() if len(line) <= LONGEST_LINE)
        frames = [match.groupdict() for line in lines if (match := _FRAME.search(line))]  # innermost first
        own = [frame for frame in frames if not is_library(frame["file"])]
        if own and not frames[0]["file"].endswith(_WAITING):
            return ", at {file}:{line} in {function}".format(**own[0])
    return ""


def _stacks_of(pid: int, descriptor: int) -> str:
    """Have a process write its stacks, and return them; that works while its interpreter is held. Empty if it fails."""
    path = f"/proc/{pid}/fd/{descriptor}"
    try:
        found = os.stat(path)
        if os.readlink(path) != _STACKS or not stat.S_ISREG(found.st_mode):
            return ""  # that program does something else on this signal by now
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
