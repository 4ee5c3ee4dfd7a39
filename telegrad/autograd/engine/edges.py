"""Torch's graph: the edge at which a tensor's gradient enters, the nodes behind, and a call of the engine."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from telegrad.errors import UsageError

_ENGINE: Any = torch._C._ImperativeEngine()  # not the one of `guard`


def edge_of(tensor: Tensor) -> GradientEdge:
    """Return the edge at which the gradient of a tensor enters."""
    if tensor.layout is not torch.strided:  # torch would make a view, and only dense tensors have views
        with torch.enable_grad():
            token = tensor.clone().grad_fn
        assert token is not None
        node, number = token.next_functions[0]
        assert node is not None
        return GradientEdge(node, number, token)
    made_by = tensor.grad_fn
    if made_by is None or isinstance(made_by, torch._C._FunctionBase):
        return get_gradient_edge(tensor)
    return GradientEdge(made_by, tensor.output_nr)


def nodes_behind(starts: Iterable[Any], stop: Iterable[Any] = ()) -> Iterator[Any]:
    """Yield the nodes of the graph behind `starts`, each once, except `stop` and the nodes that only these lead to."""
    stack, seen = [*starts], {None, *stop}
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            yield node
            stack += [following for following, _ in node.next_functions]


def device_of(edge: GradientEdge | Tensor) -> torch.device:
    """Return the device on which the gradient of an edge is expected."""
    if isinstance(edge, Tensor):
        return edge.device
    variable: Any = getattr(edge.node, "variable", None)
    found: torch.device = (edge.node._input_metadata[edge.output_nr] if variable is None else variable).device
    return found


def run_backward(
    roots: Sequence[GradientEdge], gradients: Sequence[Tensor], wanted: Sequence[Any], retain: bool, create: bool
) -> Sequence[Tensor | None]:
    """Return the result of `torch.autograd.grad`, without its checks of user arguments."""
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")  # another thread may be importing it
    if getattr(compiled, "compiled_autograd_enabled", False):
        raise UsageError(
            "a backward pass over several workers cannot be compiled: begin it outside compiled autograd "
            "(torch._dynamo.config.compiled_autograd)"
        )
    given: Sequence[Tensor | None] = _ENGINE.run_backward(
        tuple(roots), tuple(gradients), retain, create, tuple(wanted), True, accumulate_grad=False
    )
    return given
