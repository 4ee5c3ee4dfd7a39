"""What all engines refuse."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telegrad._core.directory.directory import (
    KEY_BYTES,
    LONGEST_TTL,
    SHORTEST_TTL,
    VALUE_BYTES,
    check_key,
    check_ttl,
    check_value,
)
from telegrad.errors import InvalidArgument


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1))
def test_keys_are_any_text(key: str) -> None:
    if len(key.encode()) <= KEY_BYTES:
        assert check_key(key) == key.encode()


@pytest.mark.parametrize("key", ["", "a\0b", "\udc80", "x" * (KEY_BYTES + 1), "ä" * (KEY_BYTES // 2 + 1)], ids=ascii)
def test_keys_that_are_refused(key: str) -> None:
    with pytest.raises(InvalidArgument, match="key"):
        check_key(key)


def test_values() -> None:
    check_value("a", bytes(VALUE_BYTES))
    with pytest.raises(InvalidArgument, match="store its address"):
        check_value("a", bytes(VALUE_BYTES + 1))


@pytest.mark.parametrize("ttl", [SHORTEST_TTL, 1, LONGEST_TTL])
def test_ttls(ttl: float) -> None:
    check_ttl(ttl)


@pytest.mark.parametrize("ttl", [0, -1.0, SHORTEST_TTL / 2, LONGEST_TTL + 1, float("inf"), float("nan")])
def test_ttls_that_are_refused(ttl: float) -> None:
    with pytest.raises(InvalidArgument, match="ttl"):
        check_ttl(ttl)
