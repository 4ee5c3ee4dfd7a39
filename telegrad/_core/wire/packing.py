"""Serialize tensors as a description and the blobs to send with it, and rebuild them from these.

The description is a pickle of plain tuples. Only the part of a storage that the tensors use is sent. Tensors whose
parts overlap share one blob, and therefore one storage at the receiver. Small memory is part of the description.

A tensor with memory of its own is a leaf. A tensor made of several tensors (the sparse layouts) is split into leaves. A
leaf is described by `(dtype, shape, flags, memory)`, and also by `offset, stride` if it is not dense. `memory` is the
bytes themselves, the number of a blob, or `~number` of bytes that several leaves share.
"""

import ctypes
import io
import pickle
import re
from collections.abc import Sequence
from itertools import pairwise, repeat
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _disable_current_modes

from telegrad._core import processes
from telegrad._core.wire.tensors import (
    CONJ,
    CPU,
    DTYPES,
    GRAD,
    HOST,
    NAMES,
    NEG,
    SPARSE,
    Blob,
    DeviceBlob,
    DeviceMapping,
    DeviceRoute,
    Memory,
    Spec,
    bytes_of,
    contiguous_strides,
    copy_of,
    distinct,
    extent_of,
    is_intercepted,
    joined,
    keep_for,
    memory,
    nothing,
    parts_of,
    repeats,
)
from telegrad.errors import CannotDecode, CannotEncode, CodecError, DeviceError

SMALL = 4096  # smaller tensors are part of the description
# Bytes of larger tensors in the description. The three copies of this way take 2 µs, within the processor's cache; a
# blob takes 25 µs at each end, in some forty steps of Python (docs/performance.md).
ROOM = 48 << 10
ALIGNED = 16  # size of the largest element: shared parts begin at a multiple of it, for views of any dtype
# torch gives a freed storage the address 0, so `data_ptr()` of a tensor in it is only the offset, while its shape
# remains. Reading there would kill the process. Memory is usually above this address; below it, the storage is checked
# first.
_LOW = 1 << 32

# Types of less than a byte, which torch does not copy. Their bytes are copied like those of a larger tensor.
_WITHOUT_COPIES = {dtype for name, dtype in DTYPES.items() if re.fullmatch("u?int[1-7]", name)}

_STRIDED = torch.strided
_level_of_transforms = torch._C._functorch.maybe_current_level  # of torch.func, on this thread
_tracing: Any = torch._C._get_tracing_state  # of torch.jit.trace, on this thread
_PROXY = torch._C._TorchDispatchModeKey.PROXY  # the mode of make_fx
_PRE_DISPATCH = torch._C.DispatchKey.PreDispatch  # included on a thread with modes before dispatch: a check in C
_has_modes_before_dispatch: Any = torch._C._dispatch_tls_is_dispatch_key_included
_mode_before_dispatch: Any = torch._ops._get_dispatch_mode_pre_dispatch
_REAL = {dtype: name for dtype, name in NAMES.items() if not dtype.is_complex}


_on_host = DeviceRoute(
    {},
    "a tensor on {device} cannot be sent: move it to the CPU first (tensor.cpu()), and to the device you want on the "
    "other worker",
)


Packed = tuple[bytes, list[Blob], int]


def pack(tensors: Sequence[Tensor], place: DeviceMapping = _on_host, fixed: int = 0) -> Packed:
    """Return a description of `tensors`, the blobs to send with it, and the bytes of the tensors in both.

    The last `fixed` tensors stay on the host.

    Raises:
        DeviceError: a tensor is on a device from which it cannot be sent.
        CannotEncode: torch cannot serialize a tensor of this kind.
    """
    if (
        _tracing() is not None
        or torch._C._get_dispatch_mode(_PROXY) is not None
        or (_has_modes_before_dispatch(_PRE_DISPATCH) and _mode_before_dispatch(_PROXY) is not None)
    ):
        raise CannotEncode(
            "a tensor cannot be sent while torch.jit.trace or make_fx records operators: the recording would contain "
            "the result as a constant. Record only code that runs on one worker, and call the recording"
        )
    if forward_ad._current_level >= 0 or _level_of_transforms() is not None:
        _check_untransformed(tensors)
    try:
        return (_pack_dense(tensors) if place.keeps_host else None) or _pack_any(tensors, place, fixed)
    except (CodecError, DeviceError):
        raise
    except Exception as error:
        raise CannotEncode(f"a tensor cannot be sent: {error}; send its values as a plain tensor") from error


