"""Exact differences between two versions of the same tensors, as one row of bytes.

What is compared and rebuilt are bits, so that NaN, -0.0 and every type come out as they went in. The tensors whose
elements are of one size are looked at as one long row, which is cut into pieces; each piece goes in the way that takes
the fewest bytes:

    SAME    nothing has changed
    SPARSE  the elements that have changed, and how far each lies behind the one before
    PLANES  old xor new: all first bytes, then all second ones, and so on, each of these planes deflated where that
            pays. What changes by little keeps its upper bytes
    WHOLE   the new elements

A delta begins with a mark, a checksum of all that follows, and a digest of the types and shapes that it is for. Then
come the pieces, each with a checksum of what shall come out. Every part begins at a multiple of eight bytes, so that
torch can look at it as elements.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from telegrad.errors import DeltaRefused, UsageError
from telegrad.wire.tensors import memory

Row = Tensor  # of one dimension, of integers that have the bits of the elements

SAME, SPARSE, PLANES, WHOLE = range(4)

MARK = b"TGD1"
DIGEST = 8
HEAD = struct.Struct(f"<4sI{DIGEST}s")
SUMMED = 8  # bytes of it stand before what is summed
PIECE_HEAD = struct.Struct("<BBxxIIxxxx")  # the way, the bytes of a gap, how many elements, the checksum
SIZE = struct.Struct("<Q")  # of a plane

PIECE = 1 << 18  # elements: what is worked on stays in the cache, and needs little memory beside
SAMPLE = 1 << 12  # elements of a piece that tell how well its planes deflate
WORTH = 0.75  # of the bytes that another way takes: to deflate is ten times its work
_ALIGNED = 8
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_GAPS = {1: torch.uint8, 2: torch.uint16}


def encode(old: Sequence[Tensor], new: Sequence[Tensor], small: bool = True) -> Tensor:
    """What `apply` needs to make `new` of `old`, which lie on the host and are of the same types and shapes.

    Not `small`: without planes, which take ten times as long.

    Raises:
        UsageError: they are of others.
    """
    digest = layout(new)
    if layout(old) != digest:
        raise UsageError("a delta is made between tensors of the same number, types and shapes")
    parts = [_bytes(HEAD.pack(MARK, 0, digest))]
    for before, after in zip(_pieces(old), _pieces(new), strict=True):
        parts += _encode_piece(_joined(before), _joined(after), small)
    delta = torch.cat(parts)
    room = memory(delta)
    HEAD.pack_into(room, 0, MARK, zlib.crc32(room[SUMMED:]), digest)
    return delta


def apply(delta: Tensor, tensors: Sequence[Tensor]) -> None:
    """Bring `tensors`, which are contiguous, from the old version to the new one, in place.

    Raises:
        UsageError: they are not contiguous.
        DeltaRefused: it is no delta, or damaged, or made from something else. Where that is found out late, some of
            `tensors` have changed already, and are of no use any more.
    """
    if not all(tensor.is_contiguous() for tensor in tensors):
        raise UsageError("a delta is applied to tensors that are contiguous")
    found = _Found(delta, layout(tensors))
    for piece in _pieces(tensors):
        joined = _joined(piece)
        if _apply_piece(found, joined) and len(piece) > 1:
            torch._foreach_copy_(piece, torch.split(joined, [len(row) for row in piece]))
    found.finish()


def layout(tensors: Sequence[Tensor]) -> bytes:
    """A digest of types and shapes."""
    text = repr([(str(tensor.dtype), tuple(tensor.shape)) for tensor in tensors])
    return hashlib.blake2b(text.encode(), digest_size=DIGEST).digest()


# Rows and pieces


def _pieces(tensors: Sequence[Tensor]) -> Iterator[list[Row]]:
    """All elements, by their size, in pieces; what is small lies in one piece with others."""
    rows: dict[int, list[Row]] = {}
    for tensor in tensors:
        row = _row(tensor)
        if len(row):
            rows.setdefault(row.itemsize, []).append(row)
    for _, alike in sorted(rows.items()):
        yield from _cut(alike)


def _cut(rows: list[Row]) -> Iterator[list[Row]]:
    piece: list[Row] = []
    room = PIECE
    for row in rows:
        start = 0
        while start < len(row):
            piece.append(row[start : start + room])
            start += room
            room -= len(piece[-1])
            if not room:
                yield piece
                piece, room = [], PIECE
    if piece:
        yield piece


def _row(tensor: Tensor) -> Row:
    """The bits of a tensor, in its own memory where that is contiguous."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    return flat.view(_INTEGERS[min(flat.itemsize, 8)])


def _joined(piece: list[Row]) -> Row:
    return piece[0] if len(piece) == 1 else torch.cat(piece)


def _checksum(row: Row) -> int:
    return zlib.crc32(memory(row.view(torch.uint8)))


# To bytes


def _encode_piece(old: Row, new: Row, small: bool) -> list[Tensor]:
    """The parts of a piece, in the way that takes the fewest bytes."""
    changed = (old != new).nonzero().view(-1)
    way, gap, count, parts = SAME, 0, 0, []
    if len(changed):
        way, count, parts = WHOLE, len(new), [new.view(torch.uint8)]
        if len(changed) * (1 + new.itemsize) < new.nbytes:  # and so the elements between, where there are any, are few
            gaps = _gaps(changed, new.itemsize)
            values = new.index_select(0, gaps.to(torch.int64).cumsum_(0))
            way, gap, count, parts = (
                SPARSE,
                gaps.itemsize,
                len(gaps),
                [gaps.view(torch.uint8), values.view(torch.uint8)],
            )
        planes = _planes(old ^ new, sum(map(len, parts))) if small else None
        if planes:
            way, gap, count, parts = PLANES, 0, len(new), planes
    head = _bytes(PIECE_HEAD.pack(way, gap, count, _checksum(new)))
    return [_padded(part) for part in (head, *parts)]


