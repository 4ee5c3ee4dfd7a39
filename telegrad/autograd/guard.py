"""Gradients of some tensors only: passes that return them, and calls of torch's engine that would lack some of them.

`telegrad.autograd.grad` begins a pass that returns gradients of some tensors of its driver, and accumulates none. It
runs the nodes that torch would run in one process: only nodes that lead to one of these tensors. The driver finds them
in its graph. There, a received tensor leads to the tensors that the driver had sent before, since its gradient may come
back to them. Other workers cannot know whether it does, so each received tensor counts there.

Outside of a pass, calls of the engine are refused if their results would lack gradients of other workers.
`loss.backward()` reaches a `Recv`, which raises. `torch.autograd.grad(loss, x)` and `backward(inputs=[x])` run only
nodes that lead to x. In torch's graph a received tensor leads to nothing, so its node does not run and no hook is
called. The result lacks the gradients that come back from other workers, and nothing in the graph could detect this.
Edges from each `Recv` to the tensors sent before would make the engine visit it. But then a pass could not run a part
of the graph without the nodes behind these edges, and edges cannot be changed. So this module replaces the engine by
one that checks the graph first.

The module checks the engine's callbacks as well. A wrapper such as FSDP queues one in a hook, and expects the gradients
of its parameters in `.grad` when it is called. A pass accumulates gradients elsewhere, so the callback would find none,
unless `gradients` handles it.

A hook on several tensors asks which nodes the engine will run, and waits for their gradients. A pass calls the engine
for one part of the graph after another, so a node outside of the current part may be in a later one.
"""

import functools
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.autograd.variable import Variable
from torch.optim import Optimizer
from torch.utils.checkpoint import CheckpointFunction

from telegrad._core import checks
from telegrad._core.forks import in_child
from telegrad._core.texts import hint
from telegrad.autograd.schedule import ALONE, LEAF, PLAIN, RECV, Node
from telegrad.autograd.send_recv import UNKNOWN, RecvNode, edge_of, nodes_behind, receiving
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
        output = f"an output of shape {tuple(root.shape)} and type {root.dtype}"
        if seed is None:
            if root.numel() != 1 or root.is_complex():
                raise UsageError(f"{output} needs its gradient in grad_outputs: only a real scalar has a default of 1")
            seeds[number] = torch.ones_like(root)
        elif not isinstance(seed, Tensor) or seed.shape != root.shape or seed.is_complex() != root.is_complex():
            what = f"{tuple(seed.shape)}, {seed.dtype}," if isinstance(seed, Tensor) else checks.short_repr(seed)
            raise UsageError(f"grad_outputs has {what} for {output}: give its gradient")
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

    def __init__(self, context: Any, entries: Mapping[int, Sequence[GradientEdge]], capture: Capture | None) -> None:
        """Only the driver has a `capture`."""
        places = set() if capture is None else capture.places
        starts = [edge.node for edges in entries.values() for edge in edges]
        behind = Ancestors(starts)
        self._recvs = set(behind.recvs)
        leading: set[Node] = set()
        if capture is not None:
            leading = behind.of(places)
            # Without the roots, whose entry has the number 0: gradients do not come back through them.
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


# Steps of torch's optimizers

_OWNER = "telegrad.optim.owner"  # the module whose steps may find no gradients, which its caller is told
_found_none: WeakSet[Optimizer] = WeakSet()  # optimizers that a warning has named


def look_for_gradients(optimizer: Optimizer, parameters: Sequence[Tensor], given: Iterable[Any]) -> None:
    """Warn once if an optimizer that steps finds no gradient, and was `given` no closure that computes them."""
    if any(map(callable, given)) or any(each.grad is not None for each in parameters):
        return
    if not any(each.requires_grad for each in parameters) or optimizer in _found_none:
        return
    if not any(frame.f_globals.get("__name__") == _OWNER for frame, _ in traceback.walk_stack(None)):
        _found_none.add(optimizer)
        hint(
            "plain step without gradients",
            f"{type(optimizer).__name__} steps, but none of its parameters has a gradient in .grad. The gradients of "
            "telegrad.autograd.backward are in the context: use "
            f"telegrad.optim.DistributedOptimizer.for_module(torch.optim.{type(optimizer).__name__}, model), and its "
            "step(context_id) in the `with` block of the context",
        )


# Calls of torch's engine

# callbacks that only record the end of the engine's pass
_NOTED = ("torch.utils.", "torch.distributed._tools.", "torch._functorch.")
# The threads that run the graph for a pass; each use is one set operation. A forked child clears the set, because its
# new threads may get the same ids.
running: set[int] = set()
in_child(running.clear)
# Returns True for a callback that the running pass will call itself. Guarded by `gradients.showing`.
take_callback: Callable[[Any], bool] | None = None


def install() -> None:
    """Replace torch's engine in this process by one that checks its arguments."""
    Variable._execution_engine = GuardedEngine()
    torch._C._will_engine_execute_node = _will_run


def installed() -> bool:
    """Return True if this process has taken part in a context."""
    return type(Variable._execution_engine) is GuardedEngine


