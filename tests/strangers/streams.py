"""Streams of frames, a second and simpler parser to compare with, and a reader whose allocations are limited.

A stranger may announce parts that are larger than any memory. A part above `PLENTY` is a memory error here, so that
tests see the request without its cost.
"""

import contextlib
import pickle
from collections.abc import Iterator, Sequence
from typing import Any
from unittest.mock import patch

from telegrad._core.wire import messages
from telegrad._core.wire.messages import (
    BYE,
    CALL,
    ENTRY,
    IN_STREAM,
    LEND,
    NOTICE,
    PREFIX,
    RELEASE,
    RESULT,
    FrameReader,
    Message,
    encode,
    pack_numbers,
)
from telegrad._core.wire.tensors import HOST
from telegrad.errors import ProtocolViolation

Plain = tuple[int, int, int, bytes, bytes, bytes, list[Any]]  # the fields of a frame

PLENTY = 1 << 18
SMALL = 64  # a scratch buffer that short streams overflow
NAMED = (ProtocolViolation, MemoryError, OverflowError)
MANY = 2000  # pieces
SHARED_BLOCKS = 4  # blocks of any size, which the other end may name


class Refused(MemoryError):
    """An allocation above the limit."""


def limited(size: int) -> bytearray:
    if isinstance(size, int) and size > PLENTY:
        raise Refused
    return bytearray(size)


def attach(number: int, size: int, device: int) -> tuple[int, int, int]:
    if number > SHARED_BLOCKS:
        raise ProtocolViolation("no such block")
    return number, size, device


def cut(memory: bytearray, device: int) -> Iterator[Any]:
    """Return the memory in one part, or in many for an accelerator."""
    view = memoryview(memory)
    return iter([view] if device < 0 else [view[at : at + 7] for at in range(0, len(view), 7)])


@contextlib.contextmanager
def scratch_of(size: int) -> Iterator[None]:
    """Use a scratch buffer of `size`: short streams reach the code for large frames in a small one."""
    with (
        patch.object(messages, "SCRATCH", size),
        patch.object(messages, "bytearray", limited, create=True),
        patch.object(messages, "private_memory", limited),
    ):
        yield


def read(stream: bytes, cuts: Sequence[int], apart: bool = False) -> tuple[list[Plain], bool]:
    """Return the frames of a stream that arrives in pieces of these sizes, cyclically, and True if it was refused.

    The rest after many pieces arrives at once. With `apart`, a piece that begins outside of a frame does not go through
    the reader's buffer.
    """
    promised = 0

    def allocate(size: int, device: int, striped: bool) -> tuple[bytearray, Iterator[Any]]:
        nonlocal promised
        if striped:
            raise ProtocolViolation("there are no further streams")
        memory = limited(size)
        promised += size
        assert promised <= at + PLENTY, "memory for a blob before the one in front of it has come"
        return memory, cut(memory, device)

    found: list[Message] = []
    at = turn = 0
    reader = FrameReader(allocate, attach, lambda frame: frame.kind == LEND)
    while at < len(stream):
        buffer = reader.buffer()
        count = min(len(buffer), cuts[turn % len(cuts)] if turn < MANY else len(stream), len(stream) - at)
        assert count > 0
        piece = stream[at : at + count]
        is_apart = apart and reader.target is None and not reader.end
        if not is_apart:
            buffer[:count] = piece
        at, turn = at + count, turn + 1
        try:
            found += reader.advance(count, piece if is_apart else None)
        except NAMED:
            return plain(found), True
    return plain(found), False


def plain(found: Sequence[Message]) -> list[Plain]:
    return [
        (f.kind, f.flags, f.id, f.head, f.meta, bytes(f.body), [b if type(b) is tuple else bytes(b) for b in f.blobs])
        for f in found
    ]


def parse(stream: bytes, scratch: int) -> tuple[list[Plain], bool]:
    """Return the same by parsing the whole stream: the expected result for any pieces."""
    found: list[Plain] = []
    at = 0
    while len(stream) - at >= PREFIX.size:
        kind, flags, *sizes, id_ = PREFIX.unpack_from(stream, at)
        sizes[2] *= ENTRY.size
        if PREFIX.size + sum(sizes) > max(PLENTY, scratch):
            return found, True
        if PREFIX.size + sum(sizes) > len(stream) - at:
            break
        at += PREFIX.size
        parts = []
        for size in sizes:
            parts.append(stream[at : at + size])
            at += size
        head, meta, table, body = parts
        blobs: list[Any] = []
        for number, size, device in ENTRY.iter_unpack(table):
            if number != IN_STREAM:
                if number > SHARED_BLOCKS:
                    return found, True
                blobs.append((number, size, device))
                continue
            if size > PLENTY:
                return found, True
            if size > len(stream) - at:
                return found, False
            blobs.append(stream[at : at + size])
            at += size
        if kind != LEND:
            found.append((kind, flags, id_, head, meta, body, blobs))
    return found, False


def agree(stream: bytes, cuts: Sequence[int], scratch: int) -> None:
    """Assert that the reader finds the expected frames; before a refusal, those of the last read may be missing."""
    found, refused = read(stream, cuts)
    wanted, wrong = parse(stream, scratch)
    assert refused == wrong
    assert found == wanted[: len(found)]
    assert refused or len(found) == len(wanted)


def samples() -> list[bytes]:
    """Return conversations of workers, each as one stream."""
    call = encode(Message(CALL, 1, head=b"operator:add", body=pickle.dumps(((1, 2), {}))))
    blobs = [(IN_STREAM, 40, HOST), (2, 1 << 20, HOST), (IN_STREAM, 0, 1), (IN_STREAM, 300, 0)]
    table = b"".join(ENTRY.pack(*blob) for blob in blobs)
    return [
        call,
        call + encode(Message(RESULT, 1, body=pickle.dumps(3))) + encode(Message(BYE)),
        encode(Message(CALL, 2, 3, b"torch:add", b"two tensors", b"args"), table) + bytes(340) + call,
        encode(Message(NOTICE, body=bytes(500))) + encode(Message(RELEASE, body=pack_numbers([1, 2, 3]))),
        encode(Message(CALL, 3), ENTRY.pack(IN_STREAM, 2**63, HOST)),
        PREFIX.pack(CALL, 0, 2**16 - 1, 2**32 - 1, 2**32 - 1, 2**64 - 1, 2**64 - 1),
    ]
