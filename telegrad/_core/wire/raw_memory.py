"""View memory of Python objects as byte tensors, and copy it without holding the GIL.

The transport carries byte tensors. An object whose memory is viewed as one is sent without a copy here. A copy of 256
MB takes 0.1 s, and no other thread could run meanwhile if it held the GIL.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from time import perf_counter, sleep
from typing import Any

import torch
from torch import Tensor

from telegrad._core.wire.tensors import CPU, memory

PIECE = 1 << 17  # bytes of text encoded or decoded at once: about 0.1 ms
CHECKED = 1 << 23  # bytes checked at once, without the GIL
HUGE_FROM = 1 << 22  # from this size on, huge pages take half the time of small ones to touch, and a tenth to free
PARALLEL_FROM = 1 << 21  # below this, waking torch's other threads costs more than they save
TURN = 2e-3  # seconds of work after which this thread releases the GIL
REST = 5e-5  # seconds: long enough for a waiting thread to wake, unlike sleep(0)

_api = ctypes.pythonapi


class _Buffer(ctypes.Structure):
    """The struct Py_buffer, whose layout is part of the stable ABI."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


def _function(name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
    # A separate prototype: setting the types on ctypes.pythonapi's function would change them for the whole process.
    made: Callable[..., Any] = ctypes.PYFUNCTYPE(result, *arguments)((name, _api))
    return made


_get_buffer = _function("PyObject_GetBuffer", ctypes.c_int, ctypes.py_object, ctypes.POINTER(_Buffer), ctypes.c_int)
_release_buffer = _function("PyBuffer_Release", None, ctypes.POINTER(_Buffer))
_utf8_of = _function("PyUnicode_AsUTF8AndSize", ctypes.c_void_p, ctypes.py_object, ctypes.POINTER(ctypes.c_ssize_t))
_new_text = _function("PyUnicode_New", ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_uint32)
_append_text = _function("PyUnicode_Append", None, ctypes.POINTER(ctypes.c_void_p), ctypes.py_object)
_forget = _function("Py_DecRef", None, ctypes.c_void_p)
_remember = _function("Py_IncRef", None, ctypes.py_object)
_advise = getattr(ctypes.CDLL(None), "madvise", None) if hasattr(mmap, "MADV_HUGEPAGE") else None


class GilYielder:
    """Release the GIL regularly during long work in Python."""

    __slots__ = ("_since",)

    def __init__(self) -> None:
        self._since = perf_counter()

    def give_way(self) -> None:
        if perf_counter() - self._since > TURN:
            sleep(REST)
            self._since = perf_counter()


def at_address(address: int, size: int, keeper: Any) -> Tensor:
    """Return a tensor of the `size` bytes at `address`; it keeps `keeper`, their owner, alive."""
    array: Any = (ctypes.c_ubyte * size).from_address(address)
    array.keeper = keeper
    with torch.inference_mode(False):
        return torch.frombuffer(array, dtype=torch.uint8)


def held(blob: Tensor) -> Any:
    """Return the memory of a byte tensor as a buffer that keeps the tensor alive."""
    view: Any = (ctypes.c_ubyte * blob.numel()).from_buffer(memory(blob))
    view.blob = blob
    return view


def address_of(view: memoryview) -> int:
    """Return the address of a contiguous buffer, which may be read-only."""
    buffer = _Buffer()
    _get_buffer(view, ctypes.byref(buffer), 0)
    try:
        return int(buffer.buf or 0)
    finally:
        _release_buffer(ctypes.byref(buffer))


def of_buffer(view: memoryview) -> Tensor:
    """Return the memory of a contiguous buffer as a tensor, which keeps the buffer alive."""
    return at_address(address_of(view), view.nbytes, view)


def fresh(size: int) -> Tensor:
    """Return a byte tensor of newly allocated, untouched memory."""
    with torch.inference_mode(False):
        made = torch.empty(size, dtype=torch.uint8, device=CPU)
    if not is_intercepted():
        _advise_huge(made.data_ptr(), size)
    return made


def copied(view: memoryview) -> Tensor:
    made = fresh(view.nbytes)
    copy(made.data_ptr(), address_of(view), view.nbytes)
    return made


def is_intercepted() -> bool:
    """Return True if torch operators may not work on real memory here, as in a mode of fake tensors."""
    return bool(torch._C._len_torch_dispatch_stack())


def copy(target: int, source: int, size: int) -> None:
    """Copy bytes from one address to another without the GIL."""
    if size < PARALLEL_FROM or is_intercepted():
        ctypes.memmove(target, source, size)
        return
    with torch.no_grad():
        at_address(target, size, None).copy_(at_address(source, size, None))


def fill_new(target: int, source: int, size: int) -> None:
    """Copy bytes into newly allocated, untouched memory."""
    _advise_huge(target, size)
    copy(target, source, size)


def _advise_huge(target: int, size: int) -> None:
    """Request huge pages for untouched memory, if it is large."""
    if _advise is not None and size >= HUGE_FROM:  # a kernel without huge pages uses small ones
        start = -(-target // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (target + size) // mmap.PAGESIZE * mmap.PAGESIZE
        _advise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_HUGEPAGE)


# Text


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
    """Decode UTF-8 without holding the GIL for long.

    Raises:
        UnicodeDecodeError: `encoded` is not UTF-8.
    """
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
