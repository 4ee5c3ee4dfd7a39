"""Split learning: a client keeps its images, its labels and both ends of the model; the middle is a server's."""

from __future__ import annotations

import torch
from common import Steps, report, run
from library import DistributedOptimizer, RemoteModule, autograd, rpc
from torch import nn
from torch.nn.functional import cross_entropy

STEPS, BATCH = 60, 32


def middle() -> nn.Sequential:
    return nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU())


def main() -> None:
    lower, upper = nn.Sequential(nn.Linear(784, 128), nn.ReLU()), nn.Linear(128, 10)
    there = RemoteModule("server/cpu", nn.Sequential, tuple(middle()))
    own = [rpc.RRef(parameter) for part in (lower, upper) for parameter in part.parameters()]
    optimizer = DistributedOptimizer(torch.optim.Adam, [*own, *there.remote_parameters()], lr=1e-3)
    images, labels = torch.randn(BATCH, 784), torch.randint(10, (BATCH,))
    steps = Steps(STEPS)
    for _ in steps:
        with autograd.context() as context:
            loss = cross_entropy(upper(there(lower(images))), labels)
            autograd.backward(context, [loss])
            optimizer.step(context)
    report(steps.median)


if __name__ == "__main__":
    run(main, "client", "server")
