"""Train a model in two parts on two machines that do not share their data.

The images and the first part of the model live on worker1, the labels and the second part on worker2. The training
program holds only references: the activations are sent directly from worker1 to worker2.
"""

from __future__ import annotations

import argparse

import torch
from common import Progress, compare, digits, group, learn, seeded
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import telegrad.autograd as autograd
import telegrad.rpc as rpc
from telegrad.optim import DistributedOptimizer

BATCH = 64
RATE = 0.3


class Eye(nn.Module):
    """The first part of the model: from images to features."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 8, 3, padding=1)
        self.pool = nn.MaxPool2d(2)

    def forward(self, images: Tensor) -> Tensor:
        seen: Tensor = self.convolution(images.reshape(-1, 1, 8, 8)).relu()
        return self.pool(seen).flatten(1)


class Reader(nn.Module):
    """The second part of the model: from features to classes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(128, 32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, seen: Tensor) -> Tensor:
        outputs: Tensor = self.layers(seen)
        return outputs


class Model(nn.Module):
    """The whole model, with each part on its own machine."""

    def __init__(self) -> None:
        super().__init__()
        self.eye = rpc.remote("worker1", seeded, (1, Eye))
        self.reader = rpc.remote("worker2", seeded, (2, Reader))

    def forward(self, images: rpc.RRef[Tensor]) -> rpc.RRef[Tensor]:
        seen = rpc.remote("worker1", run, (self.eye, images))
        return rpc.remote("worker2", run, (self.reader, seen))


def run(module: rpc.RRef[nn.Module], value: Tensor) -> Tensor:
    """Run a module of this worker. A reference in place of `value` is fetched from its owner first."""
    outputs: Tensor = module.local_value()(value)
    return outputs


def images_to_learn() -> Tensor:
    return digits()[0].images


def labels_to_learn() -> Tensor:
    return digits()[0].labels


def train(model: Model, steps: int) -> None:
    images = rpc.remote("worker1", images_to_learn)
    labels = rpc.remote("worker2", labels_to_learn)
    optimizer = DistributedOptimizer.for_module(torch.optim.SGD, model, lr=RATE)
    count = labels.numel().to_here()
    progress = Progress("training on two machines,", steps)
    for step in range(steps):
        places = torch.arange(step * BATCH, (step + 1) * BATCH) % count
        with autograd.context() as context:
            outputs = model(images[places])
            loss = rpc.remote("worker2", cross_entropy, (outputs, labels[places]))
            autograd.backward(context, loss)
            optimizer.step(context)
        progress.advance(f"loss {loss.to_here().item():.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    chosen = parser.parse_args()

    seen, unseen = digits()
    with group("trainer", "worker1", "worker2"):
        model = Model()
        train(model, chosen.steps)
        outputs = model(rpc.RRef(unseen.images)).to_here()

    single = nn.Sequential(seeded(1, Eye), seeded(2, Reader))
    batches = (seen.batch(step, BATCH) for step in range(chosen.steps))
    learn(single, batches, RATE, Progress("the same in one process,", chosen.steps))
    compare(outputs, single(unseen.images), unseen.labels)


if __name__ == "__main__":
    main()
