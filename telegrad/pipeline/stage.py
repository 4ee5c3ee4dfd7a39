"""A stage of a pipeline on its worker: its forward, its backward, and the packed form of values between stages.

Torch's engine runs the backward for one micro-batch, in one step or in two. The inputs of a stage get a `StageInput` as
history, whose gradients go back to the sender. The engine returns these and the gradients of the leaves, so `.grad` is
not used. With two steps, the first call of the engine returns the gradients of the inlet, and those at each junction: a
node from which one path leads to the inlet and another to weights. The second step computes the gradients of the
weights from each junction.

`telegrad.autograd` runs the graphs that the engine cannot run alone: those that lead to other workers, and those with
hooks on leaves, which need a complete gradient.

The nodes of a stage's graph between the outputs and the inlet fall into those that lead to the inlet and those that
lead to weights only. An engine call that wants only the gradients of the inlet runs the first kind, and torch's own
nodes compute only results that are wanted: at a junction, those towards the inlet. A second call, from the gradient at
the junction, computes the rest. So no work is done twice, except that tensor hooks at junctions are called in both.
"""

import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter, methodcaller
from sys import getrefcount
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from telegrad.errors import UsageError
from telegrad.ext import graphs
from telegrad.ext.calls import FifoLock
from telegrad.ext.host import in_child, renewed
from telegrad.ext.modules import moved
from telegrad.ext.values import RRef, decode, encode
from telegrad.pipeline.exported import attribute_of

Node = Any
detach: Callable[[Tensor], Tensor] = methodcaller("detach")

# Per process, because several pipelines may contain the same module.
_turns: weakref.WeakKeyDictionary[nn.Module, FifoLock] = weakref.WeakKeyDictionary()
_lock = renewed(threading.Lock())  # guards _turns
in_child(_turns.clear)  # the parent's threads, which hold turns, do not exist here


class Stage:
    """A module of this worker. It processes one micro-batch at a time, since it may have state."""

    def __init__(self, module: RRef[nn.Module], position: str) -> None:
        self._module = module.local_value()
        self._sample: Tensor | None = None  # a tensor of the module
        self._replicas: dict[str, bool] = {}  # tied weights: do they require gradients?
        self._trained = False  # the stage required gradients when its last weight was tied
        self.name = f"{position} of a Pipeline ({type(self._module).__name__})"
        with _lock:
            self._turns = _turns.setdefault(self._module, FifoLock())

    def begin(self) -> None:
        """Find a tensor of the module, which is on the device of the stage. Call this before each batch."""
        self._sample = next(itertools.chain(self._module.parameters(), self._module.buffers()), None)

    def run(self, value: Any) -> Any:
        with self._turns:
            return self._module(self.to_own_device(value))

    # Weights that stages share

    def weight(self, name: str) -> Tensor:
        """Return a parameter, or the buffer that replaces one of another worker."""
        found = attribute_of(self._module, name)
        if not isinstance(found, Tensor):
            names = ", ".join(name for name, _ in self._module.named_parameters())
            raise UsageError(f"{self.name} has no parameter {name!r} that could be tied; it has {names}")
        return found

    def tie(self, name: str, weight: Tensor | None = None) -> None:
        """Replace a parameter by that of another stage, under all names that it has here. Without `weight`, that one is
        on another worker; then a buffer replaces it here, and gets its value before each batch, and gradients."""
        # A replica on another worker is a buffer, so that optimizers, clipping and counts of parameters see the weight
        # once. As a leaf that requires a gradient it still gets one, which `SEND_GRADIENT` takes to the owner.
        own = self.weight(name)
        if weight is not None:
            self._check_shape(name, weight)
        replica = own.detach().requires_grad_(own.requires_grad)
        names = {name, *(each for each, other in self._module.named_parameters(remove_duplicate=False) if other is own)}
        for path, _, last in (each.rpartition(".") for each in names):
            holder = self._module.get_submodule(path)
            if weight is not None:
                setattr(holder, last, weight)
            elif last in holder._parameters:
                del holder._parameters[last]
                holder.register_buffer(last, replica)
        self._replicas[name] = own.requires_grad
        self._trained = self._trains()  # without this parameter, which may have been the last one

    def set_weight(self, name: str, value: Tensor) -> None:
        """Copy the owner's value to a replica."""
        self._check_shape(name, value)
        weight = self.weight(name)
        value = value.to(weight.device)  # it comes by the host if no map connects the two workers
        if not torch.equal(weight, value):  # avoid a write: another pending batch may have saved the tensor
            with torch.no_grad():
                weight.copy_(value)

    def follow(self, name: str, trains: bool, owner: str) -> None:
        """Make a replica require gradients if its owner does; raise UsageError if the replica or all parameters of its
        stage were frozen after it was tied, and the owner was not."""
        weight = self.weight(name)
        if trains and ((self._replicas[name] and not weight.requires_grad) or (self._trained and not self._trains())):
            raise UsageError(
                f"{self.name} was frozen after its weight {name!r} was tied to {owner!r}, which is not frozen: freeze "
                "that one, or freeze only the rest of this stage, before the pipeline is made"
            )
        weight.requires_grad_(trains)
        self._replicas[name] = trains

    def _trains(self) -> bool:
        return any(each.requires_grad for each in self._module.parameters())

    def _check_shape(self, name: str, value: Tensor) -> None:
        own = self.weight(name)
        if own.shape != value.shape:
            raise UsageError(
                f"{self.name}: its parameter {name!r} has the shape {tuple(own.shape)}, and cannot be tied to one of "
                f"{tuple(value.shape)}"
            )

    def to_own_device(self, value: Any) -> Any:
        """Move a value to the module's accelerator, if it has one: device maps need not cover all pairs of stages."""
        sample = self._sample
        return value if sample is None or sample.device.type in ("cpu", "meta") else moved(sample.device, value)


