"""Shapes and strides of tensors: the layout of elements in memory."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

Strides = tuple[int, ...]


def contiguous_strides(shape: Sequence[int]) -> Strides:
    """Return the strides of a new tensor of that shape. Contiguous tensors may differ in dimensions of length 1."""
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))


def extent(shape: Sequence[int], strides: Strides) -> int:
    return 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True)) if prod(shape) else 0


def distinct(shape: Sequence[int], strides: Strides) -> tuple[int, ...]:
    """Return the shape without the repetitions made by `expand`."""
    return tuple(1 if step == 0 and n else n for n, step in zip(shape, strides, strict=True))


def repeats(shape: Sequence[int], strides: Strides) -> bool:
    """Return True if two elements may have the same address."""
    reach = 0
    for step, n in sorted((step, n) for n, step in zip(shape, strides, strict=True) if n > 1):
        if step <= reach:
            return True
        reach += (n - 1) * step
    return False
