"""Hybrid parallelism: replicas of the dense part on trainers, and one large embedding table on a server.

Each pixel of a digit is one of 64 tokens, chosen by its position and brightness. The trainers look up the embeddings on
the server and send sparse gradients back. DistributedDataParallel replicates the dense part: it averages the gradients
over the trainers and stores them in the autograd context.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed
from common import Digits, Progress, compare, digits, free_port, group, learn, seeded
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import telegrad.autograd as autograd
import telegrad.rpc as rpc
from telegrad.nn import RemoteModule
from telegrad.optim import DistributedOptimizer

BATCH = 64  # per trainer
RATE = 2.0  # large, because each pixel contributes little to the mean
LEVELS = 17  # of brightness of a pixel
WIDTH = 32


def table() -> nn.Module:
    return nn.EmbeddingBag(64 * LEVELS, WIDTH, mode="mean", sparse=True)


def dense() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, 10))


def tokens_of(images: Tensor) -> Tensor:
    return (images * (LEVELS - 1)).long() + torch.arange(64) * LEVELS


class Trainer:
    """A trainer of the shared model, with its own shard of the data."""

    def __init__(self, rank: int, size: int, port: int, embedding: RemoteModule, share: Digits) -> None:
        meeting = f"tcp://localhost:{port}"
        torch.distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size)
        self.embedding = embedding
        self.model = DistributedDataParallel(seeded(1, dense))
        parameters = [rpc.RRef(parameter) for parameter in self.model.parameters()]
        self.optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=RATE)
        self.share = share

    def step(self, number: int, table_optimizer: rpc.RRef[DistributedOptimizer]) -> float:
        """Update the dense part, and accumulate gradients of the table on its owner. Return the loss."""
        images, labels = self.share.batch(number, BATCH)
        with autograd.context() as context:
            loss = cross_entropy(self.model(self.embedding(tokens_of(images))), labels)
            autograd.backward(context, loss)
            self.optimizer.step(context)
            table_optimizer.rpc_sync().accumulate(context)
        return loss.item()

    def outputs(self, images: Tensor) -> Tensor:
        with torch.no_grad():
            found: Tensor = self.model.module(self.embedding(tokens_of(images)))
        return found

    def leave(self) -> None:
        torch.distributed.destroy_process_group()


def train(embedding: RemoteModule, trainers: list[rpc.RRef[Trainer]], steps: int) -> None:
    """In each step, update all dense parts at once, and then the table with the gradients of all trainers."""
    optimizer = DistributedOptimizer.for_module(torch.optim.SGD, embedding, lr=RATE / len(trainers))
    reference = rpc.RRef(optimizer)
    progress = Progress(f"{len(trainers)} trainers and a table,", steps)
    for number in range(steps):
        losses = torch.futures.wait_all([trainer.rpc_async().step(number, reference) for trainer in trainers])
        with autograd.context() as context:
            optimizer.step(context)
        progress.advance(f"loss {sum(losses) / len(losses):.3f}")


class Whole(nn.Module):
    """The same model in one process."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = seeded(0, table)
        self.dense = seeded(1, dense)

    def forward(self, images: Tensor) -> Tensor:
        outputs: Tensor = self.dense(self.embedding(tokens_of(images)))
        return outputs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2, help="how many trainers")
    parser.add_argument("--steps", type=int, default=400)
    chosen = parser.parse_args()

    names = [f"trainer{number}" for number in range(chosen.workers)]
    with group("server", *names):
        seen, unseen = digits()
        shares = [seen.share(number, len(names)) for number in range(len(names))]
        embedding = RemoteModule("server", seeded, (0, table))
        port = free_port()
        trainers = [
            rpc.remote(name, Trainer, (rank, len(names), port, embedding, share))
            for rank, (name, share) in enumerate(zip(names, shares, strict=True))
        ]
        train(embedding, trainers, chosen.steps)
        outputs = trainers[0].rpc_sync().outputs(unseen.images)
        torch.futures.wait_all([trainer.rpc_async().leave() for trainer in trainers])

    single = Whole()
    together = (
        [torch.cat(parts) for parts in zip(*(share.batch(step, BATCH) for share in shares), strict=True)]
        for step in range(chosen.steps)
    )
    learn(single, together, RATE, Progress("the same in one process,", chosen.steps))
    with torch.no_grad():
        compare(outputs, single(unseen.images), unseen.labels)


if __name__ == "__main__":
    main()
