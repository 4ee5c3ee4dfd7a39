"""Ways through a graph, given what follows each of its nodes. Pure."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

N = TypeVar("N", bound=Hashable)
Next = Callable[[N], list[N]]


def reached(starts: Iterable[N], next_: Next[N]) -> dict[N, None]:
    """All that follows the starts, they included, in order."""
    seen = dict.fromkeys(starts)
    ahead = list(seen)
    for node in ahead:
        for after in next_(node):
            if after not in seen:
                seen[after] = None
                ahead.append(after)
    return seen


def circles(nodes: Iterable[N], next_: Next[N], is_free: Callable[[N], bool]) -> list[list[N]]:
    """Those among the nodes that follow each other, each lot by its shortest way round.

    Left out are those with a way out: of what follows a node that `is_free`, one would do, so all must be in it.
    """
    order = list(nodes)
    left = _without_ends(set(order), next_)
    found = []
    while left:
        start = next(node for node in order if node in left)
        ahead = reached(next_(start), next_)
        lot = {node for node in ahead if node in left and start in reached([node], next_)} if start in ahead else set()
        left -= lot | {start}
        if lot and all(after in lot for node in lot if is_free(node) for after in next_(node)):
            found.append(_way_round(start, lot, next_))
    return found


def _without_ends(left: set[N], next_: Next[N]) -> set[N]:
    """Circles, and what leads from one to the next."""
    while True:
        followed = {after for node in left for after in next_(node)}
        kept = {node for node in left & followed if any(after in left for after in next_(node))}
        if kept == left:
            return left
        left = kept


def _way_round(start: N, lot: set[N], next_: Next[N]) -> list[N]:
    """The shortest way from `start` back to it."""
    came_from: dict[N, N] = {}
    ahead = [start]
    for node in ahead:
        for after in next_(node):
            if after == start:
                way = [node]
                while way[-1] != start:
                    way.append(came_from[way[-1]])
                return way[::-1]
            if after in lot and after not in came_from:
                came_from[after] = node
                ahead.append(after)
    raise AssertionError("not a circle")
