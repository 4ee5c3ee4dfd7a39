"""Tensors as a description and the memory to carry.

The description is a pickle of plain tuples. Memory is carried as blobs: one-dimensional tensors of bytes that alias the
source where they can, so that nothing large is copied here. Only the part of a storage that is looked at travels;
tensors whose parts overlap share a blob, and so a storage on arrival. Little memory travels inside the description.

A tensor with memory of its own is a leaf; what is made of several tensors (the sparse layouts) is taken apart into
leaves. A leaf is described by `(dtype, shape, flags, memory)`, and by `offset, stride` too where it is not dense:
`memory` is the bytes themselves, the number of a blob, or `~number` of bytes that several leaves share.
"""

from __future__ import annotations

import ctypes
import io
import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from telegrad.errors import CannotDecode, CannotEncode, CodecError, DeviceError

SMALL = 4096  # fewer bytes than these travel inside the description
_LOW = 1 << 32  # below this an address may be an offset in a storage that was freed
ALIGNED = 16  # the largest element: a shared part begins at a multiple, so that any type can view it

_view = ctypes.pythonapi.PyMemoryView_FromMemory
_view.restype = ctypes.py_object
_view.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_WRITABLE = 0x200

_STRIDED = torch.strided
_CPU = torch.device("cpu")
_QUANTIZED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
_NAMES = {
    dtype: str(dtype).removeprefix("torch.")
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and dtype not in _QUANTIZED
}
_REAL = {dtype: name for dtype, name in _NAMES.items() if not dtype.is_complex}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_empty: dict[str, Tensor] = {}  # of each type one, to make others like it
_COMPRESSED = {
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}

_GRAD, _CONJ, _NEG = 1, 2, 4  # flags of a leaf

Spec = tuple[Any, ...]
Memory = int | bytes


def memory(blob: Tensor) -> memoryview:
    """The memory of a tensor of bytes, writable; it does not keep the tensor alive."""
    return _view(blob.data_ptr(), blob.numel(), _WRITABLE) if blob.numel() else memoryview(bytearray())


def pack(tensors: Sequence[Tensor]) -> tuple[bytes, list[Tensor]]:
    """Describe `tensors`: the description, and the blobs to carry with it.

    Raises:
        DeviceError: a tensor lives on a device from which it cannot be sent.
        CannotEncode: a tensor is of a kind that torch cannot take apart.
    """
    try:
        return _pack_dense(tensors) or _pack_any(tensors)
    except (CodecError, DeviceError):
        raise
    except Exception as error:
        raise CannotEncode(f"a tensor cannot be sent: {error}; send its values as a plain tensor") from error


def unpack(meta: bytes | memoryview, blobs: Sequence[Tensor]) -> list[Tensor]:
    """The tensors that `pack` described, built in place upon the memory of `blobs`.

    Raises:
        CannotDecode: this version of torch cannot build one of them.
    """
    if torch.is_inference_mode_enabled():  # what arrives is usable outside as well
        with torch.inference_mode(False):
            return unpack(meta, blobs)
    try:
        described = pickle.loads(meta)
        if type(described) is list:
            return [_leaf(spec, blobs) for spec in described]
        specs, shared, plans = described
        parts = [torch.frombuffer(bytearray(data), dtype=torch.uint8) for data in shared]
        leaves = [_leaf(spec, blobs, parts) for spec in specs]
        return [leaves[plan] if isinstance(plan, int) else _assemble(plan, leaves) for plan in plans]
    except Exception as error:
        raise CannotDecode(
            f"a tensor arrived but cannot be rebuilt: {type(error).__name__}: {error}; "
            "use the same version of torch on all workers"
        ) from error


def on_cpu(tensor: Tensor) -> Tensor:
    """The one place that decides what happens to tensors of other devices."""
    if not tensor.is_cpu and not tensor.is_meta:
        raise DeviceError(
            f"a tensor on {tensor.device} cannot be sent: move it to the CPU first (tensor.cpu()), "
            "and to the device you want on the other worker"
        )
    return tensor


def _nothing(name: str) -> Tensor:
    """An empty tensor to be set upon some memory; this way to make one is the fastest."""
    like = _empty.get(name)
    if like is None:
        with torch.inference_mode(False):
            like = _empty[name] = torch.empty(0, dtype=_DTYPES[name], device=_CPU)
    return torch.empty_like(like)


