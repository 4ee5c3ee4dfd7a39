"""Messages between two workers: their kinds, their fields, and how a byte stream is split into them.

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

To read, the connection asks `FrameReader.buffer` where to put the next bytes and calls `advance(n)` with the number
received. Small frames pass through one scratch buffer, many per read. A large part is received directly into its final
memory.

Frames are processed in the order of sending, and upper layers rely on that. So the memory of a frame's blobs is
complete before the frame is given out, and later frames wait for it, also for stripes that arrive in other streams. The
connection processes its own frames (LEND, RETIRE and others) before the next frame is split off, because that may use
the block.

Sizes come from the peer, and may be wrong. Memory of the host is allocated for the announced size, but no page of it is
touched before data arrives. If the allocation fails, the connection ends; for blobs of calls and results, only the call
fails.
"""

import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from telegrad._core.processes import private_memory
from telegrad.errors import CannotDecode, ProtocolViolation

# Kinds below RELEASE are never for the connection itself: `FrameReader.advance` relies on that.
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
    blobs: Any = ()  # the memory of tensors: any iterable, a list in a received message

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


# A part is followed by its size. So the receiver splits the parts off from the end, the last one first, and need not
# know where the pickle in front of them ends.
def append(body: bytes, attachments: bytes) -> bytes:
    return b"".join((body, attachments, _SIZE.pack(len(attachments))))


def split(body: bytes | memoryview) -> tuple[bytes | memoryview, bytes | memoryview]:
    """Return the body, and the data that follows it; raise ProtocolViolation if the body is shorter than its data
    claims."""
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
    """Return the numbers in the body of a RELEASE or RETIRE; raise ProtocolViolation if the length is not a multiple of
    8 bytes."""
    if len(body) % 8:
        raise ProtocolViolation(f"a body of {len(body)} bytes is not a list of 8-byte numbers")
    return struct.unpack(f"<{len(body) // 8}Q", body)


SCRATCH = 1 << 16

# size, device, striped -> a blob, and the parts of its memory to fill, in order
Allocate = Callable[[int, int, bool], tuple[Any, Iterator[memoryview]]]
Attach = Callable[[int, int, int], Any]  # number of a lent block, size, device -> the blob in that block
Control = Callable[[Message], object]  # process a frame of the connection itself; false for any other frame
_PREFIX, _ENTRY = PREFIX.size, ENTRY.size


