"""Write and read a pickle in segments: no step holds the GIL for long.

CPython's pickler writes frames of 64 KB. It passes bytes and bytearrays larger than a frame to its file unchanged; the
unpickler lets the file read them into the memory of the new object. So the two file classes here control the copies.
Between two frames they release the GIL.

    pickle      frame frame frame header | bytes of 1 MB | frame frame ...
    segments    run                        blob            run

A short run of frames is part of the body, a long one is a blob. Texts are not passed to the file unchanged: instead of
a large text, `pickling` gives the pickler a number (a persistent id).

A persistent id costs a call for each object, so pickling begins without it. When a large text comes up, pickling starts
again with it. That is possible only while no code of the user has run (`may_repeat`); after that, the text is copied.

In one call of C, a value with 256 MB of bytes took 1.2 s and twice the memory at both ends, and no other thread ran for
0.55 s.
"""

import ctypes
import pickle
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from telegrad._core.wire.tensors import (
    GilYielder,
    address_of,
    at_address,
    c_function,
    copy,
    copy_of,
    fill_new,
    fresh,
    is_intercepted,
    memory,
    of_buffer,
)

OWN_FROM = 1 << 18  # bytes, bytearrays and texts of this size are blobs; a frame has less than 1 << 17
LONGEST_RUN = 1 << 18  # bytes of a run that is part of the body
PIECE = 1 << 17  # bytes of text encoded or decoded at once: about 0.1 ms
CHECKED = 1 << 23  # bytes checked at once, without the GIL
MOST_BLOBS = 64  # of one value, because each may need a descriptor. Parts below 1/64 of the value are joined
_STOP = ord(pickle.STOP)  # the last byte of a pickle

_utf8_of = c_function("PyUnicode_AsUTF8AndSize", ctypes.c_void_p, ctypes.py_object, ctypes.POINTER(ctypes.c_ssize_t))
_new_text = c_function("PyUnicode_New", ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_uint32)
_append_text = c_function("PyUnicode_Append", None, ctypes.POINTER(ctypes.c_void_p), ctypes.py_object)
_forget = c_function("Py_DecRef", None, ctypes.c_void_p)
_remember = c_function("Py_IncRef", None, ctypes.py_object)