def _check_untransformed(tensors: Sequence[Tensor]) -> None:
    """Raise CannotEncode for wrapped tensors inside a transform, and for tensors with a tangent."""
    if any(map(torch._C._functorch.is_functorch_wrapped_tensor, tensors)):
        raise CannotEncode(
            "a tensor cannot be sent from inside a transform of torch.func (vmap, grad, jvp and the like), which "
            "covers one process only: make the remote call outside the transformed function, or transform inside the "
            "called function"
        )
    unpack: Any = forward_ad.unpack_dual
    if any(unpack(tensor).tangent is not None for tensor in tensors):
        raise CannotEncode(
            "a tensor with a tangent of torch.autograd.forward_ad cannot be sent: the tangent would be lost. Send the "
            "primal and the tangent, or use forward-mode differentiation inside the called function"
        )


def _pack_dense(tensors: Sequence[Tensor]) -> Packed | None:
    """Pack the usual case quickly: real, contiguous, on the CPU, no shared memory. Return None for any other tensor."""
    specs: list[Spec] = []
    blobs: list[Blob] = []
    spans: list[tuple[int, int]] = []
    room, total = ROOM, 0
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
        # `is_contiguous` ignores the strides of empty tensors, and of dimensions of length 1. The program can see them,
        # and `_pack_any` sends them.
        if (1 in shape or not size) and tensor.stride() != contiguous_strides(shape):
            return None
        if size:
            # Two tensors with common memory must have one storage at the receiver, which only `_pack_any` provides.
            spans.append((address, address + size))
            total += size
        if size < SMALL and address > _LOW:
            carried: Memory = ctypes.string_at(address, size)
        elif size <= room and address > _LOW:
            _check_memory(tensor, size)
            carried, room = ctypes.string_at(address, size), room - size
        else:
            carried = _carry(tensor, address, size, blobs, HOST)
        specs.append((name, shape, int(tensor.requires_grad), carried))
    if len(spans) > 1 and any(start < end for (_, end), (start, _) in pairwise(sorted(spans))):
        return None
    return pickle.dumps(specs, 5), blobs, total


class _Leaves:
    """The leaves of some tensors, and the target device of each."""

    def __init__(self, place: DeviceMapping) -> None:
        self.tensors: list[Tensor] = []
        self.targets: list[int] = []
        self.place = place

    def take(self, tensor: Tensor, fixed: bool = False) -> int | Spec:
        """Add the leaves of a tensor; return the number of a single leaf, or the plan to combine several."""
        if tensor.layout is _STRIDED and tensor.dtype in NAMES and not tensor.is_nested:
            return self._add(tensor, HOST if fixed or tensor.is_meta else self.place(tensor.device))
        target = self.place(tensor.device)
        plain, flags = tensor.detach(), tensor.requires_grad
        if tensor.layout in SPARSE:
            parts, shape = [self.take(part) for part in parts_of(plain)], tuple(tensor.shape)
            if tensor.layout is torch.sparse_coo:
                return "coo", flags, parts, shape, tensor.is_coalesced()
            return "compressed", flags, parts, shape, str(tensor.layout).removeprefix("torch.")
        if tensor.is_mkldnn:
            return "mkldnn" if target == HOST else "dense", flags, [self.take(plain.to_dense())]
        if plain.is_nested and not plain.size(0):
            raise CannotEncode("a nested tensor without parts cannot be sent, since torch cannot load it; send []")
        file = io.BytesIO()
        torch.save(plain.cpu(), file)
        saved = torch.frombuffer(bytearray(file.getbuffer()), dtype=torch.uint8)
        return "saved", flags, [self._add(saved, HOST)], target

    def _add(self, leaf: Tensor, target: int) -> int:
        if not leaf.is_cpu and not leaf.is_meta:  # it may have been created on another stream than the sending one
            keep_for(leaf, torch.accelerator.current_stream(leaf.device))
        self.tensors.append(leaf)
        self.targets.append(target)
        return len(self.tensors) - 1


