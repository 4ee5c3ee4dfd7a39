"""A batch in parts: how inputs and targets are cut, and outputs are joined."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from telegrad.errors import UsageError


def parts_of(batch: Any, chunks: int) -> list[Any]:
    """The tensors in `batch` in parts of about the same size; what else is in it goes with each."""
    leaves, form = tree_flatten(batch)
    parts = min(chunks, max(_size(batch), 1))
    cut = [leaf.tensor_split(parts) if isinstance(leaf, Tensor) else [leaf] * parts for leaf in leaves]
    return [tree_unflatten(list(part), form) for part in zip(*cut, strict=True)]


def _size(batch: Any) -> int:
    """How many samples there are."""
    shapes = [tuple(leaf.shape) for leaf in tree_flatten(batch)[0] if isinstance(leaf, Tensor)]
    if len({shape[:1] for shape in shapes}) != 1 or not shapes[0]:
        raise UsageError(
            "a batch consists of tensors with the samples along their first dimension, as many in each of them; "
            f"these have the shapes {shapes}"
        )
    return shapes[0][0]


def sizes_of(inputs: Any, targets: Any, chunks: int) -> list[int]:
    """How many samples there are in each micro-batch."""
    size, wanted = _size(inputs), _size(targets)
    sizes, of_targets = _cut(size, chunks), _cut(wanted, chunks)
    fit = len(sizes) == len(of_targets) and all(
        each * wanted == other * size for each, other in zip(sizes, of_targets, strict=True)
    )
    if not fit or not size:
        raise UsageError(
            f"{size} inputs and {wanted} targets cannot be cut into {chunks} micro-batches that belong together: "
            "give a target for each input, and at least one"
        )
    return sizes


def _cut(size: int, chunks: int) -> list[int]:
    parts = max(min(chunks, size), 1)
    return [size // parts + (number < size % parts) for number in range(parts)]


def joined(parts: list[Any]) -> Any:
    leaves = [tree_flatten(part)[0] for part in parts]
    form = tree_flatten(parts[0])[1]
    return tree_unflatten(
        [torch.cat(same) if isinstance(same[0], Tensor) else same[0] for same in zip(*leaves, strict=True)], form
    )
