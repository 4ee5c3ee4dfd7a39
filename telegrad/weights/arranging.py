"""Finds the layout of what is published, and copies it there."""

from __future__ import annotations

import pickle
import sys
from collections import OrderedDict
from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from telegrad.errors import InvalidArgument
from telegrad.weights.layout import Layout
from telegrad.weights.rounding import Rounding, named, published_type
from telegrad.weights.spans import (
    Span,
    Strides,
    bare,
    contiguous_strides,
    distinct,
    extent,
    flags_of,
    groups,
    move,
    padding,
    repeats,
)
from telegrad.wire.pickling import encode

SMALL = 1 << 20  # bytes up to which a copy takes less by itself than torch takes to begin one
TRIES = 3  # copies of a source that goes on changing, before it is refused

Spec = tuple[torch.dtype, tuple[int, ...], Strides, int]  # type, shape, strides, flags
Groups = list[list[tuple[int, int, int]]]  # of each tensor of a group its number, and where it begins and ends there
Kind = tuple[type, list[str], bytes]


class Copy(NamedTuple):
    """How some elements of a tensor come to their place."""

    number: int  # of the tensor
    skip: int  # elements of it before the first
    shape: tuple[int, ...]
    strides: Strides
    place: int
    at: int  # bytes of the place before the first
    there: Strides
    dtype: torch.dtype  # there
    size: int  # bytes, where they go as they are; else 0


