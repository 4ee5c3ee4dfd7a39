"""Backward passes across workers: `telegrad.autograd`."""

from collections.abc import Callable, Mapping, Sequence
from contextvars import Token
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from telegrad._core import checks, forks
from telegrad._core.calls import profiling
from telegrad._core.calls.call_names import not_compiled
from telegrad._core.calls.futures import Future, Signal
from telegrad._core.pickling.remote_text import fold, folded
from telegrad._core.texts import hint
from telegrad.autograd.conductor import Conductor, DrivenPass, WhenMade
from telegrad.autograd.contexts import AutogradContext, Contexts, entered, entered_id
from telegrad.autograd.guard import Capture, installed, look_for_gradients, seeds_of, tensors_of
from telegrad.autograd.passes import FusedStep
from telegrad.errors import NotInitialized, TelegradError, UsageError

__all__ = ["backward", "backward_async", "context", "get_gradients", "grad"]


class RemoteRoot(Protocol):
    """A tensor on some worker, such as a reference."""

    def _as_root(self) -> tuple[str, Any, WhenMade]:
        """Return the worker, the description by which that worker finds the value, and a function to wait for it."""


Root = Tensor | RemoteRoot


class Step(Protocol):
    """An object that steps with the gradients of a context, such as an optimizer."""

    def _telegrad_fused(self, context_id: int) -> FusedStep:
        """Begin a step that is fused with a pass."""


OWNED = "_telegrad_owned"  # an attribute of optimizers that a DistributedOptimizer steps
BACKWARD_EVENT = "torch::distributed::autograd::backward"  # the name in profiles; see also SEND_EVENT in engine.py


def _nobody() -> Conductor:
    raise NotInitialized("this process is in no group: call telegrad.rpc.init_rpc first")


# One entry: the function that finds the conductor of this thread's worker. It is handed in, because `_core/worker`,
# which knows the worker, is a layer above this one and imports it.
_find: list[Callable[[], Conductor]] = [_nobody]


def speak_for(find: Callable[[], Conductor]) -> None:
    """Set the function that returns the conductor of the current thread's worker. The layer above calls this."""
    _find[:] = [find]


class context:  # noqa: N801 - used like a function
    """`with context() as context_id:` wraps a forward and a backward pass that cross workers.

    The id names the context on all workers. On exit, all workers release the recorded graphs and the gradients.

    Raises:
        UsageError: the caller is already in a context.
        NotInitialized: this process is in no group.

    Example:
        >>> from telegrad import autograd
        >>> weight = torch.ones(2, requires_grad=True)
        >>> with autograd.context() as context_id:
        ...     loss = rpc.rpc_sync("worker1", torch.mul, (weight, 3)).sum()
        ...     autograd.backward(context_id, loss)
        ...     print(autograd.get_gradients(context_id)[weight])
        tensor([3., 3.])
    """

    _now: tuple[Contexts, AutogradContext, Token[int | None]] | None = None  # None unless entered
    _entry: object  # missing unless entered, or being entered

    def __enter__(self) -> int:
        entry = object()
        try:
            # `setdefault` is one atomic operation of a dict. If two threads enter the same object at once, exactly one
            # of them finds its own entry, and the other one is refused without touching the state of the first.
            if vars(self).setdefault("_entry", entry) is not entry:
                raise UsageError("this context is in use by another block: each block needs its own autograd.context()")
            contexts = _find[0]().contexts
            outer = entered_id()
            # It has ended if another thread has left the outer block, or its group has ended before the block.
            if outer is not None and contexts.join(outer) is not None:
                text = f"Already have an autograd context id for this thread: {outer}. Leave that context first"
                raise UsageError(text)
            context = contexts.begin()
            self._now = contexts, context, entered.set(context.id)
            return context.id
        except BaseException as error:
            if vars(self).get("_entry") is entry:
                del self._entry
            if isinstance(error, TelegradError):
                fold(error)
            raise

    def __exit__(self, *_: object) -> None:
        if self._now is None:
            return
        contexts, context, token = self._now
        self._now = None
        try:
            entered.reset(token)
        except ValueError:
            # `ContextVar.reset` refuses the token of another thread or task. The id stays set where the block was
            # entered; `__enter__` there sees that this context has ended, and does not take it for an outer block. The
            # block's own exception, if any, becomes the cause: this error must not hide it.
            raise UsageError(
                f"the block of context {context.id} was left on another thread, or in another task, than it was "
                "entered. The context has ended"
            ) from next((each for each in _ if isinstance(each, BaseException)), None)
        finally:
            del self._entry
            if not forks.is_inherited(contexts):  # else the context belongs to the parent process, which still uses it
                contexts.release(context.id)

    def __repr__(self) -> str:
        return "<context: not entered>" if self._now is None else f"<context: {self._now[1]}>"