def _pack_any(tensors: Sequence[Tensor], place: DeviceMapping, fixed: int) -> Packed:
    leaves = _Leaves(place)
    last = len(tensors) - fixed
    plans = [leaves.take(tensor, number >= last) for number, tensor in enumerate(tensors)]
    blobs: list[Blob] = []
    shared: list[bytes] = []
    parts = _find_shared(leaves, blobs, shared)
    specs: list[Spec] = []
    for number, (leaf, target) in enumerate(zip(leaves.tensors, leaves.targets, strict=True)):
        flags = GRAD * leaf.requires_grad | NEG * leaf.is_neg() | CONJ * (leaf.is_complex() and leaf.is_conj())
        head = NAMES[leaf.dtype], tuple(leaf.shape), flags
        if number in parts:
            specs.append((*head, *parts[number], leaf.stride()))
        elif leaf.is_meta:
            specs.append((*head, None, 0, leaf.stride()))
        elif leaf.is_contiguous() and leaf.stride() == contiguous_strides(head[1]):
            specs.append((*head, _carry(leaf, leaf.data_ptr(), leaf.nbytes, blobs, target)))
        else:
            specs.append((*head, *_carry_strided(leaf, blobs, target)))
    small = [*shared, *(spec[3] for spec in specs if isinstance(spec[3], bytes))]
    total = sum(map(len, small)) + sum(blob.nbytes for blob in blobs)
    return pickle.dumps((specs, shared, plans), 5), blobs, total


def _carry(leaf: Tensor, address: int, size: int, blobs: list[Blob], target: int) -> Memory:
    """Put `size` bytes from the beginning of a leaf into a blob, or return them if they are small."""
    if size and not address and leaf._is_zerotensor():
        leaf = torch.zeros(size, dtype=torch.uint8, device=leaf.device)
        address = leaf.data_ptr()
    on_host = leaf.is_cpu and target == HOST
    if size < SMALL and on_host:
        if address <= _LOW:
            _check_memory(leaf, size)
        return ctypes.string_at(address, size)
    _check_memory(leaf, size)
    blob = bytes_of(leaf.untyped_storage(), int(leaf.storage_offset()) * leaf.itemsize, size)
    blobs.append(blob if on_host else DeviceBlob(blob, target))
    return len(blobs) - 1


def _check_memory(leaf: Tensor, size: int) -> None:
    missing = leaf.untyped_storage().nbytes() < leaf.storage_offset() * leaf.itemsize + size
    if size and (missing or not leaf.data_ptr()):
        raise CannotEncode(
            f"a tensor of shape {tuple(leaf.shape)} cannot be sent: it has no memory, or its memory was freed; send it "
            "before its storage is resized"
        )


def _carry_strided(leaf: Tensor, blobs: list[Blob], target: int) -> tuple[Memory, int | None, tuple[int, ...]]:
    """Carry all bytes from the first to the last element, or only the elements if they are far apart."""
    stride, size = leaf.stride(), extent_of(leaf)
    shape = distinct(leaf.shape, stride)
    used = prod(shape) * leaf.itemsize
    # The gaps between the elements are sent too if that at most doubles the size: a dense copy takes a pass over the
    # memory. If elements share memory, as the windows of `unfold` do, a dense copy would also separate them.
    if 2 * used >= size or repeats(shape, stride):
        return _carry(leaf, leaf.data_ptr(), size, blobs, target), 0, stride
    _check_memory(leaf, size)
    raw = nothing(NAMES[leaf.dtype], leaf.device)
    raw.set_(leaf.untyped_storage(), leaf.storage_offset(), shape, stride)
    dense = raw.contiguous()
    return _carry(dense, dense.data_ptr(), used, blobs, target), None, stride


