"""Where each node of a graph goes: workers stand beside each other as columns, and values flow down through rows.

A node's row lies below those of all that it uses, on whatever worker; so a message always leads down by one row, and
crosses the other columns between two rows. Inside of a column edges over several rows go through points of their own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from telegrad.insight.graphs import LEAF, Message, Node, Part

SWEEPS = 8  # times that each row is put in order after its neighbours
LINE, PADDING, LETTER, SMALL_LETTER = 16, 8, 7.8, 6.8  # pixels
BETWEEN, THROUGH = 14, 10  # pixels between boxes of one row; how wide an edge is that passes
GAP, CROSSED_GAP = 30, 64  # between rows: messages need room for their names
LONGEST = 50  # rows that an edge passes by ways of its own; longer ones run straight behind all others
MARGIN, HEADER = 18, 34  # of columns

Key = tuple[str, int]  # a worker and a node of it; or a negative number: where an edge passes a row


class Box(NamedTuple):
    """Where a node is drawn: its middle and its size."""

    x: float
    y: float
    width: float
    height: float


class Column(NamedTuple):
    """Where a worker is drawn."""

    x: float
    width: float


class Layout(NamedTuple):
    """Where everything is drawn."""

    boxes: dict[Key, Box]
    columns: dict[str, Column]
    edges: list[tuple[str, list[Key]]]  # of one worker, and what each passes from its start to its end
    width: float
    height: float


def placed(parts: Mapping[str, Part], messages: Sequence[Message]) -> Layout:
    """Where everything goes."""
    rows = _rows(parts, messages)
    grids: dict[str, _Grid] = {}
    for worker, part in parts.items():
        grids[worker] = _Grid(worker, part, rows)
        grids[worker].arrange()
    heights: dict[int, float] = {}
    for grid in grids.values():
        for row, keys in grid.rows.items():
            heights[row] = max([heights.get(row, LINE), *(grid.size(key)[1] for key in keys)])
    crossed = {rows[message.sender, message.start] for message in messages}
    middles: dict[int, float] = {}
    y = float(MARGIN + HEADER)
    for row in sorted(heights):
        middles[row] = y + heights[row] / 2
        y += heights[row] + (CROSSED_GAP if row in crossed else GAP)
    boxes: dict[Key, Box] = {}
    columns: dict[str, Column] = {}
    x = float(MARGIN)
    for worker, grid in grids.items():
        left, right = grid.bounds()
        wide = max(right - left, LETTER * len(grid.title)) + 2 * MARGIN
        shift = x + wide / 2 - (left + right) / 2
        for row, keys in grid.rows.items():
            for key in keys:
                width, height = grid.size(key)
                boxes[key] = Box(grid.x[key] + shift, middles[row], width, height or heights[row])
        columns[worker] = Column(x, wide)
        x += wide + MARGIN
    edges = [(worker, path) for worker, grid in grids.items() for path in grid.paths]
    return Layout(boxes, columns, edges, x, y - GAP + 2 * MARGIN)


def _rows(parts: Mapping[str, Part], messages: Iterable[Message]) -> dict[Key, int]:
    """The row of each node: the length of the longest way to it.

    Leaves, and what is made of one alone, such as a weight turned round, stand right above what uses them first.
    """
    keys = [(worker, index) for worker, part in parts.items() for index in range(len(part.nodes))]
    inputs: dict[Key, list[Key]] = {key: [] for key in keys}
    users: dict[Key, list[Key]] = {key: [] for key in keys}
    pairs = [((worker, start), (worker, end)) for worker, part in parts.items() for start, end in part.edges]
    pairs += [((each.sender, each.start), (each.receiver, each.end)) for each in messages]
    for start, end in pairs:
        users[start].append(end)
        inputs[end].append(start)
    waits = {key: len(inputs[key]) for key in keys}
    rows = dict.fromkeys(keys, 0)
    order = [key for key in keys if not waits[key]]
    for key in order:
        for user in users[key]:
            rows[user] = max(rows[user], rows[key] + 1)
            waits[user] -= 1
            if not waits[user]:
                order.append(user)
    movable: set[Key] = set()
    for key in order:
        of_one = len(inputs[key]) == 1 and inputs[key][0] in movable and len(users[inputs[key][0]]) == 1
        if users[key] and (of_one or parts[key[0]].nodes[key[1]].kind == LEAF):
            movable.add(key)
    for key in reversed(order):
        if key in movable:
            rows[key] = min(rows[user] for user in users[key]) - 1
    return rows


def size_of(node: Node) -> tuple[float, float]:
    """How wide and high a node is drawn."""
    width = max(LETTER * len(node.name), SMALL_LETTER * len(node.detail)) + 2 * PADDING
    return width, LINE * (2 if node.detail else 1) + PADDING


class _Grid:
    """One worker's rows: who stands in each, in which order, and how far to the right."""

    def __init__(self, worker: str, part: Part, rows: Mapping[Key, int]) -> None:
        self.title = worker
        self.rows: dict[int, list[Key]] = {}
        self.x: dict[Key, float] = {}
        self.paths: list[list[Key]] = []
        self._sizes = {(worker, index): size_of(node) for index, node in enumerate(part.nodes)}
        self._above: dict[Key, list[Key]] = {}
        self._below: dict[Key, list[Key]] = {}
        for key in self._sizes:
            self.rows.setdefault(rows[key], []).append(key)
        trunks: dict[tuple[int, int], Key] = {}  # where what leaves a node passes a row, together
        pairs: dict[tuple[Key, Key], None] = {}
        for start, end in part.edges:
            first, last = rows[worker, start], rows[worker, end]
            path = [(worker, start)]
            for row in range(first + 1, last) if last - first <= LONGEST else ():
                if (start, row) not in trunks:
                    trunks[start, row] = (worker, -1 - len(trunks))
                    self.rows.setdefault(row, []).append(trunks[start, row])
                path.append(trunks[start, row])
            path.append((worker, end))
            self.paths.append(path)
            pairs |= dict.fromkeys(itertools.pairwise(path))
        for upper, lower in pairs:
            self._below.setdefault(upper, []).append(lower)
            self._above.setdefault(lower, []).append(upper)

    def size(self, key: Key) -> tuple[float, float]:
        return self._sizes.get(key, (THROUGH, 0.0))

    def bounds(self) -> tuple[float, float]:
        left = min((x - self.size(key)[0] / 2 for key, x in self.x.items()), default=0.0)
        return left, max((x + self.size(key)[0] / 2 for key, x in self.x.items()), default=0.0)

    def arrange(self) -> None:
        """Put each row in the order of its neighbours, from above and from below in turn; then find places for all."""
        order = sorted(self.rows)
        for row in order:
            self._spread(row, {})
        for sweep in range(SWEEPS):
            down = sweep % 2 == 0
            neighbours = self._above if down else self._below
            for row in order if down else reversed(order):
                self.rows[row].sort(key=lambda key: self._wanted(key, neighbours))
                self._spread(row, neighbours)
        both = {key: [*self._above.get(key, ()), *self._below.get(key, ())] for key in self.x}
        for row in [*order, *reversed(order)]:
            self._spread(row, both)

    def _wanted(self, key: Key, neighbours: Mapping[Key, Sequence[Key]]) -> float:
        near = neighbours.get(key)
        return sum(self.x[each] for each in near) / len(near) if near else self.x[key]

    def _spread(self, row: int, neighbours: Mapping[Key, Sequence[Key]]) -> None:
        """As near to where each wants to be as is possible in this order and without overlaps: by least squares."""
        keys = self.rows[row]
        if not neighbours:
            self.x |= dict.fromkeys(keys, 0.0)
        shifts = [0.0]  # of each from the first, where all stand close together
        for left, right in itertools.pairwise(keys):
            shifts.append(shifts[-1] + (self.size(left)[0] + self.size(right)[0]) / 2 + BETWEEN)
        blocks: list[tuple[float, int]] = []  # sums of wishes, and of how many that stand close together
        for key, shift in zip(keys, shifts, strict=True):
            total, count = self._wanted(key, neighbours) - shift, 1
            while blocks and blocks[-1][0] / blocks[-1][1] >= total / count:
                before = blocks.pop()
                total, count = total + before[0], count + before[1]
            blocks.append((total, count))
        starts = [total / count for total, count in blocks for _ in range(count)]
        for key, start, shift in zip(keys, starts, shifts, strict=True):
            self.x[key] = start + shift
