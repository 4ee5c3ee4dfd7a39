"""Finds the layout of what is published, and copies it there."""

from __future__ import annotations

import pickle
import sys
from collections import OrderedDict
from collections.abc import Sequence
from math import prod
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from telegrad.errors import InvalidArgument
from telegrad.weights.layout import ALIGNED, Layout
from telegrad.weights.rounding import Rounding, named, published_type
from telegrad.weights.spans import SMALL, Span, bare, flags_of, groups, looks, move, padding
from telegrad.wire.pickling import encode
from telegrad.wire.strides import Strides, contiguous_strides, distinct, extent, repeats

TRIES = 3  # copies of a source that goes on changing, before it is refused

Spec = tuple[torch.dtype, tuple[int, ...], Strides, int, bool]  # type, shape, strides, flags, whether on the host


class Copy(NamedTuple):
    """Some elements of a tensor, and where they go."""

    number: int  # of the tensor
    skip: int  # bytes of it before the first
    at: int  # the byte of a version where the first goes
    size: int  # bytes, if they are few and go as they are
    shape: tuple[int, ...]
    strides: Strides
    there: Strides
    dtype: torch.dtype  # there


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
        tensors, copies = self.tensors, self.copies
        for _ in range(TRIES):
            before = _versions(tensors)
            move(memory, [(tensors[each[0]], each[1], each[2], each[3]) for each in copies if each[3]], True)
            with torch.no_grad():
                for copy in copies:
                    if not copy.size:
                        _copy(memory, copy, bare(tensors[copy.number]))
            if _versions(tensors) == before:
                return
        raise InvalidArgument(
            "what is published was changed by another thread while it was copied, and a version would have parts "
            "of several steps: publish between the steps, or give a function that returns a copy made under a lock"
        )


