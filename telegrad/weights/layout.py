"""How a tree of tensors lies in one piece of memory.

The memory is cut into places. A tensor that shares its memory with no other one has a place of its own. Tensors that
share memory have one place, to which their bytes are copied once. In a reader's memory each tensor is a view of its
place, by the offset and strides that it has in the publisher's. So readers see the same sharing, however the tensors
overlap: a write to one is seen in the others.

A tensor keeps its strides, unless most of the memory between its elements is not its own. Then its elements alone
are copied, in the order of its strides.
"""

from __future__ import annotations

import pickle
from bisect import bisect_right
from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from telegrad.errors import TelegradError
from telegrad.weights.rounding import named
from telegrad.weights.spans import flagged
from telegrad.wire.pickling import decode
from telegrad.wire.strides import Strides, contiguous_strides

ALIGNED = 64  # bytes: of a line of the processor's cache
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Place(NamedTuple):
    """Some bytes of a version."""

    start: int
    size: int
    itemsize: int  # of the elements in it; 1 where these are of several sizes


class View(NamedTuple):
    """A tensor of a version: where its first element lies, and how to get from there to the others."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: Strides
    start: int  # bytes
    flags: int
    plain: int  # bytes from its start on, if these are its values in order; else 0

    def of(self, memory: Tensor) -> Tensor:
        """Return the tensor in the memory of a version."""
        with torch.inference_mode(False):
            typed = memory.view(self.dtype)
            return flagged(typed.as_strided(self.shape, self.strides, self.start // self.dtype.itemsize), self.flags)


class Layout:
    """That of one tree, and of all trees that differ in nothing but the values of their tensors."""

    def __init__(self, number: int, description: bytes) -> None:
        self.number = number
        self.description = description
        self._body, places, views, self.size = pickle.loads(description)
        self._places = [Place(*place) for place in places]
        self.plans: list[Any] = [None]  # how the last version came into other tensors, as `loading.load` has it
        self.views: list[View] = []
        self._named: list[dict[str, View] | None] = []  # once it is known
        for dtype, shape, strides, start, flags in views:
            is_plain = not flags and strides == contiguous_strides(shape)
            self.views.append(View(dtype, shape, strides, start, flags, is_plain * prod(shape) * dtype.itemsize))

    def parts(self, memory: Tensor, start: int, end: int) -> list[Tensor]:
        """The bytes of places between two positions, in rows of integers as large as the elements."""
        found = []
        for first, size, itemsize in self._places[bisect_right(self._places, start, key=_end) :]:
            if first >= end:
                break
            part = memory[max(first, start) : min(first + size, end)]
            width = min(itemsize, 8)
            found.append(part.view(_INTEGERS[1 if max(first, start) % width or len(part) % width else width]))
        return found

    def tree(self, memory: Tensor) -> Any:
        """Return the published tree, with its tensors in the memory of a version."""
        with torch.inference_mode(False):
            as_type = {dtype: memory.view(dtype) for dtype in {view.dtype for view in self.views}}
            tensors = [
                as_type[dtype].as_strided(shape, strides, start // dtype.itemsize)
                for dtype, shape, strides, start, *_ in self.views
            ]
            for number, view in enumerate(self.views):
                if view.flags:
                    tensors[number] = flagged(tensors[number], view.flags)
        return decode(self._body, tensors)

    @property
    def named(self) -> dict[str, View] | None:
        """Where the tensors of a state dict are; None where that shows in the tree itself only."""
        if not self._named:  # not by `cached_property`, which has one lock for all objects until Python 3.12
            self._named.append(self._find_named())
        return self._named[0]

    def _find_named(self) -> dict[str, View] | None:
        try:
            tree = decode(self._body, self.views)  # type: ignore[arg-type]
        except TelegradError:  # a tensor that is of another class has no view in place of it
            return None
        if not isinstance(tree, Mapping):
            return None
        found = [*named(tree, kind=View)]
        names = dict(found)
        return names if len(names) == len(found) and len({*map(id, names.values())}) == len(self.views) else None


def _end(place: Place) -> int:
    return place.start + place.size
