"""The order in which nodes of one worker's graph may run, in a pass whose gradients come in any order.

Gradients enter at *entries*: the roots, and the tensors that were sent. A node may run once no open entry leads to it,
because its gradient is complete then. An entry closes when its gradient has come, or when it is known that none will
come. Each closing entry settles some nodes, and each node is settled once. So the work of a pass is linear in the size
of the graph.

Nodes that are settled together run in the order of torch's engine: of the ready nodes, the newest first. If no node
behind them waits for more, that is one call of the engine, which determines the order itself. This case needs no count
for each node. The graph is divided into regions: entries that lead to a common node are in one region, except that a
leaf that takes its gradient in parts connects none. A region is settled as a whole when its last entry closes.

Otherwise a `Countdown` counts, for each node of the region, the edges and entries that it waits for, and this module
determines the order. The engine would call the hooks of a waiting node with an incomplete gradient. So nodes that feed
such a node run by hand. The nodes between two of these run in one call of the engine, if there is no other obstacle.

This module uses only `next_functions` and `_sequence_nr` of nodes, the result of `kinds` for their types, and whether
they have `apply`, as Python nodes do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import Any, NamedTuple

PLAIN = 1  # a leaf that may take its gradient in parts: many nodes feed it, and no node waits for it
LEAF = 2
RECV = 3  # leads to another worker
ENDS = (LEAF, RECV)  # behind which no node of this worker runs
ALONE = 4  # a node that the engine cannot run together with others

Node = Any
Kinds = Any  # has `get`: the type of a node -> a function that returns the kind of such a node, or None for no kind


class EngineCall(NamedTuple):
    """One call of torch's engine."""

    nodes: Sequence[Node]  # where gradients enter; in an ordered step all nodes that run, in order
    leaves: Sequence[Node]  # whose gradients the call returns
    recvs: Sequence[Node]  # which the call runs
    fed: Sequence[Node] = ()  # nodes run by hand afterwards, whose gradients the call returns


class GraphStep(NamedTuple):
    """The nodes that can run after some entries have closed."""

    acts: list[EngineCall | Node]  # in this order; a node runs by hand
    unreached: Sequence[Node] = ()  # Recv nodes that will not run, since no gradient reaches them


class Region:
    """The nodes that some entries lead to, and no other entry does; plain leaves do not count."""

    def __init__(self) -> None:
        self.merged: Region | None = None
        self.nodes: list[Node] = []
        self.plain: dict[Node, None] = {}
        self.leaves: list[Node] = []
        self.recvs: list[Node] = []
        self.entries: list[int] = []
        self.open = 0  # number of open entries
        self.alone = False  # True if the region has ALONE nodes
        self.closed: list[int] = []  # entries closed since the last step
        self.counted = False  # True if its nodes are in the countdown

    def take(self, other: Region) -> None:
        """Merge another region into this one, since entries of one lead to a node of the other."""
        other.merged = self
        self.nodes += other.nodes
        self.plain.update(other.plain)
        self.leaves += other.leaves
        self.recvs += other.recvs
        self.entries += other.entries
        self.alone |= other.alone


class Countdown:
    """The number of edges and entries that each node of some regions still waits for. At zero the node is settled."""

    def __init__(self, kind: Mapping[Node, int]) -> None:
        self.kind = kind
        self.next: dict[Node, list[Node]] = {}
        self.waits: dict[Node, int] = {}  # edges and entries left; without settled nodes
        self.uses: Counter[Node] = Counter()  # of plain leaves, by nodes that are not settled
        self._ages = count()  # break ties between equal sequence numbers

    def add(self, nodes: Iterable[Node], starts: Iterable[Node]) -> None:
        """Count for the nodes of a region. `starts` has each node once per entry that leads there."""
        waits, kind = self.waits, self.kind
        for node in nodes:
            waits.setdefault(node, 0)
            after = [] if kind.get(node) in ENDS else [m for m, _ in node.next_functions if m is not None]
            self.next[node] = after
            for m in after:
                if kind.get(m) == PLAIN:
                    self.uses[m] += 1
                else:
                    waits[m] = waits.get(m, 0) + 1
        for node in starts:
            waits[node] += 1

    def settle(self, starts: Iterable[Node], waiting: Collection[Node]) -> tuple[list[Node], list[Node]]:
        """Count closed entries; return the nodes that are settled now, in torch's order, and those that no gradient
        reaches.

        `starts` has each node once per closed entry that leads there. `waiting` are the nodes that have gradients.
        """
        ready: list[tuple[float, int, Node]] = []
        reached: set[Node] = set()
        order: list[Node] = []
        unreached: list[Node] = []

        def count_down(node: Node) -> None:
            # A node that no gradient reaches does not run, but the nodes behind it no longer wait for it. It is taken
            # before all others, so these nodes are ready as early as if it were not in the graph.
            self.waits[node] -= 1
            if not self.waits[node]:
                del self.waits[node]
                runs = node in waiting or node in reached
                heappush(ready, (-node._sequence_nr() if runs else -inf, next(self._ages), node))

        for node in starts:
            count_down(node)
        while ready:
            number, _, node = heappop(ready)
            (unreached if number == -inf else order).append(node)
            for m in self.next[node]:
                if self.kind.get(m) == PLAIN:
                    self.uses[m] -= 1
                    continue
                if number != -inf:
                    reached.add(m)
                count_down(m)
        return order, unreached


