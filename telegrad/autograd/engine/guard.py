"""Refuse calls of torch's engine, outside of a pass, whose results would lack gradients of other workers.

`loss.backward()` reaches a `Recv`, which raises. `torch.autograd.grad(loss, x)` and `backward(inputs=[x])` run only
nodes that lead to x. In torch's graph a received tensor leads to nothing, so its node does not run and no hook is
called. The result lacks the gradients that come back from other workers, and nothing in the graph could detect this.
Edges from each `Recv` to the tensors sent before would make the engine visit it. But then a pass could not run a part
of the graph without the nodes behind these edges, and edges cannot be changed. So this module replaces the engine by
one that checks the graph first.

The module checks the engine's callbacks as well. A wrapper such as FSDP queues one in a hook, and expects the gradients
of its parameters in `.grad` when it is called. A pass accumulates gradients elsewhere, so the callback would find none,
unless `replicas` handles it.

A hook on several tensors asks which nodes the engine will run, and waits for their gradients. A pass calls the engine
for one part of the graph after another, so a node outside of the current part may be in a later one.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.autograd.variable import Variable

from telegrad._core.atfork import in_child
from telegrad.autograd.engine.captures import Ancestors, first_leading_to
from telegrad.autograd.engine.gradients import edge_of
from telegrad.autograd.engine.record import UNKNOWN, receiving
from telegrad.errors import UsageError

# callbacks that only record the end of the engine's pass
_NOTED = ("torch.utils.", "torch.distributed._tools.", "torch._functorch.")
# The threads that run the graph for a pass; each use is one set operation. A forked child clears the set, because its
# new threads may get the same ids.
running: set[int] = set()
in_child(running.clear)


def _take_none(_: Any) -> bool:
    return False


# Returns True for a callback that the running pass will call itself. Guarded by `replicas.showing`.
take_callback: Callable[[Any], bool] = _take_none


def install() -> None:
    """Replace torch's engine in this process by one that checks its arguments."""
    if type(Variable._execution_engine) is not _GuardedEngine:
        Variable._execution_engine = _GuardedEngine()
        torch._C._will_engine_execute_node = _will_run


@contextlib.contextmanager
def no_pass() -> Iterator[None]:
    """Mark this thread as taking part in no pass: gradients are in `.grad` as usual."""
    thread = threading.get_ident()
    outer = thread in running
    running.discard(thread)
    try:
        yield
    finally:
        if outer:
            running.add(thread)


def runs_pass() -> bool:
    """Return True if this thread runs the graph for a pass. Any thread of the engine may, while a pass runs."""
    is_of_engine = isinstance(threading.current_thread(), threading._DummyThread)
    return threading.get_ident() in running or (is_of_engine and bool(running))


class _GuardedEngine(type(Variable._execution_engine)):  # type: ignore[misc] # whose type has no name
    """Torch's engine with checks, as Python code calls it."""

    def run_backward(self, roots: Any, gradients: Any, retain: Any, create: Any, *more: Any, **named: Any) -> Any:
        inputs = more[0] if more else named.get("inputs", ())
        if inputs and receiving:
            _check_inputs(roots, inputs)
        return super().run_backward(roots, gradients, retain, create, *more, **named)

    def queue_callback(self, callback: Callable[[], None]) -> None:
        if not runs_pass():
            super().queue_callback(callback)
        elif not take_callback(callback):
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
    if not hasattr(node, "variable") and _will_engine_run(node):  # for a leaf, the engine cannot answer this here
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
    if module.startswith("torch.distributed.fsdp._fully_shard."):
        callback()  # makes the module usable again: there are no gradients yet
    name = getattr(function, "__name__", type(function).__name__)
    raise UsageError(
        f"{name} uses the gradients that are in .grad at the end of torch's backward pass. In an autograd context they "
        "are not in .grad: it cannot be used there. An FSDP module (fully_shard) can, but only with "
        "telegrad.autograd.backward without create_graph=True, not with telegrad.autograd.grad. "
        "DistributedDataParallel with static_graph=True can after one backward pass outside of contexts. All others, "
        "such as FullyShardedDataParallel, need a backward pass of their own: loss.backward() behind a detached "
        "tensor, then telegrad.autograd.backward(context_id, (tensor * detached.grad).sum())"
    )
