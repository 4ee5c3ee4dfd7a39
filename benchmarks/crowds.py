"""Many workers that call at once."""

from __future__ import annotations

import importlib
from functools import partial
from itertools import cycle, islice
from time import perf_counter
from typing import Any

import torch

from benchmarks.calls import calls_per_second, nothing
from benchmarks.measuring import Row
from benchmarks.targets import OfPeer, OfRow

SIZES = (2, 8, 32)
WINDOW = 31  # calls in flight of each worker, whatever their number: one to each of the others in the largest group

# What the other workers run


def call_one(library: str, callee: str, window: int, total: int) -> None:
    calls_per_second(importlib.import_module(library), window, total, callee)


def call_others(library: str, size: int, total: int) -> None:
    """Call each of the others in turn."""
    rpc = importlib.import_module(library)
    me = rpc.get_worker_info().name
    others = cycle(name for name in (f"worker{rank}" for rank in range(size)) if name != me)
    for _ in range(total // WINDOW):
        torch.futures.wait_all([rpc.rpc_async(other, nothing) for other in islice(others, WINDOW)])


# The rows


def callers_per_second(rpc: Any, callers: int, total: int = 5000) -> float:
    """Calls per second of workers 0 and up, all to the one after them."""
    arguments = (rpc.__name__, f"worker{callers}", 1000, total)
    start = perf_counter()
    others = [rpc.rpc_async(f"worker{rank}", call_one, arguments) for rank in range(1, callers)]
    call_one(*arguments)
    torch.futures.wait_all(others)
    return callers * total / (perf_counter() - start)


def all_to_all(rpc: Any, size: int, calls: int = 32 * WINDOW * 8) -> float:
    """Microseconds per call, of all calls that all workers make of each other."""

    def round_of(total: int) -> None:
        arguments = (rpc.__name__, size, total)
        others = [rpc.rpc_async(f"worker{rank}", call_others, arguments) for rank in range(1, size)]
        call_others(*arguments)
        torch.futures.wait_all(others)

    round_of(WINDOW)  # every worker has now called every other one
    each = calls // size
    start = perf_counter()
    round_of(each)
    return (perf_counter() - start) / (each * size) * 1e6


def _name(size: int) -> str:
    return f"all to all, {size} workers, per call"


CROWDS = [
    Row(
        "rpc_async, 4 callers of one",
        "calls/s",
        True,
        partial(callers_per_second, callers=4),
        workers=5,
        targets=(OfPeer(4),),
    ),
    *(
        Row(
            _name(size),
            "µs",
            False,
            partial(all_to_all, size=size),
            workers=size,
            patience=90,  # the reference takes half a minute to connect all of the largest group
            targets=() if size == SIZES[0] else (OfRow(1.5, _name(SIZES[0])),),
        )
        for size in SIZES
    ),
]
