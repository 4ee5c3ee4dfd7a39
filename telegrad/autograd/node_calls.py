"""Run one node of torch's graph outside of the engine, with the work that the engine does around it.

This work is: call the hooks of the tensor and of the node, fit the results to the shapes and types of the next nodes,
check for NaN in anomaly mode, and free the saved tensors.

A node runs by hand if the engine would call the hooks of a following node with a part of its gradient, or if it would
refuse to run here: a node to which only None arrives, or a reentrant checkpoint. Programs must not notice the
difference, so each of these steps follows the engine, including its errors.
"""

import atexit
import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from telegrad._core.memory.device_streams import Streams
from telegrad.autograd.gradients import showing
from telegrad.autograd.guard import CheckpointNode
from telegrad.autograd.passes import PassSpec
from telegrad.autograd.send_recv import RecvNode, edge_of, expected_at, nodes_behind, run_backward
from telegrad.errors import UsageError

Node = Any
Given = Sequence[Tensor | None]
Accumulate = Callable[[Node, Tensor], None]


def run(
    node: Node,
    gradients: Mapping[int, Tensor | None],
    fire: bool,
    spec: PassSpec,
    accumulate: Accumulate,
    streams: Streams,
) -> Given:
    """Run a node, and return the gradients for the next nodes. With `fire`, call the hooks of its tensors first."""
    with torch.set_grad_enabled(spec.create):
        if hasattr(node, "variable"):
            whole = (call_tensor_hooks(node, gradients, spec) if fire else gradients).get(0)
            if whole is not None:
                accumulate(node, whole)
            return ()
        shown, taken = _taken(node, gradients, fire, spec, streams)
        streams.keep(taken)
        made = iter(_wanted(node, _as_tuple(_apply(node, taken, spec, accumulate))))
        given = tuple(
            _fit(next(made, None), following, number) if following is not None else None
            for following, number in node.next_functions
        )
        given = call_hooks(_hooks(node.register_hook), given, shown)
        if torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled():
            _check_nan(node, given)
        if not spec.retain:
            streams.publish()  # the saved tensors were most likely made on another stream
            _free(node)
    streams.keep(given)
    return given


def _taken(
    node: Node, gradients: Mapping[int, Tensor | None], fire: bool, spec: PassSpec, streams: Streams
) -> tuple[Given, Given]:
    """Call the hooks on the gradients of the outputs. Return these as later hooks see them, and the node's inputs."""
    outputs = range(len(node._input_metadata))
    if is_function(node) and any(gradients.get(number) is None for number in outputs):
        return _taken_by_function(node, gradients, spec, streams)
    if fire:
        gradients = call_tensor_hooks(node, gradients, spec)
    taken = call_hooks(_hooks(node.register_prehook), tuple(gradients.get(number) for number in outputs))
    return taken, taken


def is_function(node: Node) -> bool:
    """Return True for a Python node that a user may have written."""
    return hasattr(node, "apply") and type(node) is not RecvNode


def _apply(node: Node, taken: Given, spec: PassSpec, accumulate: Accumulate) -> Any:
    if type(node) is CheckpointNode:
        if spec.captures:
            raise UsageError(
                "telegrad.autograd.grad does not support torch.utils.checkpoint with use_reentrant=True, like "
                "torch.autograd.grad: set use_reentrant=False"
            )
        with _inner_pass(node, spec, accumulate):
            return node.apply(*taken)
    if is_compiled(node) and not spec.retain:
        return _run_in_pass(partial(node.apply, *taken))
    return (node.apply if hasattr(node, "apply") else node)(*taken)


def is_compiled(node: Node) -> bool:
    """Return True for code that `torch.compile` has made, which refuses to run in a pass that keeps the graph."""
    return type(node).__name__ == "CompiledFunctionBackward"  # as AOTAutograd calls it, in all supported torches


