"""Exact differences between two versions of a piece, for readers that have the older one.

Bits are compared and rebuilt, so NaN, -0.0 and every type are preserved. Elements of the same size form one row, which
is sent in the encoding with the fewest bytes:

    SAME    no element has changed
    SPARSE  the elements that have changed, and the distance of each to the one before
    PLANES  old xor new: all first bytes, then all second ones, and so on. Each of these planes is deflated if this
            saves enough. Elements that change by little keep their upper bytes
    WHOLE   the new elements

A checksum of the new row detects a wrong base, a flipped bit and a damaged delta. A publisher makes deltas while it
publishes, if a subscriber is on another host. Subscribers that have fetched a piece forward the same deltas.
"""

import zlib
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from telegrad.errors import DeltaRefused
from telegrad.ext.values import memory
from telegrad.weights.transfer import VersionInfo
from telegrad.weights.tree_layout import Layout

Deltas = Literal["off", "fast", "small"]
Row = Tensor  # one dimension of integers with the bits of the elements

SAME, SPARSE, PLANES, WHOLE = range(4)
SAMPLE = 1 << 12  # elements of a row from which the deflated size of its planes is estimated
# Estimates from SAMPLE elements decide before a row is deflated, since that takes ten times as long as another
# encoding. It must save a quarter of the bytes.
WORTH_DEFLATING = 0.75  # of the bytes of another encoding
WORTH_SENDING = 0.5  # of a piece: a larger delta is not sent
SHOWN = 8  # pieces that decide whether deltas of a version are made
MAX_SKIPPED = 31  # versions without deltas, after one for which they were not worth it
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_GAPS = (torch.uint8, torch.uint16)


class Delta(NamedTuple):
    """The difference from an older piece to a newer one."""

    # of each row: its encoding, the checksum of the new row, and the number of tensors
    heads: list[tuple[int, int, int]]
    tensors: list[Tensor]

    @property
    def size(self) -> int:
        """The number of bytes to send."""
        return sum(tensor.nbytes for tensor in self.tensors)


def encode(old: Sequence[Row], new: Sequence[Row], small: bool) -> Delta:
    """Return the delta of two pieces, whose rows have the same types and lengths. Without `small`, planes, which take
    ten times as long, are not tried."""
    delta = Delta([], [])
    for before, after in zip(_joined(old), _joined(new), strict=True):
        encoding, tensors = _encode_row(before, after, small)
        delta.heads.append((encoding, _checksum(after), len(tensors)))
        delta.tensors.extend(tensors)
    return delta


def apply(delta: Delta, rows: Sequence[Row]) -> None:
    """Turn the old piece into the new one, in place. Raise DeltaRefused if the delta is damaged, or was made from other
    values; some rows may have changed already."""
    at = 0
    joined = _joined(rows)
    if len(joined) != len(delta.heads):
        raise DeltaRefused("a delta is for tensors of other types or shapes")
    for row, (encoding, checksum, count) in zip(joined, delta.heads, strict=True):
        try:
            _apply_row(encoding, delta.tensors[at : at + count], row)
        except (RuntimeError, ValueError, zlib.error) as error:
            raise DeltaRefused(f"a delta is damaged: {error}") from error
        if _checksum(row) != checksum:
            raise DeltaRefused("a delta was computed from values other than those of this worker")
        alike = [each for each in rows if each.dtype == row.dtype]
        if encoding != SAME and len(alike) > 1:
            torch._foreach_copy_(alike, torch.split(row, [len(each) for each in alike]))
        at += count


def _joined(rows: Sequence[Row]) -> list[Row]:
    """Join the rows of each type into one."""
    by_type: dict[torch.dtype, list[Row]] = {}
    for row in rows:
        by_type.setdefault(row.dtype, []).append(row)
    return [alike[0] if len(alike) == 1 else torch.cat(alike) for alike in by_type.values()]


def _checksum(row: Row) -> int:
    return zlib.crc32(memory(row.view(torch.uint8)))


def _encode_row(old: Row, new: Row, small: bool) -> tuple[int, list[Tensor]]:
    changed = (old != new).nonzero().view(-1)
    if not len(changed):
        return SAME, []
    encoding, tensors = WHOLE, [new]
    # A changed element costs its value and a gap of at least one byte. `_gaps` may insert unchanged elements where a
    # gap does not fit into its type. This estimate omits them: with gaps of one byte they are at most one in 255 of the
    # row.
    if len(changed) * (1 + new.itemsize) < new.nbytes:
        gaps = _gaps(changed, new.itemsize)
        encoding, tensors = SPARSE, [gaps, new.index_select(0, gaps.to(torch.int64).cumsum_(0))]
    planes = _planes(old ^ new, sum(each.nbytes for each in tensors)) if small else None
    return (PLANES, planes) if planes else (encoding, tensors)