class PackedValue(NamedTuple):
    """A value with its tensors separate."""

    body: bytes
    tensors: Sequence[Tensor]
    positions: list[int]  # indices of the tensors that require gradients

    @property
    def differentiable(self) -> list[Tensor]:
        """The tensors that require gradients."""
        return list(map(self.tensors.__getitem__, self.positions))

    def value(self, differentiable: Sequence[Tensor]) -> Any:
        """Unpack the value, with these tensors instead of those that require gradients."""
        tensors = list(self.tensors)
        for position, tensor in zip(self.positions, differentiable, strict=True):
            tensors[position] = tensor
        return decode(self.body, tensors)


def pack_value(value: Any, same_program: bool) -> PackedValue:
    """Pack a value for another process; raise UsageError for references, which cannot be passed between stages."""
    body, tensors, references, _ = encode(value, same_program)
    if references:
        raise UsageError(
            f"values between the stages of a Pipeline cannot contain references such as {references[0]!r}: "
            "let the stage fetch the value with to_here()"
        )
    return PackedValue(body, tensors, [position for position, tensor in enumerate(tensors) if tensor.requires_grad])


# Backward


class _StageInput(torch.autograd.Function):
    """The inputs of a stage. Its only input is an empty leaf, which makes a `telegrad.autograd` pass run the node."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, inlet: "StageInput", tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        ctx.inlet = weakref.ref(inlet)  # else the two would keep each other and the received tensors alive
        ctx.set_materialize_grads(False)
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None, None]:
        inlet = ctx.inlet()
        if inlet is not None:  # the code that needs the gradients keeps it alive
            inlet.gradients = gradients
        return None, None, None


_apply: Callable[..., Sequence[Tensor]] = super(
    torch.autograd.Function, _StageInput
).apply  # skips the check for function transforms


class StageInput:
    """The received tensors of a stage that require gradients, with a history that begins here."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = _apply(torch.empty(0, device="cpu", requires_grad=True), self, list(map(detach, tensors)))
        node: Any = self.tensors[0].grad_fn
        self.node: Node = node
        self.edges = [GradientEdge(node, number) for number in range(len(tensors))]
        self.gradients: Sequence[Tensor | None] = [None] * len(tensors)


class _SeedGradients(torch.autograd.Function):
    """A root whose backward starts with given gradients."""

    @staticmethod
    def forward(ctx: Any, gradients: Sequence[Tensor], *outputs: Tensor) -> Tensor:
        ctx.gradients = gradients
        return torch.zeros((), device="cpu")

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *ctx.gradients)