# Taking apart


def _pack_dense(tensors: Sequence[Tensor]) -> tuple[bytes, list[Tensor]] | None:
    """The usual case, in the fewest steps: real, contiguous, on the CPU, and none shares memory with another."""
    specs: list[Spec] = []
    blobs: list[Tensor] = []
    spans: list[tuple[int, int]] = []
    for tensor in tensors:
        name = _REAL.get(tensor.dtype)
        if (
            name is None
            or tensor.layout is not _STRIDED
            or not tensor.is_cpu
            or tensor.is_nested
            or not tensor.is_contiguous()
            or tensor.is_neg()
        ):
            return None
        size, address, shape = tensor.nbytes, tensor.data_ptr(), tuple(tensor.shape)
        if 1 in shape and tensor.stride() != _dense_stride(shape):
            return None
        if size:
            spans.append((address, address + size))
        if size < SMALL and address > _LOW:
            carried: Memory = ctypes.string_at(address, size)
        else:
            carried = _carry(tensor, address, size, blobs)
        specs.append((name, shape, int(tensor.requires_grad), carried))
    if len(spans) > 1 and _any_overlap(spans):
        return None
    return pickle.dumps(specs, 5), blobs


def _any_overlap(spans: Sequence[tuple[int, ...]]) -> bool:
    reach = 0
    for start, end, *_ in sorted(spans):
        if start < reach:
            return True
        reach = end
    return False


def _pack_any(tensors: Sequence[Tensor]) -> tuple[bytes, list[Tensor]]:
    leaves: list[Tensor] = []
    plans = [_place(tensor, leaves) for tensor in tensors]  # which leaf it is, or what is made of which leaves
    blobs: list[Tensor] = []
    shared: list[bytes] = []
    parts = _find_shared(leaves, blobs, shared)
    specs: list[Spec] = []
    for number, leaf in enumerate(leaves):
        flags = _GRAD * leaf.requires_grad | _NEG * leaf.is_neg() | _CONJ * (leaf.is_complex() and leaf.is_conj())
        head = _NAMES[leaf.dtype], tuple(leaf.shape), flags
        if number in parts:
            specs.append((*head, *parts[number], leaf.stride()))
        elif leaf.is_meta:
            specs.append((*head, None, 0, leaf.stride()))
        elif leaf.is_contiguous() and leaf.stride() == _dense_stride(head[1]):
            specs.append((*head, _carry(leaf, leaf.data_ptr(), leaf.nbytes, blobs)))
        else:
            specs.append((*head, *_carry_strided(leaf, blobs)))
    return pickle.dumps((specs, shared, plans), 5), blobs


def _place(tensor: Tensor, leaves: list[Tensor]) -> int | Spec:
    """Add the leaves of a tensor; the number of the only one, or how to join several."""
    if tensor.layout is _STRIDED and tensor.dtype in _NAMES and not tensor.is_nested:
        leaves.append(on_cpu(tensor))
        return len(leaves) - 1
    on_cpu(tensor)
    plain, flags = tensor.detach(), tensor.requires_grad
    if tensor.layout is torch.sparse_coo:
        parts = [_place(part, leaves) for part in (plain._indices(), plain._values())]
        return "coo", flags, parts, tuple(tensor.shape), tensor.is_coalesced()
    if tensor.layout in _COMPRESSED:
        parts = [_place(getattr(plain, part)(), leaves) for part in _COMPRESSED[tensor.layout]]
        return "compressed", flags, parts, tuple(tensor.shape), str(tensor.layout).removeprefix("torch.")
    if tensor.is_mkldnn:
        return "mkldnn", flags, [_place(plain.to_dense(), leaves)]
    file = io.BytesIO()
    torch.save(plain, file)
    return "saved", flags, [_place(torch.frombuffer(bytearray(file.getbuffer()), dtype=torch.uint8), leaves)]