@not_compiled
def backward(
    context_id: int,
    roots: Root | Sequence[Root],
    retain_graph: bool = False,
    *,
    mode: str = "smart",
    timeout: float | None = None,
    create_graph: bool = False,
    step: Step | None = None,
) -> None:
    """Run the backward pass from `roots` across all workers. Block until it has ended on all of them.

    Each worker accumulates the gradients of its own leaves in the context, not in `.grad`: see `get_gradients`.

    Args:
        context_id: the id from `with context() as context_id`.
        roots: one tensor of one element, a reference to one, or a list of these.
        retain_graph: keep the graph for another pass.
        mode: "smart", or "fast": the program guarantees that every tensor sent in the context takes part.
        timeout: seconds; 0 for no limit, None for the timeout in the options.
        create_graph: record the pass itself, for gradients of gradients.
        step: an optimizer. Each owner of parameters steps as soon as it has its last gradient, instead of in
            `optimizer.step(context_id)` after the pass. If the pass fails, some owners may have stepped.

    Raises:
        ContextEnded: the context does not exist.
        UnusedSends: in fast mode, no tensor of some message took part.
        CallTimeout: the pass did not end within the timeout.
        PeerLost: a worker that took part died.
        UsageError: a root is not a tensor of one element that requires a gradient.
        Exception: the error of a backward function on any worker, or of the step.

    Example:
        >>> from telegrad import autograd
        >>> with autograd.context() as context_id:
        ...     there = rpc.remote("worker1", torch.ones, (2,), dict(requires_grad=True))
        ...     autograd.backward(context_id, (there * 2).sum())  # all of it on worker1
    """
    conductor = _find[0]()

    def run() -> None:
        # By a Signal in place of a Future the conductor knows that this thread waits, and may run this worker's part.
        driven, fused = _begin(conductor, Signal(), context_id, roots, retain_graph, mode, timeout, create_graph, step)
        conductor.wait(driven)
        if fused is not None:
            fused.end(driven.stepped)

    try:
        if profiling.enabled():
            profiling.recorded(BACKWARD_EVENT, run)
        else:
            run()
    except BaseException as error:
        fold(error)
        raise


@not_compiled
@folded
def backward_async(
    context_id: int,
    roots: Root | Sequence[Root],
    retain_graph: bool = False,
    *,
    mode: str = "smart",
    timeout: float | None = None,
    create_graph: bool = False,
    step: Step | None = None,
) -> Future[None]:
    """Run `backward` without blocking. The returned future is done when the pass, and the step if any, has ended.

    The arguments are as for `backward`.

    Returns:
        A `Future` of None; it fails with the errors of `backward`.

    Raises:
        ContextEnded: the context does not exist. `UsageError` is raised as in `backward`.

    Example:
        >>> from telegrad import autograd
        >>> weight = torch.ones(2, requires_grad=True)
        >>> with autograd.context() as context_id:
        ...     loss = rpc.rpc_sync("worker1", torch.mul, (weight, 3)).sum()
        ...     autograd.backward_async(context_id, loss).wait()
    """
    conductor, passed, stepped = _find[0](), Future[None](), Future[None]()
    passed.about = stepped.about = "backward_async"
    driven, fused = _begin(conductor, passed, context_id, roots, retain_graph, mode, timeout, create_graph, step)
    if fused is None:
        return passed

    def end(passed: Future[None]) -> None:
        try:
            passed.wait()
            fused.end(driven.stepped)
        except BaseException as error:  # including SystemExit from a backward function that ran on this thread
            stepped.set_exception(error)  # type: ignore[arg-type]
        else:
            stepped.set_result(None)

    conductor.follow(passed, end)
    return stepped


