"""At a worker's door: knocking, and what the knocking costs the worker."""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import socket
import time
from collections.abc import Callable

from telegrad.rpc.worker import Worker
from tests.cluster import PATIENCE

LATE = 1.0  # seconds that may pass until a worker looks whether somebody is late


def knock(worker: Worker) -> socket.socket:
    return socket.create_connection(worker.agent.me.tcp, 10)


def begin_to_knock(worker: Worker) -> socket.socket:
    """A connection that is being made; the worker may be slow to accept it."""
    sock = socket.socket()
    sock.setblocking(False)
    if sock.connect_ex(worker.agent.me.tcp) not in (0, errno.EINPROGRESS, errno.EWOULDBLOCK):
        raise ConnectionError
    return sock


def say(sock: socket.socket, data: bytes) -> None:
    """As much as the worker wants to hear."""
    with contextlib.suppress(OSError):
        sock.sendall(data)


def wait_closed(sock: socket.socket, patience: float = PATIENCE) -> bytes:
    """What the worker says until it closes the connection."""
    sock.settimeout(patience)
    heard = b""
    with contextlib.suppress(ConnectionError):
        while data := sock.recv(4096):
            heard += data
    return heard


def eventually(condition: Callable[[], bool], patience: float = 10.0) -> bool:
    end = time.monotonic() + patience
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def resident() -> int:
    """Bytes of memory that this process uses."""
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


HAS_PROC = pathlib.Path("/proc/self/statm").exists()
