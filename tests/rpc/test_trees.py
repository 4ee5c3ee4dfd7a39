"""The trees along which values are combined."""

from __future__ import annotations

import pytest

from telegrad.rpc.trees import BRANCHES, parts, tree_of


def order(tree: range) -> list[int]:
    """The places as they are combined."""
    return [tree.start, *(place for part in parts(tree) for place in order(part))]


@pytest.mark.parametrize("size", range(1, 41))
def test_each_place_is_combined_once_and_in_order(size: int) -> None:
    assert order(range(size)) == list(range(size))


@pytest.mark.parametrize("size", [1, 2, 4, 13, 40, 100])
def test_each_place_finds_its_tree(size: int) -> None:
    found = {place: tree_of(size, place) for place in range(size)}
    for tree, depth in found.values():
        assert len(parts(tree)) <= BRANCHES
        for part in parts(tree):
            assert found[part.start] == (part, depth + 1)
    assert max(depth for _, depth in found.values()) <= 4
    assert found[0] == (range(size), 0)
