"""Trainers keep their dense layers alike by DistributedDataParallel, and look up embeddings on a server."""

from __future__ import annotations

import statistics

import torch
import torch.distributed as dist
from common import Steps, free_port, report, run
from library import DistributedOptimizer, RemoteModule, autograd, rpc
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

STEPS, BATCH, BAG = 40, 32, 8
ROWS, WIDTH = 10_000, 32
TRAINERS = ("trainer1", "trainer2")


class Hybrid(nn.Module):
    def __init__(self, table: RemoteModule) -> None:
        super().__init__()
        self.table = table
        self.dense = DistributedDataParallel(nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, 10)))

    def forward(self, indices: Tensor, offsets: Tensor) -> Tensor:
        outputs: Tensor = self.dense(self.table.forward(indices, offsets))
        return outputs


def train(table: RemoteModule, rank: int, port: int) -> float:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=len(TRAINERS))
    model = Hybrid(table)
    parameters = table.remote_parameters() + [rpc.RRef(parameter) for parameter in model.dense.parameters()]
    optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=0.05)
    indices, offsets = torch.randint(ROWS, (BATCH * BAG,)), torch.arange(0, BATCH * BAG, BAG)
    labels = torch.randint(10, (BATCH,))
    steps = Steps(STEPS)
    for _ in steps:
        with autograd.context() as context:
            loss = cross_entropy(model(indices, offsets), labels)
            autograd.backward(context, [loss])
            optimizer.step(context)
    dist.destroy_process_group()
    return steps.median


def main() -> None:
    table = RemoteModule("server", nn.EmbeddingBag, (ROWS, WIDTH), {"mode": "sum"})
    port = free_port()
    trained = [rpc.rpc_async(name, train, (table, rank, port), timeout=0) for rank, name in enumerate(TRAINERS)]
    report(statistics.mean(torch.futures.wait_all(trained)))


if __name__ == "__main__":
    run(main, "server", *TRAINERS, start="fork")
