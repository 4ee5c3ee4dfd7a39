"""Whatever a stage is and gives, a pipeline trains it as one process would."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

import telegrad.autograd as autograd
from telegrad.nn import Pipeline, RemoteModule
from telegrad.nn.schedule import SCHEDULES
from telegrad.optim import DistributedOptimizer

pytestmark = pytest.mark.usefixtures("here")

WORKERS = ["w1", "w2", "w0"]
WIDTH = 6


def filled(module: nn.Module, seed: int) -> nn.Module:
    """The same wherever it is made."""
    chance = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.uniform_(-0.5, 0.5, generator=chance)
    return module.double()


class Pair(nn.Module):
    """Gives a tuple, of which one tensor needs no gradient, and a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor) -> tuple[Any, ...]:
        return self.one(value), {"other": self.other(value).tanh(), "mask": value > 0, "scale": 0.5}


class Joined(nn.Module):
    """Takes that, and leaves a part of it unused."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: tuple[Any, ...]) -> Tensor:
        one, rest = value
        return self.last(one * rest["mask"] + rest["scale"]) if self.training else self.last(one)


class Inplace(nn.Module):
    """Changes what comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        return self.layer(torch.relu_(value))


class Recomputed(nn.Module):
    """Keeps no activations."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.reentrant = reentrant

    def forward(self, value: Tensor) -> Tensor:
        found = checkpoint(self.layers, value, use_reentrant=self.reentrant)
        assert isinstance(found, Tensor)
        return found


class Calling(nn.Module):
    """Has a part of it on another worker."""

    def __init__(self, worker: str, seed: int) -> None:
        super().__init__()
        self.inner = RemoteModule(worker, filled_linear, (seed,))
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        found = self.layer(self.inner(value))
        assert isinstance(found, Tensor)
        return found


class Hooked(nn.Module):
    """Has hooks that change gradients: of a leaf, of a tensor on the way, and of the module."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.second.weight.register_hook(lambda gradient: gradient * 3)

    def forward(self, value: Tensor) -> Tensor:
        middle = self.first(value)
        if middle.requires_grad:
            middle.register_hook(lambda gradient: gradient * 2)
        found = self.second(middle)
        assert isinstance(found, Tensor)
        return found


class Tied(nn.Module):
    """Uses one weight twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        found = self.layer(torch.sin(self.layer(value)))
        assert isinstance(found, Tensor)
        return found


class Same(nn.Module):
    """Gives what it got."""

    def forward(self, value: Tensor) -> Tensor:
        return value


class Frozen(nn.Module):
    """Has weights that are not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, value: Tensor) -> Tensor:
        found = self.layer(value)
        assert isinstance(found, Tensor)
        return found


class Squared(torch.autograd.Function):
    """A function of the user's."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(value, weight)
        return value * weight * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        value, weight = ctx.saved_tensors
        return gradient * weight * weight, (gradient * value * 2 * weight).sum(0)


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH))

    def forward(self, value: Tensor) -> Tensor:
        found = Squared.apply(value, self.weight)
        assert isinstance(found, Tensor)
        return found


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def filled_linear(seed: int) -> nn.Module:
    return filled(nn.Linear(WIDTH, WIDTH), seed)


STAGES: dict[str, list[Callable[[], nn.Module]]] = {
    "plain": [plain],
    "several tensors": [Pair, Joined],
    "changes in place": [Inplace],
    "recomputed": [lambda: Recomputed(False)],
    "recomputed, reentrant": [lambda: Recomputed(True)],
    "hooks": [Hooked],
    "a weight used twice": [Tied],
    "nothing": [Same],
    "frozen": [Frozen],
    "a function in Python": [Own],
}


def made(kind: str, part: int, seed: int) -> nn.Module:
    return filled(STAGES[kind][part](), seed)


def forms(seed: int, count: int) -> list[tuple[str, int, int]]:
    """A random model: the kind of each stage, which part of it, and its seed."""
    chance = random.Random(seed)
    found: list[tuple[str, int, int]] = []
    while len(found) < count:
        kind = chance.choice(list(STAGES))
        if len(found) + len(STAGES[kind]) <= count:
            found += [(kind, part, 100 * seed + len(found) + part) for part in range(len(STAGES[kind]))]
    return found


def trains_as_one_process(
    model: list[tuple[str, int, int]], workers: list[str], schedule: str, chunks: int, optimizer: Any, steps: int
) -> None:
    whole = nn.Sequential(*(made(*form) for form in model))
    remote = [RemoteModule(worker, made, form) for worker, form in zip(workers, model, strict=True)]
    pipeline = Pipeline(remote, chunks=chunks, schedule=schedule)
    if not any(parameter.requires_grad for parameter in whole.parameters()):
        return
    ours = DistributedOptimizer.for_module(optimizer, pipeline, lr=0.05)
    theirs = optimizer(whole.parameters(), lr=0.05)
    torch.manual_seed(0)
    for _ in range(steps):
        inputs, targets = torch.randn(16, WIDTH).double(), torch.randn(16, WIDTH).double()
        with autograd.context() as context:
            loss = pipeline.forward_backward(context, inputs, targets, mse_loss)
            ours.step(context)
        theirs.zero_grad()
        wanted = mse_loss(whole(inputs.clone()), targets)
        wanted.backward()
        theirs.step()
        assert torch.allclose(loss, wanted.detach(), rtol=1e-8), (model, schedule)
    for (name, one), other in zip(pipeline.state_dict().items(), whole.state_dict().values(), strict=True):
        assert torch.allclose(one, other, rtol=1e-7, atol=1e-9), (name, model, schedule)


def workers_of(count: int, schedule: str) -> list[str]:
    """Some of which have several stages; in turn where the schedule wants that."""
    own = WORKERS[: 2 if count % 2 == 0 else 3] if schedule == "interleaved" and count % len(WORKERS) else WORKERS
    return (own * count)[:count]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kind", STAGES)
def test_each_kind_of_stage_gives_the_numbers_of_one_process(kind: str, schedule: str) -> None:
    own = [(kind, part, part) for part in range(len(STAGES[kind]))]
    model = [("plain", 0, 7), *own, ("plain", 0, 8)]
    trains_as_one_process(model, workers_of(len(model), schedule), schedule, 4, torch.optim.SGD, 3)