def _carry(leaf: Tensor, address: int, size: int, blobs: list[Tensor]) -> Memory:
    """The memory from where a leaf begins."""
    if size and not address and leaf._is_zerotensor():
        leaf = torch.zeros(size, dtype=torch.uint8, device=_CPU)
        address = leaf.data_ptr()
    if size < SMALL:
        if address <= _LOW:
            _check_memory(leaf, size)
        return ctypes.string_at(address, size)
    _check_memory(leaf, size)
    blobs.append(_bytes_of(leaf.untyped_storage(), int(leaf.storage_offset()) * leaf.itemsize, size))
    return len(blobs) - 1


def _check_memory(leaf: Tensor, size: int) -> None:
    missing = leaf.untyped_storage().nbytes() < leaf.storage_offset() * leaf.itemsize + size
    if size and (missing or not leaf.data_ptr()):
        raise CannotEncode(
            f"a tensor of shape {tuple(leaf.shape)} cannot be sent: it has no memory, or that was freed; "
            "send it before its storage is resized"
        )


def _bytes_of(storage: torch.UntypedStorage, start: int, size: int) -> Tensor:
    return _nothing("uint8").set_(storage, start, (size,), (1,))


def _carry_strided(leaf: Tensor, blobs: list[Tensor]) -> tuple[Memory, int | None, tuple[int, ...]]:
    """All that lies between the first and the last element, or the elements alone where they are far apart."""
    stride, extent = leaf.stride(), _extent(leaf)
    distinct = tuple(1 if step == 0 else n for n, step in zip(leaf.shape, stride, strict=True))
    used = leaf.itemsize
    for n in distinct:
        used *= n
    if 2 * used >= extent or _overlaps(distinct, stride):
        return _carry(leaf, leaf.data_ptr(), extent, blobs), 0, stride
    _check_memory(leaf, extent)
    raw = _nothing(_NAMES[leaf.dtype])
    raw.set_(leaf.untyped_storage(), leaf.storage_offset(), distinct, stride)
    dense = raw.contiguous()
    return _carry(dense, dense.data_ptr(), used, blobs), None, stride


def _dense_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The stride of a new tensor of that shape; a contiguous one may differ where it has one element."""
    stride, step = [], 1
    for n in reversed(shape):
        stride.append(step)
        step *= max(n, 1)
    return tuple(reversed(stride))


def _extent(leaf: Tensor) -> int:
    """The bytes from the first element to the end of the last one."""
    if not leaf.numel():
        return 0
    last = sum((n - 1) * step for n, step in zip(leaf.shape, leaf.stride(), strict=True))
    return (last + 1) * leaf.itemsize


def _overlaps(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether two elements may lie at one place."""
    reach = 0
    for step, n in sorted((step, n) for n, step in zip(shape, stride, strict=True) if n > 1):
        if step <= reach:
            return True
        reach += (n - 1) * step
    return False


def _find_shared(leaves: list[Tensor], blobs: list[Tensor], shared: list[bytes]) -> dict[int, tuple[Memory, int]]:
    """Of each leaf whose memory another one looks at too: what carries it, and the offset in that."""
    spans = []
    for number, leaf in enumerate(leaves):
        address, size = leaf.data_ptr(), _extent(leaf)
        if size and address:
            spans.append((address, address + size, number))
    return _join(sorted(spans), leaves, blobs, shared) if _any_overlap(spans) else {}


def _join(
    spans: list[tuple[int, int, int]], leaves: list[Tensor], blobs: list[Tensor], shared: list[bytes]
) -> dict[int, tuple[Memory, int]]:
    groups: list[tuple[int, int, list[int]]] = []
    for start, end, number in spans:
        if groups and start < groups[-1][1]:
            first, reach, members = groups[-1]
            groups[-1] = first, max(reach, end), [*members, number]
        else:
            groups.append((start, end, [number]))
    parts: dict[int, tuple[Memory, int]] = {}
    for start, end, members in groups:
        storage = _holder(start, end, [leaves[number] for number in members]) if len(members) > 1 else None
        if storage is None:
            continue
        base = storage.data_ptr()
        first = (start - base) // ALIGNED * ALIGNED
        blob = _bytes_of(storage, first, end - base - first)
        if blob.numel() < SMALL:
            shared.append(ctypes.string_at(blob.data_ptr(), blob.numel()))
            carried = ~(len(shared) - 1)
        else:
            blobs.append(blob)
            carried = len(blobs) - 1
        for number in members:
            parts[number] = carried, (leaves[number].data_ptr() - base - first) // leaves[number].itemsize
    return parts


