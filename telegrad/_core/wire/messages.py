"""What two workers say to each other: the kinds of message, and the fields of each.

On the wire it is a frame: a prefix of fixed size, then its parts in order: `head` (names), `meta` (descriptions of
tensors), `table` (one entry per blob), `body` (a pickle), and the memory of those blobs that travel in the stream.

    CALL      run `head` (or the function inside `body`) with the arguments in `body`; answered under the same id
    RESULT    the value that call `id` returned
    FAILURE   call `id` raised: `body` is a description of the exception
    REFUSAL   call `id` was not run: `head` says why
    NOTICE    a control message of an upper layer; no answer of its own
    RELEASE   `body` lists lent blocks that the other end may use again
    RETIRE    `body` lists lent blocks that will not be used again: forget their mappings
    BYE       an orderly end: nothing more follows
    LEND      block `id` is memory of an accelerator, `body` tells how to open it
    OPENED    whether block `id`, the first of its kind, could be opened: `body` says why not
    CANCEL    call `id` is not wanted any more: nobody takes its answer, but for what that carries
    PULSE     whether the other end runs: one with an `id` is answered by one without
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from telegrad.errors import CannotDecode, ProtocolViolation

CALL, RESULT, FAILURE, REFUSAL, NOTICE, RELEASE, RETIRE, BYE, LEND, OPENED, CANCEL, PULSE = range(1, 13)
KINDS = (
    *("", "CALL", "RESULT", "FAILURE", "REFUSAL", "NOTICE", "RELEASE", "RETIRE", "BYE", "LEND", "OPENED", "CANCEL"),
    "PULSE",
)
ANSWERS = frozenset((RESULT, FAILURE, REFUSAL))

# Flags of a CALL: the caller's modes, as the function would find them in a local call.
NO_GRAD = 1
INFERENCE = 2
SCENE = 16  # more that surrounds the caller stands behind the body, before what else stands there
# Of a NOTICE: it is of no use to anybody who waits, so that whatever came with it goes first.
PATIENT = 1
# Of any frame: behind the body stands something for the layers above, and its size; first what recorded its tensors.
HAS_REFERENCES = 4
HAS_GRAPH = 8

MOVED = "moved"  # what a BYE tells of one who is in the next generation of its group
OVER = "over"  # what a BYE tells of one with whom its group ends

PREFIX = struct.Struct("<BBHIIQQ")  # kind, flags, size of head, size of meta, blobs, size of body, id
ENTRY = struct.Struct("<QQi")  # of the table: number of the lent block, or one of the two below, bytes, on which device
IN_STREAM = 0
STRIPED = 2**64 - 1  # in the stream its first stripe, the others in further streams
COMMON = 1 << 62  # in the number of what is lent of a block that others may have, too: its descriptor comes along


@dataclass(slots=True, repr=False)
class Message:
    """One message: to be sent, or as it has come, its memory already in place."""

    kind: int
    id: int = 0
    flags: int = 0
    head: bytes = b""
    meta: bytes = b""
    body: bytes | memoryview = b""
    blobs: Iterable[Any] = ()  # the memory of tensors; in one that has come a list

    def __repr__(self) -> str:
        kind = KINDS[self.kind] if self.kind < len(KINDS) else self.kind
        return f"<{kind} {self.id} {bytes(self.head).decode(errors='replace')!r}: {len(self.body)} bytes>"


class Unreceived(NamedTuple):
    """Stands for a blob that has come, and was dropped since there was no memory for it."""

    size: int
    why: str
    nbytes: int = 0

    def error(self, receiver: str, sender: str) -> CannotDecode:
        """Return the error of the call for whose sake it came."""
        return CannotDecode(
            f"worker {receiver!r} has no memory for {self.size:,} bytes that worker {sender!r} sent ({self.why})"
        )


def unknown(kind: int) -> str:
    """Return what is said of a frame of a kind that is not expected where it came."""
    name = KINDS[kind] if kind < len(KINDS) else ""
    if name:
        return f"a frame of the kind {name}, which does not belong there"
    return f"a frame of kind {kind}, which this version does not know: install the same telegrad on all workers"


def unexpected(kind: int) -> ProtocolViolation:
    """Return the error for a message of a kind that must not come where it came."""
    return ProtocolViolation(unknown(kind))


_SIZE = struct.Struct("<I")


def append(body: bytes, attachments: bytes) -> bytes:
    """A body with something for the layers above behind it."""
    return b"".join((body, attachments, _SIZE.pack(len(attachments))))


def split(body: bytes | memoryview) -> tuple[bytes | memoryview, bytes | memoryview]:
    """Return the body, and what stands behind it.

    Raises:
        ProtocolViolation: it is too short for that.
    """
    end = len(body) - _SIZE.size
    start = end - _SIZE.unpack_from(body, end)[0] if end >= 0 else -1
    if start < 0:
        raise ProtocolViolation(f"a body of {len(body)} bytes is shorter than what it says to have behind it")
    return body[:start], body[start:end]


def encode(message: Message, table: bytes = b"") -> bytes:
    """Everything of a frame except the memory of its blobs, ready for one write."""
    head, meta, body = message.head, message.meta, message.body
    blobs = len(table) // ENTRY.size if table else 0
    prefix = PREFIX.pack(message.kind, message.flags, len(head), len(meta), blobs, len(body), message.id)
    return b"".join((prefix, head, meta, table, body))


def pack_numbers(numbers: list[int]) -> bytes:
    """The body of RELEASE and RETIRE."""
    return struct.pack(f"<{len(numbers)}Q", *numbers)


def unpack_numbers(body: bytes | memoryview) -> tuple[int, ...]:
    """Return the numbers of such a body.

    Raises:
        ProtocolViolation: it is not made of whole numbers.
    """
    if len(body) % 8:
        raise ProtocolViolation(f"a body of {len(body)} bytes is no list of numbers of 8 bytes")
    return struct.unpack(f"<{len(body) // 8}Q", body)