def _run_in_pass(run: Callable[[], Any]) -> Any:
    """Return the result of a function that runs in a pass of the engine which keeps no graph."""
    # Code outside of any pass is told that the graph is kept. A pass from a leaf to itself only calls the leaf's hooks.
    made: list[Any] = []
    leaf = torch.empty(0, device="cpu", requires_grad=True)
    leaf.register_hook(lambda _: made.append(run()))  # type: ignore[no-untyped-call]
    run_backward([edge_of(leaf)], [leaf.detach()], [edge_of(leaf)], False, False)
    return made[0]


def _wanted(node: Node, made: tuple[Tensor | None, ...]) -> Sequence[Tensor | None]:
    """Select the results that go to next nodes: a Python node returns one result for each argument."""
    needed = getattr(node, "needs_input_grad", None)
    if needed is None:
        following = (edge for edge, _ in node.next_functions)
        return [gradient for gradient, edge in zip(made, following, strict=False) if edge is not None]
    return [gradient for gradient, need in zip(made, needed, strict=False) if need]


def _as_tuple(given: Any) -> tuple[Tensor | None, ...]:
    return tuple(given) if isinstance(given, (tuple, list)) else (given,)


# Hooks


def call_tensor_hooks(node: Node, gradients: Mapping[int, Tensor | None], spec: PassSpec) -> dict[int, Tensor | None]:
    """Call the tensor hooks of a node. To enter and leave the engine at the same edge does only this."""
    # Python cannot reach the tensor hooks of a node. An engine call whose only input is the edge at which it starts
    # runs no node, but returns the gradient as the hooks have changed it. If there is no gradient, hooks see zeros, and
    # the result is dropped.
    edges, entering, lacking = _entrance(node, gradients)
    given = run_backward(edges, entering, edges, True, spec.create)
    return {} if lacking else {edge.output_nr: gradient for edge, gradient in zip(edges, given, strict=True)}


def _entrance(node: Node, gradients: Mapping[int, Tensor | None]) -> tuple[list[GradientEdge], list[Tensor], bool]:
    """Return the edges at which the engine starts, and their gradients. If there is none, use zeros for one edge."""
    there = {number: gradient for number, gradient in gradients.items() if gradient is not None}
    lacking = not there
    if lacking:
        number = next(iter(gradients))
        expected = expected_at(node, number)
        there[number] = torch.zeros(expected.shape, dtype=expected.dtype, device=expected.device)
    return [GradientEdge(node, number) for number in there], list(there.values()), lacking


class _Stopped(Exception):
    """The engine was about to call a function."""


def _taken_by_function(
    node: Node, gradients: Mapping[int, Tensor | None], spec: PassSpec, streams: Streams
) -> tuple[Given, Given]:
    """Return the gradients that hooks see and a Python function gets, if some outputs have no gradient.

    The engine passes zeros for these if the function asks for zeros, which only the engine knows. So the engine starts
    at the node, calls the hooks, and is stopped when it calls the function.
    """
    edges, entering, lacking = _entrance(node, gradients)
    following = next(GradientEdge(*edge) for edge in node.next_functions if edge[0] is not None)
    shown: list[Given] = []
    taken: list[Given] = []
    made_on: list[torch.Stream] = []

    def stop(*given: Any) -> None:
        taken.append(given)
        made_on.extend(streams.current())
        raise _Stopped

    # `edges` need a result that is wanted, or the engine would not run the node: any node behind it will do. Zeros that
    # only started the engine are replaced by None before other hooks of the node, hence the place at the front.
    with contextlib.ExitStack() as stack:
        if lacking:
            first = node.register_prehook(lambda given: (None,) * len(given))
            first.hooks_dict_ref().move_to_end(first.id, last=False)
            stack.callback(first.remove)
        stack.callback(node.register_prehook(shown.append).remove)
        stack.enter_context(torch.autograd.set_detect_anomaly(False))  # anomaly mode would report an error
        # The engine calls one of the two, depending on how the function is written. Attributes of the node hide them.
        node.apply, node.apply_boxed = stop, lambda given: stop(*given)
        stack.callback(delattr, node, "apply")
        stack.callback(delattr, node, "apply_boxed")
        stack.enter_context(contextlib.suppress(_Stopped))
        run_backward(edges, entering, [following], True, spec.create)
    streams.follow(made_on)  # a stopped engine does not synchronize the streams
    return shown[0], taken[0]


