"""How a tree of tensors lies in one piece of memory: where each tensor begins, and what is around them."""

from __future__ import annotations

import ctypes
import pickle
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from telegrad.errors import InvalidArgument, TelegradError
from telegrad.weights.rounding import Rounding, named, published_type
from telegrad.wire.pickling import decode, encode

ALIGNED = 64  # bytes: of a line of the processor's cache
SMALL = 1 << 20  # bytes up to which a copy takes less by itself than torch takes to begin one

Spec = tuple[torch.dtype, tuple[int, ...]]


class _Kind(NamedTuple):
    """A plain dictionary of tensors, such as most states are: to be known again without a look at all of it."""

    kind: type
    names: list[Any]
    specs: list[Spec]


class Place(NamedTuple):
    """Where a tensor lies."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    size: int  # bytes

    def view(self, memory: Tensor) -> Tensor:
        return memory[self.start : self.start + self.size].view(self.dtype).view(self.shape)


class Layout:
    """One tree's, and that of all trees that differ in nothing but the values of their tensors."""

    def __init__(self, number: int, description: bytes) -> None:
        self.number = number
        self.description = description
        self._body, specs, self._slots = pickle.loads(description)
        self._places: list[Place] = []
        end = 0
        for dtype, shape in specs:
            size = prod(shape) * dtype.itemsize
            self._places.append(Place(dtype, shape, end, size))
            end += -(-size // ALIGNED) * ALIGNED
        self.size: int = max(end, ALIGNED)

    def parts(self, memory: Tensor, start: int, end: int) -> list[Tensor]:
        """The tensors between two places in it, or their elements there, in rows; the places part no element."""
        found = []
        for dtype, _, first, size in self._places[bisect_right(self._places, start, key=_end) :]:
            if first >= end:
                break
            found.append(memory[max(first, start) : min(first + size, end)].view(dtype))
        return found

    def tree(self, memory: Tensor) -> Any:
        """What lies in it."""
        with torch.inference_mode(False):
            as_type = {dtype: memory.view(dtype) for dtype in {place.dtype for place in self._places}}
            views = [
                as_type[dtype].as_strided(shape, _strides(shape), start // dtype.itemsize)
                for dtype, shape, start, _ in self._places
            ]
        return decode(self._body, [views[slot] for slot in self._slots])

    @cached_property
    def named(self) -> dict[str, Place] | None:
        """Where the tensors of a state dict are; None where the tree is something else."""
        try:
            tree = decode(self._body, [self._places[slot] for slot in self._slots])
        except TelegradError:  # a tensor that is of another class stands for no place
            return None
        if not isinstance(tree, Mapping):
            return None
        return {name: value for name, value in tree.items() if isinstance(value, Place)}

    def fill(self, memory: Tensor, tensors: Iterable[Tensor]) -> None:
        """Copy the tensors of a tree into it."""
        base, large = memory.data_ptr(), []
        for place, tensor in zip(self._places, tensors, strict=True):
            if place.size <= SMALL and tensor.dtype == place.dtype and is_plain(tensor):
                ctypes.memmove(base + place.start, tensor.data_ptr(), place.size)
            else:
                large.append((place, tensor))
        with torch.no_grad():
            for place, tensor in large:
                place.view(memory).copy_(tensor)


def pour(memory: Tensor, pairs: Iterable[tuple[Place, Tensor]]) -> None:
    """Copy what lies at those places into tensors."""
    base, small, others = memory.data_ptr(), [], []
    for place, tensor in pairs:
        if place.size <= SMALL and tensor.dtype == place.dtype and is_plain(tensor):
            ctypes.memmove(tensor.data_ptr(), base + place.start, place.size)
            small.append(tensor)
        else:
            others.append((place, tensor))
    torch.autograd.graph.increment_version(small)
    with torch.no_grad():
        for place, tensor in others:
            tensor.copy_(place.view(memory))


def is_plain(tensor: Tensor) -> bool:
    """Whether its values are the bytes of its memory, in order."""
    return tensor.is_contiguous() and tensor.is_cpu and not (tensor.is_neg() or tensor.is_conj())


def _end(place: Place) -> int:
    return place.start + place.size


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))


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
