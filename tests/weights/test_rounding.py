"""Which tensors are rounded, and to what."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from telegrad.errors import UsageError
from telegrad.weights.tree_layout import Rounding, publish_dtype

BF16 = torch.bfloat16


@pytest.mark.parametrize(
    ("own", "published"),
    [
        (torch.float64, BF16),
        (torch.float32, BF16),
        (torch.bfloat16, BF16),
        (torch.float16, torch.float16),  # takes no more bytes
        (torch.float8_e4m3fn, torch.float8_e4m3fn),
        (torch.complex64, torch.complex64),
        (torch.int64, torch.int64),
        (torch.uint8, torch.uint8),
        (torch.bool, torch.bool),
    ],
    ids=str,
)
def test_a_type_rounds_what_is_larger(own: torch.dtype, published: torch.dtype) -> None:
    assert publish_dtype(BF16, "weight", torch.zeros(3, dtype=own)) is published
    assert publish_dtype(None, "weight", torch.zeros(3, dtype=own)) is own


def test_a_function_chooses_by_name() -> None:
    def only_weights(name: str, tensor: torch.Tensor) -> torch.dtype | None:
        return BF16 if name.endswith("weight") else None

    half = torch.zeros(3, dtype=torch.float16)
    assert publish_dtype(only_weights, "layer.weight", half) is BF16
    assert publish_dtype(only_weights, "layer.bias", half) is torch.float16
    assert publish_dtype(only_weights, "steps.weight", torch.zeros(3, dtype=torch.int64)) is torch.int64


@pytest.mark.parametrize(
    "rounding", [torch.int8, torch.bool, torch.complex32, lambda *_: torch.int8, lambda *_: "bf16"]
)
def test_weights_are_rounded_to_floating_numbers_only(rounding: Any) -> None:
    wrong: Rounding = rounding
    with pytest.raises(UsageError, match=r"'w' cannot be published as .*torch\.bfloat16"):
        publish_dtype(wrong, "w", torch.zeros(3, dtype=torch.float64))
