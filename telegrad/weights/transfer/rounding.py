"""Which type a tensor is published in: its own, or a smaller one that it is rounded to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from telegrad.errors import UsageError

Rounding = torch.dtype | Callable[[str, Tensor], torch.dtype | None] | None


def publish_dtype(rounding: Rounding, name: str, tensor: Tensor) -> torch.dtype:
    """Return the type in which the tensor of that name is published.

    Only real floating numbers are rounded: to a type, those that are larger; by a function, those for which it gives
    one.

    Raises:
        UsageError: the type is none of floating numbers.
    """
    if rounding is None or not tensor.is_floating_point():
        return tensor.dtype
    chosen = rounding if isinstance(rounding, torch.dtype) else rounding(name, tensor)
    if chosen is None or (chosen is rounding and chosen.itemsize >= tensor.itemsize):
        return tensor.dtype
    if not isinstance(chosen, torch.dtype) or not chosen.is_floating_point:
        raise UsageError(
            f"{name!r} cannot be published as {chosen}: weights are rounded to floating numbers, such as torch.bfloat16"
        )
    return chosen


def named(tree: Any, name: str = "", kind: type = Tensor) -> Iterator[tuple[str, Any]]:
    """Yield the tensors of a tree of dictionaries, lists and tuples, with the way to each, such as `layers.0.weight`.

    Args:
        tree: where to look.
        name: the way that leads to it.
        kind: what stands for tensors there.
    """
    if isinstance(tree, kind):
        yield name, tree
    elif isinstance(tree, Mapping | list | tuple):
        for key, part in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
            yield from named(part, f"{name}.{key}" if name else str(key), kind)
