"""Which bytes tensors cover, and which of them cover the same ones.

A tensor covers all bytes from its first element to the end of its last one. Tensors whose bytes overlap form a group:
what is written to one of them may be seen in another. Memory is looked at by address, so that also tensors over two
storages at one address (an array of numpy and a tensor made of it) are found.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from telegrad.errors import InvalidArgument

LINE = 16  # bytes: no element is larger, so that addresses which agree up to a multiple of it suit every type

Strides = tuple[int, ...]


class Span(NamedTuple):
    """The bytes of one of several tensors."""

    device: str  # empty: the host
    start: int
    end: int
    number: int  # of the tensor


def contiguous_strides(shape: Sequence[int]) -> Strides:
    """Return the strides of a new tensor of that shape."""
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))


def extent(shape: Sequence[int], strides: Strides) -> int:
    """Return how many elements lie between the first one and the end of the last one."""
    return 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True)) if prod(shape) else 0


def distinct(shape: Sequence[int], strides: Strides) -> tuple[int, ...]:
    """Return the shape without the repetitions that `expand` makes."""
    return tuple(1 if step == 0 and n else n for n, step in zip(shape, strides, strict=True))


def repeats(shape: Sequence[int], strides: Strides) -> bool:
    """Return whether two elements may lie at one place."""
    reach = 0
    for step, n in sorted((step, n) for n, step in zip(shape, strides, strict=True) if n > 1):
        if step <= reach:
            return True
        reach += (n - 1) * step
    return False


def groups(tensors: Sequence[Tensor]) -> list[list[Span]]:
    """Return the groups of tensors that share memory, each in the order of addresses; other tensors are in none."""
    spans = []
    for number, tensor in enumerate(tensors):
        size = tensor.nbytes if tensor.is_contiguous() else extent(tensor.shape, tensor.stride()) * tensor.itemsize
        if size:
            start = tensor.data_ptr()
            spans.append(("" if tensor.is_cpu else str(tensor.device), start, start + size, number))
    spans.sort()
    found: list[list[Span]] = []
    last: tuple[str, int, int, int] = ("", 0, 0, 0)
    joined = False  # whether `last` is in the last group that was found
    device, reach = "", 0
    for span in spans:
        overlaps = span[1] < reach and span[0] == device
        if overlaps:
            if not joined:
                found.append([Span(*last)])
            found[-1].append(Span(*span))
        joined = overlaps
        reach = max(reach, span[2]) if overlaps else span[2]
        device, last = span[0], span
    return found


def padding(group: Sequence[Span], itemsizes: Sequence[int]) -> int:
    """Return how many bytes must lie before a group, so that each tensor begins at a multiple of its element.

    Raises:
        InvalidArgument: there is no such number.
    """
    first = group[0].start
    for pad in range(LINE):
        if all((span.start - first + pad) % size == 0 for span, size in zip(group, itemsizes, strict=True)):
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


def room(tensor: Tensor) -> int:
    """Return how many bytes its storage has from its first element on."""
    return tensor.untyped_storage().nbytes() - int(tensor.storage_offset()) * tensor.itemsize


def move(target: Tensor, at: int, source: Tensor, skip: int, size: int) -> None:
    """Copy bytes between tensors of the host: the only raw copy of memory in this package.

    Args:
        target: the tensor that is written to.
        at: how many bytes behind its first element to begin.
        source: the tensor that is read.
        skip: how many bytes behind its first element to begin.
        size: how many bytes.

    Raises:
        InvalidArgument: one of them does not have that many.
    """
    if min(at, skip) < 0 or at + size > room(target) or skip + size > room(source):
        raise InvalidArgument(
            f"{size} bytes cannot be copied from a tensor that has {room(source) - skip} to one that has "
            f"{room(target) - at}: its memory was freed, or made smaller"
        )
    ctypes.memmove(target.data_ptr() + at, source.data_ptr() + skip, size)
