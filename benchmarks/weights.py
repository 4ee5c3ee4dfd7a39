"""Benchmarks of published weights, until all readers have a version."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from benchmarks.measuring import MB, TELEGRAD, Row, times
from benchmarks.targets import Absolute

READERS = 4
PARTS = 1000
_names = itertools.count(1)

# Functions of the readers

_subscribers: dict[str, Any] = {}
_loaded: dict[str, dict[str, Tensor]] = {}


def subscribe(name: str) -> None:
    from telegrad.weights import Subscriber

    _subscribers[name] = Subscriber("worker0", name)


def read(name: str, number: int) -> None:
    _subscribers[name].at_least(number)


def load(name: str, number: int) -> None:
    """Load a version into the reader's own tensors."""
    version = _subscribers[name].at_least(number)
    if name not in _loaded:
        _loaded[name] = {each: value.clone() for each, value in version.state.items()}
    version.load_into(_loaded[name])


def unsubscribe(name: str) -> None:
    _subscribers.pop(name).close()
    _loaded.pop(name, None)


# Rows


def state_of(size: int, parts: int = 1) -> dict[str, Tensor]:
    return {f"layers.{part}.weight": torch.ones(size // 4 // parts) for part in range(parts)}


def publishing(
    rpc: Any, state: dict[str, Tensor], readers: int, count: int, read: Callable[[str, int], None] = read
) -> list[float]:
    """Return the sorted seconds until all readers have a version."""
    from telegrad.weights import Publisher

    name, workers = f"weights{next(_names)}", [f"worker{rank}" for rank in range(1, readers + 1)]

    def all_do(function: Callable[..., Any], *args: Any) -> None:
        torch.futures.wait_all([rpc.rpc_async(worker, function, (name, *args)) for worker in workers])

    with Publisher(name, state) as publisher:
        all_do(subscribe)
        taken = times(count, lambda: all_do(read, publisher.publish()))
        all_do(unsubscribe)
    return taken


def milliseconds(rpc: Any, size: int) -> float:
    return statistics.median(publishing(rpc, state_of(size), READERS, 20)) * 1e3


def of_one_reader(rpc: Any, size: int) -> float:
    """Return the time for several readers on this host relative to one reader."""
    rounds = [[statistics.median(publishing(rpc, state_of(size), each, 5)) for each in (READERS, 1)] for _ in range(3)]
    return statistics.median(many / one for many, one in rounds)


def of_one_tensor(rpc: Any, size: int) -> float:
    """Return the time to publish and load a state of many tensors, relative to one tensor of the same size."""
    rounds = [
        [statistics.median(publishing(rpc, state_of(size, parts), 1, 15, load)) for parts in (PARTS, 1)]
        for _ in range(3)
    ]
    return statistics.median(many / one for many, one in rounds)


def publish_alone(rpc: Any, size: int) -> float:
    """Return the ms for which `publish` blocks the learner."""
    from telegrad.weights import Publisher

    with Publisher(f"weights{next(_names)}", state_of(size)) as publisher:
        publisher.publish()
        begun = perf_counter()
        for _ in range(10):
            publisher.publish()
        return (perf_counter() - begun) * 1e2


def _changed(size: int) -> tuple[Tensor, Tensor]:
    """Return two versions that differ in 2% of the values, at random positions."""
    old = torch.randn(size // 4)
    new = old.clone()
    new[torch.randint(0, len(old), (len(old) // 50,))] += 1
    return old.view(torch.int32), new.view(torch.int32)


def _stepped(size: int) -> tuple[Tensor, Tensor]:
    """Return two rounded versions in which each value differs by about a thousandth."""
    old = torch.randn(size // 2)
    new = old * (1 + 1e-3 * torch.randn(size // 2))
    return old.bfloat16().view(torch.int16), new.bfloat16().view(torch.int16)


def _encoded(old: Tensor, new: Tensor, small: bool) -> int:
    """Return the size of the deltas of all pieces in bytes."""
    from telegrad.weights.deltas import encode
    from telegrad.weights.publisher import PIECE

    count = PIECE // old.itemsize
    pieces = zip(old.split(count), new.split(count), strict=True)
    return sum(encode([before], [after], small).size for before, after in pieces)


def times_fewer(rpc: Any, size: int, make: Callable[[int], tuple[Tensor, Tensor]], small: bool = False) -> float:
    """Return the size of a full version relative to its deltas."""
    return size / _encoded(*make(size), small)


def per_second(rpc: Any, size: int, make: Callable[[int], tuple[Tensor, Tensor]], small: bool = False) -> float:
    """Return the MB of a version that are compared and encoded per second."""
    old, new = make(size)
    return size / MB / statistics.median(times(5, lambda: _encoded(old, new, small)))


def _row(name: str, unit: str, measure: Callable[..., float], size: int, *targets: Absolute) -> Row:
    return Row(
        name, unit, False, partial(measure, size=size), workers=READERS + 1, targets=targets, libraries=(TELEGRAD,)
    )


def _change(name: str, unit: str, measure: Callable[..., float], *targets: Absolute) -> Row:
    return Row(name, unit, True, measure, workers=1, targets=targets, libraries=(TELEGRAD,), threads=1)


WEIGHTS = [
    _row("16 MB published, to the learner", "ms", publish_alone, 16 * MB),
    _row("16 MB published to 4 workers", "ms", milliseconds, 16 * MB, Absolute(5)),
    _row("256 MB published to 4 workers", "ms", milliseconds, 256 * MB),
    _row("256 MB published to 4 workers, of one", "of one", of_one_reader, 256 * MB, Absolute(1.2)),
    _row("16 MB in 1,000 tensors published and loaded", "of one tensor", of_one_tensor, 16 * MB, Absolute(1.3)),
    _change(
        "2% of 64 MB changed, bytes", "times fewer", partial(times_fewer, size=64 * MB, make=_changed), Absolute(10)
    ),
    _change("2% of 64 MB changed, found", "MB/s", partial(per_second, size=64 * MB, make=_changed), Absolute(120)),
    _change(
        "a step of 64 MB changed, bytes", "times fewer", partial(times_fewer, size=64 * MB, make=_stepped, small=True)
    ),
    _change("a step of 64 MB changed, found", "MB/s", partial(per_second, size=64 * MB, make=_stepped, small=True)),
]
