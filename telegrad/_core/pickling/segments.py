"""A pickle that is written and read in segments, so that no step holds the interpreter for long.

The pickler of CPython writes a frame of 64 KB at a time. It gives bytes and bytearrays that are larger than a frame to
its file as they are; the unpickler has the file read them into the memory of the new object. So these two files decide
what is copied, and how. Between two frames they give the interpreter to other threads.

    pickle      frame frame frame header | bytes of 1 MB | frame frame ...
    segments    run                        blob            run

A run of frames is part of the body while it is short, and a blob otherwise. A text has no such way: where it is large,
`pickling` gives the pickler a number for it (a persistent id).
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from torch import Tensor

from telegrad._core.wire.raw_memory import (
    Turns,
    address_of,
    copied,
    copy,
    fill_new,
    fresh,
    is_intercepted,
    of_buffer,
    of_text,
)
from telegrad._core.wire.tensors import memory

OWN_FROM = 1 << 18  # bytes from which bytes, bytearrays and texts are a blob; a frame has less than 1 << 17
LONGEST_RUN = 1 << 18  # bytes of frames that are part of a body
MOST_BLOBS = 64  # of one value: each may take a descriptor. What is smaller than the 64th part of it is put together
_STOP = ord(pickle.STOP)  # with which pickles end


class Texts:
    """The large texts of one value; an instance is the `persistent_id` of a pickler, which costs 50 ns per object."""

    def __init__(self) -> None:
        self._found: list[str] = []
        self._numbers: dict[int, int] = {}  # by their ids
        self._least = OWN_FROM

    def __call__(self, obj: Any) -> int | None:
        if type(obj) is not str or len(obj) < self._least:
            return None
        number = self._numbers.get(id(obj))
        if number is None:
            number = self._numbers[id(obj)] = len(self._found)
            self._found.append(obj)
            if number >= MOST_BLOBS:  # of many, only those that are longer than most
                self._least = max(self._least, sum(map(len, self._found)) // MOST_BLOBS)
        return number

    def blobs(self) -> list[Tensor]:
        return [of_text(text) for text in self._found]


class LargeText(Exception):
    """The pickler has come to a large text, of which it would make a copy."""


def expect_texts(pickler: Any) -> None:
    """Have a pickler number the large texts from now on.

    Raises:
        LargeText: it shall be begun anew for that. From Python 3.13 on it would not be heard in the middle of a value.
    """
    if pickler.texts is None and not is_intercepted():
        if pickler.file.may_repeat:
            raise LargeText
        pickler.persistent_id = pickler.texts = Texts()


class SegmentWriter:
    """The file of a pickler."""

    __slots__ = ("_segments", "_size", "_turns", "may_repeat")

    def __init__(self) -> None:
        self.may_repeat = True  # no code but that of this package has run, so that the value can be pickled once more
        self._segments: list[bytes | Tensor] = []
        self._size = 0
        self._turns: Turns | None = None

    def write(self, data: Any) -> None:
        """Take a frame, the header of something large, or the thing itself.

        Raises:
            LargeText: a large text comes next, and `may_repeat`.
        """
        if type(data) is bytes:
            self._size += len(data)
            if data[-1] != _STOP and self.may_repeat and _announces_text(data) and not is_intercepted():
                raise LargeText
        else:  # a bytearray, which may change before it has left
            data = bytes(data) if is_intercepted() else copied(memoryview(data))
            self._size += len(data)
        self._segments.append(data)
        if self._turns is not None:
            self._turns.give_way()
        elif self._size > LONGEST_RUN:
            self._turns = Turns()

    def whole(self) -> bytes | None:
        """The pickle, if it is small, or no tensors can be made here."""
        if self._size > LONGEST_RUN and not is_intercepted():
            return None
        if len(self._segments) == 1:
            return _bytes_of(self._segments[0])
        return b"".join(map(_bytes_of, self._segments))

    def finish(self) -> tuple[list[bytes], list[int], list[Tensor]]:
        """The pickle in segments: what is part of the body, the places of all, and the blobs.

        A place is how many bytes of the body a segment has, or ~number of its blob.
        """
        segments, self._segments = self._segments, []
        least = max(OWN_FROM, self._size // MOST_BLOBS)
        parts: list[bytes] = []
        places: list[int] = []
        blobs: list[Tensor] = []
        for is_large, run in groupby(segments, lambda data: len(data) >= least):
            for group in [[data] for data in run] if is_large else [list(run)]:
                size = sum(map(len, group))
                if is_large or size > LONGEST_RUN:
                    places.append(~len(blobs))
                    blobs.append(_blob_of(group[0]) if is_large else _joined(group, size))
                else:
                    places.append(size)
                    parts += map(_bytes_of, group)
        return parts, places, blobs


class OnePiece(SegmentWriter):
    """A file whose `write` is a function of C, so that built-in types are pickled as they are at one moment."""

    __slots__ = ("write",)

    def __init__(self) -> None:
        super().__init__()
        self.may_repeat = False
        self.write: Any = self._segments.append

    def settle(self) -> None:
        """The pickle is written."""
        for place, data in enumerate(self._segments):
            if isinstance(data, bytearray):
                self._segments[place] = bytes(data)
        self._size = sum(map(len, self._segments))


def _announces_text(data: bytes) -> bool:
    """Whether the header of a large text stands behind the frame in `data`."""
    start = 2 if data[:1] == pickle.PROTO else 0
    if data[start : start + 1] == pickle.FRAME:
        start += 9 + int.from_bytes(data[start + 1 : start + 9], "little")
    header = data[start:]
    return len(header) < 16 and (header[-5:-4] == pickle.BINUNICODE or header[-9:-8] == pickle.BINUNICODE8)


def _bytes_of(data: bytes | Tensor) -> bytes:
    return data if isinstance(data, bytes) else bytes(memory(data))


def _blob_of(data: bytes | Tensor) -> Tensor:
    return of_buffer(memoryview(data)) if isinstance(data, bytes) else data


def _joined(run: list[bytes | Tensor], size: int) -> Tensor:
    turns, blob, at = Turns(), fresh(size), 0
    run.reverse()
    while run:  # each segment is freed as soon as it was copied
        data = _blob_of(run.pop())
        copy(blob.data_ptr() + at, data.data_ptr(), data.numel())
        at += data.numel()
        turns.give_way()
    return blob


class SegmentReader:
    """The file of an unpickler."""

    def __init__(self, body: memoryview, places: Sequence[int], blobs: Sequence[Tensor]) -> None:
        """`places`: of each segment, how many bytes of the body it has, or ~number of its blob."""
        self._segments: list[memoryview] = []
        self._blobs = blobs  # which own the memory of most
        start = 0
        for place in places:
            if place < 0:
                self._segments.append(memory(blobs[~place]))
            else:
                self._segments.append(body[start : start + place])
                start += place
        self._segments.reverse()
        self._at = 0  # in the last one
        self._turns = Turns()

    def read(self, size: int) -> bytes:
        self._turns.give_way()
        data = self._next(size)
        return bytes(data) if len(data) == size else bytes(data) + self.read(size - len(data))

    def readinto(self, room: memoryview) -> int:
        target, size, at = address_of(room), len(room), 0
        while at < size:
            data = self._next(size - at)
            fill_new(target + at, address_of(data), len(data))
            at += len(data)
        return size

    def readline(self) -> bytes:
        """Part of the protocol; pickles of protocol 5 have no lines."""
        raise pickle.UnpicklingError("a line in a pickle of protocol 5")

    def _next(self, size: int) -> memoryview:
        """At most `size` bytes, and at least one."""
        while self._segments:
            data = self._segments[-1]
            start, self._at = self._at, self._at + size
            if self._at >= len(data):
                self._segments.pop()
                self._at = 0
            if start < len(data):
                return data[start : start + size]
        raise EOFError("a pickle ends too early")
