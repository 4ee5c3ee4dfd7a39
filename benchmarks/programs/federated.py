"""Clients train copies of a model on data that stays with them; the coordinator takes the mean of what they return."""

from __future__ import annotations

import torch
from common import Steps, report, run
from library import rpc
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

ROUNDS, LOCAL_STEPS, BATCH = 10, 4, 32
CLIENTS = ("client1", "client2")


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 10))


class Client:
    def __init__(self) -> None:
        self.images, self.labels = torch.randn(LOCAL_STEPS * BATCH, 784), torch.randint(10, (LOCAL_STEPS * BATCH,))

    def train(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        model = network()
        model.load_state_dict(state)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for images, labels in zip(self.images.split(BATCH), self.labels.split(BATCH), strict=True):
            optimizer.zero_grad()
            cross_entropy(model(images), labels).backward()
            optimizer.step()
        return model.state_dict()


def main() -> None:
    clients = [rpc.remote(name, Client) for name in CLIENTS]
    model = network()
    steps = Steps(ROUNDS)
    for _ in steps:
        state = model.state_dict()
        found = torch.futures.wait_all([client.rpc_async().train(state) for client in clients])
        model.load_state_dict({name: torch.stack([each[name] for each in found]).mean(0) for name in state})
    report(steps.median)


if __name__ == "__main__":
    run(main, "coordinator", *CLIENTS, start="fork")
