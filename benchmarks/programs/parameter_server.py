"""A server holds the wide first layer of a model, trainers hold the rest, and all train at once."""

from __future__ import annotations

import statistics

import torch
from common import Steps, report, run
from library import DistributedOptimizer, autograd, rpc
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

STEPS, BATCH = 80, 32
TRAINERS = ("trainer1", "trainer2")


class Server(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(784, 256)

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.layer(images).relu()
        return features

    def references(self) -> list[rpc.RRef]:
        return [rpc.RRef(parameter) for parameter in self.parameters()]


class Trainer(nn.Module):
    def __init__(self, server: rpc.RRef) -> None:
        super().__init__()
        self.server = server
        self.head = nn.Sequential(nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, images: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.server.rpc_sync().forward(images))
        return outputs


def train(server: rpc.RRef) -> float:
    model = Trainer(server)
    parameters = server.rpc_sync().references() + [rpc.RRef(parameter) for parameter in model.head.parameters()]
    optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=0.05)
    images, labels = torch.randn(BATCH, 784), torch.randint(10, (BATCH,))
    steps = Steps(STEPS)
    for _ in steps:
        with autograd.context() as context:
            loss = cross_entropy(model(images), labels)
            autograd.backward(context, [loss])
            optimizer.step(context)
    return steps.median


def main() -> None:
    server = rpc.RRef(Server())
    trained = [rpc.rpc_async(name, train, (server,), timeout=0) for name in TRAINERS]
    report(statistics.mean(torch.futures.wait_all(trained)))


if __name__ == "__main__":
    run(main, "server", *TRAINERS, start="fork")