def _copy(memory: Tensor, copy: Copy, tensor: Tensor) -> None:
    try:
        source = tensor.as_strided(copy.shape, copy.strides, tensor.storage_offset() + copy.skip // tensor.itemsize)
    except RuntimeError as error:
        raise InvalidArgument(
            f"a tensor of shape {tuple(tensor.shape)} cannot be published: its memory was freed, or made smaller"
        ) from error
    memory.view(copy.dtype).as_strided(copy.shape, copy.there, copy.at // copy.dtype.itemsize).copy_(source)


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:  # those that were made for inference only count no changes
        return [tensor._version for tensor in tensors if not tensor.is_inference()]


class Layouts:
    """Those of one publisher: the last one, as long as trees have it."""

    def __init__(self, rounding: Rounding = None) -> None:
        self._rounding = rounding
        self._last: Layout | None = None
        self._copies: list[Copy] = []
        self._kind: Any = None  # of the last tree, where its body is known by that
        self._body = b""
        self._looks: Any = None  # of its tensors
        self._shape: Any = None  # all that the places of the last tree follow from

    def of(self, tree: Any) -> Arranged:
        """Arrange a tree.

        Raises:
            InvalidArgument: something in the tree cannot be published.
            CannotEncode: something in it cannot be pickled.
        """
        kind = _kind_of(tree)
        if kind is not None and kind == self._kind:
            body, tensors = self._body, [*tree.values()]
        else:
            body, tensors = _taken_apart(tree)
        seen = looks(tensors)
        if not (seen and seen == self._looks and body == self._body) or callable(self._rounding):
            seen = self._arrange(tree, body, tensors)
        self._kind, self._body, self._looks = kind, body, seen
        assert self._last is not None
        return Arranged(self._last, self._copies, tensors)

    def _arrange(self, tree: Any, body: bytes, tensors: list[Tensor]) -> Any:
        for number, tensor in enumerate(tensors):
            _check(tensor)
            if tensor._is_zerotensor():  # which torch keeps without memory
                tensors[number] = torch.zeros(tensor.shape, dtype=tensor.dtype)
        shared = [
            [
                span._replace(device="", start=span.start - group[0].start, end=span.end - group[0].start)
                for span in group
            ]
            for group in groups(tensors)
        ]
        shape = body, [*map(_spec, tensors)], shared, self._types(tree, tensors)
        if self._last is None or shape != self._shape:
            made = _Arrangement(*shape[1:], not callable(self._rounding))
            description = pickle.dumps((body, made.places, made.views, max(made.end, ALIGNED)), 5)
            self._last = Layout(self._last.number + 1 if self._last else 1, description)
            self._copies, self._shape = made.copies, shape
        return looks(tensors)

    def _types(self, tree: Any, tensors: Sequence[Tensor]) -> list[set[torch.dtype]] | None:
        """The types in which each tensor is to be published, by all of its names; None where nothing is rounded."""
        if self._rounding is None:
            return None
        names: dict[Any, list[str]] = {}
        if callable(self._rounding):
            for name, tensor in named(tree):
                names.setdefault(_identity(tensor), []).append(name)
        return [
            {published_type(self._rounding, name, tensor) for name in names.get(_identity(tensor), [""])}
            for tensor in tensors
        ]


class _Arrangement:
    """The places of a tree as they follow from its tensors."""

    def __init__(
        self,
        specs: Sequence[tuple[Any, ...]],
        shared: list[list[Span]],
        types: list[set[torch.dtype]] | None,
        one: bool,
    ) -> None:
        self.places: list[tuple[int, int, int]] = []
        self.copies: list[Copy] = []
        self.views: list[Any] = [None] * len(specs)
        self.end = 0
        self._specs = specs
        self._types = types
        self._one_type = one  # is asked for, which leaves alone what cannot have it
        alone = {*range(len(specs))}.difference(span.number for group in shared for span in group)
        for group in shared:
            self._put(group)
        for number in sorted(alone):
            dtype, shape, strides, *_ = specs[number]
            self._put([Span("", 0, extent(shape, strides) * dtype.itemsize, number)])

    def _put(self, group: list[Span]) -> None:
        """Give one place to tensors that share memory with one another only."""
        specs = [self._specs[span.number] for span in group]
        dtype, shape, strides, *_ = specs[0]
        target = self._rounded_to([span.number for span in group], {spec[0] for spec in specs})
        to = target or dtype
        once = distinct(shape, strides)
        is_one = all(spec[:3] == specs[0][:3] and not span.start for span, spec in zip(group, specs, strict=True))
        if is_one and 2 * prod(once) < extent(shape, strides) and not repeats(once, strides):
            there = _closed_up(once, strides)
            self.copies.append(Copy(group[0].number, 0, self.end, 0, once, strides, there, to))
            for span, spec in zip(group, specs, strict=True):
                self._see(span.number, to, spec, there, 0)
            self._end_place(prod(once) * to.itemsize, to.itemsize)
            return
        pad = padding(group, [spec[0].itemsize for spec in specs])
        reach = 0
        for span, spec in zip(group, specs, strict=True):
            dtype = spec[0]
            to = target or dtype
            first = (span.start + pad) // dtype.itemsize
            if span.end > reach:
                skip = max(0, reach - span.start) // dtype.itemsize
                count = (span.end - span.start) // dtype.itemsize - skip
                is_small = to == dtype and spec[4] and count * dtype.itemsize <= SMALL
                where = skip * dtype.itemsize, self.end + (first + skip) * to.itemsize
                self.copies.append(
                    Copy(span.number, *where, is_small * count * dtype.itemsize, (count,), (1,), (1,), to)
                )
                reach = span.end
            self._see(span.number, to, spec, spec[2], first * to.itemsize)
        sizes = {(target or spec[0]).itemsize for spec in specs}
        self._end_place((pad + reach) // dtype.itemsize * to.itemsize if target else pad + reach, *sizes)

    def _see(self, number: int, dtype: torch.dtype, spec: Spec, strides: Strides, offset: int) -> None:
        self.views[number] = dtype, tuple(spec[1]), strides, self.end + offset, spec[3]

    def _end_place(self, size: int, *itemsizes: int) -> None:
        if size:
            self.places.append((self.end, size, itemsizes[0] if len(itemsizes) == 1 else 1))
            self.end += -(-size // ALIGNED) * ALIGNED

    def _rounded_to(self, numbers: Sequence[int], own: set[torch.dtype]) -> torch.dtype | None:
        """The type that tensors in one place are rounded to; None where they stay as they are.

        Raises:
            InvalidArgument: they are to be of several types, and so cannot share memory.
        """
        wanted = own if self._types is None else set().union(*(self._types[number] for number in numbers))
        if len(own) == len(wanted) == 1:
            return next(iter(wanted))
        if wanted == own or self._one_type:
            return None
        raise InvalidArgument(
            f"tensors of shape {', '.join(str(tuple(self._specs[number][1])) for number in numbers)} share memory, and "
            f"are to be published as {', '.join(sorted(map(str, wanted)))}: give one type for all of them"
        )


def _taken_apart(tree: Any) -> tuple[bytes, list[Tensor]]:
    """The tree without its tensors, as bytes, and these."""
    distributed = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())  # else there is none
    try:
        values = [*named(tree)]
    except RecursionError:
        raise InvalidArgument("what is published contains itself, or more parts within each other than fit") from None
    for name, value in values:
        if is_lazy(value):
            raise InvalidArgument(f"{name!r} has no values yet: run the lazy module once before it is published")
        if isinstance(value, distributed):
            raise InvalidArgument(
                f"{name!r} is a DTensor, of which this worker has a part: publish by a ShardedPublisher, or its "
                "full_tensor()"
            )
    body, tensors, references, _ = encode(tree, same_program=False)
    if references:
        raise InvalidArgument(f"weights that are published cannot hold references, as {references[0]!r}")
    return bytes(body), [*tensors]


def _spec(tensor: Tensor) -> Spec:
    return tensor.dtype, tensor.shape, tensor.stride(), flags_of(tensor), tensor.is_cpu


def _identity(tensor: Tensor) -> Any:
    """What tells a tensor from others, also after it was lifted out of another class."""
    try:
        return (tensor.device, tensor.data_ptr(), _spec(tensor)) if tensor.numel() else id(tensor)
    except RuntimeError:  # it is made of others
        return id(tensor)


def _closed_up(shape: tuple[int, ...], strides: Strides) -> Strides:
    """Strides in the same order, without room between the elements."""
    order = sorted(range(len(shape)), key=lambda dimension: (-strides[dimension], dimension))
    closed = dict(zip(order, contiguous_strides([shape[dimension] for dimension in order]), strict=True))
    return tuple(closed[dimension] if strides[dimension] else 0 for dimension in range(len(shape)))


def _kind_of(tree: Any) -> Any:
    """What the body of a plain dictionary of plain tensors follows from; None for all else."""
    if type(tree) is not dict and type(tree) is not OrderedDict:
        return None
    values = tree.values()
    if not ({*map(type, values)} <= {Tensor} and {*map(type, tree)} <= {str}):
        return None
    if any(map(attrgetter("__dict__"), values)) or len({*map(id, values)}) < len(values):
        return None
    try:
        return type(tree), [*tree], pickle.dumps(vars(tree), 5) if type(tree) is OrderedDict else b""
    except Exception:
        return None


def _check(tensor: Tensor) -> None:
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized or tensor.is_meta:
        nature = "nested" if tensor.is_nested else "quantized" if tensor.is_quantized else str(tensor.layout)
        raise InvalidArgument(
            f"a tensor{'' if tensor.is_nested else f' of shape {tuple(tensor.shape)}'} cannot be published, since it "
            f"is {'on the meta device' if tensor.is_meta else nature}: publish what it is made of, as a dictionary of "
            "plain tensors"
        )
