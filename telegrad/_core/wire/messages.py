"""Kinds of messages between two workers, and their fields.

A message is sent as a frame: a prefix of fixed size, then in order `head` (names), `meta` (descriptions of tensors),
`table` (one entry per blob), `body` (a pickle), and the memory of those blobs that travel in the stream.

    CALL      run `head` (or the function inside `body`) with the arguments in `body`; answered under the same id
    RESULT    the value that call `id` returned
    FAILURE   call `id` raised: `body` describes the exception
    REFUSAL   call `id` was not run: `head` gives the reason
    NOTICE    a control message of an upper layer; not answered
    RELEASE   `body` lists lent blocks that the peer may use again
    RETIRE    `body` lists lent blocks that will not be used again: forget their mappings
    BYE       an orderly end of the connection: no message follows
    LEND      block `id` is memory of an accelerator, `body` is the handle to open it
    OPENED    reply to LEND, for the first block `id` of its kind: `body` is the error of opening it, or empty
    CANCEL    the caller does not want call `id` any more: its answer is ignored, except for references in it
    PULSE     check that the peer runs: one with an `id` is answered by one without
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

# Flags of a CALL: the autograd modes of the caller, which the function runs in as in a local call.
NO_GRAD = 1
INFERENCE = 2
HAS_CALL_CONTEXT = 16  # the body is followed by further call context, before the parts below
# Flag of a NOTICE: no thread waits for it, so messages received with it are processed first.
LOW_PRIORITY = 1
# Flags of any frame: the body is followed by data of the layers above, each part with its size, first that of the
# graph.
HAS_REFERENCES = 4
HAS_GRAPH = 8

MOVED = "moved"  # body of a BYE: the sender is in the next generation of its group
OVER = "over"  # body of a BYE: the group of the sender ends
SILENT = "silent"  # body of a BYE: the receiver gave no sign of life for too long

PREFIX = struct.Struct("<BBHIIQQ")  # kind, flags, size of head, size of meta, blobs, size of body, id
ENTRY = struct.Struct("<QQi")  # table entry: number of the lent block or one of the next two constants, bytes, device
IN_STREAM = 0
STRIPED = 2**64 - 1  # the first stripe is in this stream, the others are in further streams
# flag in the number of a lent block that other peers may map, too: its descriptor is sent with each message
COMMON = 1 << 62


@dataclass(slots=True, repr=False)
class Message:
    """A message to be sent, or a received one with its memory in place."""

    kind: int
    id: int = 0
    flags: int = 0
    head: bytes = b""
    meta: bytes = b""
    body: bytes | memoryview = b""
    blobs: Iterable[Any] = ()  # the memory of tensors; a list in a received message

    def __repr__(self) -> str:
        kind = KINDS[self.kind] if self.kind < len(KINDS) else self.kind
        return f"<{kind} {self.id} {bytes(self.head).decode(errors='replace')!r}: {len(self.body)} bytes>"


class Unreceived(NamedTuple):
    """Placeholder of a received blob that was dropped because there was no memory for it."""

    size: int
    why: str
    nbytes: int = 0

    def error(self, receiver: str, sender: str) -> CannotDecode:
        return CannotDecode(
            f"worker {receiver!r} has no memory for {self.size:,} bytes that worker {sender!r} sent ({self.why})"
        )


def unknown(kind: int) -> str:
    name = KINDS[kind] if kind < len(KINDS) else ""
    if name:
        return f"an unexpected frame of the kind {name}"
    return f"a frame of kind {kind}, which this version does not know: install the same telegrad on all workers"


_SIZE = struct.Struct("<I")


def append(body: bytes, attachments: bytes) -> bytes:
    return b"".join((body, attachments, _SIZE.pack(len(attachments))))


def split(body: bytes | memoryview) -> tuple[bytes | memoryview, bytes | memoryview]:
    """Return the body, and the data that follows it.

    Raises:
        ProtocolViolation: the body is shorter than its data claims.
    """
    end = len(body) - _SIZE.size
    start = end - _SIZE.unpack_from(body, end)[0] if end >= 0 else -1
    if start < 0:
        raise ProtocolViolation(f"a body of {len(body)} bytes is shorter than its attachments")
    return body[:start], body[start:end]


def encode(message: Message, table: bytes = b"") -> bytes:
    head, meta, body = message.head, message.meta, message.body
    blobs = len(table) // ENTRY.size if table else 0
    prefix = PREFIX.pack(message.kind, message.flags, len(head), len(meta), blobs, len(body), message.id)
    return b"".join((prefix, head, meta, table, body))


def pack_numbers(numbers: list[int]) -> bytes:
    return struct.pack(f"<{len(numbers)}Q", *numbers)


def unpack_numbers(body: bytes | memoryview) -> tuple[int, ...]:
    """Return the numbers in the body of a RELEASE or RETIRE.

    Raises:
        ProtocolViolation: the length is not a multiple of 8 bytes.
    """
    if len(body) % 8:
        raise ProtocolViolation(f"a body of {len(body)} bytes is not a list of 8-byte numbers")
    return struct.unpack(f"<{len(body) // 8}Q", body)
