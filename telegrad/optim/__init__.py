"""Optimizers for parameters on several workers: `telegrad.optim`."""

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from telegrad._core import checks
from telegrad._core.calls.call_names import known_as
from telegrad._core.modules.module_tree import RemotePart, parameters_of
from telegrad._core.pickling.remote_text import folded
from telegrad._core.rpc.joint_calls import call_all
from telegrad._core.rpc.remote_calls import rpc_async
from telegrad._core.rpc.rref import RRef
from telegrad._core.worker import current
from telegrad.errors import UsageError
from telegrad.optim.fused_step import check_norms, limited
from telegrad.optim.optimizer import DistributedOptimizer
from telegrad.optim.owner import LocalOptimizer, norm_of, scale

__all__ = ["DistributedOptimizer", "clip_grad_norm_"]


@folded
def clip_grad_norm_(
    context_id: int,
    params: DistributedOptimizer | Iterable[RRef[Any]],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale the gradients of a context to a norm, over all workers, of at most `max_norm`.

    Args:
        context_id: the id from `with context() as context_id`.
        params: an optimizer, for all of its parameters, or references to parameters and modules.
        max_norm: the largest norm.
        norm_type: the order of the norm; 2 is the Euclidean norm.
        error_if_nonfinite: raise if the norm is infinite or not a number.

    Returns:
        The norm before the scaling.

    Raises:
        ContextEnded: the context does not exist.
        RuntimeError: the norm is infinite or not a number, and `error_if_nonfinite` is set; nothing is scaled.

    Example:
        >>> from telegrad import autograd, optim
        >>> layer = telegrad.nn.RemoteModule("worker1", nn.Linear, (4, 1))
        >>> with autograd.context() as context_id:
        ...     autograd.backward(context_id, layer(torch.ones(1, 4)).sum())
        ...     optim.clip_grad_norm_(context_id, layer.remote_parameters(), max_norm=1.0)
        tensor(2.2361)
    """
    checks.context_id(context_id, "clip_grad_norm_")
    check_norms(max_norm, norm_type, error_if_nonfinite)
    by_worker: dict[str, list[RRef[Any]]] = {}
    for reference in _references(params):
        by_worker.setdefault(reference.owner_name(), []).append(reference)

    def on_all(function: Callable[..., Any], argument: float) -> dict[str, Any]:
        given = context_id, function, argument
        return call_all(by_worker, lambda worker, own: rpc_async(worker, _with_gradients, (own, *given)))

    total, factor = limited(on_all(norm_of, norm_type).values(), max_norm, norm_type, error_if_nonfinite, context_id)
    if factor != 1:
        on_all(scale, factor)
    return total


def _references(params: Any) -> list[RRef[Any]]:
    """Return references to the parameters, modules or optimizer parts whose gradients are clipped."""
    if isinstance(params, DistributedOptimizer):
        return list(params.locals.values())
    one = isinstance(params, RRef | Tensor | nn.Module)
    given: list[Any] = [params] if one else checks.several("params", params, "an optimizer, or a list of references")
    wrong = next((each for each in given if not isinstance(each, RRef)), None)
    if wrong is not None:
        raise UsageError(
            f"clip_grad_norm_ takes a DistributedOptimizer or references (params), not {checks.short_repr(wrong)}: "
            "write clip_grad_norm_(context_id, optimizer, max_norm)"
        )
    return given


@known_as("clip_grad_norm_")
def _with_gradients(own: list[RRef[Any]], context_id: int, function: Callable[..., Any], argument: float) -> Any:
    """Call a function with the existing gradients of these parameters, each once, and an argument."""
    parameters: dict[int, Tensor] = {}
    for reference in own:
        value = reference.local_value()
        if isinstance(value, LocalOptimizer):
            value.gather(context_id)
            found = value.parameters
        else:
            found = [parameter for _, parameter in parameters_of(RemotePart("", reference))]
        parameters |= {id(parameter): parameter for parameter in found}
    gradients = current.conductor().contexts.find(context_id).gradients.as_dict()
    return function([gradients[each] for each in parameters.values() if each in gradients], argument)
