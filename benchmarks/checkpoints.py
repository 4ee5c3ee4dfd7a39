"""Benchmarks of checkpoints: how long a training step waits."""

from __future__ import annotations

import statistics
import tempfile
from functools import partial
from time import perf_counter
from typing import Any

import torch

from benchmarks.measuring import MB, TELEGRAD, Row

OWNERS = 2
TIMES = 5


class Layer(torch.nn.Module):
    """A layer of `size` bytes."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size // 4))


def step_waits(rpc: Any, size: int, wait: bool) -> float:
    """Return the median time in ms until `save` returns."""
    from telegrad import checkpoint
    from telegrad.nn import RemoteModule

    layers = [RemoteModule(f"worker{rank}", Layer, (size // OWNERS,)) for rank in range(1, OWNERS + 1)]
    state = {"model": torch.nn.ModuleList(layers)}
    taken = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(TIMES + 1):  # the first save creates what later ones reuse
            start = perf_counter()
            if wait:
                checkpoint.save(state, f"{folder}/{number}", keep=1)
                taken.append(perf_counter() - start)
            else:
                written = checkpoint.save(state, f"{folder}/{number}", wait=False, keep=1)
                taken.append(perf_counter() - start)
                written.wait()
    return statistics.median(taken[1:]) * 1e3


def _row(name: str, wait: bool) -> Row:
    return Row(
        f"256 MB of 2 owners saved, {name}",
        "ms",
        False,
        partial(step_waits, size=256 * MB, wait=wait),
        workers=OWNERS + 1,
        libraries=(TELEGRAD,),
        rounds=3,
        threads=1,
    )


CHECKPOINTS = [_row("written", True), _row("copied, while the step waits", False)]
