"""What can be seen from outside of a process of this host that does not answer."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import stat
import time
from collections.abc import Iterable
from typing import NamedTuple

from telegrad.transport.processes import STOPPED, state_of, stopped
from telegrad.witness.stacks import is_library

WATCH = 0.1  # seconds of which the use of the processor is seen
LISTENS = "00010000"  # the flags of such a socket
WRITING = 0.5  # seconds at most for a process to write its stacks
LARGEST = 1 << 18  # bytes of written stacks that are read
LONGEST_LINE = 1000  # characters of a line of them that is looked at
_STACKS = "/memfd:stacks-of-telegrad (deleted)"
_WAITING = ("threading.py", "connection.py", "selectors.py", "socket.py", "queue.py")  # whoever is innermost in these
_FRAME = re.compile(r'File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)')


class Seen(NamedTuple):
    """Of one process."""

    state: str  # in words
    stacks: str  # of all threads, as Python's faulthandler writes them; empty where that could not be had


def look_at(pid: int, stacks: int) -> Seen:
    """Look for a moment; `stacks` is the descriptor of that process to which it writes them, or -1."""
    first = state_of(pid)
    if first is None:
        return Seen("its process has ended", "")
    state, used = first
    if state in STOPPED:
        return Seen(stopped(pid), "")
    if state == "Z":
        return Seen("its process has ended, and its parent has not noticed", "")
    written = _stacks_of(pid, stacks) if stacks >= 0 else ""
    time.sleep(WATCH)
    later = state_of(pid)
    if later is None:
        return Seen("its process has ended", written)
    if later[1] - used >= WATCH / 2 * os.sysconf("SC_CLK_TCK"):
        return Seen(
            f"its process ({pid}) is busy, and one of its threads holds the interpreter{_where(written)}", written
        )
    return Seen(f"its process ({pid}) sleeps, and one of its threads holds the interpreter{_where(written)}", written)


def process_of(name: str, pids: Iterable[int]) -> int | None:
    """Which of these processes listens on a Unix socket of the abstract namespace."""
    inode = ""
    with contextlib.suppress(OSError), open("/proc/net/unix", errors="replace") as file:  # any user can bind any bytes
        for fields in map(str.split, file):
            if fields[7:] == [f"@{name}"] and fields[3] == LISTENS:
                inode = fields[6]
    for pid in pids if inode else ():
        with contextlib.suppress(OSError), os.scandir(f"/proc/{pid}/fd") as opened:
            for each in opened:
                if os.readlink(each.path) == f"socket:[{inode}]":
                    return pid
    return None


def _where(stacks: str) -> str:
    """The line of the program that a thread is at which seems to hold the interpreter: it waits for nothing."""
    for thread in stacks.split("\n\n"):
        lines = (line for line in thread.splitlines() if len(line) <= LONGEST_LINE)
        frames = [match.groupdict() for line in lines if (match := _FRAME.search(line))]  # innermost first
        own = [frame for frame in frames if not is_library(frame["file"])]
        if own and not frames[0]["file"].endswith(_WAITING):
            return ", at {file}:{line} in {function}".format(**own[0])
    return ""


def _stacks_of(pid: int, descriptor: int) -> str:
    """Have a process write its stacks, which works while its interpreter is held; empty where it does not."""
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
