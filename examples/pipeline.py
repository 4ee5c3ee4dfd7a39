"""A network in three stages on three workers, fed with micro-batches so that all of them work at once.

It learns to read digits, beside the same network in one process, and leaves a picture of how both losses fell. With
`--schedule 1f1b` a stage keeps the activations of at most three micro-batches, with `--schedule gpipe` those of all.
"""

from __future__ import annotations

import argparse

import torch
from common import Digits, Progress, compare, digits, group, learn, seeded
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import telegrad.autograd as autograd
from telegrad.nn import Pipeline, RemoteModule
from telegrad.optim import DistributedOptimizer

BATCH = 128
RATE = 0.2


def first_stage() -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 16, 3, padding=1), nn.ReLU())


def second_stage() -> nn.Module:
    return nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))


def third_stage() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10))


STAGES = (first_stage, second_stage, third_stage)


def train(model: Pipeline, seen: Digits, steps: int) -> list[float]:
    optimizer = DistributedOptimizer.for_module(torch.optim.SGD, model, lr=RATE)
    progress = Progress(f"training in a pipeline ({model.schedule}),", steps)
    losses = []
    for step in range(steps):
        images, labels = seen.batch(step, BATCH)
        with autograd.context() as context:
            loss = model.forward_backward(context, images, labels, cross_entropy)
            optimizer.step(context)
        losses.append(loss.item())
        progress.advance(f"loss {losses[-1]:.3f}")
    return losses


def draw(losses: list[float], single: list[float], path: str) -> None:
    import matplotlib  # here, since the workers need not import it

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    axes.semilogy(losses, linewidth=4, alpha=0.4, label=f"pipeline on {len(STAGES)} workers")
    axes.semilogy(single, linewidth=1, color="black", label="one process")
    axes.set(xlabel="step", ylabel="loss", title="A network learns to read digits")
    axes.legend()
    figure.savefig(path, dpi=120)


def outputs_of(model: nn.Module, images: Tensor) -> Tensor:
    with torch.no_grad():
        outputs: Tensor = model(images)
    return outputs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--chunks", type=int, default=8, help="how many micro-batches a batch is split into")
    parser.add_argument("--schedule", choices=("1f1b", "gpipe"), default="1f1b")
    parser.add_argument("--picture", default="pipeline_loss.png", help="where to leave the picture of the losses")
    chosen = parser.parse_args()

    seen, unseen = digits()
    workers = [f"worker{number}" for number in range(1, len(STAGES) + 1)]
    with group("trainer", *workers):
        stages = [RemoteModule(worker, seeded, (0, stage)) for worker, stage in zip(workers, STAGES, strict=True)]
        model = Pipeline(stages, chosen.chunks, chosen.schedule)
        losses = train(model, seen, chosen.steps)
        outputs = outputs_of(model, unseen.images)

    whole = nn.Sequential(*(seeded(0, stage) for stage in STAGES))
    batches = (seen.batch(step, BATCH) for step in range(chosen.steps))
    single = learn(whole, batches, RATE, Progress("the same in one process,", chosen.steps))
    draw(losses, single, chosen.picture)
    compare(outputs, outputs_of(whole, unseen.images), unseen.labels)
    print(f"{'the losses, step by step':36} {chosen.picture}")


if __name__ == "__main__":
    main()
