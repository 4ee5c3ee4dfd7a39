"""Options, addresses and peers of sockets. Of all hosts, only IPv6 addresses contain colons."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import struct
import sys
from typing import Any, Protocol

HAS_UNIX = hasattr(socket, "AF_UNIX") and sys.platform == "linux"  # with abstract names, which are on no file system
NOT_NOW = (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
_UNREAD = 0x5411  # SIOCOUTQ of Linux, not named in `socket`: bytes that were sent and that the other end has not read
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
    # An idle connection is probed after a quarter of `silence`, and lost after three probes without an answer, a
    # quarter each. Probes are not sent while data is unacknowledged: TCP_USER_TIMEOUT is the limit then.
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


def family_of(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def socket_address(address: str, port: int) -> Any:
    """Return an address for `bind` and `connect`, which ignore a scope in text, as that of `fe80::1%eth0`."""
    if ":" not in address:
        return address, port
    return socket.getaddrinfo(address, port, socket.AF_INET6, socket.SOCK_STREAM)[0][4]


def text_of(address: Any) -> str:
    """Return the host of a socket's address, with the scope of a link-local one."""
    return socket.getnameinfo(address, socket.NI_NUMERICHOST | socket.NI_NUMERICSERV)[0]


def bracketed(host: str) -> str:
    """Return a host as it is written before a port: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


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
