"""The type in which a tensor is published: its own, or a smaller one that it is rounded to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from telegrad.errors import UsageError

Rounding = torch.dtype | Callable[[str, Tensor], torch.dtype | None] | None


def publish_dtype(rounding: Rounding, name: str, tensor: Tensor) -> torch.dtype:
    """Return the type in which the tensor of that name is published.

    Only real floating-point tensors are rounded. A type applies to larger types only; a function decides for each
    tensor.

    Raises:
        UsageError: the type is not a floating-point type.
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
    """Yield the tensors of a tree of dictionaries, lists and tuples, with their paths, such as `layers.0.weight`.

    Args:
        tree: the tree to search.
        name: the path of `tree`.
        kind: the class of the leaves to yield.
    """
    if isinstance(tree, kind):
        yield name, tree
    elif isinstance(tree, Mapping | list | tuple):
        for key, part in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
            yield from named(part, f"{name}.{key}" if name else str(key), kind)
