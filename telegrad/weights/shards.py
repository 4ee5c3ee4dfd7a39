"""Tensors of which several workers have parts, and who wants which part: what to copy from where to where.

A part is a box of a tensor, as in `torch.distributed.checkpoint`: where it begins in each dimension, and how far it
goes. What is wanted need not be cut as it is owned; what several own is copied from the first of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from telegrad.errors import UsageError


class Box(NamedTuple):
    """A part of a tensor: where it begins in each dimension, and how far it goes.

    Example:
        >>> rows = telegrad.weights.Box(offsets=(2, 0), sizes=(2, 4))  # rows 2 and 3 of a tensor with 4 columns
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class Part(NamedTuple):
    """A box of the tensor of that name."""

    name: str
    box: Box


class Copy(NamedTuple):
    """`source` of an owner's part becomes `target` of a part that is wanted; both as the part sees them."""

    owner: str
    owned: int  # which of its parts
    source: Box
    wanted: int  # which of the parts
    target: Box


def plan(owned: Mapping[str, Sequence[Part]], wanted: Sequence[Part]) -> list[Copy]:
    """How to make all that is wanted from what the owners have, each element once.

    Of several that have it, the first in order gives it.

    Raises:
        UsageError: nobody has what is wanted, or somebody has it with other dimensions.
    """
    parts: dict[str, list[tuple[str, int, Box]]] = {}
    for owner, theirs in owned.items():
        for number, part in enumerate(theirs):
            parts.setdefault(part.name, []).append((owner, number, part.box))
    copies: list[Copy] = []
    for number, part in enumerate(wanted):
        missing = [] if 0 in part.box.sizes else [part.box]
        for owner, index, box in parts.get(part.name, ()):
            if len(box.sizes) != len(part.box.sizes):
                has, wants = len(box.sizes), len(part.box.sizes)
                raise UsageError(f"{part.name!r} has {has} dimensions on {owner!r}, and {wants} where it is wanted")
            found = [both for both in (overlap(box, rest) for rest in missing) if both is not None]
            copies += [Copy(owner, index, within(both, box), number, within(both, part.box)) for both in found]
            missing = [rest for each in missing for rest in without(each, box)]
        if missing:
            raise UsageError(
                f"nobody has all of {part.name!r}: what begins at {missing[0].offsets}, of sizes {missing[0].sizes}, "
                f"is missing on {', '.join(map(repr, owned)) or 'no workers'}"
            )
    return copies


def within(inner: Box, outer: Box) -> Box:
    """A box as another one sees it."""
    return Box(tuple(a - b for a, b in zip(inner.offsets, outer.offsets, strict=True)), inner.sizes)


def slices(box: Box) -> tuple[slice, ...]:
    """It, to index a tensor with."""
    return tuple(slice(start, start + size) for start, size in zip(box.offsets, box.sizes, strict=True))


def overlap(one: Box, other: Box) -> Box | None:
    """What two boxes have in common; None where that is nothing."""
    starts = [max(pair) for pair in zip(one.offsets, other.offsets, strict=True)]
    ends = [min(pair) for pair in zip(_ends(one), _ends(other), strict=True)]
    if any(start >= end for start, end in zip(starts, ends, strict=True)):
        return None
    return Box(tuple(starts), tuple(end - start for start, end in zip(starts, ends, strict=True)))


def without(box: Box, hole: Box) -> Iterable[Box]:
    """The rest of a box, in boxes that do not overlap."""
    both = overlap(box, hole)
    if both is None:
        yield box
        return
    for dimension, (start, size) in enumerate(zip(both.offsets, both.sizes, strict=True)):
        first, end = box.offsets[dimension], box.offsets[dimension] + box.sizes[dimension]
        for begin, stop in ((first, start), (start + size, end)):
            if begin < stop:
                yield _between(box, dimension, begin, stop)
        box = _between(box, dimension, start, start + size)


def _ends(box: Box) -> list[int]:
    return [start + size for start, size in zip(box.offsets, box.sizes, strict=True)]


def _between(box: Box, dimension: int, start: int, end: int) -> Box:
    """The slab of a box from `start` to `end` in one dimension."""
    offsets, sizes = [*box.offsets], [*box.sizes]
    offsets[dimension], sizes[dimension] = start, end - start
    return Box(tuple(offsets), tuple(sizes))
