"""Passes that give the gradients of some tensors of their driver, and add up none: `telegrad.autograd.grad`.

Such a pass runs what torch would run in one process: only nodes that lead to one of these tensors. On the driver they
are found in its graph. A received tensor leads to what the driver had sent before, since its gradient may come back
there; other workers cannot know whether it does, and so each received tensor counts there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.utils.checkpoint import CheckpointFunction

from telegrad.autograd.engine.edges import edge_of
from telegrad.autograd.engine.record import AutogradContext, RecvNode
from telegrad.autograd.engine.schedule import ALONE, LEAF, PLAIN, RECV, Node
from telegrad.errors import UsageError

CheckpointNode: Any = CheckpointFunction._backward_cls
Place = tuple[Node, int]  # a node, and the number of one of its outputs


class Capture:
    """The gradients that one pass is to return: those that reach some places of the graph of its driver."""

    def __init__(self, seeds: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        """`seeds` are the gradients of the roots."""
        self.seeds = list(seeds)
        self._edges = [edge_of(each) for each in inputs]
        self.hooked = {edge.node for edge, each in zip(self._edges, inputs, strict=True) if each._backward_hooks}
        self._found: dict[Place, Tensor] = {}  # each is set by the thread that runs the pass, before it ends

    def __repr__(self) -> str:
        return f"<Capture: {len(self._found)} gradients of {len(self.places)}>"

    @property
    def places(self) -> set[Place]:
        return {(edge.node, edge.output_nr) for edge in self._edges}

    def take(self, place: Place, gradient: Tensor | None) -> None:
        if gradient is not None:
            self._found[place] = gradient

    def gradients(self) -> list[Tensor | None]:
        """Return the gradients of the inputs, in their order; None where the pass did not come."""
        return [self._found.get((edge.node, edge.output_nr)) for edge in self._edges]


class Ancestors:
    """The graph behind some nodes, read against its direction."""

    def __init__(self, starts: Iterable[Node]) -> None:
        self.recvs: list[Node] = []
        self._before: dict[Node, list[Node]] = {}  # of each node those that give to it
        self._feeding: dict[Place, list[Node]] = {}  # the same for one output
        stack = [*starts]
        self._seen = set(stack)
        while stack:
            node = stack.pop()
            if type(node) is RecvNode:
                self.recvs.append(node)
                continue
            for place in node.next_functions:
                following = place[0]
                if following is None:
                    continue
                self._before.setdefault(following, []).append(node)
                self._feeding.setdefault(place, []).append(node)
                if following not in self._seen:
                    self._seen.add(following)
                    stack.append(following)

    def of(self, places: Iterable[Place], nodes: Iterable[Node] = ()) -> set[Node]:
        """Return the nodes from which gradients flow to one of these places or nodes, without these."""
        stack = [each for place in places for each in self._feeding.get(place, ())]
        stack += [each for node in nodes for each in self._before.get(node, ())]
        found: set[Node] = set()
        while stack:
            node = stack.pop()
            if node not in found:
                found.add(node)
                stack += self._before.get(node, ())
        return found


def first_leading_to(places: set[Place], leading: set[Node], sends: Mapping[int, Sequence[GradientEdge]]) -> float:
    """Return the number of the first message a gradient of which may come to one of these places, or infinity."""
    numbers = (
        number
        for number, edges in sends.items()
        if any(edge.node in leading or (edge.node, edge.output_nr) in places for edge in edges)
    )
    return min(numbers, default=float("inf"))


def _check_hooks(received: set[Node]) -> None:
    """Raise UsageError where inputs that came from other workers have hooks.

    In torch the gradient of such an input is what its hooks return. Where another input depends on the same node, it is
    what its hooks are given. The driver cannot know whether another one does: the graph goes on at other workers.
    """
    if received:
        sender = next(iter(received)).origin.sender.name
        raise UsageError(
            f"one of the inputs came from worker {sender!r} and has a hook, and others of the inputs may have led to "
            "it. Register the hook on a tensor made from it, as tensor.view_as(tensor), and use that instead"
        )


class CaptureKinds:
    """The kinds of the nodes of one worker, as `Kinds`, in a pass that gives the gradients of some inputs."""

    def __init__(
        self, context: AutogradContext, entries: Mapping[int, Sequence[GradientEdge]], capture: Capture | None
    ) -> None:
        """`capture` is there on the driver alone."""
        places = set() if capture is None else capture.places
        starts = [edge.node for edges in entries.values() for edge in edges]
        behind = Ancestors(starts)
        self._recvs = set(behind.recvs)
        leading: set[Node] = set()
        if capture is not None:
            leading = behind.of(places)
            first = first_leading_to(places, leading, {number: entries[number] for number in entries if number})
            self._recvs = {
                node
                for node in behind.recvs
                if node.origin.context is not context or node.origin.may_lead_behind(first)
            }
            _check_hooks(self._recvs & capture.hooked)
        self._leading = leading | behind.of((), self._recvs)
        self._wanted: dict[Node, list[GradientEdge]] = {}
        for node, number in places:
            self._wanted.setdefault(node, []).append(GradientEdge(node, number))

    def get(self, _: type, /) -> Callable[[Node], int | None]:
        return self._kind_of

    def _kind_of(self, node: Node) -> int | None:
        """A node that leads nowhere is a leaf that nobody asks for."""
        if node in self._recvs:
            return RECV
        if node in self._leading:
            return ALONE if node in self._wanted or type(node) is CheckpointNode else None
        return LEAF if node in self._wanted else PLAIN

    def wanted(self, nodes: Iterable[Node]) -> list[GradientEdge]:
        """Return the edges of nodes whose gradients the driver wants."""
        return [edge for node in nodes for edge in self._wanted.get(node, ())]
