"""Tensors as a description and the memory to carry.

The description is a pickle of plain tuples. Memory is carried as blobs: one-dimensional tensors of bytes that alias the
source where they can, so that nothing large is copied here. Only the part of a storage that is looked at travels;
tensors whose parts overlap share a blob, and so a storage on arrival. Little memory travels inside the description.
"""

from __future__ import annotations

import ctypes
import io
import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from telegrad.errors import DeviceError

SMALL = 4096  # bytes that travel inside the description
ALIGNED = 16  # the largest element: blobs begin at a multiple, so that any type can view them

_view = ctypes.pythonapi.PyMemoryView_FromMemory
_view.restype = ctypes.py_object
_view.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_WRITABLE = 0x200

_GRAD, _CONJ = 1, 2
_BYTES, _VIEW, _SPREAD, _META, _COO, _COMPRESSED, _MKLDNN, _SAVED = range(8)
_COMPRESSED_PARTS = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}

_coo: Any = torch.sparse_coo_tensor
_compressed: Any = torch.sparse_compressed_tensor

Spec = tuple[Any, ...]


def memory(blob: Tensor) -> memoryview:
    """The memory of a tensor of bytes, writable; it does not keep the tensor alive."""
    return _view(blob.data_ptr(), blob.numel(), _WRITABLE) if blob.numel() else memoryview(bytearray())


def pack(tensors: Sequence[Tensor]) -> tuple[bytes, list[Tensor]]:
    """Describe `tensors`; the description, and the blobs to carry with it.

    Raises:
        DeviceError: a tensor lives on a device from which it cannot be sent.
    """
    packer = _Packer(tensors)
    specs = [packer.describe(tensor) for tensor in tensors]
    return pickle.dumps(specs, 5), packer.blobs


def unpack(meta: bytes | memoryview, blobs: Sequence[Tensor]) -> list[Tensor]:
    """The tensors that `pack` described, built upon the memory of `blobs`."""
    small: dict[int, Tensor] = {}
    return [_restore(spec, blobs, small) for spec in pickle.loads(meta)]


