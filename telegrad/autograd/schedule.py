"""Which nodes of one worker's graph may run when, in a pass whose gradients come in any order.

Gradients enter at *entries*: the roots, and the tensors that were sent away. A node may run once no entry that leads to
it is open any more, for then its gradient is whole. So each closing entry (its gradient has come, or it is known that
none will) settles some nodes, and each node is settled once: the work of a whole pass is linear in the graph.

What is settled together runs in one call of the engine, except where a settled node feeds one that is not. The engine
would call the hooks of the latter with a part of its gradient; so such a node, and all that it leads to, runs by hand.

Nodes are known here by `next_functions` and by what `kinds` says of their types alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

PLAIN = 1  # a leaf that may take its gradient in parts: it is wanted by many, and waits for nobody
LEAF = 2
RECV = 3  # what leads to another worker
ALONE = 4  # a node that the engine cannot run as a part of something

Node = Any
Kinds = Mapping[type, Callable[[Node], int]]


class Step(NamedTuple):
    """What can run now."""

    roots: list[Node]  # where gradients enter the engine
    leaves: list[Node]  # whose gradients it shall give
    recvs: list[Node]  # which it shall run
    fed: list[Node]  # of those run by hand afterwards: what comes there it shall give
    by_hand: list[tuple[Node, bool]]  # in order; and whether their hooks are to be called then


NOTHING = Step([], [], [], [], [])


class Region:
    """The nodes that some entries lead to, and no other entry does; plain leaves do not count."""

    def __init__(self) -> None:
        self.merged: Region | None = None
        self.nodes: list[Node] = []
        self.plain: dict[Node, None] = {}
        self.leaves: list[Node] = []
        self.recvs: list[Node] = []
        self.entries: list[int] = []
        self.open = 0  # entries
        self.came = False  # gradients of any
        self.alone: list[Node] = []
        self.closed: list[tuple[int, bool]] = []  # entries since the last step; whether gradients came
        self.ranks: Ranks | None = None  # where some nodes have to run before others are settled

    def note(self, node: Node, kind: int) -> None:
        """A node that is special, and no plain leaf."""
        (self.recvs if kind == RECV else self.leaves if kind == LEAF else self.alone).append(node)

    def take(self, other: Region) -> None:
        other.merged = self
        self.nodes += other.nodes
        self.plain.update(other.plain)
        self.leaves += other.leaves
        self.recvs += other.recvs
        self.entries += other.entries
        self.alone += other.alone


class Ranks:
    """For each node of a region what it waits for."""

    def __init__(self, nodes: Iterable[Node], kind: Mapping[Node, int]) -> None:
        self.next: dict[Node, list[Node]] = {}
        self.before: dict[Node, list[Node]] = {}
        self.waits: dict[Node, int] = {}  # for so many edges and entries; settled nodes are not in here
        self.reached: set[Node] = set()  # unsettled ones that a gradient, or the word that none comes, leads to
        for node in nodes:
            self.waits.setdefault(node, 0)
            after = [] if kind.get(node) == RECV else [m for m, _ in node.next_functions if m is not None]
            self.next[node] = after
            for m in after:
                self.before.setdefault(m, []).append(node)
                if kind.get(m) != PLAIN:
                    self.waits[m] = self.waits.get(m, 0) + 1

    def settle(self, starts: Iterable[Node], reached: bool) -> list[Node]:
        """An entry has closed: the nodes that wait for nothing now and are reached, in an order in which they can run.

        `starts` has a node as often as the entry leads there.
        """
        freed = []
        for node in starts:
            if reached:
                self.reached.add(node)
            if self._count_down(node):
                freed.append(node)
        settled = []
        while freed:
            node = freed.pop()
            touched = node in self.reached
            if touched:
                self.reached.remove(node)
                settled.append(node)
            for m in self.next[node]:
                if m in self.waits:
                    if touched:
                        self.reached.add(m)
                    if self._count_down(m):
                        freed.append(m)
        return settled

    def _count_down(self, node: Node) -> bool:
        self.waits[node] -= 1
        if self.waits[node]:
            return False
        del self.waits[node]
        return True

    def by_hand(self, settled: list[Node], alone: Callable[[Node], bool]) -> set[Node]:
        """Which of the settled nodes must not run in the engine's call.

        Seams, which feed a node that is not settled; what they lead to, since the engine would run a seam to get there;
        and whoever else feeds that, since a hook sees what all of them give.
        """
        now = set(settled)
        hand = {node for node in settled if alone(node) or any(m in self.waits for m in self.next[node])}
        grow, after = list(hand), set()
        while grow:
            for m in self.next.get(grow.pop(), ()):
                if m in after:
                    continue
                after.add(m)
                grow.append(m)
                joining = [node for node in (m, *self.before[m]) if node in now and node not in hand]
                hand.update(joining)
                grow += joining
        return hand


class Schedule:
    """The graph behind the entries of one worker, in one pass. What comes right to a plain leaf never enters it."""

    def __init__(self, entries: Mapping[int, Sequence[Node]], kinds: Kinds) -> None:
        """Each entry is given by the nodes that it leads to."""
        self._entries = dict(entries)
        self._kinds = kinds
        self._home: dict[Node, Region] = {}
        self._kind: dict[Node, int] = {}  # of those that are special
        self._region: dict[int, Region] = {entry: self._explore(entry, nodes) for entry, nodes in entries.items()}
        for entry in entries:
            self._region[entry] = region = _root(self._region[entry])
            region.open += 1
        self._changed: dict[Region, None] = {}
        self._marked: set[Node] = set()

    @property
    def open(self) -> Collection[int]:
        """The entries about which nothing is known yet."""
        return self._region.keys()

    def settled(self, node: Node) -> bool:
        """Whether all that can still come to a node has come; what leads there may have to run yet."""
        region = _root(self._home[node])
        return not region.open if region.ranks is None else node not in region.ranks.waits

    def special(self, kind: int) -> list[Node]:
        """All nodes of a kind but plain leaves."""
        return [node for node, known in self._kind.items() if known == kind]

    def kind(self, node: Node) -> int | None:
        """What is special about a node."""
        return self._kind.get(node)

    def _explore(self, entry: int, starts: Iterable[Node]) -> Region:
        region, home, kinds = Region(), self._home, self._kinds
        stack = list(starts)
        while stack:
            node = stack.pop()
            known = home.get(node)
            if known is not None:
                if known is not region:
                    region = _join(region, _root(known))
                continue
            special = kinds.get(type(node))
            if special is not None:
                kind = self._kind[node] = special(node)
                if kind == PLAIN:
                    region.plain[node] = None
                    continue
                region.note(node, kind)
            home[node] = region
            region.nodes.append(node)
            if special is None or kind != RECV:
                for m, _ in node.next_functions:
                    if m is not None:
                        stack.append(m)
        region.entries.append(entry)
        return region

    # Entries close

    def close(self, entry: int, came: bool) -> None:
        """The gradients of an entry have come, or it is known that none will."""
        region = self._region.pop(entry)
        region.open -= 1
        region.came |= came
        region.closed.append((entry, came))
        if region.nodes or region.plain:  # else all that came went to leaves
            self._changed[region] = None

    def steps(self) -> Iterable[Step]:
        """What can run after entries closed; each step is to be run before the next is asked for."""
        while self._changed:
            region, _ = self._changed.popitem()
            yield self._step(region)

    def _step(self, region: Region) -> Step:
        if not region.came:
            return NOTHING
        closed, region.closed = region.closed, []
        if not (region.open or region.alone or region.ranks) and all(came for _, came in closed):
            starts = [node for entry in region.entries for node in self._entries[entry]]
            return Step(list(dict.fromkeys(starts)), [*region.plain, *region.leaves], region.recvs, [], [])
        return self._ranked_step(region, closed)

    def _ranked_step(self, region: Region, closed: list[tuple[int, bool]]) -> Step:
        ranks = region.ranks
        if ranks is None:
            ranks = region.ranks = Ranks(region.nodes, self._kind)
            for entry in region.entries:
                for node in self._starts(entry):
                    ranks.waits[node] += 1
        settled = [node for entry, came in closed for node in ranks.settle(self._starts(entry), came)]
        kind = self._kind
        hand = ranks.by_hand(settled, lambda node: kind.get(node) == ALONE)
        engine = [node for node in settled if node not in hand]
        fed = {m for node in engine for m in ranks.next[node] if m in hand}
        plain = {m: None for node in engine for m in ranks.next[node] if kind.get(m) == PLAIN}
        return Step(
            roots=[*engine, *fed],
            leaves=[*plain, *(node for node in engine if kind.get(node) == LEAF)],
            recvs=[node for node in engine if kind.get(node) == RECV],
            fed=list(fed),
            by_hand=[(node, node not in fed) for node in settled if node in hand],
        )

    def _starts(self, entry: int) -> list[Node]:
        return [node for node in self._entries[entry] if self._kind.get(node) != PLAIN]

    # The question

    def mark(self, starts: Iterable[Node]) -> list[Node]:
        """What leads to other workers from these nodes; each is given once in a pass."""
        stack, found, marked = list(starts), [], self._marked
        while stack:
            node = stack.pop()
            if node in marked:
                continue
            marked.add(node)
            kind = self._kind.get(node)
            if kind == RECV:
                found.append(node)
            elif kind != PLAIN:
                stack += [m for m, _ in node.next_functions if m is not None]
        return found

    def is_marked(self, node: Node) -> bool:
        """Whether it was found so."""
        return node in self._marked


def _root(region: Region) -> Region:
    while region.merged is not None:
        region = region.merged
    return region


def _join(one: Region, other: Region) -> Region:
    if one is other:
        return one
    if len(one.nodes) < len(other.nodes):
        one, other = other, one
    one.take(other)
    return one
