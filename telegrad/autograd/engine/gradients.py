"""Where the gradients of one context are added up, apart from `.grad`."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor


class Gradients:
    """The gradients of leaves. Each has memory of its own, so that it may be changed in place, as a `.grad` may be."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards changes of all below: passes and pipelines of one context add
        self._sums: dict[Tensor, Tensor] = {}
        self._memory: set[int] = set()  # the storages of the sums
        self._added: set[Tensor] = set()  # leaves whose sum was made here, so that adding in place harms nobody
        self._earlier: dict[Tensor, tuple[int, int]] = {}  # the state of `.grad` of leaves before their first gradient

    def __len__(self) -> int:
        return len(self._sums)

    def as_dict(self) -> dict[Tensor, Tensor]:
        """The sums as of now, by leaves; the copy is one operation, so whoever asks needs no lock."""
        return dict(self._sums)

    def passed_over(self, leaf: Tensor) -> bool:
        """Return True if the leaf has a sum here, of which its `.grad` tells nothing: it is as it was before."""
        return leaf in self._sums and _state(leaf.grad) == self._earlier.get(leaf, _state(None))

    def clear(self) -> None:
        """Let go of all sums, since the context has ended or an optimizer has used them."""
        with self._lock:
            gone = self._sums
            self._sums, self._memory, self._added = {}, set(), set()
            self._earlier.clear()
        del gone  # not under the lock: who finds it free may be the user's code

    def take(self, leaf: Tensor) -> Tensor | None:
        """The gradient of a leaf, which has none from here on."""
        with self._lock:
            self._added.discard(leaf)
            return self._sums.pop(leaf, None)

    def replace(self, leaf: Tensor, gradient: Tensor | None) -> None:
        """Have `gradient` be that of a leaf; None: the leaf has none."""
        with self._lock:
            self._added.discard(leaf)
            if gradient is None:
                self._sums.pop(leaf, None)
            else:
                self._sums[leaf] = gradient

    def add(self, leaf: Tensor, gradient: Tensor, graph: bool, shared: bool = False) -> Tensor:
        """Add to the gradient of `leaf`, with a `graph` so that it can be differentiated again; the sum.

        A `shared` gradient is that of others, too.
        """
        with self._lock:
            return self._add(leaf, gradient, graph, shared)

    def _add(self, leaf: Tensor, gradient: Tensor, graph: bool, shared: bool) -> Tensor:
        known = self._sums.get(leaf)
        if known is None and leaf.grad is not None:
            self._earlier[leaf] = _state(leaf.grad)
        if graph:
            made = gradient if known is None else total(known, gradient)
        elif known is None:
            made = self._own(leaf, gradient, shared)
        elif leaf in self._added and not gradient.is_sparse:
            with torch.no_grad():
                known += gradient
            return known
        else:
            with torch.no_grad():
                made = total(known, gradient)
            if not made.is_sparse and has_memory(made):
                self._added.add(leaf)
        self._sums[leaf] = made
        return made

    def _own(self, leaf: Tensor, gradient: Tensor, shared: bool) -> Tensor:
        """The gradient as it is, where its memory is nobody else's and laid out as the leaf's; else a copy."""
        gradient = gradient.detach()
        if gradient.layout is not torch.strided or gradient.is_nested:
            return gradient.clone() if shared else gradient
        if not has_memory(gradient):
            return gradient.clone()
        storage = gradient.untyped_storage()
        address = storage.data_ptr()
        fills = storage.nbytes() == gradient.nbytes and gradient.stride() == leaf.stride()
        if shared or not fills or address in self._memory:
            with torch._C.DisableTorchFunctionSubclass():  # as `.grad` is a plain tensor, too
                gradient = torch.empty_like(leaf, dtype=gradient.dtype, requires_grad=False).copy_(gradient)
            address = gradient.untyped_storage().data_ptr()
        self._memory.add(address)
        return gradient


def _state(gradient: Tensor | None) -> tuple[int, int]:
    """Return what changes where a `.grad` is replaced or written to."""
    return (0, 0) if gradient is None else (id(gradient), gradient._version)


def has_memory(tensor: Tensor) -> bool:
    """Return False for a tensor that is made of others, as a DTensor, which may do without memory of its own."""
    kind: Any = type(tensor)
    same: bool = kind is Tensor or kind.__torch_dispatch__ == Tensor.__torch_dispatch__
    return same


def total(one: Tensor, other: Tensor) -> Tensor:
    """The sum of two gradients, either of which may be sparse."""
    return other + one if one.is_sparse and not other.is_sparse else one + other