class Arranged(NamedTuple):
    """The tensors of one tree, and how they come to their places."""

    layout: Layout
    copies: list[Copy]
    tensors: list[Tensor]

    def fill(self, memory: Tensor) -> None:
        """Copy the tensors.

        Raises:
            InvalidArgument: the memory of a tensor was freed, or the tensors go on changing meanwhile.
        """
        for _ in range(TRIES):
            before = _versions(self.tensors)
            self._copy(memory)
            if _versions(self.tensors) == before:
                return
        raise InvalidArgument(
            "what is published was changed by another thread while it was copied, and a version would have parts "
            "of several steps: publish between the steps, or give a function that returns a copy made under a lock"
        )

    def _copy(self, memory: Tensor) -> None:
        starts = [place.start for place in self.layout.places]
        large = []
        for copy in self.copies:
            tensor = self.tensors[copy.number]
            if 0 < copy.size <= SMALL and tensor.is_cpu:
                move(memory, starts[copy.place] + copy.at, tensor, copy.skip * tensor.itemsize, copy.size)
            else:
                large.append((copy, tensor))
        with torch.no_grad():
            for copy, tensor in large:
                whole = bare(tensor)
                try:
                    source = whole.as_strided(copy.shape, copy.strides, whole.storage_offset() + copy.skip)
                except RuntimeError as error:
                    raise InvalidArgument(
                        f"a tensor of shape {tuple(tensor.shape)} cannot be published: its memory was freed, or made "
                        "smaller"
                    ) from error
                start = starts[copy.place] + copy.at
                typed = memory.view(copy.dtype)
                typed.as_strided(copy.shape, copy.there, start // copy.dtype.itemsize).copy_(source)


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    return [tensor._version for tensor in tensors if not tensor.is_inference()]


class Layouts:
    """Those of one publisher: the last one, as long as trees have it."""

    def __init__(self, rounding: Rounding = None) -> None:
        self._rounding = rounding
        self._last: Layout | None = None
        self._copies: list[Copy] = []
        self._kind: Kind | None = None  # of the last tree, where its body is known by that
        self._body = b""
        self._shape: Any = None  # all that the places of the last tree follow from

    def of(self, tree: Any) -> Arranged:
        """Arrange a tree.

        Raises:
            InvalidArgument: something in the tree cannot be published.
            CannotEncode: something in it cannot be pickled.
        """
        body, tensors = self._taken_apart(tree)
        specs = [_spec(tensor) for tensor in tensors]
        tensors = [_with_memory(tensor) if not tensor.data_ptr() else tensor for tensor in tensors]
        shared: Groups = [
            [(span.number, span.start - group[0].start, span.end - group[0].start) for span in group]
            for group in groups(tensors)
        ]
        types = self._types(tree, tensors)
        shape = specs, shared, types
        if self._last is None or body != self._body or shape != self._shape:
            arrangement = _Arrangement(specs, shared, types, not callable(self._rounding))
            description = pickle.dumps((body, arrangement.places, arrangement.views), 5)
            self._last = Layout(self._last.number + 1 if self._last else 1, description)
            self._copies, self._body, self._shape = arrangement.copies, body, shape
        return Arranged(self._last, self._copies, tensors)

    def _taken_apart(self, tree: Any) -> tuple[bytes, list[Tensor]]:
        """The tree without its tensors, as bytes, and these."""
        kind = _kind_of(tree)
        if kind is not None and kind == self._kind:
            return self._body, [*tree.values()]
        self._kind = None
        lazy = [name for name, value in named(tree) if is_lazy(value)]
        if lazy:
            raise InvalidArgument(f"{lazy[0]!r} has no values yet: run the lazy module once before it is published")
        distributed = sys.modules.get("torch.distributed.tensor")  # whoever has such tensors has it
        parts = [name for name, value in named(tree) if distributed and isinstance(value, distributed.DTensor)]
        if parts:
            raise InvalidArgument(
                f"{parts[0]!r} is a DTensor, of which this worker has a part: publish by a ShardedPublisher, or its "
                "full_tensor()"
            )
        body, tensors, references, _ = encode(tree, same_program=False)
        if references:
            raise InvalidArgument(f"weights that are published cannot hold references, as {references[0]!r}")
        self._kind = kind
        return bytes(body), [*tensors]

    def _types(self, tree: Any, tensors: Sequence[Tensor]) -> list[list[torch.dtype]] | None:
        """The types in which each tensor is to be published, by each of its names; None where nothing is rounded."""
        if self._rounding is None:
            return None
        names: dict[Any, list[str]] = {}
        if callable(self._rounding):
            for name, tensor in named(tree):
                names.setdefault(_identity(tensor), []).append(name)
        return [
            [published_type(self._rounding, name, tensor) for name in names.get(_identity(tensor), [""])]
            for tensor in tensors
        ]


class _Arrangement:
    """The places of a tree as they follow from its tensors."""

    def __init__(
        self, specs: Sequence[Spec], shared: Groups, types: list[list[torch.dtype]] | None, one_type: bool
    ) -> None:
        self.places: list[tuple[int, int]] = []  # sizes, and sizes of elements
        self.copies: list[Copy] = []
        self._specs = specs
        self._types = types
        self._one_type = one_type  # is asked for, which leaves alone what cannot have it
        self._found: dict[int, tuple[Any, ...]] = {}
        for group in shared:
            self._put_together(group)
        for number in range(len(specs)):
            if number not in self._found:
                self._put_alone([number])
        self.views = [self._found[number] for number in range(len(specs))]

    def _put_alone(self, numbers: Sequence[int]) -> None:
        """A tensor that shares memory with none, or only with those that are the same."""
        dtype, shape, strides, flags = self._specs[numbers[0]]
        if not prod(shape):
            self._found[numbers[0]] = self._published(numbers) or dtype, shape, _known(shape, strides), None, 0, flags
            return
        target = self._published(numbers) or dtype
        once, length = distinct(shape, strides), extent(shape, strides)
        there = strides
        if 2 * prod(once) < length and not repeats(once, strides):
            there = _closed_up(once, strides)
            length = prod(once)
            self._copy(numbers[0], 0, once, strides, 0, there, dtype, target)
        else:
            self._copy(numbers[0], 0, (length,), (1,), 0, (1,), dtype, target)
        for number in numbers:
            own = self._specs[number]
            self._found[number] = target, own[1], _known(own[1], there), len(self.places), 0, own[3]
        self.places.append((length * target.itemsize, target.itemsize))

    def _put_together(self, group: list[tuple[int, int, int]]) -> None:
        numbers = [number for number, _, _ in group]
        specs = [self._specs[number] for number in numbers]
        if len({spec[:3] for spec in specs}) == 1 and not any(start for _, start, _ in group):
            self._put_alone(numbers)
            return
        own = {dtype for dtype, *_ in specs}
        target = self._published(numbers)
        pad = padding([Span("", *each[1:], each[0]) for each in group], [dtype.itemsize for dtype, *_ in specs])
        reach = 0
        for (number, start, end), (dtype, *_) in zip(group, specs, strict=True):
            to = target or dtype
            if end > reach:
                skip = max(0, reach - start) // dtype.itemsize
                count = (end - start) // dtype.itemsize - skip
                at = (start + pad) // dtype.itemsize + skip
                self._copy(number, skip, (count,), (1,), at * to.itemsize, (1,), dtype, to)
                reach = end
            offset = (start + pad) // dtype.itemsize * to.itemsize
            _, shape, strides, flags = self._specs[number]
            self._found[number] = to, shape, _known(shape, strides), len(self.places), offset, flags
        itemsizes = {(target or dtype).itemsize for dtype in own}
        itemsize = itemsizes.pop() if len(itemsizes) == 1 else 1
        size = pad + reach
        if target is not None:
            (dtype,) = own
            size = size // dtype.itemsize * target.itemsize
        self.places.append((size, itemsize))

    def _published(self, numbers: Sequence[int]) -> torch.dtype | None:
        """The type that tensors in one place are rounded to; None where they stay as they are.

        Raises:
            InvalidArgument: they are to be of several types, and so cannot share memory.
        """
        if self._types is None:
            return None
        own = {self._specs[number][0] for number in numbers}
        wanted = {dtype for number in numbers for dtype in self._types[number]}
        if len(own) == len(wanted) == 1:
            return wanted.pop()
        if wanted == own or self._one_type:
            return None
        raise InvalidArgument(
            f"tensors of shape {', '.join(str(tuple(self._specs[number][1])) for number in numbers)} share memory, and "
            f"are to be published as {', '.join(sorted(map(str, wanted)))}: give one type for all of them"
        )

    def _copy(
        self,
        number: int,
        skip: int,
        shape: tuple[int, ...],
        strides: Strides,
        at: int,
        there: Strides,
        dtype: torch.dtype,
        target: torch.dtype,
    ) -> None:
        is_row = dtype == target and strides == there == (1,)
        size = prod(shape) * dtype.itemsize if is_row else 0
        self.copies.append(Copy(number, skip, shape, strides, len(self.places), at, there, target, size))


def _identity(tensor: Tensor) -> Any:
    """What tells a tensor from others, also after it was lifted out of another class."""
    try:
        return (
            (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
            if tensor.numel()
            else id(tensor)
        )
    except RuntimeError:  # it is made of others
        return id(tensor)


def _known(shape: tuple[int, ...], strides: Strides) -> Strides | None:
    """None for those that follow from the shape."""
    return None if strides == contiguous_strides(shape) else strides


def _closed_up(shape: tuple[int, ...], strides: Strides) -> Strides:
    """Strides in the same order, without room between the elements."""
    closed, step = [0] * len(shape), 1
    for dimension in sorted(range(len(shape)), key=lambda dimension: (strides[dimension], -dimension)):
        if strides[dimension]:
            closed[dimension] = step
            step *= shape[dimension]
    return tuple(closed)


def _kind_of(tree: Any) -> Kind | None:
    """What the body of a plain dictionary of plain tensors follows from; None for all else."""
    if type(tree) is not dict and type(tree) is not OrderedDict:
        return None
    values = tree.values()
    if not all(type(value) is Tensor and not value.__dict__ for value in values):
        return None
    if len({*map(id, values)}) < len(values) or not {*map(type, tree)} <= {str}:
        return None
    try:
        return type(tree), [*tree], pickle.dumps(vars(tree), 5) if type(tree) is OrderedDict else b""
    except Exception:
        return None


def _spec(tensor: Tensor) -> Spec:
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized or tensor.is_meta:
        raise InvalidArgument(
            f"a tensor{'' if tensor.is_nested else f' of shape {tuple(tensor.shape)}'} cannot be published, since it "
            f"is {_nature(tensor)}: publish what it is made of, as a dictionary of plain tensors"
        )
    return tensor.dtype, tensor.shape, tensor.stride(), flags_of(tensor)


def _nature(tensor: Tensor) -> str:
    if tensor.is_nested:
        return "nested"
    return "quantized" if tensor.is_quantized else "on the meta device" if tensor.is_meta else str(tensor.layout)


def _with_memory(tensor: Tensor) -> Tensor:
    """Zeros that torch keeps without memory, in some."""
    return torch.zeros(tensor.shape, dtype=tensor.dtype) if tensor._is_zerotensor() else tensor
