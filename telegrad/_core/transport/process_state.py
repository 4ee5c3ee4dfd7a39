"""Reads the state of other processes of this host from the kernel, where it supports that."""

from __future__ import annotations

import os
import socket
import struct

STOPPED = "Tt"  # process states: stopped by a signal, or by a debugger
_CREDENTIALS = struct.Struct("iII")  # process, user, group
_NOBODY = (1 << 32) - 1  # the user if there is no process


def process_at(sock: socket.socket) -> int:
    """Return the process at the other end of a Unix socket; 0 if it is not visible from here, or is this process."""
    pid, _ = credentials(sock)
    return 0 if pid == os.getpid() else pid


def stranger_at(sock: socket.socket) -> str:
    """Return a description of the user at the other end of a Unix socket if it is not the user of this process.

    An unknown user counts as another user, too. Root is no exception: a process of root is another user's to a worker
    that does not run as root, and a worker of root accepts code from root only.
    """
    _, user = credentials(sock)
    mine = os.geteuid()
    if user == mine:
        return ""
    return f"uid {user}, while this worker has uid {mine}" if user >= 0 else "an unknown user"


def credentials(sock: socket.socket) -> tuple[int, int]:
    """Return the process and user of the other end when it connected or began to listen; 0 and -1 if unknown."""
    try:
        said = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    except (AttributeError, OSError):
        return 0, -1
    pid, user, _ = _CREDENTIALS.unpack(said)
    return pid, user if user != _NOBODY else -1


def state_of(pid: int) -> tuple[str, int] | None:
    """Return the state of a process and the CPU ticks that it has used, or None if it does not exist."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return fields[0].decode(), int(fields[11]) + int(fields[12])


class Stops:
    """Detects a stopped process. Running for less than the time between two checks may go unnoticed."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._used = -1  # ticks, if it was stopped at the last check

    def look(self) -> bool:
        """Return True if the process is stopped and has not run since an earlier check that found it stopped."""
        found = state_of(self._pid) if self._pid else None
        before = self._used
        self._used = found[1] if found is not None and found[0] in STOPPED else -1
        return self._used >= 0 and before in (-1, self._used)


def stopped(pid: int) -> str:
    return f"its process is stopped (SIGSTOP, or a debugger); kill -CONT {pid} lets it continue"
