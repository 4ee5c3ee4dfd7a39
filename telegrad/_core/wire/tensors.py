"""Parts of a tensor in transit: leaves, which have memory of their own, and that memory as blobs; strides of leaves.

Blobs are one-dimensional byte tensors that alias the source if possible, because large copies are expensive. Memory
from or for an accelerator is always a blob, even if it is small, with its target device. `packing` splits tensors into
these parts, `unpacking` combines them.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Iterable, Sequence
from math import prod
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
_empty: dict[str, Tensor] = {}  # one empty tensor per dtype, to create others from

# A separate prototype: setting the types on ctypes.pythonapi's function would change them for the whole process.
_view = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)(
    ("PyMemoryView_FromMemory", ctypes.pythonapi)
)
_WRITABLE = 0x200

Spec = tuple[Any, ...]
Memory = int | bytes


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
    like = _empty.get(name)
    if like is None:
        with torch.inference_mode(False):
            like = _empty[name] = torch.empty(0, dtype=DTYPES[name], device=CPU)
    return torch.empty_like(like)


def keep_for(tensor: Tensor, stream: torch.Stream) -> None:
    """Do not reuse the memory of a tensor before `stream` has completed the work queued until now."""
    for part in _parts_of(tensor):
        with torch.no_grad():
            # A view without the conj or neg bits: torch's `record_stream` corrupts memory if they are set.
            bare = part.conj() if part.is_complex() and part.is_conj() else part
            bare = torch._neg_view(bare) if bare.is_neg() else bare
        bare.record_stream(stream)


def _parts_of(tensor: Tensor) -> Iterable[Tensor]:
    if tensor.layout is torch.strided:
        return (tensor,)
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    return tensor.ccol_indices(), tensor.row_indices(), tensor.values()


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