def root_of(outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> Tensor:
    """Return a root for a backward pass from outputs with given gradients."""
    root: Tensor = _SeedGradients.apply(gradients, *outputs)  # type: ignore[no-untyped-call]
    return root


class _Graph(NamedTuple):
    """The nodes that a graph leads to, without the inlet."""

    leaves: list[Node]
    nodes: list[Node]  # all others, each after the nodes that it leads to
    is_plain: bool  # torch's engine can run it without `telegrad.autograd`


def _find_leaves(starts: Iterable[Node], inlet: Node | None) -> _Graph:
    # A walk in depth that meets each node twice: `left` is True when all nodes that it leads to are in `nodes`.
    leaves: list[Node] = []
    nodes: list[Node] = []
    is_plain = True
    averaged = graphs.replicas.averaged_ids()
    seen = {None, inlet}
    stack = [(node, False) for node in starts]
    while stack:
        node, left = stack.pop()
        if left:
            nodes.append(node)
        elif node not in seen:
            seen.add(node)
            kind = graphs.KINDS.get(type(node))
            if kind is None:
                stack.append((node, True))
                for following, _ in node.next_functions:
                    stack.append((following, False))
            elif kind(node) == graphs.PLAIN and id(node.variable) not in averaged:
                leaves.append(node)
            else:
                is_plain = False
    return _Graph(leaves, nodes, is_plain)


def _junctions_of(graph: _Graph, inlet: Node | None) -> tuple[set[Node], list[Node]]:
    """Return the nodes that lead to the inlet, and those of them with another path to weights."""
    lead = set() if inlet is None else {inlet}
    to_weights = set(graph.leaves)
    junctions = []
    for node in graph.nodes:
        following = {each for each, _ in node.next_functions}
        aside = not to_weights.isdisjoint(following - lead)
        if not lead.isdisjoint(following):
            lead.add(node)
            if aside:
                junctions.append(node)
        elif aside:
            to_weights.add(node)
    return lead, junctions


class Backward:
    """The backward of a stage for one micro-batch, created after its forward."""

    def __init__(
        self,
        sums: graphs.Gradients,
        outputs: Sequence[Tensor],
        inlet: StageInput | None,
        run_distributed: Callable[[Tensor], None],
    ) -> None:
        """`outputs` require gradients; `run_distributed` runs a pass of `telegrad.autograd` from a root. The gradients
        of leaves are added to `sums`."""
        self.outputs = outputs
        self._sums = sums
        self._inlet = inlet
        self._run_distributed = run_distributed
        self._edges: list[GradientEdge] = []  # where the engine starts, with the gradients below
        self._entering: list[Tensor] = []
        # For the second step: the gradients at each junction, and the leaves behind it.
        self._junctions: list[tuple[list[tuple[GradientEdge, Tensor]], list[Node]]] = []

    def run(self, gradients: Sequence[Tensor | None], in_steps: bool = False) -> Sequence[Tensor | None]:
        """Return the inlet's gradients, given those of the outputs; add the leaves', unless `in_steps` defers them."""
        there = [(output, each) for output, each in zip(self.outputs, gradients, strict=True) if each is not None]
        inlet, self.outputs = self._inlet, ()
        if there:
            outputs, self._entering = map(list, zip(*there, strict=True))
            self._edges = list(map(graphs.edge_of, outputs))
            graph = _find_leaves(map(attrgetter("node"), self._edges), inlet and inlet.node)
            if not graph.is_plain:
                self._run_distributed(root_of(outputs, self._entering))
            elif not (in_steps and self._run_first(graph)):
                wanted = [GradientEdge(leaf, 0) for leaf in graph.leaves]
                wanted += inlet.edges if inlet is not None else []
                given = graphs.run_backward(self._edges, self._entering, wanted, False, False) if wanted else ()
                self._add(graph.leaves, given)
                if inlet is not None:
                    inlet.gradients = given[len(graph.leaves) :]
        return inlet.gradients if inlet is not None else ()

    def _add(self, leaves: list[Node], given: Sequence[Tensor | None]) -> None:
        found = []
        for leaf, gradient in zip(leaves, given, strict=False):
            if gradient is not None:
                shared = getrefcount(gradient) > graphs.UNSHARED
                found.append((leaf.variable, gradient, shared))
        self._sums.add_all(found)

    # In two steps

    def _run_first(self, graph: _Graph) -> bool:
        """Take the first step; return False if two are not possible: Python nodes must not run twice, compiled code
        refuses a pass that keeps its graph, and gradients of weights behind several junctions cannot be separated."""
        if any(map(graphs.is_compiled, graph.nodes)):
            return False
        # A leaf behind two junctions would be counted twice, because the call from the one passes through the other.
        # This shows in the sum over the junctions, which is then larger than the number of leaves.
        inlet = self._inlet
        lead, nodes = _junctions_of(graph, inlet and inlet.node)
        roots = list(zip(self._edges, self._entering, strict=True))
        apart = [(edge, gradient) for edge, gradient in roots if edge.node not in lead]
        aside = [_find_leaves([each for each, _ in node.next_functions if each not in lead], None) for node in nodes]
        alone = _find_leaves([edge.node for edge, _ in apart], None)
        if any(map(graphs.is_function, nodes)) or sum(len(each.leaves) for each in (*aside, alone)) > len(graph.leaves):
            return False
        if apart:
            self._junctions.append((apart, alone.leaves))
        if inlet is not None and len(apart) < len(roots):
            edges = [[GradientEdge(node, number) for number in range(len(node._input_metadata))] for node in nodes]
            wanted = [*inlet.edges, *(edge for own in edges for edge in own)]
            given = iter(graphs.run_backward(self._edges, self._entering, wanted, True, False))
            inlet.gradients = [next(given) for _ in inlet.edges]
            for own, weights in zip(edges, aside, strict=True):
                came = [(edge, gradient) for edge in own if (gradient := next(given)) is not None]
                self._junctions.append((came, weights.leaves))
        return True

    def run_weights(self) -> None:
        """Take the second step, if there are two."""
        junctions, self._junctions = self._junctions, []
        for pairs, leaves in junctions:
            edges, entering = [edge for edge, _ in pairs], [gradient for _, gradient in pairs]
            # The gradients at the edges themselves are wanted for the comparison below: the engine returns them as the
            # tensor hooks there have changed them, which the first step has called already.
            wanted = [GradientEdge(leaf, 0) for leaf in leaves]
            given = graphs.run_backward(edges, entering, [*wanted, *edges], True, False)
            if any(one is not other for one, other in zip(given[len(leaves) :], entering, strict=True)):
                # A tensor hook changed the gradients here a second time. Compute them again from the outputs.
                given = graphs.run_backward(self._edges, self._entering, wanted, True, False)
            self._add(leaves, given)
