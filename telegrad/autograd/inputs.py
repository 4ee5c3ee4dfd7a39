"""Gradients of given tensors across workers: `telegrad.autograd.grad`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from telegrad._core import checks
from telegrad._core.calls.compiling import not_compiled
from telegrad._core.calls.futures import Signal
from telegrad.autograd.engine.captures import Capture
from telegrad.autograd.entry_points import check_context_id, conductor
from telegrad.errors import UsageError


@not_compiled
def grad(
    context_id: int,
    outputs: Tensor | Sequence[Tensor],
    inputs: Tensor | Sequence[Tensor],
    grad_outputs: Tensor | Sequence[Tensor | None] | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    allow_unused: bool = False,
    *,
    timeout: float | None = None,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of `outputs` with respect to `inputs`, across all workers in the graph.

    `torch.autograd.grad` covers one worker only. No gradient is accumulated, neither in the context nor in `.grad`.

    Args:
        context_id: the id from `with context() as context_id`.
        outputs: one tensor of this worker, or a list.
        inputs: one tensor of this worker, a leaf or not, or a list.
        grad_outputs: the gradient of each output. None means 1, for an output of one element.
        retain_graph: keep the graph for another pass; default: the value of `create_graph`.
        create_graph: record the pass itself, for gradients of gradients.
        allow_unused: return None for an input on which no output depends, instead of raising.
        timeout: seconds; 0 for no limit, None for the timeout in the options.

    Returns:
        One gradient for each input.

    Raises:
        ContextEnded: the context does not exist.
        RuntimeError: no output depends on one of the inputs.
        CallTimeout: the pass did not end within the timeout.
        PeerLost: a worker that took part died.
        UsageError: an output or an input is not a tensor of this worker that requires a gradient.
        Exception: the error of a backward function on any worker.

    Example:
        >>> from telegrad import autograd
        >>> x = torch.ones(2, requires_grad=True)
        >>> with autograd.context() as context_id:
        ...     y = rpc.rpc_sync("worker1", torch.mul, (x, x))
        ...     (slope,) = autograd.grad(context_id, y.sum(), x, create_graph=True)
        ...     autograd.grad(context_id, slope.sum(), x)
        (tensor([2., 2.]),)
    """
    check_context_id(context_id)
    if retain_graph is not None:
        checks.flag("retain_graph", retain_graph)
    checks.flag("create_graph", create_graph)
    checks.flag("allow_unused", allow_unused)
    if timeout is not None:
        checks.seconds("timeout", timeout)
    roots, wanted = _tensors("outputs", outputs), _tensors("inputs", inputs)
    capture = Capture(_seeds(roots, grad_outputs), wanted)
    here = conductor()
    driven = here.begin(
        here.contexts.find(context_id),
        {here.name: roots},
        retain=create_graph if retain_graph is None else retain_graph,
        create=create_graph,
        fast=False,
        timeout=timeout,
        keeps=(roots, capture),
        outcome=Signal(),
        capture=capture,
    )
    here.wait(driven)
    gradients = capture.gradients()
    for number, gradient in enumerate(gradients):
        if gradient is None and not allow_unused:
            raise RuntimeError(
                f"inputs[{number}] appears not to have been used in the graph of the outputs, on any worker. Set "
                "allow_unused=True to be given None for it"
            )
    return tuple(gradients)


def _tensors(name: str, given: Any) -> list[Tensor]:
    several = list(given) if isinstance(given, (list, tuple)) else [given]
    if not several:
        raise UsageError(f"{name} is empty: give at least one tensor")
    for each in several:
        if not isinstance(each, Tensor):
            raise UsageError(
                f"{name} must be tensors of this worker, not {checks.short_repr(each)}. "
                "Write telegrad.autograd.grad(context_id, outputs, inputs)"
            )
        if not each.requires_grad:
            raise UsageError(f"one of the {name} does not require a gradient and has no graph")
        if each.is_inference():
            raise UsageError(f"one of the {name} was made in torch.inference_mode(), and so is in no graph: clone it")
    return several


def _seeds(roots: Sequence[Tensor], given: Any) -> list[Tensor]:
    seeds = list(given) if isinstance(given, (list, tuple)) else [given] * (1 if given is not None else len(roots))
    if len(seeds) != len(roots):
        raise UsageError(f"grad_outputs has {len(seeds)} gradients for {len(roots)} outputs: give one for each")
    return [_seed(root, seed) for root, seed in zip(roots, seeds, strict=True)]


def _seed(root: Tensor, given: Any) -> Tensor:
    if given is None:
        if root.numel() != 1 or root.is_complex():
            raise UsageError(
                f"an output of shape {tuple(root.shape)} and type {root.dtype} needs its gradient in grad_outputs: "
                "only that of a real scalar is known to be 1"
            )
        return torch.ones_like(root)
    if not isinstance(given, Tensor) or given.shape != root.shape:
        what = tuple(given.shape) if isinstance(given, Tensor) else checks.short_repr(given)
        raise UsageError(f"in grad_outputs is {what} for an output of shape {tuple(root.shape)}: give its gradient")
    return given