class FrameReader:
    """Read one direction of one connection. Not thread-safe: one reader at a time."""

    def __init__(
        self, allocate: Allocate, attach: Attach, control: Control, arrived: Callable[[], bool] = lambda: True
    ) -> None:
        """`arrived` returns True if the further streams of the connection have delivered all their stripes."""
        self.awaits_lanes = False  # True while a frame waits for further streams; there is no buffer to read into
        self._arrived = arrived
        self._allocate = allocate
        self._attach = attach
        self._control = control
        self._scratch = memoryview(bytearray(SCRATCH))
        self._source: memoryview | bytes = self._scratch  # the data being split into frames
        self._start = self.end = 0  # the unread part of _source; between two calls `end` is 0 if nothing is unread
        self.missing = 0  # bytes that a frame lacks that has begun in the scratch buffer
        self.target: memoryview | None = None  # memory of the large part that is being received
        self._filled = 0
        self._large: memoryview | None = None  # the parts of one frame that do not fit in the scratch buffer
        self._frame: Message | None = None  # complete except for its blobs
        self._entries: list[tuple[int, int, int]] = []  # table entries of the blobs still to be received
        self._parts: Iterator[memoryview] = iter(())  # memory parts of the blob that is being received

    def buffer(self, most: int = SCRATCH) -> memoryview:
        """Return memory for the next bytes, at most `most` unless of one frame; never empty unless `awaits_lanes`."""
        if self.target is not None:
            return self.target[self._filled :]
        return self._scratch[self.end : self.end + max(most, self.missing)]

    def advance(self, count: int, data: bytes | None = None) -> Iterable[Message]:
        """Process `count` bytes written to `buffer()`; return the frames that they complete.

        The caller must iterate over all of them. Frames are created one by one, because thousands at once would trigger
        the garbage collector. If no frame has begun, the bytes, at most SCRATCH, may be passed as `data` instead of
        being written to `buffer()`.
        """
        if data is not None:
            self._source, self.end = data, count
        elif self.target is None:
            self.end += count
        else:
            self._filled += count
            if self._filled < len(self.target):
                return ()
            self.target = None
        frame = self._next()
        if frame is None or self._start < self.end:
            return self._split(frame)
        # The usual case: one frame, and no further data. It needs no generator.
        self._source = self._scratch
        self._start = self.end = 0
        return (frame,) if frame.kind < RELEASE or not self._control(frame) else ()

    def _split(self, frame: Message | None) -> Iterator[Message]:
        """Yield this frame and all further ones; keep the beginning of a frame that is not complete."""
        while frame is not None:
            # Control frames take effect here, before the next frame is split off. A comparison saves the usual frame a
            # call.
            if frame.kind < RELEASE or not self._control(frame):
                yield frame
            frame = self._next() if self._start < self.end else None
        unread = self.end - self._start
        # The beginning of the next frame moves to the front of the scratch buffer, where the rest will follow.
        if unread and (self._start or self._source is not self._scratch):
            self._scratch[:unread] = bytes(self._source[self._start : self.end])
        self._source = self._scratch
        self._start, self.end = 0, unread

    def _next(self) -> Message | None:
        if self._frame is not None:
            return self._receive_blobs()
        large, self._large = self._large, None
        source, start = (self._source, self._start) if large is None else (large, 0)
        available = self.end - start if large is None else len(large)
        if available < _PREFIX:
            return None
        kind, flags, head, meta, blobs, body, id_ = PREFIX.unpack_from(source, start)
        at_head = start + _PREFIX
        at_meta = at_head + head
        at_table = at_meta + meta
        at_body = at_table + blobs * _ENTRY
        end = at_body + body
        if available < end - start:
            # The frame without its blobs does not fit in the scratch buffer: it gets memory of its own, which the body
            # keeps.
            if end - start > SCRATCH:
                self._large = self._reserve(end - start)
                self._land(self._large)
            else:
                self.missing = end - start - available
            return None
        self.missing = 0
        if large is None:
            self._start = end
        frame = Message(
            kind,
            id_,
            flags,
            bytes(source[at_head:at_meta]) if head else b"",
            bytes(source[at_meta:at_table]) if meta else b"",
            bytes(source[at_body:end]) if large is None else large[at_body:end],
        )
        if not blobs:
            return frame
        frame.blobs = []
        self._entries = list(ENTRY.iter_unpack(bytes(source[at_table:at_body])))[::-1]
        self._frame = frame
        return self._receive_blobs()

    def _receive_blobs(self) -> Message | None:
        frame = self._frame
        assert frame is not None
        while True:
            for memory in self._parts:
                if not self._land(memory):
                    return None
            if not self._entries:
                # All bytes of this stream are here. The other streams may still deliver stripes; the caller then
                # continues by `advance(0)`.
                self.awaits_lanes = not self._arrived()
                if self.awaits_lanes:
                    return None
                self._frame = None  # from here on the receiver owns the memory of the blobs
                return frame
            self._begin_blob(frame, *self._entries.pop())

    def _begin_blob(self, frame: Message, block: int, size: int, device: int) -> None:
        if block not in (IN_STREAM, STRIPED):
            blob = self._attach(block, size, device)
        else:
            try:
                blob, self._parts = self._allocate(size, device, block == STRIPED)
            except (MemoryError, OverflowError, ValueError, OSError, RuntimeError) as error:
                raise ProtocolViolation(f"a tensor of {size} bytes was announced ({error})") from error
        # The bytes of a blob without memory are received and dropped, and its call reports the error. For other kinds
        # no call can report it, and an upper layer would miss a message, so the connection ends.
        if type(blob) is Unreceived and frame.kind not in (CALL, RESULT):
            raise MemoryError(blob.why)
        frame.blobs.append(blob)

    @staticmethod
    def _reserve(size: int) -> memoryview:
        """Allocate memory for a part. Its pages are not used before data is written, whatever size was announced."""
        try:
            return memoryview(private_memory(size))
        except (MemoryError, OverflowError, ValueError, OSError) as error:
            raise ProtocolViolation(f"a message of {size} bytes was announced ({error})") from error

    def _land(self, memory: memoryview) -> bool:
        """Fill `memory` with unread bytes, the rest from the stream later; return True if it is full already."""
        here = min(len(memory), self.end - self._start)
        memory[:here] = self._source[self._start : self._start + here]
        self._start += here
        if here == len(memory):
            return True
        self.target, self._filled = memory, here
        return False