def _hooks(register: Callable[[Any], Any]) -> list[Callable[..., Any]]:
    """Return the hooks of a node. Torch gives access to them only through the handle of a newly registered hook."""
    handle = register(_look)
    hooks = handle.hooks_dict_ref()
    del hooks[handle.id]
    return list(hooks.values())


def _look(*_: Any) -> None:
    """Do nothing. Registering this hook gives access to the others."""


# True, once a node of this process has got a hook from Python: then nodes of leaves may have some, too. Without this,
# each leaf of each pass would be asked for hooks, which registers and removes one (`_hooks`).
hooked: set[bool] = set()
_register_hook: Any = torch.autograd.Function._register_hook


def _watched_register_hook(hooks: Any, hook: Any) -> Any:
    """Register a hook of a node as torch does, and record that nodes of leaves may have hooks from now on."""
    if hook is not _look:
        hooked.add(True)
    return _register_hook(hooks, hook)


torch.autograd.function._HookMixin._register_hook = staticmethod(_watched_register_hook)  # type: ignore[method-assign]


def hooks_before_leaf(node: Node) -> list[Callable[..., Any]]:
    """Return the hooks that get a leaf's gradient before its node accumulates it."""
    return _hooks(node.register_prehook) if hooked else []


def hooks_behind_leaf(node: Node) -> list[Callable[..., Any]]:
    """Return the hooks that are called after the node of a leaf has accumulated its gradient."""
    return _hooks(node.register_hook) if hooked else []


def call_hooks(
    hooks: Sequence[Callable[..., Any]], values: tuple[Tensor | None, ...], *more: Any
) -> tuple[Tensor | None, ...]:
    for hook in hooks:
        changed = hook(values, *more)
        if changed is not None:
            changed = _as_tuple(changed)
            if any(value is None and new is not None for value, new in zip(values, changed, strict=False)):
                # same error as torch's engine
                raise RuntimeError("can't replace a None gradient with a non-None value")
            values = changed
    return values


def call_hooks_of_leaf(
    leaf: Tensor, whole: Tensor, added: Tensor, behind: Sequence[Callable[..., Any]]
) -> Tensor | None:
    """Call the hooks that wait for the `whole` gradient; return the gradient that they leave in `.grad`.

    During the call `.grad` is the whole gradient, since the hooks read it there. A lock serializes concurrent contexts.
    The hooks `behind` the leaf's node get the `added` gradient.
    """
    with showing:
        hidden, leaf.grad = leaf.grad, whole
        try:
            for hook in list((leaf._post_accumulate_grad_hooks or {}).values()):
                if hook(leaf) is not None:
                    raise RuntimeError("Tensor post accumulate grad hooks should return None.")
            for hook in behind:
                hook((), (added,))
            return leaf.grad
        finally:
            leaf.grad = hidden


# The results of a node


def _fit(gradient: Tensor | None, following: Node, number: int) -> Tensor | None:
    if gradient is None:
        return None
    expected = expected_at(following, number)
    shape = tuple(expected.shape)
    if tuple(gradient.shape) != shape:
        gradient = gradient.sum_to_size(shape)
    if gradient.dtype != expected.dtype or gradient.device != expected.device:
        gradient = gradient.to(device=expected.device, dtype=expected.dtype)
    return gradient


def _check_nan(node: Node, given: Given) -> None:
    for number, gradient in enumerate(given):
        if gradient is not None and gradient.isnan().any():
            trace = "".join(node.metadata.get("traceback_", ()))
            raise RuntimeError(
                f"Function '{type(node).__name__}' returned nan values in its {number}th output."
                + (f" It was made here:\n{trace}" if trace else "")
            )


@cache
def _saved_names(kind: Hashable) -> tuple[str, ...]:
    """Return the attributes that hold the saved values of nodes of a kind."""
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


atexit.register(_saved_names.cache_clear)  # see `_own` in main_modules.py


