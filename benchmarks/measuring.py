"""Rows of the benchmark, and timing."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any, NamedTuple

from benchmarks.targets import Target

TELEGRAD, TORCH, PIPELINING = "telegrad.rpc", "torch.distributed.rpc", "torch.distributed.pipelining"
LIBRARIES = TELEGRAD, TORCH, PIPELINING
OTHER, THIRD = "worker1", "worker2"
MB = 1 << 20


class Row(NamedTuple):
    """A benchmark. Worker 0 runs `measure` with the library's `rpc` module; for `PIPELINING`, all ranks run it."""

    name: str
    unit: str
    higher_is_better: bool
    measure: Callable[..., float]
    ways: tuple[str, ...] = ("host",)  # transports
    workers: int = 3
    targets: tuple[Target, ...] = ()
    patience: float = 60.0  # time limit of a measurement in seconds
    rounds: int = 5  # maximum; slow rows have fewer
    alone: bool = False  # the benchmark's process runs `measure(library, way)`, which starts its own workers
    libraries: tuple[str, ...] = (TELEGRAD, TORCH)  # libraries that support it
    threads: int | None = None  # threads of torch's operators per process; None: torch's default


def times(count: int, call: Callable[[], Any]) -> list[float]:
    """Return the sorted seconds of `count` calls, after some warm-up calls."""
    for _ in range(max(3, count // 10)):
        call()
    taken = []
    for _ in range(count):
        start = perf_counter()
        call()
        taken.append(perf_counter() - start)
    return sorted(taken)
