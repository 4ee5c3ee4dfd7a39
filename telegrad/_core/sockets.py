"""Sockets set up alike wherever they are made."""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import sys
from typing import Protocol

HAS_UNIX = hasattr(socket, "AF_UNIX") and sys.platform == "linux"  # with names that are on no file system
NOT_NOW = (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
_UNREAD = 0x5411  # SIOCOUTQ, which Python has no name for
# Linux doubles the time until it sends a lost packet again: four losses in a row take 3 s, and a renewal of a lease is
# late. With these two, the time stays at 0.2 s for six tries where few packets are in flight, and ends at a second.
_RESENDS = ((16, 1), (44, 1000))  # TCP_THIN_LINEAR_TIMEOUTS and TCP_RTO_MAX_MS (since Linux 6.15), unnamed in Python
BUFFER = 1 << 20  # of a Unix socket: large enough that blobs below the sharing threshold pass in one go


def unix_address(name: str) -> str:
    return f"\0{name}"


def shut(sock: socket.socket) -> None:
    """End both directions, whoever uses them just now.

    The method of a TLS socket ends TLS first, and another thread could then send or take in plain bytes.
    """
    with contextlib.suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


class HasDescriptor(Protocol):
    def fileno(self) -> int: ...


def unread(sock: HasDescriptor) -> bool:
    """Return True if the other end of a Unix socket has not read all that was sent; False where nobody can tell."""
    if not HAS_UNIX:
        return False
    import fcntl

    try:
        return any(fcntl.ioctl(sock.fileno(), _UNREAD, struct.pack("i", 0)))
    except (OSError, ValueError):  # it was closed
        return False


def tune_unix(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)


def tune_tcp(sock: socket.socket, silence: float) -> None:
    """Have small frames sent at once, and soon again if they are lost.

    A host that is silent for `silence` seconds is found out by the kernels, not by the processes, so that one whose
    interpreter is busy is not taken for dead; 0 for never.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if sys.platform == "linux":
        for number, setting in _RESENDS:
            with contextlib.suppress(OSError):  # an older kernel, or one that only looks like Linux
                sock.setsockopt(socket.IPPROTO_TCP, number, setting)
    if not silence:
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    probe = max(1, round(silence / 4))
    for option, value in (
        ("TCP_KEEPIDLE", probe),
        ("TCP_KEEPALIVE", probe),  # the name that macOS has for it
        ("TCP_KEEPINTVL", probe),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", round(silence * 1000)),
    ):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
