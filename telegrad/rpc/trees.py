"""Trees of workers, along which values are combined in order. Pure.

A tree of several places has the first at its root; those behind it are cut into parts of about one size, each a tree.
So what a place combines, its own value and then those of its parts, stands in the order of the places.
"""

from __future__ import annotations

from itertools import pairwise

BRANCHES = 3  # a level costs as many values as these, and there are log(n) / log(BRANCHES) of them: least for e


def parts(tree: range) -> list[range]:
    """The trees right below the root of one."""
    first, rest = tree.start + 1, len(tree) - 1
    count = min(BRANCHES, rest)
    cuts = [first + rest * each // count for each in range(count + 1)] if count else [first]
    return [range(start, stop) for start, stop in pairwise(cuts)]


def tree_of(size: int, place: int) -> tuple[range, int]:
    """The tree below a place, itself included, in one of so many places; and how deep in it that is."""
    tree, depth = range(size), 0
    while tree.start != place:
        tree = next(part for part in parts(tree) if place in part)
        depth += 1
    return tree, depth
