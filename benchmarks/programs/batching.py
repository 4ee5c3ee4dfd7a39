"""A server waits for the gradients of all trainers, makes one step with their mean, and answers all with the model."""

from __future__ import annotations

import statistics
import threading

import torch
from common import Steps, report, run
from library import rpc
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

STEPS, BATCH = 40, 32
TRAINERS = ("trainer1", "trainer2")


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 10))


class Server:
    def __init__(self) -> None:
        self.model = network()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.lock = threading.Lock()
        self.future: torch.futures.Future[nn.Module] = torch.futures.Future()
        self.waiting = 0
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def fetch(self) -> nn.Module:
        return self.model

    @staticmethod
    @rpc.functions.async_execution
    def update(reference: rpc.RRef, gradients: list[Tensor]) -> torch.futures.Future[nn.Module]:
        self = reference.local_value()
        with self.lock:
            for parameter, gradient in zip(self.model.parameters(), gradients, strict=True):
                parameter.grad += gradient / len(TRAINERS)
            self.waiting += 1
            future = self.future
            if self.waiting == len(TRAINERS):
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=False)
                self.waiting = 0
                self.future = torch.futures.Future()
                future.set_result(self.model)
        return future


def train(server: rpc.RRef) -> float:
    model = server.rpc_sync().fetch()
    images, labels = torch.randn(BATCH, 784), torch.randint(10, (BATCH,))
    steps = Steps(STEPS)
    for _ in steps:
        cross_entropy(model(images), labels).backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        model = rpc.rpc_sync(server.owner(), Server.update, (server, gradients))
    return steps.median


def main() -> None:
    server = rpc.RRef(Server())
    trained = [rpc.rpc_async(name, train, (server,), timeout=0) for name in TRAINERS]
    report(statistics.mean(torch.futures.wait_all(trained)))


if __name__ == "__main__":
    run(main, "server", *TRAINERS, start="fork")
