"""Benchmarks of gradients, remote modules and optimizers."""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import torch

from benchmarks.groups import HOSTS
from benchmarks.measuring import OTHER, TELEGRAD, THIRD, Row, times
from benchmarks.targets import OfPeer

# Functions of the other workers


def hop(library: str, tensor: torch.Tensor, left: int) -> torch.Tensor:
    """Pass a tensor back and forth between two workers."""
    if not left:
        return tensor * 2
    rpc = importlib.import_module(library)
    there = THIRD if rpc.get_worker_info().name == OTHER else OTHER
    passed = rpc.rpc_sync(there, hop, (library, tensor, left - 1))
    assert isinstance(passed, torch.Tensor)
    return passed


# Rows


def neighbour(rpc: Any, name: str) -> Any:
    """Return another module of the same library."""
    return importlib.import_module(rpc.__name__.replace("rpc", name))


def train_once(rpc: Any, forward: Callable[[], torch.Tensor], optimizer: Any = None, **options: Any) -> None:
    """Run forward, backward and an optimizer step in a context. On Telegrad, the step is part of the backward pass."""
    autograd = neighbour(rpc, "autograd")
    rides = rpc.__name__ == TELEGRAD and optimizer is not None
    if rides:
        options["step"] = optimizer
    with autograd.context() as context:
        autograd.backward(context, [forward()], **options)
        if optimizer is not None and not rides:
            optimizer.step(context)


def training_step(
    rpc: Any, forward: Callable[[], torch.Tensor], count: int, optimizer: Any = None, **options: Any
) -> float:
    def step() -> None:
        train_once(rpc, forward, optimizer, **options)

    return statistics.median(times(count, step)) * 1e6


def add_step(rpc: Any) -> float:
    one, other = torch.ones(3, 3, requires_grad=True), torch.ones(3, 3, requires_grad=True)
    return training_step(rpc, lambda: rpc.rpc_sync(OTHER, torch.add, (one, other)).sum(), 500)


def chain_step(rpc: Any, hops: int, fast: bool) -> float:
    tensor = torch.ones(3, 3, requires_grad=True)
    options = {"mode": "fast"} if fast and rpc.__name__ == TELEGRAD else {}
    return training_step(rpc, lambda: hop(rpc.__name__, tensor, hops).sum(), 100, **options)


def row_step(rpc: Any, calls: int) -> float:
    """Return the time of a step whose calls follow each other."""
    tensor = torch.ones(3, 3, requires_grad=True)

    def forward() -> torch.Tensor:
        value = tensor
        for _ in range(calls):
            value = rpc.rpc_sync(OTHER, torch.add, (value, 1))
        return value.sum()

    return training_step(rpc, forward, 100)


def local_graph(rpc: Any, nodes: int = 10_000) -> float:
    """Return the time of a backward pass through a local graph in a context, relative to one without a context."""
    autograd = neighbour(rpc, "autograd")
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


def module_step(rpc: Any) -> float:
    """Time forward, backward and step of one layer on another worker."""
    layer = neighbour(rpc, "nn").RemoteModule(OTHER, torch.nn.Linear, (128, 128))
    inputs = torch.ones(32, 128)
    return training_step(rpc, lambda: layer(inputs).sum(), 300, sgd(rpc, [layer]))


def sgd(rpc: Any, layers: Sequence[Any]) -> Any:
    parameters = [parameter for layer in layers for parameter in layer.remote_parameters()]
    return neighbour(rpc, "optim").DistributedOptimizer(torch.optim.SGD, parameters, lr=1e-6)


def layers_of(rpc: Any, owners: int) -> list[Any]:
    make = neighbour(rpc, "nn").RemoteModule
    return [make(f"worker{rank}", torch.nn.Linear, (128, 128)) for rank in range(1, owners + 1)]


def optimizer_step(rpc: Any, owners: int) -> float:
    """Time an SGD step over parameters on several workers, after the backward pass."""
    layers = layers_of(rpc, owners)
    optimizer = sgd(rpc, layers)
    value = torch.ones(32, 128)
    autograd = neighbour(rpc, "autograd")
    with autograd.context() as context:
        for layer in layers:
            value = layer(value)
        autograd.backward(context, [value.sum()])
        return statistics.median(times(300, lambda: optimizer.step(context))) * 1e6


def layers_step(rpc: Any, owners: int) -> float:
    """Time forward, backward and step of parallel layers, each on its own worker."""
    layers = layers_of(rpc, owners)
    inputs = torch.ones(32, 128)

    def forward() -> torch.Tensor:
        outputs = [layer.forward_async(inputs) for layer in layers]
        return torch.stack([output.wait().sum() for output in outputs]).sum()

    return training_step(rpc, forward, 200, sgd(rpc, layers))


def train_alone(library: str, layer: Any, steps: int) -> None:
    """Train as one trainer of a parameter server."""
    rpc = importlib.import_module(library)
    optimizer = sgd(rpc, [layer])
    inputs = torch.ones(32, 64)
    for _ in range(steps):
        train_once(rpc, lambda: layer.forward(inputs).square().mean(), optimizer)


def server_steps(rpc: Any, trainers: int, steps: int = 100) -> float:
    """Return the steps per second of trainers that share a layer on worker 0."""
    layer = neighbour(rpc, "nn").RemoteModule("worker0", torch.nn.Linear, (64, 10))

    def train(count: int) -> None:
        names = [f"worker{rank}" for rank in range(1, trainers + 1)]
        torch.futures.wait_all([rpc.rpc_async(name, train_alone, (rpc.__name__, layer, count)) for name in names])

    train(10)
    start = perf_counter()
    train(steps)
    return trainers * steps / (perf_counter() - start)


_THIRD, _HALF = (OfPeer(0.35),), (OfPeer(0.5),)
_THREE_FIFTHS = (OfPeer(0.6),)

TRAINING = [
    Row("context, forward, backward of an add", "µs", False, add_step, ("host", HOSTS), targets=_THIRD),
    *(
        Row(f"backward through {hops} hops", "µs", False, partial(chain_step, hops=hops, fast=False), targets=targets)
        for hops, targets in ((2, ()), (4, ()), (8, _THREE_FIFTHS))
    ),
    Row("backward through 8 calls in a row", "µs", False, partial(row_step, calls=8), targets=_THREE_FIFTHS),
    Row(
        "backward through 8 hops, fast mode",
        "µs",
        False,
        partial(chain_step, hops=8, fast=True),
        targets=_THREE_FIFTHS,
    ),
    Row("backward, 10000 local nodes, to plain", "times", False, local_graph, rounds=3),
    Row("RemoteModule forward, backward, step", "µs", False, module_step, targets=_THIRD),
    Row(
        "optimizer step over 4 owners",
        "µs",
        False,
        partial(optimizer_step, owners=4),
        workers=5,
        targets=_HALF,
    ),
    Row(
        "forward, backward, step over 4 owners",
        "µs",
        False,
        partial(layers_step, owners=4),
        workers=5,
        targets=_HALF,
    ),
    *(
        Row(
            f"parameter server, {count} trainers",
            "steps/s",
            True,
            partial(server_steps, trainers=count),
            workers=5,
            targets=(OfPeer(2),),
        )
        for count in (1, 2, 4)
    ),
]
