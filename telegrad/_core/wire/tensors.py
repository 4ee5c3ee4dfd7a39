"""Parts of a tensor in transit: leaves, which have memory of their own, and that memory as blobs.

Blobs are one-dimensional byte tensors that alias the source if possible, because large copies are expensive. Memory
from or for an accelerator is always a blob, even if it is small, with its target device. `packing` splits tensors into
these parts, `unpacking` combines them.

The transport carries blobs only. The memory of other Python objects is viewed as a blob, so it is sent without a copy.
Large copies release the GIL: a copy of 256 MB takes 0.1 s, and no other thread could run meanwhile.

The thread that makes a tensor here may be in any mode of the program's. The tensor must not depend on that. So it is
made outside of inference mode, since autograd cannot save such tensors, and with an explicit device, since the program
may have set a default one. Operators are avoided where a mode may intercept them (`is_intercepted`): within
FakeTensorMode a new tensor has no memory.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import warnings
from collections.abc import Callable, Sequence
from math import prod
from time import perf_counter, sleep
from typing import Any, NamedTuple

import torch
from torch import Tensor

# torch warns about experimental kinds of tensors at the line that creates them. The program chooses to use them; the
# lines here only rebuild received tensors.
warnings.filterwarnings("ignore", category=UserWarning, module=r"telegrad\._core\.wire\.(tensors|packing|unpacking)$")

CPU = torch.device("cpu")
HOST = -1  # instead of an accelerator's number
GRAD, CONJ, NEG = 1, 2, 4  # flags of a leaf

_QUANTIZED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
NAMES = {
    dtype: str(dtype).removeprefix("torch.")
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and dtype not in _QUANTIZED
}
DTYPES = {name: dtype for dtype, name in NAMES.items()}

PIECE = 1 << 17  # bytes of text encoded or decoded at once: about 0.1 ms
CHECKED = 1 << 23  # bytes checked at once, without the GIL
HUGE_FROM = 1 << 22  # from this size on, huge pages take half the time of small ones to touch, and a tenth to free
PARALLEL_FROM = 1 << 21  # below this, waking torch's other threads costs more than they save
TURN = 2e-3  # seconds of work after which this thread releases the GIL
REST = 5e-5  # seconds: long enough for a waiting thread to wake, unlike sleep(0)

Spec = tuple[Any, ...]
Memory = int | bytes


def _function(name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
    # A separate prototype: setting the types on ctypes.pythonapi's function would change them for the whole process.
    made: Callable[..., Any] = ctypes.PYFUNCTYPE(result, *arguments)((name, ctypes.pythonapi))
    return made


_Buffer = ctypes.c_void_p * 11  # room for a Py_buffer, a struct of the stable ABI whose first field is the address
_get_buffer = _function("PyObject_GetBuffer", ctypes.c_int, ctypes.py_object, ctypes.c_void_p, ctypes.c_int)
_release_buffer = _function("PyBuffer_Release", None, ctypes.c_void_p)
_view = _function("PyMemoryView_FromMemory", ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_WRITABLE = 0x200  # for `_view`
_utf8_of = _function("PyUnicode_AsUTF8AndSize", ctypes.c_void_p, ctypes.py_object, ctypes.POINTER(ctypes.c_ssize_t))
_new_text = _function("PyUnicode_New", ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_uint32)
_append_text = _function("PyUnicode_Append", None, ctypes.POINTER(ctypes.c_void_p), ctypes.py_object)
_forget = _function("Py_DecRef", None, ctypes.c_void_p)
_remember = _function("Py_IncRef", None, ctypes.py_object)
_advise = getattr(ctypes.CDLL(None), "madvise", None) if hasattr(mmap, "MADV_HUGEPAGE") else None


class DeviceBlob(NamedTuple):
    """A blob that is on an accelerator, or is to arrive on one."""

    blob: Tensor
    device: int  # device of the receiver, or HOST
    ready: torch.Event | None = None  # event before which it may not be read; None: the work on the current stream

    @property
    def nbytes(self) -> int:
        return self.blob.nbytes

    def numel(self) -> int:
        return self.blob.numel()


Blob = Tensor | DeviceBlob


def memory(blob: Tensor) -> memoryview:
    """Return the memory of a byte tensor, writable; the view does not keep the tensor alive."""
    return _view(blob.data_ptr(), blob.numel(), _WRITABLE) if blob.numel() else memoryview(bytearray())


def nothing(name: str, device: torch.device = CPU) -> Tensor:
    """Return an empty tensor that can be set to some memory. For the host, this is the fastest way."""
    if device.type != "cpu":
        with torch.inference_mode(False):
            return torch.empty(0, dtype=DTYPES[name], device=device)
    return torch.empty_like(_empty(name))


@functools.cache
def _empty(name: str) -> Tensor:
    with torch.inference_mode(False):
        return torch.empty(0, dtype=DTYPES[name], device=CPU)


def keep_for(tensor: Tensor, stream: torch.Stream) -> None:
    """Do not reuse the memory of a tensor before `stream` has completed the work queued until now."""
    for part in parts_of(tensor):
        with torch.no_grad():
            # A view without the conj or neg bits: torch's `record_stream` corrupts memory if they are set.
            bare = part.conj() if part.is_complex() and part.is_conj() else part
            bare = torch._neg_view(bare) if bare.is_neg() else bare
        bare.record_stream(stream)


SPARSE = {  # by layout: the methods that return the parts of a tensor
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


def parts_of(tensor: Tensor) -> list[Tensor]:
    """Return the tensors of which a sparse tensor is made; of any other tensor, the tensor itself."""
    methods = SPARSE.get(tensor.layout)
    return [getattr(tensor, method)() for method in methods] if methods else [tensor]


Strides = tuple[int, ...]


def contiguous_strides(shape: Sequence[int]) -> Strides:
    """Return the strides of a new tensor of that shape. Contiguous tensors may differ in dimensions of length 1."""
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))


def extent(shape: Sequence[int], strides: Strides) -> int:
    return 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True)) if prod(shape) else 0


def distinct(shape: Sequence[int], strides: Strides) -> tuple[int, ...]:
    """Return the shape without the repetitions made by `expand`."""
    return tuple(1 if step == 0 and n else n for n, step in zip(shape, strides, strict=True))


def repeats(shape: Sequence[int], strides: Strides) -> bool:
    """Return True if two elements may have the same address."""
    reach = 0
    for step, n in sorted((step, n) for n, step in zip(shape, strides, strict=True) if n > 1):
        if step <= reach:
            return True
        reach += (n - 1) * step
    return False


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
    # torch keeps the array alive, and the array keeps `keeper`: unlike a memoryview, an array of ctypes can have
    # attributes.
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
    _get_buffer(view, buffer, 0)
    try:
        return int(buffer[0] or 0)
    finally:
        _release_buffer(buffer)


def of_buffer(view: memoryview) -> Tensor:
    """Return the memory of a contiguous buffer as a tensor, which keeps the buffer alive."""
    return at_address(address_of(view), view.nbytes, view)


def fresh(size: int) -> Tensor:
    """Return a byte tensor of newly allocated, untouched memory."""
    with torch.inference_mode(False):
        made = torch.empty(size, dtype=torch.uint8, device=CPU)
    if not is_intercepted():
        advise_huge(made.data_ptr(), size)
    return made


def copy_of(view: memoryview) -> Tensor:
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
    advise_huge(target, size)
    copy(target, source, size)


def advise_huge(target: int, size: int) -> None:
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
