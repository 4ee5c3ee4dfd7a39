"""What users may give as a timeout."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest

from telegrad.agent.deadlines import seconds
from telegrad.errors import InvalidArgument


@pytest.mark.parametrize("timeout", [0, 1, 2.5, inf])
def test_timeouts_are_seconds(timeout: float) -> None:
    assert seconds(timeout) == timeout


@pytest.mark.parametrize("timeout", [-1, -0.5, float("nan"), "3", None, [1]])
def test_other_timeouts_are_refused(timeout: Any) -> None:
    with pytest.raises(InvalidArgument, match="0 for no limit"):
        seconds(timeout)