def runs_pass() -> bool:
    """Return True if this thread runs the graph for a pass. Any thread of the engine may, while a pass runs."""
    # The engine runs nodes of an accelerator on a thread of its own. Python knows it only as a dummy thread, and
    # nothing tells for which call it works. So any of these counts while some pass runs.
    is_of_engine = isinstance(threading.current_thread(), threading._DummyThread)
    return threading.get_ident() in running or (is_of_engine and bool(running))


class GuardedEngine(type(Variable._execution_engine)):  # type: ignore[misc] # whose type has no name
    """Torch's engine with checks, as Python code calls it."""

    def run_backward(self, roots: Any, gradients: Any, retain: Any, create: Any, *more: Any, **named: Any) -> Any:
        # Without inputs the engine runs the whole graph, and a Recv in it raises by itself. `receiving` is empty
        # while no context has received a tensor: then the graph need not be walked.
        inputs = more[0] if more else named.get("inputs", ())
        if inputs and receiving:
            _check_inputs(roots, inputs)
        return super().run_backward(roots, gradients, retain, create, *more, **named)

    def queue_callback(self, callback: Callable[[], None]) -> None:
        # A callback outside of passes is torch's business. In a pass it would be called at the end of one of several
        # calls of the engine: only FSDP's can be postponed (`gradients`), and those that only note the end do no harm.
        if not runs_pass():
            super().queue_callback(callback)
        elif take_callback is None or not take_callback(callback):
            _check_callback(callback)
            super().queue_callback(callback)


def _check_inputs(roots: Sequence[Any], inputs: Sequence[Any]) -> None:
    """Raise UsageError if gradients of inputs come back from other workers."""
    nodes = [root.node if isinstance(root, GradientEdge) else root.grad_fn for root in roots]
    graph = Ancestors(node for node in nodes if node is not None)
    if not graph.recvs:
        return
    given = [each for each in inputs if isinstance(each, GradientEdge) or each.requires_grad]
    edges = [each if isinstance(each, GradientEdge) else edge_of(each) for each in given]
    places = {(edge.node, edge.output_nr) for edge in edges}
    for context in {node.origin.context for node in graph.recvs}:
        origins = [node.origin for node in graph.recvs if node.origin.context is context]
        if context.ended:
            raise UsageError(
                f"the graph leads to tensors that came from worker {origins[0].sender.name!r} in context {context.id}, "
                "which has ended, so this worker cannot know which gradients come back from there. Detach tensors that "
                "outlive their context"
            )
        sends = {
            number: [edge_of(edge) if isinstance(edge, Tensor) else edge for edge in send.edges]
            for number, send in context.sends.items()
        }
        leading = Ancestors(edge.node for edges in sends.values() for edge in edges).of(places)
        first = first_leading_to(places, leading, sends)
        for origin in origins:
            if origin.number == UNKNOWN:
                raise origin.refusal()
            if origin.may_lead_behind(first):
                raise UsageError(
                    "torch.autograd.grad and backward(inputs=...) cover only this worker, but gradients of the inputs "
                    f"also come from worker {origin.sender.name!r}, in context {context.id}. Inside that context use "
                    "telegrad.autograd.grad(context_id, outputs, inputs), or telegrad.autograd.backward and "
                    "get_gradients"
                )


_will_engine_run: Callable[[Any], bool] = torch._C._will_engine_execute_node


def _will_run(node: Any) -> bool:
    """Return True if the engine runs a node. Raise UsageError if a pass may run it later."""
    if not runs_pass():
        return _will_engine_run(node)
    # True is certain: the current call of the engine runs the node. False is not, since a later call may run it. For a
    # leaf the engine cannot answer, as these calls ask for its gradient instead of running its node.
    if not hasattr(node, "variable") and _will_engine_run(node):
        return True
    raise UsageError(
        "torch.autograd.graph.register_multi_grad_hook cannot wait for all gradients of these tensors: in an autograd "
        "context they may arrive at different times, or from other workers. Register a hook on each tensor, "
        "tensor.register_hook(hook)"
    )


def _check_callback(callback: Any) -> None:
    """Raise UsageError for a callback that reads `.grad` at the end of torch's backward pass."""
    function = callback
    while isinstance(function, functools.partial):
        function = function.func
    module = getattr(function, "__module__", None) or ""
    if module.startswith(_NOTED):
        return
    # FSDP has noted that this callback is queued. Until it is called, the module queues no other one, and its next
    # passes, in contexts or not, would lose gradients. There are no gradients yet that this call would reduce.
    if module.startswith("torch.distributed.fsdp._fully_shard."):
        callback()
    name = getattr(function, "__name__", type(function).__name__)
    raise UsageError(
        f"{name} uses the gradients that are in .grad at the end of torch's backward pass. In an autograd context they "
        "are not in .grad: it cannot be used there. An FSDP module (fully_shard) can, but only with "
        "telegrad.autograd.backward without create_graph=True, not with telegrad.autograd.grad. "
        "DistributedDataParallel with static_graph=True can after one backward pass outside of contexts. All others, "
        "such as FullyShardedDataParallel, need a backward pass of their own: loss.backward() behind a detached "
        "tensor, then telegrad.autograd.backward(context_id, (tensor * detached.grad).sum())"
    )
