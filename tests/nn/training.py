"""Train a pipeline, and the same model in one process."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import telegrad.autograd as autograd
from telegrad.nn import Pipeline
from telegrad.optim import DistributedOptimizer


def backward(pipeline: Pipeline, *args: Any, **options: Any) -> None:
    """Run a batch forward and backward in a context of its own."""
    with autograd.context() as context:
        pipeline.forward_backward(context, *args, **options)


def train_both(
    pipeline: Pipeline, whole: nn.Module, optimizer: Any, batches: Iterable[tuple[Any, Tensor]], **options: Any
) -> DistributedOptimizer:
    """Train both; fail if a batch has another loss in one process than over workers."""
    ours = DistributedOptimizer.for_module(optimizer, pipeline, **options)
    theirs = optimizer(whole.parameters(), **options)
    for inputs, targets in batches:
        with autograd.context() as context:
            loss = pipeline.forward_backward(context, inputs, targets, mse_loss)
            ours.step(context)
        theirs.zero_grad()
        wanted = mse_loss(whole(**inputs) if isinstance(inputs, dict) else whole(inputs.clone()), targets)
        wanted.backward()
        theirs.step()
        assert torch.allclose(loss, wanted.detach(), rtol=1e-8), pipeline
        assert not loss.requires_grad
    return ours


def filled(module: nn.Module, seed: int) -> Any:
    """Fill a module with values that depend on the seed alone; agents of one process share torch's own generator."""
    chance = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.uniform_(-0.5, 0.5, generator=chance)
    return module.double()


def batch(step: int) -> tuple[Tensor, Tensor]:
    chance = torch.Generator().manual_seed(step)
    return tuple(torch.randn(12, 4, generator=chance).double() for _ in range(2))  # type: ignore[return-value]


def train(model: nn.Module, optimizer: DistributedOptimizer, steps: range) -> list[float]:
    """Train a distributed model with the batches of these steps; return the losses."""
    losses = []
    for step in steps:
        inputs, targets = batch(step)
        with autograd.context() as context_id:
            if isinstance(model, Pipeline):
                loss = model.forward_backward(context_id, inputs, targets, mse_loss)
            else:
                loss = mse_loss(model(inputs), targets)
                autograd.backward(context_id, loss)
            optimizer.step(context_id)
        losses.append(loss.item())
    return losses


def train_alone(model: nn.Module, steps: int) -> list[float]:
    """Train in one process; return the losses."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    losses = []
    for step in range(steps):
        inputs, targets = batch(step)
        optimizer.zero_grad()
        loss = mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
