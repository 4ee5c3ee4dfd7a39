"""Compute the copies that make wanted parts of tensors from the parts that several workers own.

A part is a box in a tensor, as in `torch.distributed.checkpoint`: its offset and size in each dimension. Wanted parts
need not match owned parts.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from telegrad.errors import UsageError
from telegrad.ext.feedback import checks


class Box(NamedTuple):
    """A part of a tensor: its offset and size in each dimension.

    Example:
        >>> rows = telegrad.weights.Box(offsets=(2, 0), sizes=(2, 4))  # rows 2 and 3 of a tensor with 4 columns
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def is_within(box: Box, shape: Sequence[int]) -> bool:
    # Programs make boxes and shards, so these may have any values.
    if not all(isinstance(each, Sequence) and all(map(checks.is_whole, each)) for each in (*box, shape)):
        return False
    if not len(box.offsets) == len(box.sizes) == len(shape):
        return False
    return all(start >= 0 and size >= 0 and start + size <= end for start, size, end in zip(*box, shape, strict=True))


class Part(NamedTuple):
    """A box of the named tensor."""

    name: str
    box: Box


class ShardCopy(NamedTuple):
    """Copy `source` in an owner's part to `target` in a wanted part. Both boxes are relative to their part."""

    owner: str
    owned: int  # index of the part
    source: Box
    wanted: int  # index of the wanted part
    target: Box


def plan(owned: Mapping[str, Sequence[Part]], wanted: Sequence[Part]) -> list[ShardCopy]:
    """Return the copies that make all wanted parts, with each element copied once, from its first owner. An empty part
    gets one copy without elements, which has the type of the tensor. Raise UsageError if no owner has a wanted element,
    or if one has the tensor with a different number of dimensions."""
    parts: dict[str, list[tuple[str, int, Box]]] = {}
    for owner, theirs in owned.items():
        for number, part in enumerate(theirs):
            parts.setdefault(part.name, []).append((owner, number, part.box))
    copies: list[ShardCopy] = []
    for number, part in enumerate(wanted):
        missing = [part.box]
        for owner, index, box in parts.get(part.name, ()):
            if len(box.sizes) != len(part.box.sizes):
                has, wants = len(box.sizes), len(part.box.sizes)
                raise UsageError(f"{part.name!r} has {has} dimensions on {owner!r}, but {wants} in the requested part")
            # An empty part overlaps nothing. The copy without elements shows the reader from which owner it gets the
            # type.
            if 0 in part.box.sizes:
                nothing = Box((0,) * len(box.sizes), (0,) * len(box.sizes))
                copies.append(ShardCopy(owner, index, nothing, number, nothing))
                missing = []
                break
            found = [both for both in (overlap(box, rest) for rest in missing) if both is not None]
            copies += [ShardCopy(owner, index, within(both, box), number, within(both, part.box)) for both in found]
            missing = [rest for each in missing for rest in without(each, box)]
        if missing:
            raise UsageError(
                f"no workers hold all of {part.name!r}: the part at offsets {missing[0].offsets} with sizes "
                f"{missing[0].sizes} is missing on {', '.join(map(repr, owned)) or 'no workers'}"
            )
    return copies


def within(inner: Box, outer: Box) -> Box:
    """Return a box relative to another one."""
    return Box(tuple(a - b for a, b in zip(inner.offsets, outer.offsets, strict=True)), inner.sizes)


def slices(box: Box) -> tuple[slice, ...]:
    """Return the index of a box in its tensor."""
    return tuple(slice(start, start + size) for start, size in zip(*box, strict=True))


def overlap(one: Box, other: Box) -> Box | None:
    """Return the intersection of two boxes, or None if it is empty."""
    starts = tuple(map(max, one.offsets, other.offsets))
    ends = [min(a + size, b + length) for a, size, b, length in zip(*one, *other, strict=True)]
    sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
    return Box(starts, sizes) if all(size > 0 for size in sizes) else None


def without(box: Box, hole: Box) -> Iterable[Box]:
    """Yield the rest of a box without a hole, in boxes that do not overlap."""
    both = overlap(box, hole)
    if both is None:
        yield box
        return
    for at, (start, size) in enumerate(zip(*both, strict=True)):
        first, end = box.offsets[at], box.offsets[at] + box.sizes[at]
        slabs = [
            Box(
                (*box.offsets[:at], begin, *box.offsets[at + 1 :]),
                (*box.sizes[:at], stop - begin, *box.sizes[at + 1 :]),
            )
            for begin, stop in ((first, start), (start + size, end), (start, start + size))
        ]
        yield from (slab for slab in slabs[:2] if slab.sizes[at])
        box = slabs[2]
