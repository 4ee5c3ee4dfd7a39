"""What a row is, and how its times are taken."""

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
    """A figure, by `measure`, which worker 0 runs with the library's `rpc` module, and with `PIPELINING` all ranks."""

    name: str
    unit: str
    higher_is_better: bool
    measure: Callable[..., float]
    ways: tuple[str, ...] = ("host",)  # the transports over which it is measured
    workers: int = 3
    targets: tuple[Target, ...] = ()
    patience: float = 60.0  # seconds after which a measurement is given up
    rounds: int = 5  # at most; a slow row has fewer
    alone: bool = False  # the benchmark itself runs `measure(library, way)`, which makes its own workers
    libraries: tuple[str, ...] = (TELEGRAD, TORCH)  # that can do it
    threads: int | None = None  # of torch's operators in each process, where not as many as torch takes


def times(count: int, call: Callable[[], Any]) -> list[float]:
    """Seconds of each of `count` calls, sorted; after some to warm up."""
    for _ in range(max(3, count // 10)):
        call()
    taken = []
    for _ in range(count):
        start = perf_counter()
        call()
        taken.append(perf_counter() - start)
    return sorted(taken)
