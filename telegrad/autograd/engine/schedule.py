"""Which nodes of one worker's graph may run when, in a pass whose gradients come in any order.

Gradients enter at *entries*: the roots, and the tensors that were sent away. A node may run once no entry that leads to
it is open any more, for then its gradient is whole. So each closing entry (its gradient has come, or it is known that
none will) settles some nodes, and each node is settled once: the work of a whole pass is linear in the graph.

What is settled together runs as torch's engine would run it: of the nodes that are ready, the newest first. Where
nothing behind them waits for more, that is one call of the engine, which sees to the order by itself.

Elsewhere the order is found out here. The engine would call the hooks of a node that still waits with a part of its
gradient; so what feeds such a node runs by hand, and what comes between two such in one call of the engine, if nothing
else speaks against it.

Nodes are known here by `next_functions` and `_sequence_nr`, by what `kinds` says of their types, and by whether they
have an `apply`, as those have that are written in Python.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import Any, NamedTuple, Protocol

PLAIN = 1  # a leaf that may take its gradient in parts: it is wanted by many, and waits for nobody
LEAF = 2
RECV = 3  # what leads to another worker
ENDS = (LEAF, RECV)  # behind which nothing of this worker runs
ALONE = 4  # a node that the engine cannot run as a part of something

Node = Any


class Kinds(Protocol):
    """A mapping from the type of a node to the function that returns the kind of such a node, or None for no kind."""

    def get(self, kind: type, /) -> Callable[[Node], int | None] | None: ...


class EngineCall(NamedTuple):
    """What runs in one call of torch's engine."""

    nodes: Sequence[Node]  # where gradients enter; in an ordered step all that run, in their order
    leaves: Sequence[Node]  # whose gradients it shall give
    recvs: Sequence[Node]  # which it shall run
    fed: Sequence[Node] = ()  # of those run by hand afterwards: what comes there it shall give


class GraphStep(NamedTuple):
    """What can run now, after some entries have closed."""

    acts: list[EngineCall | Node]  # one after the other; a node runs by hand
    unreached: Sequence[Node] = ()  # what leads to other workers and will not run, since nothing comes there


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
        self.alone = False  # whether there are nodes that the engine cannot run as a part of something
        self.closed: list[int] = []  # entries since the last step
        self.counted = False  # whether its nodes are in the countdown

    def note(self, node: Node, kind: int) -> None:
        """Take note of a node that is special, and no plain leaf."""
        if kind == ALONE:
            self.alone = True
        else:
            (self.recvs if kind == RECV else self.leaves).append(node)

    def take(self, other: Region) -> None:
        """Swallow another region, since one's entries lead to a node of the other."""
        other.merged = self
        self.nodes += other.nodes
        self.plain.update(other.plain)
        self.leaves += other.leaves
        self.recvs += other.recvs
        self.entries += other.entries
        self.alone |= other.alone


