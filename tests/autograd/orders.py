"""Check the order in which nodes ran against that of torch's engine, found by experiments.

The engine runs the newest of the reached nodes that no other node which may still run leads to. `watching` records the
gradients that arrive at each worker in each pass, and which numbered nodes run; `check` compares.
"""

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from telegrad.autograd.engine import ROOTS, EngineRunner
from telegrad.autograd.send_recv import RecvNode

Node = Any
Batch = list[tuple[int, list[Node]]]  # entries that close together, each with its reached nodes

_acting = threading.local()
_numbers = itertools.count(1 << 40)  # above the numbers of torch, and below those of received tensors


def renumber(values: Iterable[Any], known: set[Node]) -> None:
    """Number the new nodes by their age on all threads, since torch counts for each thread."""
    found, stack = [], [value.grad_fn for value in values if value.grad_fn is not None]
    while stack:
        node = stack.pop()
        if node in known or type(node) is RecvNode or hasattr(node, "variable"):
            continue
        known.add(node)
        found.append(node)
        stack += [following for following, _ in node.next_functions if following is not None]
    for node in sorted(found, key=lambda node: node._sequence_nr()):
        node._set_sequence_nr(next(_numbers))


class Watched:
    """The part of a pass on one worker."""

    def __init__(self, local: EngineRunner) -> None:
        self.local = local
        self.batches: list[Batch] = []
        self.ran: list[int] = []

    def came(self, gradients: Iterable[tuple[int, Sequence[Any]]]) -> None:
        edges = self.local._edges
        self.batches.append(
            [
                (
                    entry,
                    [
                        edge.node
                        for edge, part in zip(edges[entry], parts, strict=False)
                        if part is not None and hasattr(edge, "node")
                    ],
                )
                for entry, parts in gradients
            ]
        )

    def buried(self) -> None:
        closed = {entry for batch in self.batches for entry, _ in batch}
        self.batches.append([(e, []) for e in self.local._edges if e not in closed and e not in self.local._marked])

    def expected(self) -> list[int]:
        entries = {
            entry: [edge.node for edge in edges if hasattr(edge, "node")] for entry, edges in self.local._edges.items()
        }
        return [node.number for node in in_order(entries, self.batches) if hasattr(node, "number")]


def ran(number: int) -> None:
    """Record that a node runs."""
    watched = getattr(_acting, "watched", None)
    if watched is not None:
        watched.ran.append(number)


@contextlib.contextmanager
def watching() -> Iterator[Iterable[Watched]]:
    """Record the passes of all workers of this process."""
    all_: dict[EngineRunner, Watched] = {}
    originals = {name: getattr(EngineRunner, name) for name in ("start", "arrive", "bury")}

    def wrapped(name: str) -> Any:
        def act(local: EngineRunner, *given: Any) -> None:
            watched = _acting.watched = all_.setdefault(local, Watched(local))
            _note(watched, name, *given)
            try:
                originals[name](local, *given)
            finally:
                _acting.watched = None

        return act

    for name in originals:
        setattr(EngineRunner, name, wrapped(name))
    try:
        yield all_.values()
    finally:
        for name, original in originals.items():
            setattr(EngineRunner, name, original)


def _note(watched: Watched, name: str, given: Any = ()) -> None:
    if name == "start":
        watched.batches.append([(ROOTS, [edge.node for edge in watched.local._edges[ROOTS]])])
    elif name == "bury":
        watched.buried()
    else:
        watched.came(given)


def check(all_: Iterable[Watched]) -> None:
    for watched in all_:
        expected = watched.expected()
        assert watched.ran == expected, f"nodes ran in the order {watched.ran}, not {expected}"


def in_order(entries: Mapping[int, Sequence[Node]], batches: Iterable[Batch]) -> list[Node]:
    """Return all nodes that run, in the order of torch's engine."""
    nodes = reachable(itertools.chain(*entries.values()), _following)
    ahead = {node: reachable(_following(node), _following) for node in nodes}
    open_, waiting, done = set(entries), set(), []
    for batch in batches:
        for entry, reached in batch:
            open_.remove(entry)
            waiting.update(reached)
        unsettled = reachable((node for entry in open_ for node in entries[entry]), _following)
        while True:
            ready = [
                node for node in waiting if node not in unsettled and not any(node in ahead[other] for other in waiting)
            ]
            if not ready:
                break
            newest = max(ready, key=lambda node: node._sequence_nr())
            waiting.remove(newest)
            waiting.update(_following(newest))
            done.append(newest)
    return done


def _following(node: Node) -> list[Node]:
    is_end = type(node) is RecvNode
    return [] if is_end else [following for following, _ in node.next_functions if following is not None]


def reachable(starts: Iterable[Node], following: Callable[[Node], Iterable[Node]]) -> set[Node]:
    stack, seen = list(starts), set()
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack += following(node)
    return seen
