"""Passing descriptors of shared memory over a Unix socket."""

from __future__ import annotations

import array
import socket

DESCRIPTORS_AT_ONCE = 64  # in one write
MOST_NEW = 512  # descriptors in one message; its further blobs are sent through the socket
MOST_UNNAMED = MOST_NEW + DESCRIPTORS_AT_ONCE  # those of a message, and of the read that ends it

ANCILLARY = socket.CMSG_SPACE(DESCRIPTORS_AT_ONCE * array.array("i").itemsize) if hasattr(socket, "CMSG_SPACE") else 0
# Plain numbers: the constants of `socket` are enumerations, whose operators take a microsecond each.
TRUNCATED = int(getattr(socket, "MSG_CTRUNC", 0))
CLOSE_ON_EXEC = int(getattr(socket, "MSG_CMSG_CLOEXEC", 0))  # child processes inherit none


def passed(ancillary: list[tuple[int, int, bytes]], flags: int) -> tuple[array.array[int], bool]:
    """Return the descriptors that `recvmsg` brought, and False if the kernel left some out."""
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return fds, not flags & TRUNCATED
