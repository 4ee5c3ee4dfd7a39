"""Benchmarks of calls, tensors and references."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from time import perf_counter
from typing import Any

import torch

from benchmarks.groups import HOSTS
from benchmarks.limits import COPY, SIZES, TCP
from benchmarks.measuring import MB, OTHER, TELEGRAD, THIRD, Row, times
from benchmarks.targets import OfLimit, OfPeer, OfRow, Target

_held: dict[int, torch.Tensor] = {}


# Functions of the other worker


def nothing() -> None:
    """Do nothing."""


def echo(value: Any) -> Any:
    return value


def take(value: Any) -> None:
    """Discard a received value."""


def give(size: int) -> torch.Tensor:
    """Return a cached tensor."""
    if size not in _held:
        _held.clear()
        _held[size] = torch.ones(size // 4)
    return _held[size]


def count(n: int) -> Iterator[int]:
    """Yield the items of a stream."""
    yield from range(n)


class Counter:
    """A small object that is called on its owner."""

    def __init__(self) -> None:
        self.value = 0

    def add(self, amount: int) -> int:
        self.value += amount
        return self.value


# Rows


def sync_empty(rpc: Any, at: float) -> float:
    taken = times(2000, lambda: rpc.rpc_sync(OTHER, nothing))
    return taken[int(at * len(taken))] * 1e6


def sync_add(rpc: Any) -> float:
    tensor = torch.ones(4)
    return statistics.median(times(1000, lambda: rpc.rpc_sync(OTHER, torch.add, (tensor, 1)))) * 1e6


def sync_small_echo(rpc: Any) -> float:
    tensor = torch.ones(256)
    return statistics.median(times(1000, lambda: rpc.rpc_sync(OTHER, echo, (tensor,)))) * 1e6


def calls_per_second(
    rpc: Any, window: int, total: int, callee: str = OTHER, wait_all: Callable[[Any], Any] = torch.futures.wait_all
) -> float:
    start = perf_counter()
    for _ in range(total // window):
        wait_all([rpc.rpc_async(callee, nothing) for _ in range(window)])
    return total / (perf_counter() - start)


def items_per_second(rpc: Any, total: int) -> float:
    """Return the items per second of a stream of integers."""
    start = perf_counter()
    taken = sum(1 for _ in rpc.rpc_stream(OTHER, count, (total,)))
    return taken / (perf_counter() - start)


def bandwidth(rpc: Any, size: int, direction: str) -> float:
    """Return the payload per second in GB/s. An echo counts its payload once."""
    tensor = torch.ones(size // 4)
    call = {
        "to": lambda: rpc.rpc_sync(OTHER, take, (tensor,)),
        "from": lambda: rpc.rpc_sync(OTHER, give, (size,)),
        "echo": lambda: rpc.rpc_sync(OTHER, echo, (tensor,)),
    }[direction]
    return size / statistics.median(times(max(4, min(100, 64 * MB // size)), call)) / 1e9


def remote_round(rpc: Any) -> float:
    """Create a remote value, fetch it and drop the reference. Return the median in µs."""
    return statistics.median(times(1000, lambda: rpc.remote(OTHER, echo, (1,)).to_here())) * 1e6


def references_per_second(rpc: Any, count: int) -> float:
    start = perf_counter()
    for reference in [rpc.remote(OTHER, nothing) for _ in range(count)]:
        reference._get_future().wait()
    return count / (perf_counter() - start)


def sharing(rpc: Any) -> float:
    """Pass a reference to another worker, which drops it. Return the median in µs."""
    reference = rpc.remote(OTHER, nothing)
    return statistics.median(times(1000, lambda: rpc.rpc_sync(THIRD, take, (reference,)))) * 1e6


def proxy_call(rpc: Any) -> float:
    reference = rpc.remote(OTHER, Counter)
    return statistics.median(times(1000, lambda: reference.rpc_sync().add(1))) * 1e6


def _rate(window: int) -> Row:
    """Return a row for `window` calls in flight from one caller."""
    measure = partial(calls_per_second, window=window, total=10_000)
    return Row(f"rpc_async, {window} in flight", "calls/s", True, measure, targets=(OfPeer(6),))


def _transfer(name: str, direction: str, way: str) -> Row:
    """Return a row for a tensor in one direction or in both."""
    targets: list[Target] = [OfPeer(1)]
    if SIZES[name] >= 16 * MB:
        part, limit = (0.6, COPY) if way == "host" else (0.9, TCP)
        # An echo is sent twice, but counts its payload once.
        targets.append(OfLimit(part / 2 if direction == "echo" else part, f"{limit}, {name}"))
    measure = partial(bandwidth, size=SIZES[name], direction=direction)
    rounds = 3 if SIZES[name] > 64 * MB else 5
    return Row(f"{name} {direction}", "GB/s", True, measure, (way,), targets=tuple(targets), rounds=rounds)


def _between_hosts(size: int, direction: str) -> Row:
    """Return a row whose target is 1.3 times the peer's time, because only Telegrad encrypts."""
    measure = partial(bandwidth, size=size * MB, direction=direction)
    return Row(f"{size} MB {direction}", "GB/s", True, measure, (HOSTS,), workers=2, targets=(OfPeer(0.77),))


_BOTH, _QUICKER = ("host", "tcp"), (OfPeer(0.3),)

CALLS = [
    Row("empty rpc_sync, p50", "µs", False, partial(sync_empty, at=0.5), _BOTH, targets=_QUICKER),
    Row("empty rpc_sync, p99", "µs", False, partial(sync_empty, at=0.99), _BOTH, targets=_QUICKER),
    Row("rpc_sync torch.add", "µs", False, sync_add, targets=_QUICKER),
    Row("1 KB tensor echo", "µs", False, sync_small_echo, targets=_QUICKER),
    _rate(1000),
    _rate(10_000),
    Row(
        "rpc_stream, 100,000 items",
        "items/s",
        True,
        partial(items_per_second, total=100_000),
        targets=(OfRow(0.5, "rpc_async, 1000 in flight"),),
        libraries=(TELEGRAD,),
    ),
    Row("remote, to_here, drop", "µs", False, remote_round, targets=_QUICKER),
    Row("remote, 1000 at once", "references/s", True, partial(references_per_second, count=1000)),
    Row("reference from user to user", "µs", False, sharing),
    Row("call by proxy", "µs", False, proxy_call),
    *(_transfer(name, direction, way) for way in _BOTH for name in SIZES for direction in ("to", "from", "echo")),
    Row("empty rpc_sync, p50", "µs", False, partial(sync_empty, at=0.5), (HOSTS,), workers=2, targets=_QUICKER),
    *(_between_hosts(size, direction) for size in (4, 8, 16, 32, 64) for direction in ("to", "from")),
]
