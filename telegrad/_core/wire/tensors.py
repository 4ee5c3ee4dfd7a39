"""What a tensor on its way is made of: leaves, which have memory of their own, and that memory, as blobs.

Blobs are one-dimensional tensors of bytes that alias the source where they can, so that nothing large is copied here.
What lies on an accelerator, or shall arrive on one, is carried as a blob however small it is, bound for its device.
`packing` takes tensors apart, `unpacking` puts them together.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

# torch warns of kinds of tensors that are experimental, at the line that makes them. It is the program's choice to use
# them, and the lines here only rebuild tensors that were received.
warnings.filterwarnings("ignore", category=UserWarning, module=r"telegrad\._core\.wire\.(tensors|packing|unpacking)$")

CPU = torch.device("cpu")
HOST = -1  # in the place of an accelerator's number
GRAD, CONJ, NEG = 1, 2, 4  # flags of a leaf

_QUANTIZED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
NAMES = {
    dtype: str(dtype).removeprefix("torch.")
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and dtype not in _QUANTIZED
}
DTYPES = {name: dtype for dtype, name in NAMES.items()}
_empty: dict[str, Tensor] = {}  # of each type one, to make others like it

# A prototype of our own: to set the types of ctypes.pythonapi's function would set them for the whole process.
_view = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)(
    ("PyMemoryView_FromMemory", ctypes.pythonapi)
)
_WRITABLE = 0x200

Spec = tuple[Any, ...]
Memory = int | bytes


class Bound(NamedTuple):
    """A blob that lies on an accelerator, or shall arrive on one."""

    blob: Tensor
    device: int  # the receiver's, or HOST
    ready: torch.Event | None = None  # after which it may be read; else after what is on the current stream

    @property
    def nbytes(self) -> int:
        return self.blob.nbytes

    def numel(self) -> int:
        return self.blob.numel()


Blob = Tensor | Bound


def memory(blob: Tensor) -> memoryview:
    """The memory of a tensor of bytes, writable; it does not keep the tensor alive."""
    return _view(blob.data_ptr(), blob.numel(), _WRITABLE) if blob.numel() else memoryview(bytearray())


def nothing(name: str, device: torch.device = CPU) -> Tensor:
    """An empty tensor to be set upon some memory; for that of the host, this way to make one is the fastest."""
    if device.type != "cpu":
        with torch.inference_mode(False):
            return torch.empty(0, dtype=DTYPES[name], device=device)
    like = _empty.get(name)
    if like is None:
        with torch.inference_mode(False):
            like = _empty[name] = torch.empty(0, dtype=DTYPES[name], device=CPU)
    return torch.empty_like(like)


def keep_for(tensor: Tensor, stream: torch.Stream) -> None:
    """The memory of a tensor is not used anew before `stream` has done what it was asked for until then."""
    for part in _parts_of(tensor):
        with torch.no_grad():
            # A view without the bits of the other: `record_stream` of torch destroys memory where they are set.
            bare = part.conj() if part.is_complex() and part.is_conj() else part
            bare = torch._neg_view(bare) if bare.is_neg() else bare
        bare.record_stream(stream)


def _parts_of(tensor: Tensor) -> Iterable[Tensor]:
    """The tensors that have the memory of one."""
    if tensor.layout is torch.strided:
        return (tensor,)
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