class Texts:
    """The large texts of one value. An instance is the `persistent_id` of a pickler, and costs 50 ns per object."""

    def __init__(self) -> None:
        self._found: list[str] = []
        self._numbers: dict[int, int] = {}  # by id of the text
        self._least = OWN_FROM

    def __call__(self, obj: Any) -> int | None:
        if type(obj) is not str or len(obj) < self._least:
            return None
        number = self._numbers.get(id(obj))
        if number is None:
            number = self._numbers[id(obj)] = len(self._found)
            self._found.append(obj)
            if number >= MOST_BLOBS:  # if there are many, only those of more than average length
                self._least = max(self._least, sum(map(len, self._found)) // MOST_BLOBS)
        return number

    def blobs(self) -> list[Tensor]:
        return [of_text(text) for text in self._found]


class LargeText(Exception):
    """Raised when the pickler reaches a large text, which it would copy."""


def expect_texts(pickler: Any) -> None:
    """Make a pickler replace large texts by numbers from now on. Raise LargeText if the pickling must start again:
    since Python 3.13, `persistent_id` has no effect if set during it."""
    if pickler.texts is None and not is_intercepted():
        if pickler.file.may_repeat:
            raise LargeText
        pickler.persistent_id = pickler.texts = Texts()


class SegmentWriter:
    __slots__ = ("_segments", "_size", "_turns", "may_repeat")

    def __init__(self, data: bytes = b"") -> None:
        """`data` is what was written already."""
        self.may_repeat = True  # no foreign code has run yet, so the value can be pickled again
        self._segments: list[bytes | Tensor] = [data] if data else []
        self._size = len(data)
        self._turns: GilYielder | None = None

    def write(self, data: Any) -> None:
        """Append a frame, the header of a large object, or the object itself; raise LargeText if a large text is next,
        and `may_repeat`."""
        if type(data) is bytes:
            self._size += len(data)
            # The first test is the cheapest, and is false for the usual value, which is one frame.
            if data[-1] != _STOP and self.may_repeat and _announces_text(data) and not is_intercepted():
                raise LargeText
        else:  # a bytearray, which may change before it is sent
            data = bytes(data) if is_intercepted() else copy_of(memoryview(data))
            self._size += len(data)
        self._segments.append(data)
        if self._turns is not None:
            self._turns.give_way()
        elif self._size > LONGEST_RUN:
            self._turns = GilYielder()

    def whole(self) -> bytes | None:
        """Return the pickle if it is small, or if no tensors can be created here."""
        if self._size > LONGEST_RUN and not is_intercepted():
            return None
        if len(self._segments) == 1:
            return _bytes_of(self._segments[0])
        return b"".join(map(_bytes_of, self._segments))

    def finish(self) -> tuple[list[bytes], list[int], list[Tensor]]:
        """Return the segments of the pickle: the parts of the body, the places of all segments, and the blobs.

        A place is the number of bytes of a segment in the body, or ~number of its blob.
        """
        segments, self._segments = self._segments, []
        least = max(OWN_FROM, self._size // MOST_BLOBS)
        parts: list[bytes] = []
        places: list[int] = []
        blobs: list[Tensor] = []
        # Frames between two large objects are small and many. They are joined, since each blob costs a table entry, and
        # perhaps a memory file and two descriptors.
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


def _announces_text(data: bytes) -> bool:
    """Return True if the frame in `data` is followed by the header of a large text."""
    # For an object larger than a frame, CPython ends the frame, and writes it together with the object's header: an
    # opcode and 4 or 8 bytes of size. Only after this write it copies the text into a bytes object. So the text is
    # found before the copy. A wrong guess costs only time: pickling starts again.
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
    turns, blob, at = GilYielder(), fresh(size), 0
    run.reverse()
    while run:  # each segment is freed after its copy
        data = _blob_of(run.pop())
        copy(blob.data_ptr() + at, data.data_ptr(), data.numel())
        at += data.numel()
        turns.give_way()
    return blob


class SegmentReader:
    def __init__(self, body: memoryview, places: Sequence[int], blobs: Sequence[Tensor]) -> None:
        """`places`: for each segment its number of bytes in the body, or ~number of its blob."""
        self._segments: list[memoryview] = []
        self._blobs = blobs  # own the memory of most segments
        start = 0
        for place in places:
            if place < 0:
                self._segments.append(memory(blobs[~place]))
            else:
                self._segments.append(body[start : start + place])
                start += place
        self._segments.reverse()
        self._at = 0  # position in the last segment
        self._turns = GilYielder()

    def read(self, size: int) -> bytes:
        self._turns.give_way()
        data = self._next(size)
        return bytes(data) if len(data) == size else bytes(data) + self.read(size - len(data))

    def readinto(self, room: memoryview) -> int:
        # The unpickler has created the object, and calls this to fill it. So the bytes are copied once, without the
        # GIL, from the received memory into their final place.
        target, size, at = address_of(room), len(room), 0
        while at < size:
            data = self._next(size - at)
            fill_new(target + at, address_of(data), len(data))
            at += len(data)
        return size

    def readline(self) -> bytes:
        """Raise: the file protocol requires this method, but pickles of protocol 5 have no lines."""
        raise pickle.UnpicklingError("a line in a pickle of protocol 5")

    def _next(self, size: int) -> memoryview:
        """Return at least one byte and at most `size` bytes."""
        while self._segments:
            data = self._segments[-1]
            start, self._at = self._at, self._at + size
            if self._at >= len(data):
                self._segments.pop()
                self._at = 0
            if start < len(data):
                return data[start : start + size]
        raise EOFError("a pickle ends too early")


# Texts


def of_text(text: str) -> Tensor:
    """Return the UTF-8 of a text as a tensor; for ASCII, that is the text's own memory."""
    if text.isascii():
        size = ctypes.c_ssize_t()
        return at_address(_utf8_of(text, ctypes.byref(size)), len(text), text)
    turns, encoded = GilYielder(), bytearray()
    for start in range(0, len(text), PIECE):
        encoded += text[start : start + PIECE].encode("utf-8", "surrogatepass")
        turns.give_way()
    return of_buffer(memoryview(encoded))


def to_text(encoded: Tensor) -> str:
    """Decode UTF-8 without holding the GIL for long; raise UnicodeDecodeError if `encoded` is not UTF-8."""
    # CPython decodes in one call, which holds the GIL. So the text is made as C code makes it: allocated, then filled,
    # or extended piece by piece. That is permitted only while no other code has a reference to it.
    made = ctypes.c_void_p()  # the only reference to the text until it is complete
    try:
        if _is_ascii(encoded):
            made.value = _new_text(encoded.numel(), 127)
            fill_new(_utf8_of(_object_at(made), None), encoded.data_ptr(), encoded.numel())
        else:
            _decode_into(made, encoded)
        return _object_at(made)  # type: ignore[no-any-return]
    finally:
        if made.value is not None:
            _forget(made)


def _object_at(address: ctypes.c_void_p) -> Any:
    return ctypes.cast(address, ctypes.py_object).value


def _is_ascii(encoded: Tensor) -> bool:
    if is_intercepted():
        return False  # unknown
    with torch.inference_mode(False), torch.no_grad():
        signed = encoded.view(torch.int8)
        return all(int(signed[at : at + CHECKED].min()) >= 0 for at in range(0, len(signed), CHECKED))


def _decode_into(made: ctypes.c_void_p, encoded: Tensor) -> None:
    turns, view = GilYielder(), memory(encoded)
    start, size = 0, len(view)
    while start < size:
        end = min(start + PIECE, size)
        while end < size and end > start and view[end] & 0xC0 == 0x80:  # inside a character
            end -= 1
        end = end if end > start else size
        piece = str(view[start:end], "utf-8", "surrogatepass")
        if made.value is None:
            _remember(piece)
            made.value = id(piece)
            del piece
        else:
            _append_text(ctypes.byref(made), piece)  # in place, because this is the only reference
        start = end
        turns.give_way()