def _find_shared(leaves: _Leaves, blobs: list[Blob], shared: list[bytes]) -> dict[int, tuple[Memory, int]]:
    """Return the memory and the offset in it for each leaf that overlaps with another one."""
    # Only leaves for the same target device can share a storage there.
    by_target: dict[int, list[tuple[int, int, int]]] = {}
    for number, leaf in enumerate(leaves.tensors):
        address, size = leaf.data_ptr(), extent_of(leaf)
        if size and address:
            by_target.setdefault(leaves.targets[number], []).append((address, address + size, number))
    parts: dict[int, tuple[Memory, int]] = {}
    for target, spans in by_target.items():
        for start, end, members in joined(spans):
            storage = _holder(start, end, [leaves.tensors[number] for number in members]) if len(members) > 1 else None
            if storage is None:
                continue
            base = storage.data_ptr()
            # The receiver puts this part at the beginning of an allocation, which is aligned. So the part begins at a
            # multiple of ALIGNED in its storage: each leaf is then at a multiple of its own element size, as `_holder`
            # has checked.
            first = (start - base) // ALIGNED * ALIGNED
            part = bytes_of(storage, first, end - base - first)
            carried = _carry(part, part.data_ptr(), part.numel(), blobs, target)
            if isinstance(carried, bytes):
                shared.append(carried)
                carried = ~(len(shared) - 1)
            for number in members:
                leaf = leaves.tensors[number]
                parts[number] = carried, (leaf.data_ptr() - base - first) // leaf.itemsize
    return parts


def _holder(start: int, end: int, members: list[Tensor]) -> torch.UntypedStorage | None:
    """Return a storage that contains all members, or None, as for partly overlapping arrays made outside of torch."""
    for leaf in members:
        storage = leaf.untyped_storage()
        base = storage.data_ptr()
        aligned = all((other.data_ptr() - base) % other.itemsize == 0 for other in members)
        if base <= start and end <= base + storage.nbytes() and aligned:
            return storage
    return None


# Rebuilding


class MayOverlap(list[Tensor]):
    """Tensors of one message whose memory may overlap. Tensors in a plain list do not overlap."""