def _gaps(changed: Tensor, itemsize: int) -> Tensor:
    """How far each element lies behind the one before, in as few bytes as pays.

    Where it lies further than these can say, elements that have not changed stand between.
    """
    gaps = changed.diff(prepend=changed.new_zeros(1))
    between = {size: (gaps - 1).div_(_reach(size), rounding_mode="floor").clamp_(min=0) for size in _GAPS}
    size = min(_GAPS, key=lambda size: (len(gaps) + int(between[size].sum())) * (size + itemsize))
    at = (between[size] + 1).cumsum_(0) - 1
    steps = gaps.new_full((int(at[-1]) + 1,), _reach(size))
    steps[at] = gaps - between[size] * _reach(size)
    return steps.to(_GAPS[size])


def _reach(size: int) -> int:
    return (1 << 8 * size) - 1


def _planes(bits: Row, limit: int) -> list[Tensor] | None:
    """The bytes of elements by their places, deflated where that pays; None where it is not worth it.

    `limit` is how many bytes another way takes.
    """
    sample = _apart(bits[:: max(1, len(bits) // SAMPLE)].contiguous())
    size = sample.shape[1]
    shown = [len(_deflated(plane)) for plane in sample]
    if sum(shown) * len(bits) > WORTH * limit * size:
        return None
    parts: list[Tensor] = []
    for plane, small in zip(_apart(bits), shown, strict=True):
        part = _deflated(plane) if small < WORTH * size else plane
        parts += [_bytes(SIZE.pack(len(part))), part]
    return parts if sum(map(len, parts)) < limit else None


def _apart(bits: Row) -> Tensor:
    return bits.view(torch.uint8).view(-1, bits.itemsize).t().contiguous()


def _deflated(plane: Tensor) -> Tensor:
    """In fewer bytes, or as it is. Runs and frequencies are all that is looked for: bits that flip repeat no words."""
    squeeze = zlib.compressobj(1, zlib.DEFLATED, -zlib.MAX_WBITS, zlib.DEF_MEM_LEVEL, zlib.Z_RLE)
    squeezed = squeeze.compress(memory(plane)) + squeeze.flush()
    return _bytes(squeezed) if len(squeezed) < len(plane) else plane


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _padded(part: Tensor) -> Tensor:
    missing = -len(part) % _ALIGNED
    return torch.nn.functional.pad(part, (0, missing)) if missing else part


# From bytes


class _Found:
    """A delta that is read from its beginning; nothing that it says is believed."""

    def __init__(self, delta: Tensor, digest: bytes) -> None:
        if delta.dtype is not torch.uint8 or delta.dim() != 1 or len(delta) < HEAD.size:
            raise DeltaRefused("this is no delta: it has no head")
        if delta.storage_offset() % _ALIGNED or delta.stride() != (1,):
            delta = delta.clone(memory_format=torch.contiguous_format)
        self._delta = delta
        self._at = HEAD.size
        room = memory(delta)
        mark, checksum, made_for = HEAD.unpack_from(room)
        if mark != MARK:
            raise DeltaRefused("this is no delta: it does not begin as one")
        if checksum != zlib.crc32(room[SUMMED:]):
            raise DeltaRefused("a delta is damaged: its checksum does not fit")
        if made_for != digest:
            raise DeltaRefused("a delta is for tensors of other types or shapes")

    def take(self, size: int) -> Tensor:
        """The next bytes."""
        part = self._delta[self._at : self._at + size]
        if len(part) < size:
            raise DeltaRefused("a delta ends too early")
        self._at += size + -size % _ALIGNED
        return part

    def head(self) -> tuple[int, int, int, int]:
        way, gap, count, checksum = PIECE_HEAD.unpack(memory(self.take(PIECE_HEAD.size)))
        return way, gap, count, checksum

    def finish(self) -> None:
        if self._at != len(self._delta):
            raise DeltaRefused("a delta goes on behind its end")


def _apply_piece(found: _Found, row: Row) -> bool:
    """Whether it has changed."""
    way, gap, count, checksum = found.head()
    if way == SPARSE and gap in _GAPS and 0 < count <= len(row):
        at = found.take(gap * count).view(_GAPS[gap]).to(torch.int64).cumsum_(0)
        values = found.take(row.itemsize * count).view(row.dtype)
        if int(at[-1]) >= len(row):
            raise DeltaRefused("a delta leads out of its tensors")
        row.scatter_(0, at, values)
    elif way == PLANES and count == len(row):
        planes = [_inflated(found, len(row)) for _ in range(row.itemsize)]
        row ^= torch.stack(planes, 1).view(row.dtype).view(-1)
    elif way == WHOLE and count == len(row):
        row.copy_(found.take(row.nbytes).view(row.dtype))
    elif way != SAME:
        raise DeltaRefused(f"a delta has a piece that makes no sense: way {way}, {count} of {len(row)} elements")
    if _checksum(row) != checksum:
        raise DeltaRefused("a delta was made from other values than those that are here")
    return way != SAME


def _inflated(found: _Found, length: int) -> Tensor:
    (size,) = SIZE.unpack(memory(found.take(SIZE.size)))
    if size >= length:
        return found.take(length)
    swell = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        plane = swell.decompress(memory(found.take(size)), length + 1)
    except zlib.error as error:
        raise DeltaRefused(f"a delta has a piece that cannot be inflated: {error}") from error
    if len(plane) != length:
        raise DeltaRefused("a delta has a piece of another length than its tensors")
    return _bytes(plane)
