"""What the kernel tells of other processes of this host; nothing where it tells nothing."""

from __future__ import annotations

import os
import socket
import struct

STOPPED = "Tt"  # the states of a process that a signal has stopped, or a debugger
_CREDENTIALS = struct.Struct("3i")  # process, user, group


def process_at(sock: socket.socket) -> int:
    """The process that has made the other end of a Unix socket; 0 where it cannot be seen from this one, or is this."""
    try:
        said = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    except (AttributeError, OSError):
        return 0
    pid: int = _CREDENTIALS.unpack(said)[0]
    return 0 if pid == os.getpid() else pid


def state_of(pid: int) -> tuple[str, int] | None:
    """The state of a process, and the ticks that it has used; None where there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return fields[0].decode(), int(fields[11]) + int(fields[12])


class Stops:
    """Whether a process stands still; it may go on for less than the time between two looks."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._used = -1  # ticks, where it was stopped at the last look

    def look(self) -> bool:
        """Whether it is stopped, and has not run since a look that found it stopped, too."""
        found = state_of(self._pid) if self._pid else None
        before = self._used
        self._used = found[1] if found is not None and found[0] in STOPPED else -1
        return self._used >= 0 and before in (-1, self._used)


def stopped(pid: int) -> str:
    """What users are told of one that is."""
    return f"its process is stopped (SIGSTOP, or a debugger); kill -CONT {pid} has it go on"