@not_compiled
@folded
def get_gradients(context_id: int) -> dict[Tensor, Tensor]:
    """Return the gradients of this worker's leaves that were accumulated in a context.

    Args:
        context_id: the id from `with context() as context_id`.

    Returns:
        A dict from each leaf to its gradient.

    Raises:
        ContextEnded: the context does not exist on this worker.

    Example:
        >>> from telegrad import autograd
        >>> weight = torch.ones(2, requires_grad=True)
        >>> with autograd.context() as context_id:
        ...     autograd.backward(context_id, (weight * 2).sum())
        ...     autograd.get_gradients(context_id)[weight]
        tensor([2., 2.])
    """
    check_context_id(context_id)
    return _find[0]().gradients(context_id)


@not_compiled
@folded
def grad(
    context_id: int,
    outputs: Tensor | Sequence[Tensor],
    inputs: Tensor | Sequence[Tensor],
    grad_outputs: Tensor | Sequence[Tensor | None] | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    allow_unused: bool = False,
    *,
    timeout: float | None = None,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of `outputs` with respect to `inputs`, across all workers in the graph.

    `torch.autograd.grad` covers one worker only. No gradient is accumulated, neither in the context nor in `.grad`.

    Args:
        context_id: the id from `with context() as context_id`.
        outputs: one tensor of this worker, or a list.
        inputs: one tensor of this worker, a leaf or not, or a list.
        grad_outputs: the gradient of each output. None means 1, for an output of one element.
        retain_graph: keep the graph for another pass; default: the value of `create_graph`.
        create_graph: record the pass itself, for gradients of gradients.
        allow_unused: return None for an input on which no output depends, instead of raising.
        timeout: seconds; 0 for no limit, None for the timeout in the options.

    Returns:
        One gradient for each input.

    Raises:
        ContextEnded: the context does not exist.
        RuntimeError: no output depends on one of the inputs.
        CallTimeout: the pass did not end within the timeout.
        PeerLost: a worker that took part died.
        UsageError: an output or an input is not a tensor of this worker that requires a gradient.
        Exception: the error of a backward function on any worker.

    Example:
        >>> from telegrad import autograd
        >>> x = torch.ones(2, requires_grad=True)
        >>> with autograd.context() as context_id:
        ...     y = rpc.rpc_sync("worker1", torch.mul, (x, x))
        ...     (slope,) = autograd.grad(context_id, y.sum(), x, create_graph=True)
        ...     autograd.grad(context_id, slope.sum(), x)
        (tensor([2., 2.]),)
    """
    check_context_id(context_id)
    retain = create_graph if retain_graph is None else retain_graph
    for name, flag in (("create_graph", create_graph), ("retain_graph", retain), ("allow_unused", allow_unused)):
        checks.flag(name, flag)
    if timeout is not None:
        checks.seconds("timeout", timeout)
    roots, wanted = tensors_of("outputs", outputs), tensors_of("inputs", inputs)
    capture = Capture(seeds_of(roots, grad_outputs), wanted)
    conductor = _find[0]()
    driven = conductor.begin(
        conductor.contexts.find(context_id),
        {conductor.name: roots},
        timeout,
        (roots, capture),
        Signal(),
        capture,
        retain=retain,
        create=create_graph,
        fast=False,
    )
    conductor.wait(driven)
    gradients = capture.gradients()
    for number, gradient in enumerate(gradients):
        if gradient is None and not allow_unused:
            raise RuntimeError(
                f"inputs[{number}] appears not to have been used in the graph of the outputs, on any worker. Set "
                "allow_unused=True to get None for it"
            )
    return tuple(gradients)


def _begin(
    conductor: Conductor,
    outcome: Signal | Future[None],
    context_id: int,
    roots: Root | Sequence[Root],
    retain: bool,
    mode: str,
    timeout: float | None,
    create: bool,
    step: Step | None,
) -> tuple[DrivenPass, FusedStep | None]:
    # Nearly all passes have right ids and the defaults, which conditions recognize without a call of a Python function.
    if type(context_id) is not int or context_id < 0:
        check_context_id(context_id)
    if retain is not False or create is not False or type(mode) is not str or mode != "smart":
        checks.flag("retain_graph", retain)
        checks.flag("create_graph", create)
        checks.one_of("mode", mode, ("smart", "fast"))
    if timeout is not None:
        checks.seconds("timeout", timeout)
    if step is not None:
        check_step(step)
    context = conductor.contexts.find(context_id)
    places, awaited = _places(conductor.name, roots)
    # Last, when the arguments are known to be right: from here on the optimizer may count this step as pending.
    fused = step._telegrad_fused(context_id) if step is not None else None
    driven = conductor.begin(
        context,
        places,
        timeout,
        (roots, fused),  # an owner keeps a value only as long as a reference to it exists
        outcome,
        awaited=awaited,
        retain=retain or create,
        create=create,
        fast=mode == "fast",
        step_id=fused.step_id if fused is not None else 0,
        request=fused.request if fused is not None else b"",
    )
    return driven, fused


def check_context_id(context_id: Any) -> None:
    """Raise UsageError for a tensor or a list, and InvalidArgument for any other value that is no context id."""
    if isinstance(context_id, (Tensor, list, tuple)):
        raise UsageError(
            "the id of the context comes first, before the tensors: write telegrad.autograd.backward(context_id, "
            "roots) or telegrad.autograd.grad(context_id, outputs, inputs)"
        )
    checks.count("context_id", context_id, 0, what="the id that `with autograd.context() as context_id` gives")


def check_step(step: Any) -> None:
    """Raise UsageError if `step` cannot be fused with a pass."""
    if step is not None and not hasattr(step, "_telegrad_fused"):
        raise UsageError(f"step must be a DistributedOptimizer, not {type(step).__name__}")


def _places(here: str, roots: Root | Sequence[Root]) -> tuple[dict[str, list[Any]], list[tuple[str, WhenMade]]]:
    """Group the roots by the workers that hold them. Return also how to wait for those that are references."""
    several = list(roots) if isinstance(roots, (list, tuple)) else [roots]
    if not several:
        raise UsageError("No tensors provided for gradient computation: give at least one root")
    places: dict[str, list[Any]] = {}
    awaited: list[tuple[str, WhenMade]] = []
    for root in several:
        if isinstance(root, Tensor):
            check_root(root)
            places.setdefault(here, []).append(root)
        elif hasattr(root, "_as_root"):
            worker, value, when_made = root._as_root()
            places.setdefault(worker, []).append(value)
            awaited.append((worker, when_made))
        else:
            raise UsageError(f"a root must be a tensor or a reference to one, not {type(root).__name__}")
    return places, awaited


def check_root(root: Any) -> None:
    """Raise UsageError if a value cannot be a root."""
    if not isinstance(root, Tensor):
        raise UsageError(
            f"an RRef should contain a tensor for .backward(), not {type(root).__name__}: roots are tensors"
        )
    if not root.requires_grad:
        raise UsageError("requires_grad not set on root: there is no graph to run backward")
    if root.numel() != 1:
        raise UsageError(f"root of shape {tuple(root.shape)} is not a scalar, all roots need to be scalar: sum it up")
    if root.is_complex():
        raise UsageError(f"root of type {root.dtype} is complex, all roots need to be real: take its real part")


def look_at_step(optimizer: Optimizer, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Warn if an optimizer reads `.grad` although the gradients are in a context."""
    if not installed() or hasattr(optimizer, OWNED):
        return
    try:
        contexts = _find[0]().contexts
    except TelegradError:  # this process has left its group, so contexts do not concern this step
        return
    # Inside of a context the gradients can be looked up there, so the warning is exact. Behind it they are gone, and
    # only the absence of any gradient in .grad is a sign.
    several = [each for group in optimizer.param_groups for each in group["params"] if isinstance(each, Tensor)]
    id_ = entered_id()
    if id_ is None:
        look_for_gradients(optimizer, several, [*args[1:], *kwargs.values()])
        return
    context = contexts.get(id_)
    if passed_over := [each for each in several if context is not None and context.gradients.passed_over(each)]:
        earlier = any(each.grad is not None for each in passed_over)
        what = "changes parameters by gradients of an earlier pass" if earlier else "leaves parameters unchanged"
        hint(
            f"plain step {earlier}",
            f"{type(optimizer).__name__} steps with the gradients in .grad, but the gradients of this autograd context "
            f"are not there, so it {what}: use "
            f"telegrad.optim.DistributedOptimizer.for_module(torch.optim.{type(optimizer).__name__}, model)",
        )


# A hook of all torch optimizers in this process. `optim/fused_step.py` must know it by its identity: any other global
# hook makes a fused step impossible.
register_optimizer_step_pre_hook(look_at_step)
