"""Shared code of the examples: a group of workers, a progress bar, data, and training in one process for comparison."""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import telegrad.rpc as rpc

LEARNT = 0.8  # minimum accuracy of a trained model on the digits
SAME = 1e-6  # maximum difference between outputs that should be equal

# Workers


@contextlib.contextmanager
def group(*names: str) -> Iterator[None]:
    """Run one worker process for each name until the block ends. The calling process is the first worker."""
    port = free_port()
    spawn = mp.get_context("spawn")
    others = [
        spawn.Process(target=serve, args=(name, rank, len(names), port), daemon=True)
        for rank, name in enumerate(names)
        if rank > 0
    ]
    try:
        for other in others:
            other.start()
        join(names[0], 0, len(names), port)
        yield
        rpc.shutdown()
        for other in others:
            other.join()
    finally:
        for other in others:
            other.kill()  # only after an error: otherwise the process has already exited


def serve(name: str, rank: int, size: int, port: int) -> None:
    """Serve calls until all workers have called `shutdown`. Runs in each other process."""
    join(name, rank, size, port)
    rpc.shutdown()


def join(name: str, rank: int, size: int, port: int) -> None:
    """Join the group as a worker that computes in double precision on one core."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    rpc.init_rpc(name, rank=rank, world_size=size)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


# Progress


class Progress:
    """Show a progress bar on a terminal, otherwise print one line at the end. Thread-safe."""

    def __init__(self, what: str, total: int) -> None:
        self.what = what
        self.total = total
        self.done = 0
        self.start = time.perf_counter()
        self.lock = threading.Lock()  # guards `done` and the output line

    def advance(self, note: str = "") -> None:
        with self.lock:
            self.done += 1
            line = f"{self.what} {note}"
            if self.done == self.total:
                line += f" ({time.perf_counter() - self.start:.1f} s)"
            if sys.stdout.isatty():
                bar = "#" * (30 * self.done // self.total)
                print(f"\r[{bar:30}] {line:60}", end="\n" if self.done == self.total else "", flush=True)
            elif self.done == self.total:
                print(line, flush=True)


# Data


class Digits(NamedTuple):
    """Images of 8 x 8 pixels with values from 0 to 1, and their labels."""

    images: Tensor
    labels: Tensor

    def share(self, number: int, of: int) -> Digits:
        """Return shard `number` of `of` similar shards."""
        return Digits(self.images[number::of], self.labels[number::of])

    def batch(self, step: int, size: int) -> Digits:
        """Return the batch of a step. Batches wrap around at the end of the data."""
        places = torch.arange(step * size, (step + 1) * size) % len(self.labels)
        return Digits(self.images[places], self.labels[places])


def digits() -> tuple[Digits, Digits]:
    """Return handwritten digits: a training set and a test set."""
    from sklearn.datasets import load_digits  # imported here because the workers do not need it

    images, labels = (torch.from_numpy(each) for each in load_digits(return_X_y=True))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    everything = Digits(images[order] / 16, labels[order])
    return Digits(*(each[:1500] for each in everything)), Digits(*(each[1500:] for each in everything))


# Models


def seeded(seed: int, make: Callable[..., nn.Module], *args: Any) -> nn.Module:
    """Return `make(*args)`, with the same parameters on every worker."""
    torch.manual_seed(seed)
    return make(*args)


def learn(
    model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], rate: float, progress: Progress | None = None
) -> list[float]:
    """Train a model in this process by plain gradient descent. Return the losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    losses = []
    for inputs, labels in batches:
        loss = cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if progress:
            progress.advance(f"loss {losses[-1]:.3f}")
    return losses


def compare(ours: Tensor, single: Tensor, labels: Tensor, exact: bool = True) -> None:
    """Print the accuracy of both models. Check that both have learnt, and with `exact` that their outputs are equal."""
    right = [(outputs.argmax(1) == labels).double().mean().item() for outputs in (ours, single)]
    apart = (ours - single).abs().max().item()
    print()
    print(f"{'accuracy on digits not seen before':36}{right[0]:8.3f}")
    print(f"{'... of the same, in one process':36}{right[1]:8.3f}")
    if exact:
        print(f"{'largest difference of outputs':36}{apart:8.1e}")
    assert min(right) > LEARNT, f"it has not learnt: {right}"
    assert apart < SAME or not exact, f"the outputs differ by {apart}"
