"""Tests of the timeouts that users may give."""

from math import inf, nan
from typing import Any

import pytest

from telegrad._core.calls.settings import DEFAULT, check_timeout, limit_of
from telegrad.errors import InvalidArgument


@pytest.mark.parametrize(
    ("timeout", "limit"), [(0, 0), (1, 1), (2.5, 2.5), (inf, 0), (DEFAULT, 60), (-1, 60), (-1.0, 60)]
)
def test_timeouts_are_seconds(timeout: float, limit: float) -> None:
    assert limit_of(timeout, 60) == limit
    check_timeout(timeout)


@pytest.mark.parametrize("timeout", ["1", None, nan, -2])
def test_other_timeouts_are_refused(timeout: Any) -> None:
    for check in (check_timeout, lambda given: limit_of(given, 60)):
        with pytest.raises(InvalidArgument, match=r"^timeout must .* leave it out for the rpc_timeout"):
            check(timeout)
