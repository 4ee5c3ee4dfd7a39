"""Limits of the machine without any library, measured in the same run as the benchmarks."""

from __future__ import annotations

import os
import socket
import statistics
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from benchmarks.measuring import MB, times

SIZES = {"64 KB": MB // 16, "1 MB": MB, "16 MB": 16 * MB, "64 MB": 64 * MB, "256 MB": 256 * MB}
COPY, TCP = "warm memory copy", "raw TCP loop"


class Limit(NamedTuple):
    unit: str
    measure: Callable[[], float]


def ping_pong(rounds: int = 5000) -> float:
    """Return the µs of a round trip of 64 bytes between two processes over a blocking Unix socket."""
    near, far = socket.socketpair()
    child = os.fork()
    if not child:
        near.close()
        while data := far.recv(4096):
            far.send(data)
        os._exit(0)
    far.close()

    def bounce() -> None:
        near.send(b"x" * 64)
        near.recv(4096)

    found = statistics.median(times(rounds, bounce)) * 1e6
    near.close()
    os.waitpid(child, 0)
    return found


def copy_bandwidth(size: int) -> float:
    """Return the GB/s of a copy between warm buffers."""
    source, target = torch.ones(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8)
    return _bandwidth(size, lambda: target.copy_(source))


def tcp_bandwidth(size: int) -> float:
    """Return the GB/s of a plain socket loop over loopback, into warm memory."""
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        door.listen()
        near = socket.create_connection(door.getsockname())
        far, _ = door.accept()
    into = memoryview(bytearray(size))

    def receive() -> None:
        while True:
            filled = 0
            while filled < size:
                count = far.recv_into(into[filled:])
                if not count:
                    return
                filled += count
            far.send(b"!")

    reader = threading.Thread(target=receive)
    reader.start()
    data = bytes(size)

    def send() -> None:
        near.sendall(data)
        near.recv(1)

    with near, far:
        try:
            return _bandwidth(size, send)
        finally:
            near.shutdown(socket.SHUT_RDWR)
            reader.join()


def _bandwidth(size: int, run: Callable[[], Any]) -> float:
    return size / statistics.median(times(max(8, min(100, 64 * MB // size)), run)) / 1e9


LIMITS = {
    "raw Unix socket ping-pong": Limit("µs", ping_pong),
    **{f"{COPY}, {name}": Limit("GB/s", partial(copy_bandwidth, size)) for name, size in SIZES.items()},
    **{f"{TCP}, {name}": Limit("GB/s", partial(tcp_bandwidth, size)) for name, size in SIZES.items()},
}
