"""Benchmarks of large values other than tensors, and of calls beside them."""

from __future__ import annotations

import array
import pathlib
import statistics
import threading
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

import numpy
import torch

from benchmarks.calls import nothing, take
from benchmarks.groups import Group
from benchmarks.limits import SIZES
from benchmarks.measuring import MB, OTHER, TELEGRAD, Row, times
from benchmarks.targets import Absolute, OfPeer, OfRow, Target

ITEMS = 1_000_000


def bandwidth(rpc: Any, size: int) -> float:
    """Return the bandwidth of bytes in GB/s."""
    value = b"x" * size
    call = partial(rpc.rpc_sync, OTHER, take, (value,))
    return size / statistics.median(times(max(4, min(100, 64 * MB // size)), call)) / 1e9


def list_of_numbers(rpc: Any) -> float:
    numbers = list(range(ITEMS))
    return statistics.median(times(5, lambda: rpc.rpc_sync(OTHER, take, (numbers,)))) * 1e3


def call_beside(rpc: Any, kind: str) -> float:
    """Return the p99 of empty calls in ms while another thread sends large values."""
    value: Any = {
        "bytes": lambda: b"x" * (256 * MB),
        "tensor": lambda: torch.ones(64 * MB),
        "list": lambda: list(range(ITEMS)),
    }[kind]()
    over = threading.Event()

    def send() -> None:
        for _ in range(3):
            rpc.rpc_sync(OTHER, take, (value,))
        over.set()

    thread = threading.Thread(target=send)
    thread.start()
    taken = []
    while not over.is_set():
        start = perf_counter()
        rpc.rpc_sync(OTHER, nothing)
        taken.append(perf_counter() - start)
    thread.join()
    return sorted(taken)[int(0.99 * len(taken))] * 1e3


KINDS: dict[str, Callable[[int], Any]] = {
    "bytes": lambda size: b"x" * size,
    "bytearray": lambda size: bytearray(b"x") * size,
    "str": lambda size: "x" * size,
    "array.array": lambda size: array.array("B", b"x") * size,
    "numpy array": lambda size: numpy.ones(size, dtype=numpy.uint8),
    "tensor": lambda size: torch.ones(size, dtype=torch.uint8),
}
MOST_RATIO = 1.5  # maximum ratio to a tensor's time or memory


def warm_ratio(rpc: Any, kind: str) -> float:
    """Return the time of a large value relative to a tensor of equal size whose shared memory is already mapped."""
    value, tensor = (KINDS[each](256 * MB) for each in (kind, "tensor"))
    taken: dict[str, list[float]] = {kind: [], "tensor": []}
    for _ in range(6):
        for name, each in ((kind, value), ("tensor", tensor)):
            start = perf_counter()
            rpc.rpc_sync(OTHER, take, (each,))
            taken[name].append(perf_counter() - start)
    return statistics.median(taken[kind][1:]) / statistics.median(taken["tensor"][1:])


def cold_ratio(library: str, way: str, kind: str, of_memory: bool = False) -> float:
    """Return the time, or the memory of both workers, for the first large value relative to the first tensor.

    Runs in a new group. The value is a quarter larger than the tensor, so that it cannot reuse the tensor's memory.
    """
    group = Group(library, way, 2)
    try:
        measure = partial(first_of, of_memory=of_memory)
        tensor, value = (group.measure(partial(measure, kind=k, size=s), 60) for k, s in (("tensor", 4), (kind, 5)))
        return round((value / 5) / (tensor / 4), 2)
    finally:
        group.kill()


def first_of(rpc: Any, kind: str, size: int, of_memory: bool) -> float:
    """Return the seconds or bytes for the first value of `size` units of 64 MB."""
    rpc.rpc_sync(OTHER, take, (KINDS[kind](16 * MB),))
    before = proportional() + rpc.rpc_sync(OTHER, proportional)
    value = KINDS[kind](size * 64 * MB)
    start = perf_counter()
    there = rpc.rpc_sync(OTHER, proportional, (value,)) if of_memory else rpc.rpc_sync(OTHER, take, (value,))
    taken = perf_counter() - start
    return float(proportional() + there - before) if of_memory else taken


def proportional(_: Any = None) -> int:
    """Return the memory of this process in bytes (PSS). A shared page counts in proportion."""
    lines = pathlib.Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def _warm(kind: str) -> Row:
    name, targets = f"{kind} of 256 MB, in the time of a warm tensor", (Absolute(MOST_RATIO),)
    return Row(name, "times", False, partial(warm_ratio, kind=kind), targets=targets, rounds=3, libraries=(TELEGRAD,))


def _cold(kind: str, of_memory: bool = False) -> Row:
    name = f"{kind} of 256 MB, in the {'memory' if of_memory else 'time'} of a first tensor"
    measure = partial(cold_ratio, kind=kind, of_memory=of_memory)
    targets, only = (Absolute(MOST_RATIO),), (TELEGRAD,)
    return Row(name, "times", False, measure, targets=targets, rounds=3, alone=True, workers=2, libraries=only)


def _transfer(name: str) -> Row:
    measure = partial(bandwidth, size=SIZES[name])
    return Row(f"bytes, {name} to", "GB/s", True, measure, targets=(OfPeer(1),), rounds=3)


def _beside(kind: str, what: str) -> Row:
    targets: list[Target] = [OfPeer(1)] if kind == "tensor" else [OfRow(2, _TENSOR), OfPeer(0.5)]
    name = f"empty call beside {what}, p99"
    return Row(name, "ms", False, partial(call_beside, kind=kind), targets=tuple(targets), rounds=3)


_TENSOR = "empty call beside a tensor of 256 MB, p99"

VALUES = [
    *map(_transfer, ("1 MB", "16 MB", "256 MB")),
    Row("list of 1,000,000 numbers", "ms", False, list_of_numbers, targets=(OfPeer(1),), rounds=3),
    _beside("tensor", "a tensor of 256 MB"),
    _beside("bytes", "256 MB of bytes"),
    _beside("list", "a list of 1,000,000 numbers"),
    *(_warm(kind) for kind in KINDS if kind != "tensor"),
    _cold("bytes"),
    _cold("bytes", of_memory=True),
]