class Countdown:
    """For each node of some regions how much it still waits for: at nothing it is settled."""

    def __init__(self, kind: Mapping[Node, int]) -> None:
        self.kind = kind
        self.next: dict[Node, list[Node]] = {}
        self.waits: dict[Node, int] = {}  # for so many edges and entries; settled nodes are not in here
        self.uses: Counter[Node] = Counter()  # of plain leaves, by nodes that are not settled
        self._ages = count()  # tell apart what has the same number

    def add(self, nodes: Iterable[Node], starts: Iterable[Node]) -> None:
        """Count for the nodes of a region; `starts` has a node as often as entries lead there."""
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
        """Entries have closed: which nodes wait for nothing now, in torch's order; and those that nothing comes to.

        `starts` has a node as often as entries lead there, `waiting` are those to which something has come.
        """
        ready: list[tuple[float, int, Node]] = []
        reached: set[Node] = set()
        order: list[Node] = []
        unreached: list[Node] = []

        def count_down(node: Node) -> None:
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
    """Cuts a step into acts.

    It says of settled nodes, from the last to the first, whether they run by hand or in which call of the engine.

    What a call gives to a node outside of it has gone through that node's hooks. So a call may do that only for one
    that gets nothing more later, and that then runs by hand, without those hooks; not for one in Python, which needs
    them then (see `byhand`). And a call that does so must not ask for a leaf behind such a node, since the engine would
    run the node to get there.
    """

    def __init__(self, countdown: Countdown) -> None:
        self._countdown = countdown
        self._groups: list[list[Node]] = []  # of each act its nodes, from the last to the first
        self._by_hand: set[int] = set()  # which of them
        self._home: dict[Node, int] = {}  # in which of them a node is, and which is the last to give to a plain leaf
        self._feeder: dict[Node, int] = {}  # which is the last to give to a node outside of it
        self._feeds = self._shares = False  # the current call, to such a node; to a leaf that others use later

    def take(self, node: Node) -> None:
        """Find the place of the node that runs before all those that were taken so far."""
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
        """Whether the engine may run the node in the call that is at that place."""
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
        kind = self._countdown.kind.get(m)
        needs_hooks = kind == ALONE or (hasattr(m, "apply") and kind != RECV)
        return self._home.get(m) in self._by_hand and not needs_hooks and self._feeder.get(m, place) == place

    def acts(self) -> list[EngineCall | Node]:
        """What was taken, as calls of the engine and nodes that run by hand, in the order in which they run."""
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
        self._countdown: Countdown | None = None  # once some nodes can run before others that they lead to
        self._changed: dict[Region, None] = {}
        self._marked: set[Node] = set()

    @property
    def open(self) -> Collection[int]:
        """The entries about which nothing is known yet."""
        return self._region.keys()

    def settled(self, node: Node) -> bool:
        """Whether all that can still come to a node has come; what leads there may have to run yet."""
        region = _root(self._home[node])
        return node not in self._counting().waits if region.counted else not region.open

    def special(self, kind: int) -> list[Node]:
        """All nodes of a kind but plain leaves."""
        return [node for node, known in self._kind.items() if known == kind]

    def kind(self, node: Node) -> int | None:
        """What is special about a node: one of the kinds above, or None."""
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
            kind = special(node) if special is not None else None
            if kind is not None:
                self._kind[node] = kind
                if kind == PLAIN:
                    region.plain[node] = None
                    continue
                region.note(node, kind)
            home[node] = region
            region.nodes.append(node)
            if kind not in ENDS:
                for m, _ in node.next_functions:
                    if m is not None:
                        stack.append(m)
        region.entries.append(entry)
        return region

    # Entries close

    def close(self, entry: int) -> None:
        """The gradients of an entry have come, or it is known that none will."""
        region = self._region.pop(entry)
        region.open -= 1
        region.closed.append(entry)
        if region.nodes or region.plain:  # else all that came went to leaves
            self._changed[region] = None

    def step(self, waiting: Collection[Node], ordered: bool) -> GraphStep | None:
        """What can run after entries closed, if something can. `waiting` are the nodes to which something has come.

        An `ordered` step names all nodes, since some may have to run by hand.
        """
        regions, self._changed = list(self._changed), {}
        if not regions:
            return None
        for region in regions:
            ordered = ordered or region.alone or region.open > 0
        if ordered:
            return self._ordered_step(regions, waiting)
        return GraphStep([self._whole(regions, waiting)])

    def _whole(self, regions: list[Region], waiting: Collection[Node]) -> EngineCall:
        """All that is left of regions of which no entry is open."""
        starts: dict[Node, None] = {}
        leaves: dict[Node, None] = {}
        recvs: list[Node] = []
        for region in regions:
            leaves.update(region.plain)
            leaves.update(dict.fromkeys(region.leaves))
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
        order, unreached = countdown.settle(starts, waiting)
        plan = ActPlan(countdown)
        for node in reversed(order):
            plan.take(node)
        return GraphStep(plan.acts(), [node for node in unreached if self._kind.get(node) == RECV])

    def _counting(self) -> Countdown:
        if self._countdown is None:
            self._countdown = Countdown(self._kind)
        return self._countdown

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
            elif kind not in (PLAIN, LEAF):
                stack += [m for m, _ in node.next_functions if m is not None]
        return found

    def is_marked(self, node: Node) -> bool:
        """Whether `mark` has come to the node: gradients may still go there."""
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
