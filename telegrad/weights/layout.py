"""How a tree of tensors lies in one piece of memory: where each tensor begins, and what is around them."""

from __future__ import annotations

import pickle
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from telegrad.errors import InvalidArgument
from telegrad.weights.rounding import Rounding, named, published_type
from telegrad.wire.pickling import decode, encode

ALIGNED = 64  # bytes: of a line of the processor's cache

Spec = tuple[torch.dtype, tuple[int, ...]]


class _Kind(NamedTuple):
    """A plain dictionary of tensors, such as most states are: to be known again without a look at all of it."""

    kind: type
    names: list[Any]
    specs: list[Spec]


class Layout:
    """One tree's, and that of all trees that differ in nothing but the values of their tensors."""

    def __init__(self, number: int, description: bytes) -> None:
        self.number = number
        self.description = description
        self._body, specs, self._slots = pickle.loads(description)
        self._places: list[tuple[torch.dtype, tuple[int, ...], int, int]] = []
        end = 0
        for dtype, shape in specs:
            size = prod(shape) * dtype.itemsize
            self._places.append((dtype, shape, end, end + size))
            end += -(-size // ALIGNED) * ALIGNED
        self.size = max(end, ALIGNED)

    def views(self, memory: Tensor) -> list[Tensor]:
        """The tensors that lie in it, none of them twice."""
        with torch.inference_mode(False):
            as_type = {dtype: memory.view(dtype) for dtype in {place[0] for place in self._places}}
            return [
                as_type[dtype][start // dtype.itemsize : end // dtype.itemsize].view(shape)
                for dtype, shape, start, end in self._places
            ]

    def parts(self, memory: Tensor, start: int, end: int) -> list[Tensor]:
        """The tensors between two places in it, or their elements there, in rows; the places part no element."""
        found = []
        for dtype, _, first, last in self._places[bisect_right(self._places, start, key=lambda place: place[3]) :]:
            if first >= end:
                break
            found.append(memory[max(first, start) : min(last, end)].view(dtype))
        return found

    def tree(self, memory: Tensor) -> Any:
        """What lies in it."""
        views = self.views(memory)
        return decode(self._body, [views[slot] for slot in self._slots])

    def fill(self, memory: Tensor, tensors: list[Tensor]) -> None:
        """Copy the tensors of a tree into it."""
        if tensors:
            with torch.no_grad():
                torch._foreach_copy_(self.views(memory), tensors)


class Layouts:
    """Those of one publisher: the last one, as long as trees have it."""

    def __init__(self, rounding: Rounding = None) -> None:
        self._rounding = rounding
        self._last: Layout | None = None
        self._kind: _Kind | None = None  # of the last tree, where it is known by that

    def of(self, tree: Any) -> tuple[Layout, list[Tensor]]:
        """The layout of a tree, and the tensors to fill it with.

        Raises:
            InvalidArgument: something in the tree cannot be published.
            CannotEncode: something in it cannot be pickled.
        """
        kind = _kind_of(tree)
        if self._last is not None and kind is not None and kind == self._kind:
            return self._last, [*tree.values()]
        body, tensors, references, _ = encode(tree, same_program=False)
        if references:
            raise InvalidArgument(f"weights that are published cannot hold references, as {references[0]!r}")
        for tensor in tensors:
            _check(tensor)
        slots = _slots(tensors)
        firsts = [*dict(zip(reversed(slots), reversed(tensors), strict=True)).values()][::-1]
        names = {_identity(tensor): name for name, tensor in named(tree)} if callable(self._rounding) else {}
        specs = [
            (published_type(self._rounding, names.get(_identity(tensor), ""), tensor), tuple(tensor.shape))
            for tensor in firsts
        ]
        description = pickle.dumps((bytes(body), specs, slots), 5)
        if self._last is None or description != self._last.description:
            self._last = Layout(self._last.number + 1 if self._last else 1, description)
        self._kind = kind if len(firsts) == len(tensors) else None  # which may have one memory no more
        return self._last, firsts


def _kind_of(tree: Any) -> _Kind | None:
    if not isinstance(tree, Mapping):
        return None
    values = tree.values()
    if not all(type(value) is Tensor and not value.__dict__ for value in values):
        return None
    return _Kind(type(tree), [*tree], [(value.dtype, value.shape) for value in values])


def _slots(tensors: Sequence[Tensor]) -> list[int]:
    """Which place each has; tensors that are one memory have one place."""
    places: dict[Any, int] = {}
    return [places.setdefault(_identity(tensor) or index, len(places)) for index, tensor in enumerate(tensors)]


def _identity(tensor: Tensor) -> Any:
    if not tensor.numel():
        return None
    return tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def _check(tensor: Tensor) -> None:
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        raise InvalidArgument(
            f"a tensor of shape {tuple(tensor.shape)} cannot be published, since it is {_nature(tensor)}: publish what "
            "it is made of, as a dictionary of plain tensors"
        )


def _nature(tensor: Tensor) -> str:
    return "quantized" if tensor.is_quantized else "on the meta device" if tensor.is_meta else str(tensor.layout)
