"""Calls, tensors and references."""

from __future__ import annotations

import statistics
from functools import partial
from time import perf_counter
from typing import Any

import torch

from benchmarks.measuring import OTHER, THIRD, Row, times

MB = 1 << 20
SIZES = {"64 KB": MB // 16, "1 MB": MB, "16 MB": 16 * MB, "64 MB": 64 * MB, "256 MB": 256 * MB}

_held: dict[int, torch.Tensor] = {}


# What the other worker runs


def nothing() -> None:
    """An empty function."""


def echo(value: Any) -> Any:
    return value


def take(value: Any) -> None:
    """Receive and forget."""


def give(size: int) -> torch.Tensor:
    """A tensor that is ready."""
    if size not in _held:
        _held.clear()
        _held[size] = torch.ones(size // 4)
    return _held[size]


class Counter:
    """A small object to be called where it lives."""

    def __init__(self) -> None:
        self.value = 0

    def add(self, amount: int) -> int:
        self.value += amount
        return self.value


# The rows


def sync_empty(rpc: Any, at: float) -> float:
    taken = times(2000, lambda: rpc.rpc_sync(OTHER, nothing))
    return taken[int(at * len(taken))] * 1e6


def sync_add(rpc: Any) -> float:
    tensor = torch.ones(4)
    return statistics.median(times(1000, lambda: rpc.rpc_sync(OTHER, torch.add, (tensor, 1)))) * 1e6


def sync_small_echo(rpc: Any) -> float:
    tensor = torch.ones(256)
    return statistics.median(times(1000, lambda: rpc.rpc_sync(OTHER, echo, (tensor,)))) * 1e6


def calls_per_second(rpc: Any, window: int, total: int) -> float:
    start = perf_counter()
    for _ in range(total // window):
        torch.futures.wait_all([rpc.rpc_async(OTHER, nothing) for _ in range(window)])
    return total / (perf_counter() - start)


def bandwidth(rpc: Any, size: int, direction: str) -> float:
    """Payload per second in GB/s; an echo counts its payload once."""
    tensor = torch.ones(size // 4)
    call = {
        "to": lambda: rpc.rpc_sync(OTHER, take, (tensor,)),
        "from": lambda: rpc.rpc_sync(OTHER, give, (size,)),
        "echo": lambda: rpc.rpc_sync(OTHER, echo, (tensor,)),
    }[direction]
    return size / statistics.median(times(max(4, min(100, 64 * MB // size)), call)) / 1e9


def remote_round(rpc: Any) -> float:
    """Make a value there, fetch it, drop the reference."""
    return statistics.median(times(1000, lambda: rpc.remote(OTHER, echo, (1,)).to_here())) * 1e6


def references_per_second(rpc: Any, count: int) -> float:
    start = perf_counter()
    for reference in [rpc.remote(OTHER, nothing) for _ in range(count)]:
        reference._get_future().wait()
    return count / (perf_counter() - start)


def sharing(rpc: Any) -> float:
    """Pass a reference from one user to another, who drops it."""
    reference = rpc.remote(OTHER, nothing)
    return statistics.median(times(1000, lambda: rpc.rpc_sync(THIRD, take, (reference,)))) * 1e6


def proxy_call(rpc: Any) -> float:
    reference = rpc.remote(OTHER, Counter)
    return statistics.median(times(1000, lambda: reference.rpc_sync().add(1))) * 1e6


CALLS = [
    Row("empty rpc_sync, p50", "µs", False, partial(sync_empty, at=0.5), ("host", "tcp")),
    Row("empty rpc_sync, p99", "µs", False, partial(sync_empty, at=0.99), ("host", "tcp")),
    Row("rpc_sync torch.add", "µs", False, sync_add),
    Row("1 KB tensor echo", "µs", False, sync_small_echo),
    Row("rpc_async, 1000 in flight", "calls/s", True, partial(calls_per_second, window=1000, total=10_000)),
    Row("rpc_async, 10000 in flight", "calls/s", True, partial(calls_per_second, window=10_000, total=10_000)),
    Row("remote, to_here, drop", "µs", False, remote_round),
    Row("remote, 1000 at once", "references/s", True, partial(references_per_second, count=1000)),
    Row("reference from user to user", "µs", False, sharing),
    Row("call by proxy", "µs", False, proxy_call),
    *(
        Row(f"{name} {direction}", "GB/s", True, partial(bandwidth, size=size, direction=direction), ("host", "tcp"))
        for name, size in SIZES.items()
        for direction in ("to", "from", "echo")
    ),
]
