"""Which bytes tensors cover, and which of them cover the same ones.

A tensor covers all bytes from its first element to the end of its last one. Tensors whose bytes overlap form a group:
what is written to one of them may be seen in another. Memory is looked at by address, so that also tensors over two
storages at one address (an array of numpy and a tensor made of it) are found.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from telegrad.errors import InvalidArgument
from telegrad.wire.strides import extent

LINE = 16  # bytes: no element is larger, so that addresses which agree up to a multiple of it suit every type
SMALL = 1 << 20  # bytes up to which a copy takes less by itself than torch takes to begin one

_LOOKS: tuple[Callable[[Tensor], Any], ...] = (
    *(type, attrgetter("device", "dtype", "shape"), Tensor.stride, Tensor.is_conj, Tensor.is_neg, Tensor.data_ptr),
)


class Span(NamedTuple):
    """The bytes of one of several tensors."""

    device: str  # empty: the host
    start: int
    end: int
    number: int  # of the tensor


def looks(tensors: Sequence[Tensor]) -> list[list[Any]] | None:
    """Return all of tensors that copies of them depend on but their values; None if one has no memory of its own."""
    try:
        return [[*map(look, tensors)] for look in _LOOKS]
    except RuntimeError:
        return None


def groups(tensors: Sequence[Tensor]) -> list[list[Span]]:
    """Return the groups of tensors that share memory, each in the order of addresses; other tensors are in none."""
    spans: list[tuple[str, int, int, int]] = []
    for number, tensor in enumerate(tensors):
        size = tensor.nbytes if tensor.is_contiguous() else extent(tensor.shape, tensor.stride()) * tensor.itemsize
        if size:
            start = tensor.data_ptr()
            spans.append(("" if tensor.is_cpu else str(tensor.device), start, start + size, number))
    spans.sort()
    found: list[list[tuple[str, int, int, int]]] = [[]]
    device, reach = "", 0
    for span in spans:
        if span[1] >= reach or span[0] != device:
            if len(found[-1]) < 2:
                found.pop()
            found.append([])
            device, reach = span[0], span[2]
        found[-1].append(span)
        reach = max(reach, span[2])
    return [[Span(*span) for span in group] for group in found if len(group) > 1]


def padding(group: Sequence[Span], itemsizes: Sequence[int]) -> int:
    """Return how many bytes must lie before a group, so that each tensor begins at a multiple of its element.

    Raises:
        InvalidArgument: there is no such number.
    """
    starts = [(span.start - group[0].start, size) for span, size in zip(group, itemsizes, strict=True)]
    for pad in range(LINE):
        if all((start + pad) % size == 0 for start, size in starts):
            return pad
    raise InvalidArgument(
        "two tensors overlap in memory by a part of an element, so that they cannot be published together: clone one"
    )


def bare(tensor: Tensor) -> Tensor:
    """Return the same memory without the bits for a conjugate or a negative."""
    tensor = tensor.detach()
    if tensor.is_complex() and tensor.is_conj():
        tensor = tensor.conj()
    return torch._neg_view(tensor) if tensor.is_neg() else tensor


def flags_of(tensor: Tensor) -> int:
    """Return the bits for a conjugate and a negative as a number."""
    return tensor.is_conj() + 2 * tensor.is_neg()


def flagged(tensor: Tensor, flags: int) -> Tensor:
    """Return the same memory with these bits."""
    if flags & 1:
        tensor = tensor.conj()
    return torch._neg_view(tensor) if flags & 2 else tensor


def move(memory: Tensor, moves: Iterable[tuple[Tensor, int, int, int]], into_memory: bool) -> None:
    """Copy bytes between a row of bytes and tensors of the host: the only raw copy of memory in this package.

    Args:
        memory: the row.
        moves: of each tensor itself, how many bytes behind its first element to begin, where to begin in the row, and
            how many bytes to copy.
        into_memory: True to copy from the tensors, False to copy to them.

    Raises:
        InvalidArgument: a tensor or the row does not have that many bytes.
    """
    base, room = memory.data_ptr(), len(memory)
    for tensor, skip, at, size in moves:
        storage, there = tensor.untyped_storage(), tensor.data_ptr() + skip
        left = storage.data_ptr() + storage.nbytes() - there
        if size > left or at + size > room or min(skip, at, size) < 0:
            raise InvalidArgument(
                f"{size} bytes cannot be copied between a tensor that has {left} and a row that has {room - at}: its "
                "memory was freed, or made smaller"
            )
        if into_memory:
            ctypes.memmove(base + at, there, size)
        else:
            ctypes.memmove(there, base + at, size)