def _free(node: Node) -> None:
    """Drop the saved values of the node. Using it again raises an error, as after a run of the engine."""
    # A saved value cannot be deleted from Python. But registering hooks calls the first one with the tensor, and keeps
    # its result, here None, in place of the tensor. The second one is called at the next use, and raises.
    kind: Any = type(node)
    for name in _saved_names(kind):
        saved: Any = ()
        with contextlib.suppress(RuntimeError):  # the node has dropped them itself, as a compiled one does
            saved = getattr(node, name)
        for each in saved if isinstance(saved, (tuple, list)) else (saved,):
            with contextlib.suppress(RuntimeError):  # nothing was saved, or it has hooks of the user
                each.register_hooks(lambda _: None, _second_time)


def _second_time(_: Any) -> Tensor:
    raise RuntimeError(
        "Trying to backward through the graph a second time, after its saved tensors were freed. "
        "Specify retain_graph=True in the first backward pass"
    )


# Reentrant activation checkpoints: their backward runs its own pass, into `.grad`


@contextlib.contextmanager
def _inner_pass(node: Node, spec: PassSpec, accumulate: Accumulate) -> Iterator[None]:
    """Make the recomputed function return outputs whose gradients go to the leaves of the context."""
    # The backward of a reentrant checkpoint runs its function again, and then calls `torch.autograd.backward` on the
    # results, which would accumulate into `.grad`. Its function is replaced for this run by one whose results have a
    # `_Segment` as history: that runs the recomputed graph, and gives the gradients of leaves to the context.
    original = node.run_function

    def run_function(*inputs: Any) -> Any:
        outputs = original(*inputs)
        several = _as_tuple(outputs)
        graded = [output for output in several if isinstance(output, Tensor) and output.requires_grad]
        if not graded:
            return outputs
        given = iter(_Segment.apply(spec, accumulate, graded, *inputs))  # type: ignore[no-untyped-call]
        replaced = tuple(
            next(given) if isinstance(output, Tensor) and output.requires_grad else output for output in several
        )
        return replaced if isinstance(outputs, (tuple, list)) else replaced[0]

    node.run_function = run_function
    try:
        yield
    finally:
        node.run_function = original


class _Segment(torch.autograd.Function):
    """Detached outputs that represent the originals, which have a separate graph."""

    @staticmethod
    def forward(
        ctx: Any, spec: PassSpec, accumulate: Accumulate, outputs: Sequence[Tensor], *inputs: Any
    ) -> tuple[Tensor, ...]:
        ctx.spec, ctx.accumulate, ctx.inputs = spec, accumulate, inputs
        ctx.outputs = [edge_of(output) for output in outputs]
        return tuple(output.detach() for output in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        inputs = [each for each in ctx.inputs if isinstance(each, Tensor) and each.requires_grad]
        edges = [edge_of(each) for each in inputs]
        leaves = _leaves(ctx.outputs, {edge.node for edge in edges})
        wanted = [*edges, *(GradientEdge(leaf, 0) for leaf in leaves)]
        given = run_backward(ctx.outputs, gradients, wanted, ctx.spec.create, ctx.spec.create)
        for leaf, gradient in zip(leaves, given[len(edges) :], strict=True):
            if gradient is not None:
                ctx.accumulate(leaf, gradient)
        back = iter(given)
        mine = (next(back) if isinstance(each, Tensor) and each.requires_grad else None for each in ctx.inputs)
        return (None, None, None, *mine)


def _leaves(outputs: Sequence[GradientEdge], stop: set[Node]) -> list[Node]:
    leaves = []
    for node in nodes_behind((edge.node for edge in outputs), stop):
        if type(node) is RecvNode:
            recv: Any = node
            raise UsageError(
                "the function of a torch.utils.checkpoint with use_reentrant=True leads to a tensor that came from "
                f"worker {recv.origin.sender.name!r}: it makes a remote call, or uses a received tensor that is not "
                "one of its arguments. Set use_reentrant=False, or pass the tensor as an argument"
            )
        if hasattr(node, "variable"):
            leaves.append(node)
    return leaves