def _gaps(changed: Tensor, itemsize: int) -> Tensor:
    """Return the distance of each element to the one before, in the smaller of two types. Where a distance exceeds the
    type, unchanged elements are inserted."""
    gaps = changed.diff(prepend=changed.new_zeros(1))
    # The first gap counts from the start of the row and may be 0, for which the quotient is -1.
    between = {dtype: (gaps - 1).div_(_reach(dtype), rounding_mode="floor").clamp_(min=0) for dtype in _GAPS}
    best = min(_GAPS, key=lambda dtype: (len(gaps) + int(between[dtype].sum())) * (dtype.itemsize + itemsize))
    at = (between[best] + 1).cumsum_(0) - 1
    steps = gaps.new_full((int(at[-1]) + 1,), _reach(best))
    steps[at] = gaps - between[best] * _reach(best)
    return steps.to(best)


def _reach(dtype: torch.dtype) -> int:
    return (1 << 8 * dtype.itemsize) - 1


def _planes(bits: Row, limit: int) -> list[Tensor] | None:
    """Return the bytes of elements by position, deflated if worthwhile; None if they take about `limit` or more."""
    # Elements at equal distances represent the whole row: layers that hardly change may be anywhere in it.
    sample = _apart(bits[:: max(1, len(bits) // SAMPLE)].contiguous())
    size = sample.shape[1]
    shown = [len(_deflated(plane)) for plane in sample]
    if sum(shown) * len(bits) > WORTH_DEFLATING * limit * size:
        return None
    planes = [
        _deflated(plane) if small < WORTH_DEFLATING * size else plane
        for plane, small in zip(_apart(bits), shown, strict=True)
    ]
    return planes if sum(map(len, planes)) < limit else None


def _apart(bits: Row) -> Tensor:
    return bits.view(torch.uint8).view(-1, bits.itemsize).t().contiguous()


def _deflated(plane: Tensor) -> Tensor:
    """Deflate a plane, or return it unchanged if that is smaller. Z_RLE only encodes runs and frequencies, since
    flipped bits contain no repeated strings."""
    squeeze = zlib.compressobj(1, zlib.DEFLATED, -zlib.MAX_WBITS, zlib.DEF_MEM_LEVEL, zlib.Z_RLE)
    squeezed = squeeze.compress(memory(plane)) + squeeze.flush()
    return _bytes(squeezed) if len(squeezed) < len(plane) else plane


def _inflated(plane: Tensor, length: int) -> Tensor:
    # The encoder keeps a plane as it is unless deflating makes it shorter, so its length shows which of both it did.
    if len(plane) == length:
        return plane
    # The limit bounds the memory that a damaged plane can take. One byte more than expected shows that it is too long.
    return _bytes(zlib.decompressobj(-zlib.MAX_WBITS).decompress(memory(plane.contiguous()), length + 1))


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _apply_row(encoding: int, tensors: Sequence[Tensor], row: Row) -> None:
    """Change a row; raise RuntimeError or ValueError if the tensors do not match."""
    if encoding == SPARSE:
        gaps, values = tensors
        at = gaps.to(torch.int64).cumsum_(0)
        if gaps.dtype not in _GAPS or values.dtype != row.dtype or not 0 < len(at) == len(values) <= len(row):
            raise ValueError("its elements have a wrong type or number")
        # Gaps have unsigned types, so no index is negative and the last one is the highest: one comparison checks all.
        if int(at[-1]) >= len(row):
            raise ValueError("it points outside its tensors")
        row.scatter_(0, at, values)
    elif encoding == PLANES:
        row ^= torch.stack([_inflated(plane, len(row)) for plane in tensors], 1).view(row.dtype).view(len(row))
    elif encoding == WHOLE:
        (values,) = tensors
        row.view(torch.uint8).copy_(values.contiguous().view(torch.uint8))
    elif encoding != SAME or tensors:
        raise ValueError(f"unknown encoding {encoding}")


# Deltas of versions


class DeltaCache:
    """The deltas of recent versions, limited to the memory of one version."""

    def __init__(self) -> None:
        self._deltas: OrderedDict[tuple[int, int], Delta] = OrderedDict()  # by target version and piece
        self._size = 0

    def keep(self, number: int, piece: int, delta: Delta, room: int) -> None:
        """Keep a delta. Drop older ones until all take `room` bytes at most."""
        if (number, piece) not in self._deltas:
            self._deltas[number, piece] = delta
            self._size += delta.size
        while self._size > room:
            self._size -= self._deltas.popitem(last=False)[1].size

    def between(self, base: int, number: int, piece: int, room: int) -> list[Delta]:
        """Return the deltas from one version to another, if all are here and take less than `room` bytes."""
        # A host that skipped versions gets one delta for each of them, if no step is missing.
        steps = [self._deltas.get((step, piece)) for step in range(base + 1, number + 1)] if base else []
        found = [step for step in steps if step is not None]
        return found if len(found) == len(steps) and sum(step.size for step in found) < room else []


class DeltaEncoder:
    """Makes the deltas of a publisher's versions, if they are worth it."""

    def __init__(self, deltas: Deltas) -> None:
        self._small = deltas == "small"
        self._off = deltas == "off"
        self._skipped = self._left = 0  # versions to skip after a failure, and how many of these are left

    def encode(self, layout: Layout, info: VersionInfo, old: Tensor, new: Tensor) -> dict[int, Delta]:
        """Return the deltas of two versions by pieces, except those that are not worth it."""
        if self._off or self._left:
            self._left = max(0, self._left - 1)
            return {}
        found: dict[int, Delta] = {}
        spent = size = 0
        for looked, piece in enumerate(_spread(info.pieces), 1):
            delta = encode(rows_of(layout, info, old, piece), rows_of(layout, info, new, piece), self._small)
            whole = min(info.piece, info.size - piece * info.piece)
            is_worth_it = delta.size < WORTH_SENDING * whole
            size += whole
            spent += delta.size if is_worth_it else whole
            if is_worth_it:
                found[piece] = delta
            # Stop once the first pieces, which represent the version, show that deltas save less than half. To find
            # that out costs time in each `publish`, so more versions are skipped after each failure in sequence: 1, 3,
            # 7, 15, 31.
            if looked >= min(SHOWN, info.pieces) and spent > WORTH_SENDING * size:
                self._skipped = self._left = min(2 * self._skipped + 1, MAX_SKIPPED)
                return {}
        self._skipped = 0
        return found


def deltas_of(several: Sequence[Any], tensors: Sequence[Tensor]) -> list[Delta]:
    """Return the deltas that a message contains, given their heads and the tensors of all of them."""
    deltas = []
    for heads in several:
        count = sum(each[2] for each in heads)
        deltas.append(Delta(heads, [*tensors[:count]]))
        tensors = tensors[count:]
    return deltas


def apply_deltas(
    layout: Layout, info: VersionInfo, old: Tensor | None, new: Tensor, piece: int, deltas: Sequence[Delta]
) -> None:
    """Make a piece of a version from that of an older one; raise DeltaRefused if that is another, or not here."""
    if old is None:
        raise DeltaRefused("a delta starts from a version which this worker no longer has")
    rows = rows_of(layout, info, new, piece)
    for here, there in zip(rows, rows_of(layout, info, old, piece), strict=True):
        # Into the new memory: the old version must stay as it is for its readers.
        here.copy_(there)
    for delta in deltas:
        apply(delta, rows)


def rows_of(layout: Layout, info: VersionInfo, memory: Tensor, piece: int) -> list[Row]:
    """Return the bytes of a piece of a version, as rows of integers of the elements' size."""
    # Publisher and reader compute the same rows, as these follow from the layout and the size of pieces alone. A slot
    # whose elements have several sizes, and an element that the end of a piece cuts, are compared byte by byte. Complex
    # numbers of 16 bytes are compared as pairs of 8.
    start, end = piece * info.piece, min((piece + 1) * info.piece, info.size)
    rows = []
    begin = bisect_right(layout.slots, start, key=lambda slot: slot[0] + slot[1])
    for first, size, itemsize in layout.slots[begin:]:
        if first >= end:
            break
        part = memory[max(first, start) : min(first + size, end)]
        width = min(itemsize, 8)
        rows.append(part.view(_INTEGERS[1 if max(first, start) % width or len(part) % width else width]))
    return rows


def _spread(count: int) -> Iterator[int]:
    """Yield all numbers below `count`, beginning with evenly spaced ones."""
    step = max(1, count // SHOWN)
    for start in range(step):
        yield from range(start, count, step)
