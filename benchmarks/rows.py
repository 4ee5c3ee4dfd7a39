"""What is measured: one function per row, run by worker 0 with the library's `rpc` module; each gives one figure."""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import torch

OTHER, THIRD = "worker1", "worker2"
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


class Stage(torch.nn.Module):
    """A part of a pipeline."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(128, 128), torch.nn.ReLU(), torch.nn.Linear(128, 128))

    def forward(self, reference: Any) -> torch.Tensor:
        value = self.layers(reference.to_here() if hasattr(reference, "to_here") else reference)
        assert isinstance(value, torch.Tensor)
        return value


def hop(library: str, tensor: torch.Tensor, left: int) -> torch.Tensor:
    """Pass a tensor to and fro between two workers."""
    if not left:
        return tensor * 2
    rpc = importlib.import_module(library)
    there = THIRD if rpc.get_worker_info().name == OTHER else OTHER
    passed = rpc.rpc_sync(there, hop, (library, tensor, left - 1))
    assert isinstance(passed, torch.Tensor)
    return passed


# The rows


class Row(NamedTuple):
    """A figure; `ways` are the transports it is measured over."""

    name: str
    unit: str
    higher_is_better: bool
    measure: Callable[[Any], float]
    ways: tuple[str, ...] = ("host",)


def _times(count: int, call: Callable[[], Any]) -> list[float]:
    for _ in range(max(3, count // 10)):
        call()
    times = []
    for _ in range(count):
        start = perf_counter()
        call()
        times.append(perf_counter() - start)
    return sorted(times)


def sync_empty(rpc: Any, at: float) -> float:
    times = _times(2000, lambda: rpc.rpc_sync(OTHER, nothing))
    return times[int(at * len(times))] * 1e6


def sync_add(rpc: Any) -> float:
    tensor = torch.ones(4)
    return statistics.median(_times(1000, lambda: rpc.rpc_sync(OTHER, torch.add, (tensor, 1)))) * 1e6


def sync_small_echo(rpc: Any) -> float:
    tensor = torch.ones(256)
    return statistics.median(_times(1000, lambda: rpc.rpc_sync(OTHER, echo, (tensor,)))) * 1e6


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
    return size / statistics.median(_times(max(4, min(100, 64 * MB // size)), call)) / 1e9


def remote_round(rpc: Any) -> float:
    """Make a value there, fetch it, drop the reference."""
    return statistics.median(_times(1000, lambda: rpc.remote(OTHER, echo, (1,)).to_here())) * 1e6


def references_per_second(rpc: Any, count: int) -> float:
    start = perf_counter()
    for reference in [rpc.remote(OTHER, nothing) for _ in range(count)]:
        reference._get_future().wait()
    return count / (perf_counter() - start)


def sharing(rpc: Any) -> float:
    """Pass a reference from one user to another, who drops it."""
    reference = rpc.remote(OTHER, nothing)
    return statistics.median(_times(1000, lambda: rpc.rpc_sync(THIRD, take, (reference,)))) * 1e6


def proxy_call(rpc: Any) -> float:
    reference = rpc.remote(OTHER, Counter)
    return statistics.median(_times(1000, lambda: reference.rpc_sync().add(1))) * 1e6


# Gradients


def autograd_of(rpc: Any) -> Any:
    return importlib.import_module(rpc.__name__.replace("rpc", "autograd"))


def training_step(rpc: Any, forward: Callable[[], torch.Tensor], count: int, **options: Any) -> float:
    """A context with forward and backward."""
    autograd = autograd_of(rpc)

    def step() -> None:
        with autograd.context() as context:
            autograd.backward(context, [forward()], **options)

    return statistics.median(_times(count, step)) * 1e6


def add_step(rpc: Any) -> float:
    one, other = torch.ones(3, 3, requires_grad=True), torch.ones(3, 3, requires_grad=True)
    return training_step(rpc, lambda: rpc.rpc_sync(OTHER, torch.add, (one, other)).sum(), 500)


def chain_step(rpc: Any, hops: int, fast: bool) -> float:
    tensor = torch.ones(3, 3, requires_grad=True)
    options = {"mode": "fast"} if fast and rpc.__name__.startswith("telegrad") else {}
    return training_step(rpc, lambda: hop(rpc.__name__, tensor, hops).sum(), 100, **options)


def pipeline_step(rpc: Any, batches: int) -> float:
    """Three stages, the last one here; eight batches at a time, since more block all threads of the reference."""
    first, second, third = rpc.remote(OTHER, Stage), rpc.remote(THIRD, Stage), Stage()
    inputs = [torch.ones(32, 128) for _ in range(batches)]

    def forward() -> torch.Tensor:
        losses = []
        for start in range(0, batches, 8):
            some = inputs[start : start + 8]
            passed = [second.rpc_async().forward(first.remote().forward(each)) for each in some]
            losses += [third(future.wait()).sum() for future in passed]
        return torch.stack(losses).sum()

    return training_step(rpc, forward, 30)


def local_graph(rpc: Any, nodes: int = 10_000) -> float:
    """Backward in a context through a graph of this worker alone; how many times as long as without."""
    autograd = autograd_of(rpc)
    leaf = torch.ones(3, 3, requires_grad=True)

    def build() -> torch.Tensor:
        value = leaf
        for _ in range(nodes // 2):
            value = (value * 1.01).sin()
        return value.sum()

    within, without = [], []
    for _ in range(15):
        with autograd.context() as context:
            root = build()
            start = perf_counter()
            autograd.backward(context, [root])
            within.append(perf_counter() - start)
        root = build()
        start = perf_counter()
        root.backward()
        without.append(perf_counter() - start)
    return statistics.median(within) / statistics.median(without)


def batches_growth(rpc: Any) -> float:
    """How many times as long 32 micro-batches take as 8; they share their parameters."""
    return pipeline_step(rpc, 32) / pipeline_step(rpc, 8)


ROWS = [
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
    Row("context, forward, backward of an add", "µs", False, add_step),
    Row("backward through 8 hops", "µs", False, partial(chain_step, hops=8, fast=False)),
    Row("backward through 8 hops, fast mode", "µs", False, partial(chain_step, hops=8, fast=True)),
    Row("pipeline of 3 stages, 8 micro-batches", "µs", False, partial(pipeline_step, batches=8)),
    Row("backward, 10000 local nodes, to plain", "times", False, local_graph),
    Row("pipeline, 32 micro-batches to 8", "times", False, batches_growth),
    *(
        Row(f"{name} {direction}", "GB/s", True, partial(bandwidth, size=size, direction=direction), ("host", "tcp"))
        for name, size in SIZES.items()
        for direction in ("to", "from", "echo")
    ),
]
