"""A recurrent network on two workers learns English, character by character, from a chapter of Python's manual.

The embedding table and the decoder are on a server, the LSTM on the trainer. Gradients are clipped by their norm over
both workers, and a scheduler of torch.optim sets the learning rate on both.
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Callable
from pydoc_data.topics import topics

import torch
from common import SAME, Progress, group, seeded
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR

import telegrad.autograd as autograd
from telegrad.nn import RemoteModule
from telegrad.optim import DistributedOptimizer, clip_grad_norm_

TEXT = topics["types"]
CHARACTERS = sorted(set(TEXT))
WIDTH = 32  # of the embedding
HIDDEN = 96
ROWS = 16  # of text in a batch
LENGTH = 32  # characters per row and step
RATE = 0.01
NORM = 0.5

State = tuple[Tensor, Tensor] | None
Step = Callable[..., tuple[float, State]]


class Writer(nn.Module):
    """Predict the next character. The embedding and the decoder can be local or remote modules."""

    def __init__(self, embedding: nn.Module, decoder: nn.Module) -> None:
        super().__init__()
        self.embedding = embedding
        self.lstm = seeded(1, nn.LSTM, WIDTH, HIDDEN)
        self.decoder = decoder

    def forward(self, characters: Tensor, state: State) -> tuple[Tensor, State]:
        hidden, state = self.lstm(self.embedding(characters), state)
        return self.decoder(hidden), tuple(each.detach() for each in state)


def loss_of(model: Writer, part: Tensor, state: State) -> tuple[Tensor, State]:
    outputs, state = model(part[:-1], state)
    return cross_entropy(outputs.flatten(0, 1), part[1:].flatten()), state


def distributed_step(model: Writer, optimizer: DistributedOptimizer, part: Tensor, state: State) -> tuple[float, State]:
    with autograd.context() as context:
        loss, state = loss_of(model, part, state)
        autograd.backward(context, loss)
        clip_grad_norm_(context, optimizer, NORM)
        optimizer.step(context)
    return loss.item(), state


def local_step(model: Writer, optimizer: torch.optim.Optimizer, part: Tensor, state: State) -> tuple[float, State]:
    loss, state = loss_of(model, part, state)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), NORM)
    optimizer.step()
    return loss.item(), state


def train(model: Writer, optimizer: torch.optim.Optimizer, step: Step, steps: int, what: str) -> list[float]:
    rows = torch.tensor([CHARACTERS.index(character) for character in TEXT])
    rows = rows[: len(rows) // ROWS * ROWS].reshape(ROWS, -1).T
    scheduler = CosineAnnealingLR(optimizer, steps)
    progress = Progress(what, steps)
    losses = []
    state = None
    for number in range(steps):
        start = number * LENGTH % (len(rows) - LENGTH)
        loss, state = step(model, optimizer, rows[start : start + LENGTH + 1], state)
        scheduler.step()
        losses.append(loss)
        progress.advance(f"loss {loss:.3f}")
    return losses


def write(model: Writer, length: int) -> str:
    """Return text that the model generates."""
    text = "The "
    state = None
    last = torch.tensor([[CHARACTERS.index(character)] for character in text])
    chance = torch.Generator().manual_seed(0)
    for _ in range(length):
        outputs, state = model(last, state)
        last = torch.multinomial((outputs[-1] / 0.5).softmax(1), 1, generator=chance)
        text += CHARACTERS[last.item()]
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    chosen = parser.parse_args()

    embedding = (0, nn.Embedding, len(CHARACTERS), WIDTH)
    decoder = (2, nn.Linear, HIDDEN, len(CHARACTERS))
    with group("trainer", "server"):
        model = Writer(RemoteModule("server", seeded, embedding), RemoteModule("server", seeded, decoder))
        optimizer = DistributedOptimizer.for_module(torch.optim.Adam, model, lr=RATE)
        losses = train(model, optimizer, distributed_step, chosen.steps, "training on two workers,")
        with torch.no_grad():
            written = write(model, 300)

    model = Writer(seeded(*embedding), seeded(*decoder))
    adam = torch.optim.Adam(model.parameters(), lr=RATE)
    single = train(model, adam, local_step, chosen.steps, "the same in one process,")

    print("\nIt writes:\n")
    print(textwrap.indent(textwrap.fill(" ".join(written.split()), 80), "    "))
    print()
    print(f"{'loss per character, at first':36}{losses[0]:8.3f}")
    print(f"{'... in the end':36}{losses[-1]:8.3f}")
    print(f"{'... of the same, in one process':36}{single[-1]:8.3f}")
    assert losses[-1] < 0.75 * losses[0], "it has not learnt"
    assert abs(losses[-1] - single[-1]) < SAME


if __name__ == "__main__":
    main()
