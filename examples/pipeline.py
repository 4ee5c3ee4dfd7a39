"""Pipeline parallelism: a small transformer in three stages on three workers, with micro-batches.

The model learns the text of Python's documentation, character by character. The same model is trained in one process,
and both losses are plotted. The first and the last stage share one parameter: the embedding table is also the weight of
the last layer. `--schedule` selects the pipeline schedule; docs/pipelines.md describes the schedules.
"""

from __future__ import annotations

import argparse
import time
from pydoc_data.topics import topics
from typing import NamedTuple

import torch
from common import Progress, group, seeded
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import telegrad.autograd as autograd
from telegrad.nn import Pipeline, RemoteModule
from telegrad.optim import DistributedOptimizer

WIDTH, HEADS, LENGTH = 64, 4, 64
BATCH = 32
RATE = 3e-3
SAME = 1e-6  # maximum difference between losses that should be equal

TEXT = "\n".join(topics[name] for name in sorted(topics))
CHARACTERS = "".join(sorted(set(TEXT)))


class Block(nn.Module):
    """A transformer block: causal self-attention and a feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attend, self.gather = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layers = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, value: Tensor) -> Tensor:
        size, length, _ = value.shape
        heads = self.attend(self.before(value)).view(size, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        found = scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).reshape(size, length, WIDTH)
        value = value + self.gather(found)
        return value + self.layers(self.between(value))


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(len(CHARACTERS), WIDTH)
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH) / 10)
        self.block = Block()
        nn.init.normal_(self.table.weight, std=0.1)

    def forward(self, characters: Tensor) -> Tensor:
        found: Tensor = self.block(self.table(characters) + self.places)
        return found


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.norm = Block(), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, len(CHARACTERS), bias=False)

    def forward(self, value: Tensor) -> Tensor:
        found: Tensor = self.head(self.norm(self.block(value)))
        return found


STAGES = (First, Block, Last)
WORKERS = ("worker1", "worker2", "trainer")
TABLE, HEAD = "0.table.weight", "2.head.weight"


def loss_of(outputs: Tensor, wanted: Tensor) -> Tensor:
    return cross_entropy(outputs.flatten(0, 1), wanted.flatten())


def batch(step: int, text: Tensor) -> tuple[Tensor, Tensor]:
    """Return sequences of the text, and the next character for each position."""
    starts = torch.randint(len(text) - LENGTH, (BATCH,), generator=torch.Generator().manual_seed(step))
    pieces = text[starts[:, None] + torch.arange(LENGTH + 1)]
    return pieces[:, :-1], pieces[:, 1:]


class Trained(NamedTuple):
    losses: list[float]
    per_second: float  # characters per second


def train(model: Pipeline, text: Tensor, steps: int) -> Trained:
    optimizer = DistributedOptimizer.for_module(torch.optim.Adam, model, lr=RATE)
    progress = Progress(f"training in a pipeline ({model.schedule}),", steps)
    losses = []
    start = time.perf_counter()
    for step in range(steps):
        with autograd.context() as context:
            loss = model.forward_backward(context, *batch(step, text), loss_of)
            optimizer.step(context)
        losses.append(loss.item())
        progress.advance(f"loss {losses[-1]:.3f}")
    return Trained(losses, steps * BATCH * LENGTH / (time.perf_counter() - start))


def train_alone(text: Tensor, steps: int) -> Trained:
    model = nn.Sequential(*(seeded(0, stage) for stage in STAGES))
    model.get_submodule("2.head").weight = model.get_parameter(TABLE)
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    progress = Progress("the same in one process,", steps)
    losses = []
    start = time.perf_counter()
    for step in range(steps):
        inputs, wanted = batch(step, text)
        optimizer.zero_grad()
        loss = loss_of(model(inputs), wanted)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        progress.advance(f"loss {losses[-1]:.3f}")
    return Trained(losses, steps * BATCH * LENGTH / (time.perf_counter() - start))


def write_on(model: Pipeline, text: Tensor, count: int = 60) -> str:
    """Return text of the model, with the most likely character at each position."""
    written = text[:LENGTH]
    with torch.no_grad():
        for _ in range(count):
            written = torch.cat([written, model(written[None, -LENGTH:])[0, -1].argmax()[None]])
    return "".join(CHARACTERS[number] for number in written[LENGTH:])


def draw(ours: list[float], single: list[float], path: str) -> None:
    import matplotlib  # imported here because the workers do not need it

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot(ours, linewidth=4, alpha=0.4, label=f"pipeline on {len(STAGES)} workers")
    axes.plot(single, linewidth=1, color="black", label="one process")
    axes.set(xlabel="step", ylabel="loss per character", title="A transformer learns to write documentation")
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--chunks", type=int, default=8, help="how many micro-batches a batch is split into")
    parser.add_argument("--schedule", choices=("gpipe", "1f1b", "interleaved", "zero-bubble"), default="1f1b")
    parser.add_argument("--picture", default="pipeline_loss.png", help="where to leave the picture of the losses")
    chosen = parser.parse_args()

    number = {character: number for number, character in enumerate(CHARACTERS)}
    text = torch.tensor([number[character] for character in TEXT])
    with group("trainer", "worker1", "worker2"):
        stages = [RemoteModule(worker, seeded, (0, stage)) for worker, stage in zip(WORKERS, STAGES, strict=True)]
        model = Pipeline(stages, chosen.chunks, chosen.schedule, tied=[(TABLE, HEAD)])
        ours = train(model, text, chosen.steps)
        written = write_on(model, text)
    single = train_alone(text, chosen.steps)
    draw(ours.losses, single.losses, chosen.picture)

    apart = max(abs(one - other) for one, other in zip(ours.losses, single.losses, strict=True))
    print()
    print(f"{'characters per second':36}{ours.per_second:8,.0f}")
    print(f"{'... in one process, on one core':36}{single.per_second:8,.0f}")
    print(f"{'largest difference of losses':36}{apart:8.1e}")
    print(f"{'the losses, step by step':36} {chosen.picture}")
    print(f"{'it goes on writing':36} {written!r}")
    assert apart < SAME, f"the losses differ by {apart}"
    assert ours.losses[-1] < ours.losses[0], "it has not learnt"


if __name__ == "__main__":
    main()
