"""Memory of Python objects as tensors of bytes, and copies that do not hold the interpreter.

A tensor of bytes is what the transport carries, so an object whose memory is one travels without a copy here. A copy of
256 MB takes 0.1 s, in which no other thread could run if the interpreter's lock were held.
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

PIECE = 1 << 17  # bytes of text that are encoded or decoded at once: about 0.1 ms
CHECKED = 1 << 23  # bytes that are looked at at once, without the interpreter's lock
HUGE_FROM = 1 << 22  # bytes from which huge pages take half the time of small ones to touch, and a tenth to free
PARALLEL_FROM = 1 << 21  # as in `transport.blocks`: below, waking torch's other threads costs more than their help
TURN = 2e-3  # seconds of work after which another thread gets the interpreter
REST = 5e-5  # seconds: long enough for a waiting thread to wake, which sleep(0) is not

_api = ctypes.pythonapi


class _Buffer(ctypes.Structure):
    """Py_buffer, whose layout is part of the stable ABI."""

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
    # A prototype of our own: to set the types of ctypes.pythonapi's function would set them for the whole process.
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


class Turns:
    """Gives the interpreter to another thread now and then during a long piece of work in Python."""

    __slots__ = ("_since",)

    def __init__(self) -> None:
        self._since = perf_counter()

    def give_way(self) -> None:
        if perf_counter() - self._since > TURN:
            sleep(REST)
            self._since = perf_counter()


def at_address(address: int, size: int, keeper: Any) -> Tensor:
    """A tensor of the `size` bytes at `address`, which `keeper` owns."""
    array: Any = (ctypes.c_ubyte * size).from_address(address)
    array.keeper = keeper
    with torch.inference_mode(False):
        return torch.frombuffer(array, dtype=torch.uint8)


def held(blob: Tensor) -> Any:
    """The memory of a tensor of bytes as a buffer, which keeps it alive."""
    view: Any = (ctypes.c_ubyte * blob.numel()).from_buffer(memory(blob))
    view.blob = blob
    return view


def address_of(view: memoryview) -> int:
    """Where a contiguous buffer lies, a read-only one too."""
    buffer = _Buffer()
    _get_buffer(view, ctypes.byref(buffer), 0)
    try:
        return int(buffer.buf or 0)
    finally:
        _release_buffer(ctypes.byref(buffer))


def of_buffer(view: memoryview) -> Tensor:
    """The memory of a contiguous buffer; the tensor holds the buffer."""
    return at_address(address_of(view), view.nbytes, view)


def fresh(size: int) -> Tensor:
    """Return bytes that were not touched yet."""
    with torch.inference_mode(False):
        made = torch.empty(size, dtype=torch.uint8, device=CPU)
    if not is_intercepted():
        _advise_huge(made.data_ptr(), size)
    return made


def copied(view: memoryview) -> Tensor:
    """A copy of the memory of a contiguous buffer."""
    made = fresh(view.nbytes)
    copy(made.data_ptr(), address_of(view), view.nbytes)
    return made


def is_intercepted() -> bool:
    """Whether operators of torch may do something else here than to work on memory, as in a mode of fake tensors."""
    return bool(torch._C._len_torch_dispatch_stack())


def copy(target: int, source: int, size: int) -> None:
    """Copy bytes from one address to another without the interpreter's lock."""
    if size < PARALLEL_FROM or is_intercepted():
        ctypes.memmove(target, source, size)
        return
    with torch.no_grad():
        at_address(target, size, None).copy_(at_address(source, size, None))


def fill_new(target: int, source: int, size: int) -> None:
    """Copy bytes into memory that was allocated and not touched yet."""
    _advise_huge(target, size)
    copy(target, source, size)


def _advise_huge(target: int, size: int) -> None:
    """Have memory that was not touched yet lie on huge pages, if there is much of it."""
    if _advise is not None and size >= HUGE_FROM:  # a kernel without huge pages serves small ones
        start = -(-target // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (target + size) // mmap.PAGESIZE * mmap.PAGESIZE
        _advise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_HUGEPAGE)


# Text


def of_text(text: str) -> Tensor:
    """The UTF-8 of a text: its own memory where it is ASCII."""
    if text.isascii():
        size = ctypes.c_ssize_t()
        return at_address(_utf8_of(text, ctypes.byref(size)), len(text), text)
    turns, encoded = Turns(), bytearray()
    for start in range(0, len(text), PIECE):
        encoded += text[start : start + PIECE].encode("utf-8", "surrogatepass")
        turns.give_way()
    return of_buffer(memoryview(encoded))


def to_text(encoded: Tensor) -> str:
    """The text of which `encoded` is the UTF-8, made without holding the interpreter for long.

    Raises:
        UnicodeDecodeError: it is no UTF-8.
    """
    made = ctypes.c_void_p()  # refers to the text, and nothing else does until it is whole
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
        return False  # not known
    with torch.inference_mode(False), torch.no_grad():
        signed = encoded.view(torch.int8)
        return all(int(signed[at : at + CHECKED].min()) >= 0 for at in range(0, len(signed), CHECKED))


def _decode_into(made: ctypes.c_void_p, encoded: Tensor) -> None:
    turns, view = Turns(), memory(encoded)
    start, size = 0, len(view)
    while start < size:
        end = min(start + PIECE, size)
        while end < size and end > start and view[end] & 0xC0 == 0x80:  # inside of a character
            end -= 1
        end = end if end > start else size
        piece = str(view[start:end], "utf-8", "surrogatepass")
        if made.value is None:
            _remember(piece)
            made.value = id(piece)
            del piece
        else:
            _append_text(ctypes.byref(made), piece)  # in place, as nothing else refers to it
        start = end
        turns.give_way()
