"""Common socket options and helpers."""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import sys
from typing import Protocol

HAS_UNIX = hasattr(socket, "AF_UNIX") and sys.platform == "linux"  # with abstract names, which are on no file system
NOT_NOW = (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
_UNREAD = 0x5411  # not named in Python
# Linux doubles the retransmission timeout at each loss: four losses in a row take 3 s, and a renewal of a lease is
# late. With these options, the timeout stays at 0.2 s for six tries if few packets are in flight, and is at most 1 s.
_RESENDS = ((16, 1), (44, 1000))  # TCP_THIN_LINEAR_TIMEOUTS and TCP_RTO_MAX_MS (since Linux 6.15), unnamed in Python
BUFFER = 1 << 20  # send buffer of a Unix socket: blobs below the sharing threshold fit at once


def unix_address(name: str) -> str:
    return f"\0{name}"


def shut(sock: socket.socket) -> None:
    """End both directions of a connection, even while other threads use the socket.

    The method of a TLS socket ends TLS first, and another thread could then send or receive plaintext.
    """
    with contextlib.suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


class HasDescriptor(Protocol):
    def fileno(self) -> int: ...


def unread(sock: HasDescriptor) -> bool:
    """Return True if the other end of a Unix socket has not read all data; False if that is unknown."""
    if not HAS_UNIX:
        return False
    import fcntl

    try:
        return any(fcntl.ioctl(sock.fileno(), _UNREAD, struct.pack("i", 0)))
    except (OSError, ValueError):  # closed
        return False


def tune_unix(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)


def tune_tcp(sock: socket.socket, silence: float) -> None:
    """Send small frames at once, and retransmit lost ones soon.

    The kernels detect a host that is silent for `silence` seconds, not the processes: so a process with a busy
    interpreter is not declared lost. 0 disables that.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if sys.platform == "linux":
        for number, setting in _RESENDS:
            with contextlib.suppress(OSError):  # an older kernel, or an emulation of Linux
                sock.setsockopt(socket.IPPROTO_TCP, number, setting)
    if not silence:
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    probe = max(1, round(silence / 4))
    for option, value in (
        ("TCP_KEEPIDLE", probe),
        ("TCP_KEEPALIVE", probe),  # the name on macOS
        ("TCP_KEEPINTVL", probe),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", round(silence * 1000)),
    ):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
