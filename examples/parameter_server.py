"""A parameter server: trainers train one model whose parameters are on a server.

In each step, a trainer fetches the model, computes the loss of a batch of its own digits, and sends the gradients to
the server. With `--mode sync`, the server waits for the gradients of all trainers before it updates the parameters, and
the result equals training in one process. With `--mode async`, each trainer's gradients update the parameters at once.
"""

from __future__ import annotations

import argparse

import torch
from common import Digits, Progress, compare, digits, group, learn, seeded
from torch import nn
from torch.nn.functional import cross_entropy

import telegrad.autograd as autograd
import telegrad.rpc as rpc
from telegrad.optim import DistributedOptimizer

BATCH = 32  # per trainer
RATE = 0.3


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))


class Trainer:
    """A trainer on its own worker, with its shard of the digits."""

    def __init__(self, model: rpc.RRef[nn.Module], share: Digits) -> None:
        self.model = model
        self.share = share

    def help(self, step: int, optimizer: rpc.RRef[DistributedOptimizer]) -> float:
        """Accumulate gradients for the server's next step. Return the loss."""
        with autograd.context() as context:
            loss = self.backward(context, step)
            optimizer.rpc_sync().accumulate(context)
        return loss

    def train(self, steps: int, rate: float, progress: rpc.RRef[Progress]) -> None:
        """Update the parameters independently of the other trainers."""
        optimizer = DistributedOptimizer(torch.optim.SGD, [self.model], lr=rate, hogwild=True)
        for step in range(steps):
            with autograd.context() as context:
                loss = self.backward(context, step)
                optimizer.step(context)
            progress.rpc_async().advance(f"loss {loss:.3f}")

    def backward(self, context: int, step: int) -> float:
        """Compute the gradients of one batch. Return the loss."""
        images, labels = self.share.batch(step, BATCH)
        model = self.model.to_here()  # a copy; backward sends its gradients to the server
        loss = cross_entropy(model(images), labels)
        autograd.backward(context, loss)
        return loss.item()


def train_sync(model: rpc.RRef[nn.Module], trainers: list[rpc.RRef[Trainer]], steps: int) -> None:
    optimizer = DistributedOptimizer(torch.optim.SGD, [model], lr=RATE / len(trainers))  # gradients are summed
    progress = Progress("training, in step,", steps)
    for step in range(steps):
        asked = [trainer.rpc_async().help(step, rpc.RRef(optimizer)) for trainer in trainers]
        losses = torch.futures.wait_all(asked)
        with autograd.context() as context:
            optimizer.step(context)
        progress.advance(f"loss {sum(losses) / len(losses):.3f}")


def train_async(trainers: list[rpc.RRef[Trainer]], steps: int) -> None:
    progress = rpc.RRef(Progress("training, each at its own pace,", steps * len(trainers)))
    rate = RATE / len(trainers)
    torch.futures.wait_all([trainer.rpc_async(timeout=0).train(steps, rate, progress) for trainer in trainers])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=("sync", "async"), default="sync")
    parser.add_argument("--workers", type=int, default=2, help="how many trainers")
    parser.add_argument("--steps", type=int, default=500, help="how many steps each trainer takes part in")
    chosen = parser.parse_args()

    names = [f"trainer{number}" for number in range(chosen.workers)]
    with group("server", *names):
        seen, unseen = digits()
        shares = [seen.share(number, len(names)) for number in range(len(names))]
        model = seeded(0, network)
        reference = rpc.RRef(model)
        trainers = [rpc.remote(name, Trainer, (reference, share)) for name, share in zip(names, shares, strict=True)]
        if chosen.mode == "sync":
            train_sync(reference, trainers, chosen.steps)
        else:
            train_async(trainers, chosen.steps)

    single = seeded(0, network)
    together = (
        [torch.cat(parts) for parts in zip(*(share.batch(step, BATCH) for share in shares), strict=True)]
        for step in range(chosen.steps)
    )
    learn(single, together, RATE, Progress("the same in one process,", chosen.steps))
    compare(model(unseen.images), single(unseen.images), unseen.labels, exact=chosen.mode == "sync")


if __name__ == "__main__":
    main()
