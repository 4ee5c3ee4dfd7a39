"""Two halves of a residual network on two workers; a batch goes through in micro-batches."""

from __future__ import annotations

import threading
from typing import Any

import torch
from common import Steps, report, run
from library import DistributedOptimizer, autograd, rpc
from torch import Tensor, nn
from torch.nn.functional import mse_loss

STEPS, BATCH, PARTS = 6, 32, 4


class Block(nn.Module):
    def __init__(self, channels: int, wider: int, stride: int) -> None:
        super().__init__()
        self.path = nn.Sequential(
            nn.Conv2d(channels, wider, 3, stride, 1, bias=False),
            nn.BatchNorm2d(wider),
            nn.ReLU(),
            nn.Conv2d(wider, wider, 3, 1, 1, bias=False),
            nn.BatchNorm2d(wider),
        )
        self.across = nn.Conv2d(channels, wider, 1, stride, bias=False)

    def forward(self, value: Tensor) -> Tensor:
        return (self.path(value) + self.across(value)).relu()


class Half(nn.Module):
    """A part of the network; one micro-batch at a time."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)
        self._lock = threading.Lock()

    def forward(self, reference: rpc.RRef) -> Tensor:
        value = reference.to_here()
        with self._lock:
            outputs: Tensor = self.layers(value)
        return outputs

    def references(self) -> list[rpc.RRef]:
        return [rpc.RRef(parameter) for parameter in self.parameters()]


def first_half() -> nn.Module:
    return Half(nn.Conv2d(3, 16, 3, 1, 1), Block(16, 16, 1), Block(16, 32, 2))


def second_half() -> nn.Module:
    return Half(Block(32, 64, 2), Block(64, 64, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = rpc.remote("worker1", first_half)
        self.second = rpc.remote("worker2", second_half)

    def forward(self, images: Tensor) -> Tensor:
        outputs: list[Any] = []
        for part in images.chunk(PARTS):
            middle = self.first.remote().forward(rpc.RRef(part))
            outputs.append(self.second.rpc_async().forward(middle))
        return torch.cat(torch.futures.wait_all(outputs))

    def references(self) -> list[rpc.RRef]:
        return [*self.first.rpc_sync().references(), *self.second.rpc_sync().references()]


def main() -> None:
    network = Network()
    optimizer = DistributedOptimizer(torch.optim.SGD, network.references(), lr=0.01)
    images, targets = torch.randn(BATCH, 3, 32, 32), torch.randn(BATCH, 10)
    steps = Steps(STEPS)
    for _ in steps:
        with autograd.context() as context:
            autograd.backward(context, [mse_loss(network(images), targets)])
            optimizer.step(context)
    report(steps.median)


if __name__ == "__main__":
    run(main, "master", "worker1", "worker2", start="fork")