class ActPlan:
    """Divides a step into acts: for each settled node, from last to first, by hand or in which call of the engine.

    The gradients that a call returns for a node outside of it have passed that node's hooks. So a call may return
    gradients only for a node that gets no more later, and that then runs by hand, without those hooks. This excludes
    Python nodes, which need their hooks then (see `node_calls`). Such a call must not ask for a leaf behind such a
    node, since the engine would run the node to get there.
    """

    def __init__(self, countdown: Countdown) -> None:
        self._countdown = countdown
        self._groups: list[list[Node]] = []  # the nodes of each act, from last to first
        self._by_hand: set[int] = set()  # indices of acts that run by hand
        self._home: dict[Node, int] = {}  # the act of a node; for a plain leaf, the last act that feeds it
        self._feeder: dict[Node, int] = {}  # the last act that feeds a node from outside of the node's act
        self._feeds = self._shares = False  # the current call feeds such a node; it feeds a leaf that others use later

    def take(self, node: Node) -> None:
        """Assign a node to an act. The node runs before all nodes that were taken so far."""
        place = len(self._groups) - 1
        if place < 0 or place in self._by_hand:
            place, self._feeds, self._shares = place + 1, False, False
        in_engine = self._in_engine(node, place)
        if not in_engine:
            place = len(self._groups)
            self._by_hand.add(place)
        if place == len(self._groups):
            self._groups.append([])
        self._groups[place].append(node)
        self._home[node] = place
        for m in self._countdown.next[node]:
            if self._countdown.kind.get(m) == PLAIN:
                self._home.setdefault(m, place)
            elif self._home.get(m) != place:
                self._feeder.setdefault(m, place)

    def _in_engine(self, node: Node, place: int) -> bool:
        """Return True if the engine may run the node in the call at that place."""
        kind = self._countdown.kind
        if kind.get(node) == ALONE:
            return False
        feeds, shares = self._feeds, self._shares
        for m in self._countdown.next[node]:
            if kind.get(m) == PLAIN:
                shares |= self._countdown.uses[m] > 0 or self._home.get(m, place) != place
            elif self._home.get(m) != place:
                feeds = True
                if not self._may_feed(m, place):
                    return False
        if feeds and shares:
            return False
        self._feeds, self._shares = feeds, shares
        return True

    def _may_feed(self, m: Node, place: int) -> bool:
        # The call returns the sum of its own gradients and of those that earlier acts left at `m`, and calls the hooks
        # of `m` with it. So no act after the call may feed `m`, and `m` must run by hand, after the call. A node that
        # is not settled in this step has no home, and fails the same test.
        kind = self._countdown.kind.get(m)
        needs_hooks = kind == ALONE or (hasattr(m, "apply") and kind != RECV)
        return self._home.get(m) in self._by_hand and not needs_hooks and self._feeder.get(m, place) == place

    def acts(self) -> list[EngineCall | Node]:
        """Return the engine calls and the nodes to run by hand, in the order in which they run."""
        fed: dict[int, list[Node]] = {}
        for m, place in self._feeder.items():
            fed.setdefault(place, []).append(m)
        return [
            group[0] if place in self._by_hand else self._call(group[::-1], fed.get(place, []))
            for place, group in reversed([*enumerate(self._groups)])
        ]

    def _call(self, nodes: list[Node], fed: list[Node]) -> EngineCall:
        kind = self._countdown.kind
        plain = {m: None for node in nodes for m in self._countdown.next[node] if kind.get(m) == PLAIN}
        leaves = [node for node in nodes if kind.get(node) == LEAF]
        return EngineCall(nodes, [*plain, *leaves], [node for node in nodes if kind.get(node) == RECV], fed)


