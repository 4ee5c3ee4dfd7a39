"""How an item of a stream travels: encoded as it is yielded, and opened by the thread that takes it.

So what a function does later to a list that it has yielded changes nothing, an item that cannot be sent fails at its
yield, and who reads a connection opens nothing of a user's. Tensors leave from their own memory, perhaps much later.
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

LARGE = 1 << 16  # bytes of a tensor that is not kept only to see whether it was written to
_ATOMS = frozenset({int, float, bool, str, bytes, complex, type(None)})


class Parcel(NamedTuple):
    """An item that is more than an atom."""

    body: bytes
    tensors: Sequence[Tensor]
    references: Sequence[Any]  # handles where it leaves, references of users where it has come
    weight: int


class Counts(NamedTuple):
    """Of the writes to the tensors of an item, as it was yielded."""

    tensors: Sequence[tuple[Tensor, int, tuple[int, ...]]]  # which count the same writes, the counts, and the shapes

    def check(self) -> None:
        """Raise UsageError where one was written to."""
        for tensor, count, shape in self.tensors:
            if tensor._version != count:
                raise UsageError(
                    f"a tensor of shape {shape} was written to after the stream's function had yielded "
                    "it: its reader might get the old values, the new ones, or some of each, since the function goes "
                    "on before the reader has it. Yield tensor.clone(), or make a new tensor for each item"
                )


NOTHING_TO_CHECK = Counts(())


def packed(item: Any, same_program: bool) -> tuple[Any, int, Counts]:
    """What to send of an item, about how many bytes it has, and what must not change from now on.

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
    memory = [each.clone() for each in tensors[whole:]]  # of arrays, whose writes nobody counts
    return Parcel(body, [*tensors[:whole], *memory], references, weight), weight, counts


def _counter(tensor: Tensor) -> Tensor:
    """Return a tensor with the count of writes of another, and without its memory if that is large.

    It is kept for as long as the function waits for its reader, and the item would stay in memory with it. Taking other
    `data` leaves the count of a detached tensor, which is that of the tensor it comes from.
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
    """The item itself.

    Raises:
        CannotDecode: it cannot be rebuilt here.
    """
    return decode(item.body, item.tensors, item.references) if type(item) is Parcel else item


def weight_of(item: Any) -> int:
    """About how many bytes it has."""
    if type(item) is Parcel:
        return item.weight
    kind = type(item)
    if kind is int:
        return item.bit_length() >> 3  # type: ignore[no-any-return]
    return len(item) if kind is str or kind is bytes else 0


REDUCERS[Handle] = reduce_reference
