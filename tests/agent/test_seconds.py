"""What users may give as a timeout."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest
import torch

from telegrad._core.calls.deadlines import DEFAULT, check_timeout, limit_of
from telegrad.errors import InvalidArgument


@pytest.mark.parametrize(
    ("timeout", "limit"), [(0, 0), (1, 1), (2.5, 2.5), (inf, 0), (DEFAULT, 60), (-1, 60), (-1.0, 60)]
)
def test_timeouts_are_seconds(timeout: float, limit: float) -> None:
    assert limit_of(timeout, 60) == limit
    check_timeout(timeout)


@pytest.mark.parametrize(
    "timeout", [-2, -0.5, float("nan"), 1e300, 10**400, True, False, "3", None, [1], torch.tensor(2.0), torch.ones(2)]
)
def test_other_timeouts_are_refused(timeout: Any) -> None:
    for refuses in check_timeout, lambda timeout: limit_of(timeout, 60):
        with pytest.raises(InvalidArgument, match="timeout must be a number of seconds, 0 for no limit") as caught:
            refuses(timeout)
        assert len(str(caught.value)) < 300
