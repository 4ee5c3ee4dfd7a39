"""Passes that return gradients of some tensors of their driver, and accumulate none: `telegrad.autograd.grad`.

Such a pass runs the nodes that torch would run in one process: only nodes that lead to one of these tensors. The driver
finds them in its graph. There, a received tensor leads to the tensors that the driver had sent before, since its
gradient may come back to them. Other workers cannot know whether it does, so each received tensor counts there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.utils.checkpoint import CheckpointFunction

from telegrad._core import checks
from telegrad.autograd.engine.gradients import edge_of, nodes_behind
from telegrad.autograd.engine.record import AutogradContext, RecvNode
from telegrad.autograd.engine.schedule import ALONE, LEAF, PLAIN, RECV, Node
from telegrad.errors import UsageError

CheckpointNode: Any = CheckpointFunction._backward_cls
Place = tuple[Node, int]  # a node and the index of one of its outputs


class Capture:
    """The gradients that one pass returns: those at some places of the driver's graph."""

    def __init__(self, seeds: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        """`seeds` are the gradients of the roots."""
        self.seeds = list(seeds)
        self._edges = [edge_of(each) for each in inputs]
        self.hooked = {edge.node for edge, each in zip(self._edges, inputs, strict=True) if each._backward_hooks}
        self._found: dict[Place, Tensor] = {}  # the thread that runs the pass sets each before the pass ends

    def __repr__(self) -> str:
        return f"<Capture: {len(self._found)} gradients of {len(self.places)}>"

    @property
    def places(self) -> set[Place]:
        return {(edge.node, edge.output_nr) for edge in self._edges}

    def take(self, place: Place, gradient: Tensor | None) -> None:
        if gradient is not None:
            self._found[place] = gradient

    def gradients(self) -> list[Tensor | None]:
        """Return the gradients of the inputs, in their order; None for an input that the pass did not reach."""
        return [self._found.get((edge.node, edge.output_nr)) for edge in self._edges]


def tensors_of(name: str, given: Any) -> list[Tensor]:
    """Return the tensors that a user gave as outputs or inputs."""
    several = list(given) if isinstance(given, (list, tuple)) else [given]
    if not several:
        raise UsageError(f"{name} is empty: give at least one tensor")
    for each in several:
        if not isinstance(each, Tensor):
            raise UsageError(
                f"{name} must be tensors of this worker, not {checks.short_repr(each)}. "
                "Write telegrad.autograd.grad(context_id, outputs, inputs)"
            )
        if not each.requires_grad:
            raise UsageError(f"one of the {name} does not require a gradient and has no graph")
        if each.is_inference():
            raise UsageError(f"one of the {name} was made in torch.inference_mode(), and so has no graph: clone it")
    return several


def seeds_of(roots: Sequence[Tensor], given: Any) -> list[Tensor]:
    """Return the gradients at which a pass begins."""
    seeds = list(given) if isinstance(given, (list, tuple)) else [given] * (1 if given is not None else len(roots))
    if len(seeds) != len(roots):
        raise UsageError(f"grad_outputs has {len(seeds)} gradients for {len(roots)} outputs: give one for each")
    for number, (root, seed) in enumerate(zip(roots, seeds, strict=True)):
        if seed is None:
            if root.numel() != 1 or root.is_complex():
                raise UsageError(
                    f"an output of shape {tuple(root.shape)} and type {root.dtype} needs its gradient in grad_outputs: "
                    "only a real scalar has a default of 1"
                )
            seeds[number] = torch.ones_like(root)
        elif not isinstance(seed, Tensor) or seed.shape != root.shape:
            what = tuple(seed.shape) if isinstance(seed, Tensor) else checks.short_repr(seed)
            raise UsageError(f"grad_outputs has {what} for an output of shape {tuple(root.shape)}: give its gradient")
    return seeds


class Ancestors:
    """The graph behind some nodes, traversed backwards."""

    def __init__(self, starts: Iterable[Node]) -> None:
        self.recvs: list[Node] = []
        self._before: dict[Node, list[Node]] = {}  # of each node, the nodes whose gradients flow into it
        self._feeding: dict[Place, list[Node]] = {}  # the same for one output
        for node in nodes_behind(starts):
            if type(node) is RecvNode:
                self.recvs.append(node)
            for place in node.next_functions:
                self._before.setdefault(place[0], []).append(node)
                self._feeding.setdefault(place, []).append(node)

    def of(self, places: Iterable[Place], nodes: Iterable[Node] = ()) -> set[Node]:
        """Return the nodes from which gradients flow to one of these places or nodes, without these themselves."""
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
    """Return the number of the first message whose gradients may reach one of these places, or infinity."""
    numbers = (
        number
        for number, edges in sends.items()
        if any(edge.node in leading or (edge.node, edge.output_nr) in places for edge in edges)
    )
    return min(numbers, default=float("inf"))


def _check_hooks(received: set[Node]) -> None:
    """Raise UsageError if inputs that came from other workers have hooks.

    In torch the gradient of such an input is the result of its hooks. But if another input depends on the same node, it
    is the argument of its hooks. The driver cannot know whether another input does: the graph continues on other
    workers.
    """
    if received:
        sender = next(iter(received)).origin.sender.name
        raise UsageError(
            f"one of the inputs came from worker {sender!r} and has a hook, and other inputs may contribute to it. "
            "Register the hook on a tensor derived from it, such as tensor.view_as(tensor), and use that instead"
        )


class CaptureKinds:
    """The kinds of one worker's nodes, as in `Kinds`, in a pass that returns the gradients of some inputs."""

    def __init__(
        self, context: AutogradContext, entries: Mapping[int, Sequence[GradientEdge]], capture: Capture | None
    ) -> None:
        """Only the driver has a `capture`."""
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
        """Return the kind of a node. A node that leads nowhere counts as a leaf that may be ignored."""
        if node in self._recvs:
            return RECV
        if node in self._leading:
            return ALONE if node in self._wanted or type(node) is CheckpointNode else None
        return LEAF if node in self._wanted else PLAIN

    def wanted(self, nodes: Iterable[Node]) -> list[GradientEdge]:
        """Return the edges at these nodes whose gradients the driver wants."""
        return [edge for node in nodes for edge in self._wanted.get(node, ())]
