"""Rebuild tensors from their description and the received blobs; the reverse of `packing`."""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Sequence
from itertools import repeat
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from telegrad._core import processes
from telegrad._core.wire.packing import SMALL, extent_of, joined, pack
from telegrad._core.wire.tensors import (
    CONJ,
    CPU,
    DTYPES,
    GRAD,
    HOST,
    NEG,
    DeviceBlob,
    Memory,
    Spec,
    copy_of,
    distinct,
    is_intercepted,
    memory,
    nothing,
)
from telegrad.errors import CannotDecode

# Types of less than a byte, which torch does not copy. Their bytes are copied like those of a larger tensor.
_WITHOUT_COPIES = {dtype for name, dtype in DTYPES.items() if re.fullmatch("u?int[1-7]", name)}


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


def as_views_of_shared(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors, with those that share memory replaced by views of one tensor.

    Autograd then detects writes through one of them when it uses another, and refuses writes that it cannot track.
    """
    spans = []
    for number, each in enumerate(tensors):
        if each.layout is torch.strided and not each.is_nested and not each.is_meta and each.numel():
            spans.append((each.data_ptr(), each.data_ptr() + extent_of(each), number))
    found = list(tensors)
    bases: dict[int, Tensor] = {}  # by address of their storage
    with torch.inference_mode(False), torch.no_grad():
        for number in [number for *_, members in joined(spans) if len(members) > 1 for number in members]:
            each = tensors[number]
            storage = each.untyped_storage()
            base = bases.get(storage.data_ptr())
            if base is None:
                base = nothing("uint8", each.device).set_(storage, 0, (storage.nbytes(),), (1,))
                bases[storage.data_ptr()] = base
            found[number] = _view(base, each)
    return found


def _view(base: Tensor, like: Tensor) -> Tensor:
    """Return a view of the bytes `base` with the dtype, shape and strides of `like`; call this under `no_grad`."""
    first = int(like.storage_offset()) * like.itemsize
    view = base[first : first + extent_of(like)].view(like.dtype)
    view = view.as_strided(like.shape, like.stride(), int(like.storage_offset()))
    view = torch._neg_view(view) if like.is_neg() else view
    view = view.conj() if like.is_complex() and like.is_conj() else view
    return view.requires_grad_(like.requires_grad)


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
            tensor = _spread(_bytes(carried, blobs, shared), name, shape, stride)
        else:
            tensor = _upon(_bytes(carried, blobs, shared), name, offset, shape, stride)
    if flags:
        if flags & (CONJ | NEG):
            bits = {name: True for name, bit in (("conj", CONJ), ("neg", NEG)) if flags & bit}
            torch._utils.set_tensor_metadata(tensor, bits)  # type: ignore[no-untyped-call]
        if flags & GRAD:
            tensor.requires_grad_()
    return tensor


def _bytes(carried: Memory, blobs: Sequence[Tensor], shared: Sequence[Tensor]) -> Tensor:
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
