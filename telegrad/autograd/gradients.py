"""Gradients in one process: the edges of torch's graph at which they enter, and the sums of one context.

The sums are separate from `.grad`.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from telegrad.errors import UsageError

# Torch's engine itself, and not the one by which `guard` replaces it: that one refuses calls whose results lack
# gradients of other workers, as the calls of a pass do.
_ENGINE: Any = torch._C._ImperativeEngine()


def edge_of(tensor: Tensor) -> GradientEdge:
    """Return the edge at which the gradient of a tensor enters."""
    if tensor.layout is not torch.strided:  # torch would make a view, and only dense tensors have views
        with torch.enable_grad():
            token = tensor.clone().grad_fn
        assert token is not None
        node, number = token.next_functions[0]
        assert node is not None
        return GradientEdge(node, number, token)
    # `get_gradient_edge` costs more, but a leaf needs it to find its node, and a Python node needs the token that it
    # makes: such a node does not keep its graph alive.
    made_by = tensor.grad_fn
    if made_by is None or isinstance(made_by, torch._C._FunctionBase):
        if torch.is_inference_mode_enabled():  # there torch finds no edge of a leaf
            with torch.inference_mode(False):
                return get_gradient_edge(tensor)
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


def expected_at(node: Any, number: int) -> Any:
    """Return an object with the shape, the type and the device of the gradient of a node's output."""
    return node.variable if hasattr(node, "variable") else node._input_metadata[number]


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


# Sums of gradients


class Gradients:
    """The gradients of leaves. Each has its own memory, so code may change it in place, as it may change a `.grad`."""

    # The engine may return one tensor for several leaves, and functions may keep a gradient that they return. So the
    # first gradient of a leaf is kept itself only if nothing else refers to it or to its memory, and otherwise copied
    # (`_own`). A sum that was made here belongs to this object alone, and later gradients are added to it in place.

    def __init__(self) -> None:
        # guards changes of all fields below: passes and pipelines of one context add concurrently
        self._lock = threading.Lock()
        self._sums: dict[Tensor, Tensor] = {}
        # Addresses of the storages of the sums. Entries stay when a sum is replaced or taken. If other memory gets the
        # same address, its gradient is copied without need, which is no error.
        self._memory: set[int] = set()
        self._added: set[Tensor] = set()  # leaves whose sum was made here, so it may be changed in place
        # The state of the `.grad` of leaves before their first gradient. If it is unchanged when an optimizer of torch
        # steps, the program has not copied the gradients of this context to `.grad`.
        self._earlier: dict[Tensor, tuple[int, int]] = {}

    def __len__(self) -> int:
        return len(self._sums)

    def as_dict(self) -> dict[Tensor, Tensor]:
        """Return the current sums by leaves. The copy is atomic, so the caller needs no lock."""
        return dict(self._sums)

    def passed_over(self, leaf: Tensor) -> bool:
        """Return True if the leaf has a sum here, and its `.grad` has not changed since before the first gradient."""
        return leaf in self._sums and _state(leaf.grad) == self._earlier.get(leaf, _state(None))

    def clear(self) -> None:
        """Drop all sums, because the context has ended or an optimizer has used them."""
        with self._lock:
            gone = self._sums
            self._sums, self._memory, self._added = {}, set(), set()
            self._earlier.clear()
        del gone  # not under the lock: freeing tensors may run user code

    def take(self, leaf: Tensor) -> Tensor | None:
        """Remove and return the gradient of a leaf."""
        with self._lock:
            self._added.discard(leaf)
            return self._sums.pop(leaf, None)

    def replace(self, leaf: Tensor, gradient: Tensor | None) -> None:
        """Set the gradient of a leaf; None removes it."""
        with self._lock:
            self._added.discard(leaf)
            if gradient is None:
                self._sums.pop(leaf, None)
            else:
                self._sums[leaf] = gradient

    def add(self, leaf: Tensor, gradient: Tensor, graph: bool, shared: bool = False) -> Tensor:
        """Add to the gradient of `leaf`; return the sum, differentiable with `graph`. `shared`: it has other owners."""
        with self._lock:
            return self._add(leaf, gradient, graph, shared)

    def add_all(self, found: Iterable[tuple[Tensor, Tensor, bool]]) -> None:
        """Add gradients without graphs: leaf, gradient, and True if the gradient has other owners."""
        with self._lock, torch.no_grad():
            for leaf, gradient, shared in found:
                if leaf in self._added and not gradient.is_sparse:
                    known = self._sums[leaf]
                    known += gradient
                else:
                    self._add(leaf, gradient, False, shared)

    def _add(self, leaf: Tensor, gradient: Tensor, graph: bool, shared: bool) -> Tensor:
        known = self._sums.get(leaf)
        if known is None and leaf.grad is not None:
            self._earlier[leaf] = _state(leaf.grad)
        if graph:
            made = gradient if known is None else total(known, gradient)
        elif known is None:
            made = self._own(leaf, gradient, shared)
        else:
            with torch.no_grad():
                if leaf in self._added and not gradient.is_sparse:
                    known += gradient
                    return known
                made = total(known, gradient)
            if not made.is_sparse and has_memory(made):
                self._added.add(leaf)
        self._sums[leaf] = made
        return made

    def _own(self, leaf: Tensor, gradient: Tensor, shared: bool) -> Tensor:
        """Return the gradient itself if it owns its memory and has the leaf's layout, else a copy."""
        gradient = gradient.detach()
        if gradient.layout is not torch.strided or gradient.is_nested:
            return gradient.clone() if shared else gradient
        if type(gradient) is not Tensor and not has_memory(gradient):
            return gradient.clone()
        storage = gradient.untyped_storage()
        address = storage.data_ptr()
        fills = storage.nbytes() == gradient.nbytes and gradient.stride() == leaf.stride()
        if shared or not fills or address in self._memory:
            with torch._C.DisableTorchFunctionSubclass():  # a `.grad` is a plain tensor, too
                gradient = torch.empty_like(leaf, dtype=gradient.dtype, requires_grad=False).copy_(gradient)
            address = gradient.untyped_storage().data_ptr()
        self._memory.add(address)
        return gradient


def _state(gradient: Tensor | None) -> tuple[int, int]:
    """Return a value that changes when a `.grad` is replaced or written to."""
    return (0, 0) if gradient is None else (id(gradient), gradient._version)


def has_memory(tensor: Tensor) -> bool:
    """Return False for a tensor that consists of others, such as a DTensor, and may have no memory of its own."""
    kind: Any = type(tensor)
    same: bool = kind is Tensor or kind.__torch_dispatch__ == Tensor.__torch_dispatch__
    return same


def total(one: Tensor, other: Tensor) -> Tensor:
    """Return the sum of two gradients, either of which may be sparse."""
    return other + one if one.is_sparse and not other.is_sparse else one + other
