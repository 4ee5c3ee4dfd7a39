"""Places for modules."""

from __future__ import annotations

import pytest
import torch

from telegrad._core.modules.module_host import parse_place
from telegrad.errors import UsageError


@pytest.mark.parametrize(
    ("text", "worker", "device"),
    [
        ("trainer0/cpu", "trainer0", "cpu"),
        ("trainer0", "trainer0", None),
        ("ps0/cuda:0", "ps0", "cuda:0"),
        ("rank:1/cuda:1", 1, "cuda:1"),
        ("rank:12", 12, None),
        ("a:b/meta", "a:b", "meta"),
    ],
)
def test_places(text: str, worker: int | str, device: str | None) -> None:
    assert parse_place(text) == (worker, torch.device(device) if device else None)


@pytest.mark.parametrize("text", ["", "cpu", "cuda:0", "/cpu", "a/", "a/b", "a/cpu/cpu", "rank:x/cpu", "rank:"])
def test_what_is_no_place(text: str) -> None:
    with pytest.raises(UsageError, match="is not a place for a module"):
        parse_place(text)