def unpack(meta: bytes | memoryview, blobs: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors that `pack` described, built on the memory of `blobs` without copies; raise CannotDecode if
    this version of torch cannot build one of them."""
    if torch.is_inference_mode_enabled():  # received tensors must be usable outside of inference mode
        with torch.inference_mode(False):
            return unpack(meta, blobs)
    if torch._C._len_torch_dispatch_stack():  # `is_intercepted`: received tensors are real, even in such a mode
        with _disable_current_modes():
            return unpack(meta, blobs)
    try:
        described = pickle.loads(meta)
        if type(described) is list:
            return list(map(_leaf, described, repeat(blobs)))
        specs, shared, plans = described
        parts = [torch.frombuffer(bytearray(data), dtype=torch.uint8) for data in shared]
        leaves = [_leaf(spec, blobs, parts) for spec in specs]
        return MayOverlap(leaves[plan] if isinstance(plan, int) else _assemble(plan, leaves) for plan in plans)
    except Exception as error:
        raise CannotDecode(
            f"a tensor arrived but cannot be rebuilt: {type(error).__name__}: {error}; "
            f"{processes.advice(error, 'use the same version of torch on all workers')}"
        ) from error


class _Stays:
    """Map each device to itself."""

    keeps_host = True

    def __call__(self, device: torch.device) -> int:
        return HOST if device.type == "cpu" else device.index or 0


def copied(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return copies of tensors on their devices, with equal strides and shared memory, and without history.

    Raise CannotEncode or CannotDecode if torch cannot serialize or rebuild a tensor of this kind.
    """
    if not tensors:
        return []
    if is_intercepted():  # otherwise a mode of fake tensors would have copies without memory
        with _disable_current_modes():
            return copied(tensors)
    if len(tensors) == 1 and _is_small_and_dense(tensors[0]):  # the usual item of a stream, in a tenth of the time
        return [tensors[0].detach().clone().requires_grad_(tensors[0].requires_grad)]
    meta, blobs, _ = pack(tensors, _Stays())
    with torch.inference_mode(False), torch.no_grad():
        made = [each.blob.clone() if isinstance(each, DeviceBlob) else copy_of(memory(each)) for each in blobs]
    return unpack(meta, made)


def _is_small_and_dense(tensor: Tensor) -> bool:
    return (
        type(tensor) is Tensor
        and tensor.layout is torch.strided
        and tensor.is_cpu
        and not tensor.is_nested
        and not tensor.is_complex()
        and tensor.dtype not in _WITHOUT_COPIES
        and not tensor.is_neg()
        and tensor.is_contiguous()
        and 0 < tensor.nbytes < SMALL
        and tensor.untyped_storage().nbytes() >= (tensor.storage_offset() + tensor.numel()) * tensor.itemsize
    )


def _leaf(spec: Spec, blobs: Sequence[Tensor], shared: Sequence[Tensor] = ()) -> Tensor:
    if len(spec) == 4:
        name, shape, flags, carried = spec
        if type(carried) is bytes:
            if carried:
                tensor = torch.frombuffer(bytearray(carried), dtype=DTYPES[name])
                # `resize_` and not `view`: a received tensor must not be a view of another one. The bytes are copied
                # into a bytearray because they must be writable.
                if len(shape) != 1:
                    tensor.resize_(shape)
            else:
                tensor = torch.empty(shape, dtype=DTYPES[name], device=CPU)
        else:
            tensor = _upon(blobs[carried], name, 0, shape, None)
    else:
        name, shape, flags, carried, offset, stride = spec
        if carried is None:
            tensor = torch.empty_strided(shape, stride, dtype=DTYPES[name], device="meta")
        elif offset is None:
            tensor = _spread(_carried(carried, blobs, shared), name, shape, stride)
        else:
            tensor = _upon(_carried(carried, blobs, shared), name, offset, shape, stride)
    if flags:
        if flags & (CONJ | NEG):
            bits = {name: True for name, bit in (("conj", CONJ), ("neg", NEG)) if flags & bit}
            torch._utils.set_tensor_metadata(tensor, bits)  # type: ignore[no-untyped-call]
        if flags & GRAD:
            tensor.requires_grad_()
    return tensor


def _carried(carried: Memory, blobs: Sequence[Tensor], shared: Sequence[Tensor]) -> Tensor:
    if isinstance(carried, bytes):
        return torch.frombuffer(bytearray(carried), dtype=torch.uint8) if carried else nothing("uint8")
    return blobs[carried] if carried >= 0 else shared[~carried]


def _upon(blob: Tensor, name: str, offset: int, shape: tuple[int, ...], stride: tuple[int, ...] | None) -> Tensor:
    """Return a tensor on the memory of a blob. It is no view: it can be modified and saved like any other tensor."""
    tensor = nothing(name, blob.device)
    start = blob.storage_offset()
    if start:
        if start % tensor.itemsize:
            blob, start = blob.clone(), 0
        offset += start // tensor.itemsize
    place: Any = (shape,) if stride is None else (shape, stride)
    return tensor.set_(blob.untyped_storage(), offset, *place)


def _spread(blob: Tensor, name: str, shape: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
    """Return a tensor with the original strides, filled with the elements of a dense blob."""
    single = distinct(shape, stride)
    # `single` has no repeated elements: torch refuses to write to a tensor whose elements share memory.
    base = torch.empty_strided(single, stride, dtype=DTYPES[name], device=blob.device)
    base.copy_(_upon(blob, name, 0, single, None))
    tensor = nothing(name, blob.device)
    return tensor.set_(base.untyped_storage(), 0, shape, stride)


def _assemble(plan: Spec, leaves: list[Tensor]) -> Tensor:
    kind, requires_grad, numbers, *rest = plan
    parts = [leaves[number] for number in numbers]
    options: Any = {"device": parts[0].device, "check_invariants": False}
    if kind == "coo":
        shape, coalesced = rest
        tensor = torch.sparse_coo_tensor(parts[0], parts[1], shape, is_coalesced=coalesced, **options)
    elif kind == "compressed":
        shape, layout = rest
        layout = getattr(torch, layout)
        tensor = torch.sparse_compressed_tensor(parts[0], parts[1], parts[2], shape, layout=layout, **options)
    elif kind == "mkldnn":
        tensor = parts[0].to_mkldnn()
    elif kind == "dense":
        tensor = parts[0]
    else:
        tensor = torch.load(io.BytesIO(memory(parts[0])), weights_only=False)
        if rest[0] != HOST:
            tensor = tensor.to(rest[0])
    return tensor.requires_grad_() if requires_grad else tensor
