"""What the kernel tells of other processes of this host; nothing where it tells nothing."""

from __future__ import annotations

import os
import socket
import struct

STOPPED = "Tt"  # the states of a process that a signal has stopped, or a debugger
_CREDENTIALS = struct.Struct("3i")  # process, user, group


def process_at(sock: socket.socket) -> int:
    """The process that has made the other end of a Unix socket; 0 where it cannot be seen from this one, or is this."""
    pid, _ = _credentials(sock)
    return 0 if pid == os.getpid() else pid


def stranger_at(sock: socket.socket) -> str:
    """Return a description of the user at the other end of a Unix socket if that is not the user of this process.

    An end whose user the kernel does not tell is a stranger, too. Root is no exception: whoever runs as root is
    another user to a worker that does not, and a worker of root takes code from nobody else.
    """
    _, user = _credentials(sock)
    mine = os.geteuid()
    if user == mine:
        return ""
    return f"uid {user}, while this worker has uid {mine}" if user >= 0 else "a user whom the kernel does not name"


def _credentials(sock: socket.socket) -> tuple[int, int]:
    """The process and the user of the other end as it connected or began to listen; 0 and -1 where nothing is told."""
    try:
        said = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    except (AttributeError, OSError):
        return 0, -1
    pid, user, _ = _CREDENTIALS.unpack(said)
    return pid, user


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
