"""Python functions that record the runs of their nodes, and functions that rely on the order of nodes."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from tests.autograd import orders


def leaf(*shape: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*(shape or (3,)), generator=generator, dtype=torch.float64).requires_grad_()


def mix(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.sin() * b


def two(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return a * 2, a + b.tanh()


class Way(NamedTuple):
    """The properties of a function."""

    outputs: int
    materialize: bool
    gives: tuple[bool, ...]  # for each input, True if it gets a gradient
    aside: bool = False  # True if the last output is not differentiable


class Told(torch.autograd.Function):
    """Records the runs of its node, and which gradients are None."""

    @staticmethod
    def forward(ctx: Any, stage: Any, number: int, way: Way, *xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.stage, ctx.number, ctx.way = stage, number, way
        ctx.set_materialize_grads(way.materialize)
        total: Any = sum(xs)
        made = tuple(total * (0.5 + each) for each in range(way.outputs))
        if way.aside:
            ctx.mark_non_differentiable(made[-1])
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        orders.ran(ctx.number)
        ctx.stage.took[ctx.number].append([None if each is None else each.detach().clone() for each in gradients])
        parts = [each * (0.5 + place) for place, each in enumerate(gradients) if each is not None]
        total = sum(parts[1:], parts[0]) if parts else None
        return (None, None, None, *(total if gives else None for gives in ctx.way.gives))


# Recomputation in two nodes, as in pipelines: the node that runs the function anew is newer than the one that needs it


class Ahead(torch.autograd.Function):
    """Runs the function anew in its backward, and gives no gradient."""

    @staticmethod
    def forward(ctx: Any, shared: list[Any], function: Callable[..., Any], number: int, x: torch.Tensor) -> Any:
        ctx.shared, ctx.function, ctx.number = shared, function, number
        ctx.random = torch.get_rng_state()
        ctx.save_for_backward(x)
        return x.new_empty(1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, ...]:
        orders.ran(ctx.number)
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad(), torch.random.fork_rng(devices=[]):
            torch.set_rng_state(ctx.random)
            ctx.shared.append((ctx.function(x), x))
        return None, None, None, None


class Behind(torch.autograd.Function):
    """Needs the results of `Ahead` in its backward."""

    @staticmethod
    def forward(ctx: Any, shared: list[Any], function: Callable[..., Any], number: int, x: torch.Tensor) -> Any:
        ctx.shared, ctx.number = shared, number
        return function(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        orders.ran(ctx.number)
        y, x = ctx.shared.pop()
        torch.autograd.backward(y, gradient)
        return None, None, None, x.grad


class Passing(torch.autograd.Function):
    """Returns its input; its subclasses have a backward function."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()


class Join(torch.autograd.Function):
    """Returns its first input; the second one orders the nodes and gets no gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


def recomputed(function: Callable[..., Any], x: torch.Tensor, numbers: tuple[int, int] = (0, 0)) -> torch.Tensor:
    """Return `function(x)`, and run the function anew in the backward pass."""
    shared: list[Any] = []
    random = torch.get_rng_state()
    y = Behind.apply(shared, function, numbers[0], x)
    after = torch.get_rng_state()
    torch.set_rng_state(random)
    token = Ahead.apply(shared, function, numbers[1], x)
    torch.set_rng_state(after)
    return Join.apply(y, token)
