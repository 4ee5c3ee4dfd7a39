"""Large values that are no tensors, and what a call of another thread feels of them."""

from __future__ import annotations

import statistics
import threading
from functools import partial
from time import perf_counter
from typing import Any

import torch

from benchmarks.calls import nothing, take
from benchmarks.limits import SIZES
from benchmarks.measuring import MB, OTHER, Row, times
from benchmarks.targets import OfPeer, OfRow, Target

ITEMS = 1_000_000


def bandwidth(rpc: Any, size: int) -> float:
    """Bytes per second in GB/s."""
    value = b"x" * size
    call = partial(rpc.rpc_sync, OTHER, take, (value,))
    return size / statistics.median(times(max(4, min(100, 64 * MB // size)), call)) / 1e9


def list_of_numbers(rpc: Any) -> float:
    numbers = list(range(ITEMS))
    return statistics.median(times(5, lambda: rpc.rpc_sync(OTHER, take, (numbers,)))) * 1e3


def call_beside(rpc: Any, kind: str) -> float:
    """In which time 99 of 100 empty calls are answered while another thread sends large values."""
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
]