class GraphSchedule:
    """The graph behind the entries of one worker, in one pass. Gradients that go directly to a plain leaf bypass it."""

    def __init__(self, entries: Mapping[int, Sequence[Node]], kinds: Kinds) -> None:
        """`entries` maps each entry to the nodes that it leads to."""
        self._entries = dict(entries)
        self._kinds = kinds
        self._home: dict[Node, Region] = {}
        self.kind: dict[Node, int] = {}  # of special nodes: one of the constants above
        # The entries that are still open. None: all gradients go directly to leaves.
        self.open: dict[int, Region | None] = {}
        for entry, nodes in entries.items():
            self.open[entry] = self._explore(entry, nodes) if nodes else None
        # Regions are joined while entries are explored, and never after that. The counts begin here, so `open` and
        # `step` hold final regions, and `take` need not move counts.
        for entry, region in self.open.items():
            if region is not None:
                self.open[entry] = region = _root(region)
                region.open += 1
        self._countdown: Countdown | None = None  # created once some nodes can run before others that they lead to
        self.changed: dict[Region, None] = {}  # with entries closed since the last step
        self.marked: set[Node] = set()  # that `mark` has reached: gradients may still go there

    def settled(self, node: Node) -> bool:
        """Return True if no more gradients can come to a node. Nodes that lead to it may still have to run."""
        region = _root(self._home[node])
        return node not in self._counting().waits if region.counted else not region.open

    def _explore(self, entry: int, starts: Iterable[Node]) -> Region:
        # Each node is visited once for all entries: at a node of another entry the two regions are joined, and the walk
        # does not continue there. The smaller region is moved into the larger one, as in a union-find structure.
        region, home, kinds = Region(), self._home, self._kinds
        stack = list(starts)
        while stack:
            node = stack.pop()
            known = home.get(node)
            if known is not None:
                if known is not region and (other := _root(known)) is not region:
                    if len(region.nodes) < len(other.nodes):
                        region, other = other, region
                    region.take(other)
                continue
            special = kinds.get(type(node))
            kind = special(node) if special is not None else None
            if kind is not None:
                self.kind[node] = kind
                if kind == PLAIN:
                    region.plain[node] = None
                    continue
                if kind == ALONE:
                    region.alone = True
                else:
                    (region.recvs if kind == RECV else region.leaves).append(node)
            home[node] = region
            region.nodes.append(node)
            if kind not in ENDS:
                for m, _ in node.next_functions:
                    if m is not None:
                        stack.append(m)
        region.entries.append(entry)
        return region

    # Closing entries

    def close(self, entry: int) -> None:
        """Close an entry, whose gradients have come or are known not to come."""
        region = self.open.pop(entry)
        if region is not None:
            region.open -= 1
            region.closed.append(entry)
            self.changed[region] = None

    def step(self, waiting: Collection[Node], ordered: bool) -> GraphStep:
        """Return the nodes that can run after the changes. `waiting` are the nodes that have gradients.

        An `ordered` step lists all nodes, since some may have to run by hand.
        """
        regions, self.changed = list(self.changed), {}
        for region in regions:
            ordered = ordered or region.alone or region.open > 0
        if ordered:
            return self._ordered_step(regions, waiting)
        return GraphStep([self._whole(regions, waiting)])

    def _whole(self, regions: list[Region], waiting: Collection[Node]) -> EngineCall:
        """Return one call for the rest of regions without open entries."""
        starts: dict[Node, None] = {}
        leaves: dict[Node, None] = {}
        recvs: list[Node] = []
        for region in regions:
            leaves.update(region.plain)
            leaves.update(dict.fromkeys(region.leaves))
            # Earlier ordered steps have run a part of a counted region: the rest begins at the nodes that have
            # gradients. The countdown is not continued. Without `counted`, `settled` returns True, since no entry is
            # open.
            if region.counted:
                region.counted = False
                starts.update({node: None for node in region.nodes if node in waiting})
                recvs += [node for node in region.recvs if node in self._counting().waits]
            else:
                for entry in region.entries:
                    starts.update(dict.fromkeys(self._entries[entry]))
                recvs += region.recvs
        return EngineCall(list(starts), list(leaves), recvs)

    def _ordered_step(self, regions: list[Region], waiting: Collection[Node]) -> GraphStep:
        countdown = self._counting()
        starts: list[Node] = []
        for region in regions:
            if not region.counted:
                region.counted = True
                countdown.add(region.nodes, [node for entry in region.entries for node in self._starts(entry)])
            starts += [node for entry in region.closed for node in self._starts(entry)]
            region.closed.clear()
        # From last to first: whether a node may run in a call depends on the acts of the nodes that it feeds, which run
        # later.
        order, unreached = countdown.settle(starts, waiting)
        plan = ActPlan(countdown)
        for node in reversed(order):
            plan.take(node)
        return GraphStep(plan.acts(), [node for node in unreached if self.kind.get(node) == RECV])

    def _counting(self) -> Countdown:
        if self._countdown is None:
            self._countdown = Countdown(self.kind)
        return self._countdown

    def _starts(self, entry: int) -> list[Node]:
        return [node for node in self._entries[entry] if self.kind.get(node) != PLAIN]

    # Marking

    def mark(self, starts: Iterable[Node]) -> list[Node]:
        """Return the Recv nodes that these nodes lead to; each is returned once in a pass."""
        stack, found, marked = list(starts), [], self.marked
        while stack:
            node = stack.pop()
            if node in marked:
                continue
            marked.add(node)
            kind = self.kind.get(node)
            if kind == RECV:
                found.append(node)
            elif kind not in (PLAIN, LEAF):
                stack += [m for m, _ in node.next_functions if m is not None]
        return found


def _root(region: Region) -> Region:
    while region.merged is not None:
        region = region.merged
    return region
