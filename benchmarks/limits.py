"""What the machine allows, without any library: measured in the same run as the rest."""

from __future__ import annotations

import os
import socket
import statistics
import threading
from time import perf_counter

import torch

from benchmarks.calls import SIZES


def ping_pong(rounds: int = 5000) -> float:
    """Microseconds for 64 bytes there and back over a Unix socket, two processes, blocking."""
    near, far = socket.socketpair()
    child = os.fork()
    if not child:
        near.close()
        while data := far.recv(4096):
            far.send(data)
        os._exit(0)
    far.close()
    times = []
    for _ in range(rounds):
        start = perf_counter()
        near.send(b"x" * 64)
        near.recv(4096)
        times.append(perf_counter() - start)
    near.close()
    os.waitpid(child, 0)
    return statistics.median(times) * 1e6


def copy_bandwidth(size: int) -> float:
    """GB/s of a copy between warm buffers."""
    source, target = torch.ones(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8)
    return _best(size, lambda: target.copy_(source))


def tcp_bandwidth(size: int) -> float:
    """GB/s of a plain socket loop over loopback, into warm memory."""
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

    found = _best(size, send)
    near.close()
    reader.join()
    far.close()
    return found


def _best(size: int, run: object) -> float:
    times = []
    for _ in range(8):
        start = perf_counter()
        run()  # type: ignore[operator]
        times.append(perf_counter() - start)
    return size / statistics.median(times) / 1e9


def measure() -> list[tuple[str, str, float]]:
    """Name, unit and figure of each limit."""
    return [
        ("raw Unix socket ping-pong", "µs", ping_pong()),
        *((f"warm memory copy, {name}", "GB/s", copy_bandwidth(size)) for name, size in SIZES.items()),
        *((f"raw TCP loop, {name}", "GB/s", tcp_bandwidth(size)) for name, size in SIZES.items()),
    ]