def _holder(start: int, end: int, members: list[Tensor]) -> torch.UntypedStorage | None:
    """A storage that holds all of the members; none does where two foreign arrays overlap by half."""
    for leaf in members:
        storage = leaf.untyped_storage()
        base = storage.data_ptr()
        aligned = all((other.data_ptr() - base) % other.itemsize == 0 for other in members)
        if base <= start and end <= base + storage.nbytes() and aligned:
            return storage
    return None


# Putting together


def _leaf(spec: Spec, blobs: Sequence[Tensor], shared: Sequence[Tensor] = ()) -> Tensor:
    if len(spec) == 4:
        name, shape, flags, carried = spec
        if type(carried) is bytes:
            if carried:
                tensor = torch.frombuffer(bytearray(carried), dtype=_DTYPES[name])
                if len(shape) != 1:
                    tensor.resize_(shape)
            else:
                tensor = torch.empty(shape, dtype=_DTYPES[name], device=_CPU)
        else:
            tensor = _upon(blobs[carried], name, 0, shape, None)
    else:
        name, shape, flags, carried, offset, stride = spec
        if carried is None:
            tensor = torch.empty_strided(shape, stride, dtype=_DTYPES[name], device="meta")
        elif offset is None:
            tensor = _spread(_bytes(carried, blobs, shared), name, shape, stride)
        else:
            tensor = _upon(_bytes(carried, blobs, shared), name, offset, shape, stride)
    if flags:
        if flags & (_CONJ | _NEG):
            bits = {name: True for name, bit in (("conj", _CONJ), ("neg", _NEG)) if flags & bit}
            torch._utils.set_tensor_metadata(tensor, bits)  # type: ignore[no-untyped-call]
        if flags & _GRAD:
            tensor.requires_grad_()
    return tensor


def _bytes(carried: Memory, blobs: Sequence[Tensor], shared: Sequence[Tensor]) -> Tensor:
    if isinstance(carried, bytes):
        return torch.frombuffer(bytearray(carried), dtype=torch.uint8) if carried else _nothing("uint8")
    return blobs[carried] if carried >= 0 else shared[~carried]


def _upon(blob: Tensor, name: str, offset: int, shape: tuple[int, ...], stride: tuple[int, ...] | None) -> Tensor:
    """A tensor upon the memory of a blob; as no view of it, so that it may be changed and saved like any other."""
    tensor = _nothing(name)
    start = blob.storage_offset()
    if start:
        if start % tensor.itemsize:
            blob, start = blob.clone(), 0
        offset += start // tensor.itemsize
    place: Any = (shape,) if stride is None else (shape, stride)
    return tensor.set_(blob.untyped_storage(), offset, *place)


def _spread(blob: Tensor, name: str, shape: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
    """The elements put as far apart as they were."""
    distinct = tuple(1 if step == 0 else n for n, step in zip(shape, stride, strict=True))
    base = torch.empty_strided(distinct, stride, dtype=_DTYPES[name], device=_CPU)
    base.copy_(_upon(blob, name, 0, distinct, None))
    tensor = _nothing(name)
    return tensor.set_(base.untyped_storage(), 0, shape, stride)


def _assemble(plan: Spec, leaves: list[Tensor]) -> Tensor:
    kind, requires_grad, numbers, *rest = plan
    parts = [leaves[number] for number in numbers]
    if kind == "coo":
        shape, coalesced = rest
        tensor = torch.sparse_coo_tensor(
            parts[0], parts[1], shape, device=parts[0].device, is_coalesced=coalesced, check_invariants=False
        )
    elif kind == "compressed":
        shape, layout = rest
        tensor = torch.sparse_compressed_tensor(
            parts[0],
            parts[1],
            parts[2],
            shape,
            layout=getattr(torch, layout),
            device=parts[0].device,
            check_invariants=False,
        )
    elif kind == "mkldnn":
        tensor = parts[0].to_mkldnn()
    else:
        tensor = torch.load(io.BytesIO(memory(parts[0])), weights_only=False)
    return tensor.requires_grad_() if requires_grad else tensor
