"""What the examples share: a group of workers, a progress bar, data, and training in one process to compare with."""

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

LEARNT = 0.8  # the accuracy from which a model is said to have learnt the digits
SAME = 1e-6  # how far outputs may be apart that should be the same

# Workers


@contextlib.contextmanager
def group(*names: str) -> Iterator[None]:
    """While this lasts, a process for each name is a worker of one group; this process is the first of them."""
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
            other.kill()  # where something went wrong; else it has ended


def serve(name: str, rank: int, size: int, port: int) -> None:
    """What each other process does: answer calls until all have called shutdown."""
    join(name, rank, size, port)
    rpc.shutdown()


def join(name: str, rank: int, size: int, port: int) -> None:
    """Become a worker, one that computes in double precision on one core."""
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
    """A bar that moves, where somebody watches; else one line at the end. Several threads may advance it."""

    def __init__(self, what: str, total: int) -> None:
        self.what = what
        self.total = total
        self.done = 0
        self.start = time.perf_counter()
        self.lock = threading.Lock()  # guards `done` and the line on the screen

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
    """Images of 8 x 8 pixels, from 0 to 1, and what they show."""

    images: Tensor
    labels: Tensor

    def share(self, number: int, of: int) -> Digits:
        """One of `of` parts that are alike."""
        return Digits(self.images[number::of], self.labels[number::of])

    def batch(self, step: int, size: int) -> Digits:
        """The batch of a step; after the last image comes the first."""
        places = torch.arange(step * size, (step + 1) * size) % len(self.labels)
        return Digits(self.images[places], self.labels[places])


def digits() -> tuple[Digits, Digits]:
    """Handwritten digits to learn, and others for a test."""
    from sklearn.datasets import load_digits  # here, since the workers need not import it

    images, labels = (torch.from_numpy(each) for each in load_digits(return_X_y=True))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    everything = Digits(images[order] / 16, labels[order])
    return Digits(*(each[:1500] for each in everything)), Digits(*(each[1500:] for each in everything))


# Models


def seeded(seed: int, make: Callable[..., nn.Module], *args: Any) -> nn.Module:
    """What `make(*args)` gives, with the same parameters on whichever worker it runs."""
    torch.manual_seed(seed)
    return make(*args)


def learn(
    model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], rate: float, progress: Progress | None = None
) -> list[float]:
    """Train a model of this process alone, by plain gradient descent; its losses."""
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
    """Print what the outputs of both models are worth; they must have learnt, and be the same where that is `exact`."""
    right = [(outputs.argmax(1) == labels).double().mean().item() for outputs in (ours, single)]
    apart = (ours - single).abs().max().item()
    print()
    print(f"{'accuracy on digits not seen before':36}{right[0]:8.3f}")
    print(f"{'... of the same, in one process':36}{right[1]:8.3f}")
    if exact:
        print(f"{'largest difference of outputs':36}{apart:8.1e}")
    assert min(right) > LEARNT, f"it has not learnt: {right}"
    assert apart < SAME or not exact, f"the outputs differ by {apart}"