class _Packer:
    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.blobs: list[Tensor] = []
        self._small = 0
        # Only where one storage is seen twice need parts of storages be compared.
        self._parts: dict[tuple[int, int], Any] = {}
        if len(tensors) > 1:
            self._find_shared(tensors)

    def describe(self, tensor: Tensor) -> Spec:
        if tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized:
            if tensor.is_cpu:
                return self._strided(tensor)
            if tensor.is_meta:
                return _META, _dtype(tensor), tuple(tensor.shape), tensor.stride(), int(tensor.requires_grad)
        if not tensor.is_cpu:
            raise DeviceError(
                f"a tensor on {tensor.device} cannot be sent: move it to the CPU first (tensor.cpu()), "
                "and to the device you want on the other worker"
            )
        return self._special(tensor)

    def _strided(self, tensor: Tensor) -> Spec:
        flags = int(tensor.requires_grad)
        if tensor.is_conj():
            flags |= _CONJ
            tensor = tensor.detach().conj()
        if tensor.is_neg():
            tensor = tensor.detach().resolve_neg()
        dtype, shape = _dtype(tensor), tuple(tensor.shape)
        part = self._parts.get(_key(tensor)) if self._parts else None
        size = tensor.numel() * tensor.itemsize
        if part is None and tensor.is_contiguous():
            if size < SMALL:
                return _BYTES, dtype, shape, flags, ctypes.string_at(tensor.data_ptr(), size)
            start, _ = _extent(tensor)
            return _VIEW, self._carry(_bytes_of(tensor, start, size)), dtype, 0, shape, None, flags
        if part is None:
            start, end = _extent(tensor)
            if end - start > 2 * size:
                dense = tensor.detach().contiguous()
                return _SPREAD, self._carry(_bytes_of(dense, 0, size)), dtype, shape, tensor.stride(), flags
            part = _Part(start // ALIGNED * ALIGNED, end)
        if part.carried is None:
            part.carried = self._carry(_bytes_of(tensor, part.start, part.end - part.start))
        offset = (tensor.storage_offset() * tensor.itemsize - part.start) // tensor.itemsize
        return _VIEW, part.carried, dtype, offset, shape, tensor.stride(), flags

    def _carry(self, blob: Tensor) -> int | tuple[int, bytes]:
        """How a description names its memory: a number, or the bytes and a number that tells them from equal ones."""
        if blob.numel() < SMALL:
            self._small += 1
            return self._small, ctypes.string_at(blob.data_ptr(), blob.numel())
        self.blobs.append(blob)
        return len(self.blobs) - 1

    def _special(self, tensor: Tensor) -> Spec:
        flags = int(tensor.requires_grad)
        plain = tensor.detach()
        if tensor.layout is torch.sparse_coo:
            parts = [self.describe(plain._indices()), self.describe(plain._values())]
            return _COO, parts, tuple(tensor.shape), tensor.is_coalesced(), flags
        if tensor.layout in _COMPRESSED_PARTS:
            names = _COMPRESSED_PARTS[tensor.layout]
            parts = [self.describe(getattr(plain, name)()) for name in (*names, "values")]
            return _COMPRESSED, parts, tuple(tensor.shape), str(tensor.layout).removeprefix("torch."), flags
        if tensor.is_mkldnn:
            return _MKLDNN, self.describe(plain.to_dense()), flags
        file = io.BytesIO()
        torch.save(plain, file)
        saved = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
        return _SAVED, self.describe(saved), flags

    def _find_shared(self, tensors: Sequence[Tensor]) -> None:
        by_storage: dict[int, list[tuple[int, int, Tensor]]] = {}
        for tensor in tensors:
            if tensor.layout is torch.strided and tensor.is_cpu and not tensor.is_nested and tensor.numel():
                start, end = _extent(tensor)
                by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append((start, end, tensor))
        for views in by_storage.values():
            if len(views) > 1:
                self._join(sorted(views, key=lambda view: view[:2]))

    def _join(self, views: list[tuple[int, int, Tensor]]) -> None:
        """Views of one storage that overlap travel as one part of it."""
        parts: list[tuple[_Part, list[Tensor]]] = []
        for start, end, tensor in views:
            if parts and start < parts[-1][0].end:
                parts[-1][0].end = max(parts[-1][0].end, end)
                parts[-1][1].append(tensor)
            else:
                parts.append((_Part(start // ALIGNED * ALIGNED, end), [tensor]))
        for part, members in parts:
            if len(members) > 1:
                self._parts.update((_key(tensor), part) for tensor in members)


class _Part:
    """A range of bytes of a storage, carried once."""

    __slots__ = ("carried", "end", "start")

    def __init__(self, start: int, end: int) -> None:
        self.start, self.end = start, end
        self.carried: Any = None


def _key(tensor: Tensor) -> tuple[int, int]:
    return tensor.untyped_storage().data_ptr(), id(tensor)


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype)[6:]  # without "torch."


def _extent(tensor: Tensor) -> tuple[int, int]:
    """The range of bytes in its storage that a tensor looks at."""
    start = int(tensor.storage_offset())
    end = start + 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start * tensor.itemsize, (end if tensor.numel() else start) * tensor.itemsize


def _bytes_of(tensor: Tensor, start: int, size: int) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage(), start, (size,), (1,))


def _restore(spec: Spec, blobs: Sequence[Tensor], small: dict[int, Tensor]) -> Tensor:
    kind = spec[0]
    if kind == _BYTES:
        _, dtype, shape, flags, data = spec
        tensor = _from_bytes(data, getattr(torch, dtype), shape)
    elif kind == _VIEW:
        _, carried, dtype, offset, shape, stride, flags = spec
        storage = _memory(carried, blobs, small).untyped_storage()
        tensor = torch.empty(0, dtype=getattr(torch, dtype))
        tensor.set_(storage, offset, shape, stride if stride is not None else ())
    elif kind == _SPREAD:
        _, carried, dtype, shape, stride, flags = spec
        dense = _memory(carried, blobs, small).view(getattr(torch, dtype)).view(shape)
        tensor = torch.empty_strided(shape, stride, dtype=dense.dtype).copy_(dense)
    else:
        tensor, flags = _restore_special(spec, blobs, small)
    if flags & _CONJ:
        tensor = tensor.conj()
    return tensor.requires_grad_() if flags & _GRAD else tensor


def _restore_special(spec: Spec, blobs: Sequence[Tensor], small: dict[int, Tensor]) -> tuple[Tensor, int]:
    kind, flags = spec[0], spec[-1]
    if kind == _META:
        _, dtype, shape, stride, _ = spec
        return torch.empty_strided(shape, stride, dtype=getattr(torch, dtype), device="meta"), flags
    if kind == _MKLDNN:
        return _restore(spec[1], blobs, small).to_mkldnn(), flags
    if kind == _SAVED:
        return torch.load(io.BytesIO(memory(_restore(spec[1], blobs, small))), weights_only=False), flags
    parts = [_restore(part, blobs, small) for part in spec[1]]
    if kind == _COO:
        _, _, shape, coalesced, _ = spec
        return _coo(*parts, shape, is_coalesced=coalesced, check_invariants=False), flags
    _, _, shape, layout, _ = spec
    return _compressed(*parts, shape, layout=getattr(torch, layout), check_invariants=False), flags


def _memory(carried: int | tuple[int, bytes], blobs: Sequence[Tensor], small: dict[int, Tensor]) -> Tensor:
    if isinstance(carried, int):
        return blobs[carried]
    number, data = carried
    if number not in small:
        small[number] = (
            torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        )
    return small[number]


def _from_bytes(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype)
    tensor = torch.frombuffer(bytearray(data), dtype=dtype)
    return tensor if len(shape) == 1 else tensor.resize_(shape)
