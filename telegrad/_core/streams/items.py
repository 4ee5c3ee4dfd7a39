"""Encoding of stream items: at the yield. Decoding: on the thread that takes them.

Later changes of a yielded list therefore have no effect, an item that cannot be sent fails at its yield, and the reader
thread of a connection decodes no user data. Tensors are sent from their own memory, perhaps much later.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from telegrad._core.pickling.pickling import decode, encode
from telegrad._core.pickling.reducers import REDUCERS, reduce_reference
from telegrad._core.references.handle import Handle
from telegrad.errors import UsageError

LARGE = 1 << 16  # bytes from which a tensor's memory is not kept only to detect writes
_ATOMS = frozenset({int, float, bool, str, bytes, complex, type(None)})


class EncodedItem(NamedTuple):
    """An item that is no atom."""

    body: bytes
    tensors: Sequence[Tensor]
    references: Sequence[Any]  # handles at the sender, references of users at the receiver
    weight: int


class Counts(NamedTuple):
    """Version counters of an item's tensors at the yield."""

    tensors: Sequence[tuple[Tensor, int, tuple[int, ...]]]  # tensors that share the counters, counts, and shapes

    def check(self) -> None:
        """Raise UsageError if a tensor was written to."""
        for tensor, count, shape in self.tensors:
            if tensor._version != count:
                raise UsageError(
                    f"a tensor of shape {shape} was written to after the stream's function had yielded "
                    "it: its reader might get the old values, the new ones, or some of each, since the function goes "
                    "on before the reader has it. Yield tensor.clone(), or make a new tensor for each item"
                )


NOTHING_TO_CHECK = Counts(())


def packed(item: Any, same_program: bool) -> tuple[Any, int, Counts]:
    """Return the encoded item, its approximate size in bytes, and counters of tensors that must not change from now on.

    Raises:
        CannotEncode: something in it cannot be pickled.
    """
    if type(item) in _ATOMS:
        return item, weight_of(item), NOTHING_TO_CHECK
    body, tensors, references, buffers = encode(item, same_program)
    whole = len(tensors) - buffers
    weight = len(body) + sum(each.numel() * each.element_size() for each in tensors)
    counts = Counts(
        [(_counter(each), each._version, _shape(each)) for each in tensors[:whole] if not each.is_inference()]
    )
    memory = [each.clone() for each in tensors[whole:]]  # buffers of arrays, which have no version counters
    return EncodedItem(body, [*tensors[:whole], *memory], references, weight), weight, counts


def _counter(tensor: Tensor) -> Tensor:
    """Return a tensor that shares the version counter of another, and not its memory if that is large.

    The result is kept while the function waits for its reader, and would keep the item's memory. A detached tensor
    shares the counter of its source even after its `data` was replaced.
    """
    plain = type(tensor) is Tensor and tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_quantized)
    if not plain or tensor.numel() * tensor.element_size() < LARGE:
        return tensor
    counter = tensor.detach()
    counter.data = tensor.new_empty(0)
    return counter


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return () if tensor.is_nested else tuple(tensor.shape)


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
