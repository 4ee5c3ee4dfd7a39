"""Clipping by the norm over all workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from telegrad.errors import UsageError
from telegrad.nn.tree import Branch, parameters_of
from telegrad.optim.local import LocalOptimizer
from telegrad.optim.optimizer import DistributedOptimizer
from telegrad.rpc import RRef, current, rpc_async
from telegrad.rpc.together import together


def clip_grad_norm_(
    context_id: int,
    params: DistributedOptimizer | Iterable[RRef[Any]],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale the gradients of a context so that their norm, over all workers, is at most `max_norm`; what it was.

    `params` is an optimizer, for all of its parameters, or references to parameters and modules.

    Raises:
        ContextEnded: there is no such context.
        RuntimeError: with `error_if_nonfinite`, where the norm is infinite or not a number; nothing is scaled.
    """
    by_worker: dict[str, list[RRef[Any]]] = {}
    for reference in _references(params):
        by_worker.setdefault(reference.owner_name(), []).append(reference)

    def on_all(function: Callable[..., Any], argument: float) -> dict[str, Any]:
        return together(by_worker, lambda worker, own: rpc_async(worker, function, (own, context_id, argument)))

    norms = [norm.cpu() for norm in on_all(_norm, norm_type).values() if norm is not None]  # a map may lead elsewhere
    total = torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else torch.tensor(0.0)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"the norm of order {norm_type:g} of the gradients of context {context_id} is {total.item()}, "
            "so they cannot be clipped. Give error_if_nonfinite=False to scale them all the same"
        )
    factor = max_norm / (total.item() + 1e-6)
    if not factor >= 1:
        on_all(_scale, factor)
    return total


def _references(params: Any) -> list[RRef[Any]]:
    """Those whose gradients are clipped."""
    if isinstance(params, DistributedOptimizer):
        return list(params.locals.values())
    given: list[Any] = [params] if isinstance(params, RRef | Tensor | nn.Module) else list(params)
    wrong = next((each for each in given if not isinstance(each, RRef)), None)
    if wrong is not None:
        raise UsageError(
            f"clip_grad_norm_ takes a DistributedOptimizer or references, not {type(wrong).__name__}: "
            "write clip_grad_norm_(context_id, optimizer, max_norm)"
        )
    return given


def _norm(own: list[RRef[Any]], context_id: int, norm_type: float) -> Tensor | None:
    """On the CPU: the host waits for it once."""
    gradients = _gradients(own, context_id)
    return nn.utils.get_total_norm(map(_values, gradients), norm_type).cpu() if gradients else None


def _scale(own: list[RRef[Any]], context_id: int, factor: float) -> None:
    with torch.no_grad():
        for gradient in _gradients(own, context_id):
            gradient.mul_(factor)


def _values(gradient: Tensor) -> Tensor:
    return gradient.detach().coalesce().values() if gradient.is_sparse else gradient.detach()


def _gradients(own: list[RRef[Any]], context_id: int) -> list[Tensor]:
    """The gradients that there are of these parameters, each once."""
    parameters: dict[int, Tensor] = {}
    for reference in own:
        value = reference.local_value()
        if isinstance(value, LocalOptimizer):
            value.gather(context_id)
            found = value.parameters
        else:
            found = [parameter for _, parameter in parameters_of(Branch("", reference))]
        parameters |= {id(parameter): parameter for parameter in found}
    gradients = current.conductor().contexts.find(context_id).gradients.as_dict()
    return [gradients[parameter] for parameter in parameters.values() if parameter in gradients]
