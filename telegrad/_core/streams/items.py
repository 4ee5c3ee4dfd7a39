"""Encoding of stream items: at the yield. Decoding: on the thread that takes them.

Later changes of an item therefore have no effect, an item that cannot be sent fails at its yield, and the reader thread
of a connection decodes no user data. Tensors are copied, since they are sent perhaps much later, and torch counts no
writes by `data`, by numpy, by fused optimizers, or to inference tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from telegrad._core.pickling.pickling import decode, encode
from telegrad._core.pickling.reducers import REDUCERS, reduce_reference
from telegrad._core.references.handles import Handle
from telegrad._core.wire.unpacking import copied

_ATOMS = frozenset({int, float, bool, str, bytes, complex, type(None)})


class EncodedItem(NamedTuple):
    """An item that is no atom."""

    body: bytes
    tensors: Sequence[Tensor]
    references: Sequence[Any]  # handles at the sender, references of users at the receiver
    weight: int


def packed(item: Any, same_program: bool, recorded: bool) -> tuple[Any, int]:
    """Return the encoded item, with copies of its tensors and arrays, and its approximate size in bytes.

    `recorded`: gradients of the copies go to the tensors.

    Raises:
        CannotEncode: something in it cannot be sent.
    """
    if type(item) in _ATOMS:
        return item, weight_of(item)
    body, tensors, references, _ = encode(item, same_program)
    weight = len(body) + sum(each.numel() * each.element_size() for each in tensors)
    copies = [*copied(tensors)]
    if recorded:
        with torch.enable_grad():
            for slot, tensor in enumerate(tensors):
                if tensor.is_nested and tensor.requires_grad:
                    copies[slot] = tensor  # which is refused, as torch records no copy of it
                elif tensor.requires_grad:
                    made = [copies[slot].requires_grad_(False)]
                    copies[slot] = _Copied.apply(tensor, made)  # type: ignore[no-untyped-call]
    return EncodedItem(body, copies, references, weight), weight


class _Copied(torch.autograd.Function):
    """Not `clone`, which loses the strides, and the memory that several tensors share."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, made: list[Tensor]) -> Tensor:
        return made[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def unpacked(item: Any) -> Any:
    """Return the decoded item.

    Raises:
        CannotDecode: it cannot be rebuilt here.
    """
    return decode(item.body, item.tensors, item.references) if type(item) is EncodedItem else item


def weight_of(item: Any) -> int:
    """Return the approximate size of an item in bytes."""
    if type(item) is EncodedItem:
        return item.weight
    kind = type(item)
    if kind is int:
        return item.bit_length() >> 3  # type: ignore[no-any-return]
    return len(item) if kind is str or kind is bytes else 0


REDUCERS[Handle] = reduce_reference
