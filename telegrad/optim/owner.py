"""The part of a distributed optimizer on a worker.

It uses torch's optimizers without importing `torch._dynamo`, which takes seconds. They import it to exclude their
methods from tracing. As long as no other code has imported it, nothing is traced. Until then torch's wrappers of these
methods call the methods themselves, and `step_of` calls the function inside of the wrapper of `step`. A step that calls
another one's wrapper is used unchanged; `may_import` identifies it.
"""

import copy
import functools
import importlib
import inspect
import pickle
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from time import perf_counter
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from telegrad._core import checks, events
from telegrad._core.calls.call_names import known_as
from telegrad._core.calls.cancelling import finishing
from telegrad._core.calls.futures import Future
from telegrad._core.calls.settings import DEFAULT
from telegrad._core.forks import in_child, renewed
from telegrad._core.modules.module_host import on_host
from telegrad._core.modules.module_tree import RemotePart, parameters_of, places_of
from telegrad._core.rpc.rref import RRef
from telegrad._core.worker import current
from telegrad._core.worker.actors import FifoLock
from telegrad.autograd import OWNED
from telegrad.autograd.contexts import AutogradContext
from telegrad.autograd.gradients import Gradients, total
from telegrad.errors import InvalidArgument, UsageError

TRACER = "torch._dynamo"
_CACHE = "__dynamo_disable"  # where a wrapper of torch keeps the wrapped function (torch 2.13: torch/_compile.py)

Hyperparameters = dict[str, Any]
Changes = Mapping[int, Hyperparameters]  # of hyperparameters, by group number
USER_NAMES = {
    "step_in_pass": "step",
    "norm": "step",
    "retire": "recover",
    "state": "state_dict",
    "kept": "state_dict",
    "load": "load_state_dict",
}

# Steps on the same parameters run one after another, others run concurrently.
# The table has weak keys, so it keeps no parameter alive, and a later tensor at the same address gets a lock of its
# own.
_lock = renewed(threading.Lock())  # guards _guards
_guards: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # a lock for each parameter; often many have the same
in_child(_guards.clear)  # threads of the parent that hold locks do not exist in a child


def guards_of(parameters: Iterable[Tensor]) -> list[FifoLock]:
    """Return the locks to hold while these parameters are changed. Parameters without a lock get a common new one."""
    with _lock:
        # An optimizer whose parameters no other one has holds a single lock, however many parameters there are.
        own = FifoLock()
        found: set[FifoLock] = {_guards.setdefault(each, own) for each in parameters}  # type: ignore[no-untyped-call]
    # Two optimizers that share some parameters may hold several locks each. Both take them in this order, so neither
    # waits for the other in a circle.
    return sorted(found, key=id)


def holding(guards: list[FifoLock]) -> AbstractContextManager[None]:
    """Hold `guards` in a `with` block, where only this thread changes these parameters."""
    return guards[0] if len(guards) == 1 else _holding_all(guards)


@contextmanager
def _holding_all(guards: list[FifoLock]) -> Iterator[None]:
    with ExitStack() as stack:
        for guard in guards:
            stack.enter_context(guard)
        yield


class LocalOptimizer:
    """A plain torch optimizer for the parameters on this worker."""

    def __init__(self, make: Callable[..., Optimizer], args: Sequence[Any], kwargs: Mapping[str, Any], hogwild: bool):
        self._make: Callable[[list[dict[str, Any]]], Optimizer] = lambda groups: make(groups, *args, **kwargs)
        self._step: Callable[[], Any]
        self._hogwild = hogwild
        self._optimizer: Optimizer | None = None
        self.groups: list[int] = []  # the numbers of this worker's groups in the whole optimizer
        self.names: list[str] = []  # of the parameters in the model
        self.parameters: list[Tensor] = []
        self._targets: list[Tensor] = []  # the tensor that the optimizer changes for each parameter
        self._guards = guards_of([])
        self._kept = Gradients()  # gradients of ended contexts, for the next step
        self._retired = False  # a newer part has replaced this one; guarded by the guards

    def _telegrad_runs(self, method: str) -> str:
        return f"{user_name(method)} ({type(self._optimizer).__name__})"

    def add_group(
        self, number: int, branches: Sequence[RemotePart], options: Hyperparameters
    ) -> tuple[list[tuple[tuple[int, ...], str]], Hyperparameters]:
        """Add a parameter group, the one with that index in the distributed optimizer, unless it is empty.

        Return the places and names of its parameters, and its options including the optimizer's defaults.
        """
        found: dict[int, tuple[str, Tensor]] = {}
        for name, parameter in (each for branch in branches for each in parameters_of(branch)):
            found.setdefault(id(parameter), (name, parameter))
        named = dict(found.values())
        if not named:  # the modules here have no parameters of their own, and an optimizer may refuse an empty group
            return [], {}
        parameters = list(named.values())
        # A hogwild step changes these in place. They share memory with the parameters but not the version counter, by
        # which autograd would notice that a tensor it has saved for a later pass was changed.
        targets = [nn.Parameter(each.data) for each in parameters] if self._hogwild else parameters
        group = {**options, "params": targets}
        if self._optimizer is None:
            made = self._make([group])
            check_needs_no_closure(type(made))
            self._optimizer, self._step = made, step_of(made)
            setattr(made, OWNED, True)
        else:
            self._optimizer.add_param_group(group)
        self.groups.append(number)
        self.names += named
        self.parameters += parameters
        self._targets += targets
        self._guards = guards_of(self.parameters)
        places = {key: place for branch in reversed(branches) for key, place in places_of(branch).items()}
        placed = [(places.get(id(each), ()), name) for name, each in named.items()]
        return placed, copy.deepcopy(hyperparameters(self._optimizer.param_groups[-1]))

    # Stepping

    def step_in_pass(self, context_id: int, request: bytes) -> Any:
        """Run a pickled request during a backward pass: one of the methods below with its arguments."""
        method, *args = pickle.loads(request)
        return getattr(self, method)(context_id, *args)

    # `finishing`: a step that was cancelled in the middle would leave some parameters changed and others not.
    @finishing
    def step(self, context_id: int, changes: Changes, factor: float = 1.0) -> tuple[bool, bool | None]:
        """Apply changes of hyperparameters, then the gradients of a context times `factor`. Return `_outcome`."""
        assert self._optimizer is not None
        start = perf_counter()
        with holding(self._guards):
            if self._retired:
                raise UsageError("this step is too late: its optimizer has been recovered since, see recover()")
            context = self._gather(context_id)
            gradients = {} if context is None else context.gradients.as_dict()
            if changes:
                for number, group in zip(self.groups, self._optimizer.param_groups, strict=True):
                    # a copy: the optimizer may change tensors in place
                    group.update(copy.deepcopy(changes.get(number, {})))
            if factor != 1:
                scale((gradients[each] for each in self.parameters if each in gradients), factor)
            # The optimizer reads `.grad`, but the gradients belong to the context. So `.grad` has them only for the
            # step, and what the program keeps there is put back afterwards.
            before: list[Tensor | None] = []
            try:
                for parameter, target in zip(self.parameters, self._targets, strict=True):
                    if self._hogwild:
                        target.data = parameter.data  # the parameter's data may have been replaced meanwhile
                    before.append(target.grad)
                    target.grad = gradients.get(parameter)
                self._step()
            finally:
                for target, gradient in zip(self._targets, before, strict=False):
                    target.grad = gradient
        if (note := events.note) is not None:
            note((events.STEPPED, start, perf_counter(), context_id, type(self._optimizer).__name__))
        return self._outcome(context, gradients)

    def _outcome(self, context: AutogradContext | None, gradients: Mapping[Tensor, Tensor]) -> tuple[bool, bool | None]:
        """Return if this worker knows the context, and if a parameter has a gradient there; None if all are frozen."""
        found = any(each in gradients for each in self.parameters)
        frozen = not found and not any(each.requires_grad for each in self.parameters)
        return context is not None, None if frozen else found

    @finishing
    def retire(self) -> None:
        """Refuse later steps: pending steps of a failed batch must not change the parameters."""
        with holding(self._guards):
            self._retired = True

    def norm(self, context_id: int, norm_type: float) -> float | None:
        """Return the norm of the gradients of a context, including kept gradients, or None if there are none."""
        context = current.conductor().contexts.get(context_id)
        with holding(self._guards):
            kept = self._kept.as_dict()  # the step removes these, not this method: the pass may still fail
            gradients = {} if context is None else context.gradients.as_dict()
        both = {each: total(gradients[each], kept[each]) for each in gradients if each in kept}
        known = {**kept, **gradients, **both}
        found = norm_of((known[each] for each in self.parameters if each in known), norm_type)
        return None if found is None else found.item()

    # Gradients

    @finishing
    def accumulate(self, context_id: int) -> tuple[bool, bool | None]:
        """Keep the gradients of a context for the next step. Return `_outcome`."""
        context = current.conductor().contexts.get(context_id)
        gradients = {} if context is None else context.gradients.as_dict()
        # These are copies, because a later pass of the context adds to its gradients in place.
        with holding(self._guards):
            for parameter in self.parameters:
                if parameter in gradients:
                    self._kept.add(parameter, gradients[parameter].clone(), graph=False)
        return self._outcome(context, gradients)

    @finishing
    def gather(self, context_id: int) -> None:
        """Add the gradients kept for the next step to those of a context."""
        with holding(self._guards):
            self._gather(context_id)

    def _gather(self, context_id: int) -> AutogradContext | None:
        """Return the context if this worker takes part in it, or has kept gradients for it."""
        contexts = current.conductor().contexts
        kept = self._kept.as_dict()
        if not kept:
            return contexts.get(context_id)
        # This worker may have taken no part in the context so far, and still has gradients for its step.
        context = contexts.join(context_id)
        if context is not None:
            for parameter, gradient in kept.items():
                context.gradients.add(parameter, gradient, graph=False)
            self._kept.clear()
        return context

    # State, by the names of the parameters

    def state(self, has_map: bool = True) -> dict[str, dict[str, Any]]:
        """Return the optimizer's state. Without a device map to the caller, the tensors are on the CPU."""
        assert self._optimizer is not None
        state = self._optimizer.state_dict()["state"]
        named = {name: state[index] for index, name in enumerate(self.names) if index in state}
        return named if has_map else on_host(named)

    def kept(self, has_map: bool = True) -> Changes:
        """Return the groups by their numbers: some optimizers store values there that change with each step."""
        assert self._optimizer is not None
        groups = zip(self.groups, self._optimizer.param_groups, strict=True)
        found = copy.deepcopy({number: hyperparameters(group) for number, group in groups})
        return found if has_map else on_host(found)

    @finishing
    def load(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Load the state of this worker's parameters."""
        assert self._optimizer is not None
        with holding(self._guards):
            whole = self._optimizer.state_dict()
            whole["state"] = {index: state[name] for index, name in enumerate(self.names) if name in state}
            self._optimizer.load_state_dict(whole)


@known_as("DistributedOptimizer()")
def add_group(
    local: RRef[LocalOptimizer] | None,
    step_id: int,
    optimizer_maker: Any,
    number: int,
    own: list[RemotePart],
    param_group: Hyperparameters,
) -> tuple[RRef[LocalOptimizer], list[tuple[tuple[int, ...], str]], Hyperparameters]:
    """On an owner: add a group of its parameters. The first group creates the optimizer."""
    if local is None:
        local = RRef(LocalOptimizer(*optimizer_maker))
        # Passes find this part by the number. The table is weak: the part ends with the optimizer's last reference to
        # it.
        current.conductor().fused_steps[step_id] = local.local_value()
    return (local, *local.local_value().add_group(number, own, param_group))


@known_as("DistributedOptimizer()")
def check_new(local: RRef[LocalOptimizer] | None, own: list[RemotePart]) -> None:
    """On an owner: raise InvalidArgument if a parameter of a new group is in another one, or in it twice."""
    there = None if local is None else local.local_value()
    taken = {} if there is None else dict(zip(map(id, there.parameters), there.names, strict=True))
    others = taken.copy()
    for name, parameter in (each for branch in own for each in parameters_of(branch)):
        if id(parameter) in taken:
            fault = "a parameter group contains duplicate parameters"
            if id(parameter) in others:
                fault = "some parameters appear in more than one parameter group"
            raise InvalidArgument(
                f"{fault}: {taken[id(parameter)]!r} and {name!r} are the same one, where a number is the position of "
                "the reference among all. Give each parameter once"
            )
        taken[id(parameter)] = name


def ask(local: RRef[LocalOptimizer], method: str, *args: Any) -> Future[Any]:
    """Call a method of an owner's part, under the method name that timeout errors show."""
    return local._call_async(method, DEFAULT, args, {}, user_name(method))


def user_name(method: str) -> str:
    return f"DistributedOptimizer.{USER_NAMES.get(method, method)}"


def check_maker(optimizer_class: Any) -> None:
    """Raise UsageError if `optimizer_class` does not create supported optimizers."""
    if isinstance(optimizer_class, Optimizer) or not callable(optimizer_class):
        raise UsageError(
            f"DistributedOptimizer takes a class of optimizers (optimizer_class), "
            f"not {checks.short_repr(optimizer_class)}: "
            "write DistributedOptimizer.for_module(torch.optim.SGD, model, lr=0.1)"
        )
    if isinstance(optimizer_class, type):
        check_needs_no_closure(optimizer_class)


def check_needs_no_closure(optimizer_class: type) -> None:
    """Raise UsageError if the optimizer's step needs a closure."""
    step = getattr(optimizer_class, "step", None)
    if step is None:
        raise UsageError(f"{optimizer_class.__name__} is not an optimizer class: it has no step")
    closure = inspect.signature(step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise UsageError(
            f"{optimizer_class.__name__} cannot be used over several workers: its step needs a closure that computes "
            "the loss again. Use one that steps once for each backward pass, such as torch.optim.Adam"
        )


def hyperparameters(group: Mapping[str, Any]) -> Hyperparameters:
    """Return a parameter group without its parameters."""
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


def changed(group: Mapping[str, Any], sent: Hyperparameters) -> Hyperparameters:
    """Return a copy of the values in a parameter group that differ from those that were sent."""
    # `sent` has copies: an object that is in both is none that can be changed in place. `group` itself is in neither.
    return {
        name: copy.deepcopy(value)
        for name, value in group.items()
        if value is not sent.get(name, group)
        and name not in ("params", "param_names")
        and (name not in sent or _differ(sent[name], value))
    }


def _differ(one: Any, other: Any) -> bool:
    if type(one) is type(other) and isinstance(one, Tensor):
        return one.dtype != other.dtype or bool(one.tolist() != other.tolist())
    return isinstance(one, Tensor) or isinstance(other, Tensor) or bool(one != other)


def agreed(number: int, kept: Mapping[str, Changes], without: Iterable[str]) -> Hyperparameters:
    """Return the values that all owners of group `number` have `kept`, except those of the names in `without`; raise
    UsageError if two owners have different values."""
    found = [(worker, groups[number]) for worker, groups in kept.items() if number in groups]
    first, group = found[0]
    for worker, other in found[1:]:
        for name in (group.keys() | other.keys()) - set(without):
            if name not in group or name not in other or _differ(group[name], other[name]):
                raise UsageError(
                    f"the optimizers of workers {first!r} and {worker!r} have different values of {name!r} in "
                    f"parameter group {number}: {group.get(name)} and {other.get(name)}. A state has one value for "
                    "each group: give the parameters of each worker a group of their own, as dictionaries with "
                    "'params'"
                )
    return {name: value for name, value in group.items() if name not in without}


def norm_of(gradients: Iterable[Tensor], norm_type: float) -> Tensor | None:
    """Return the norm of one worker's gradients, on the CPU so that the host waits only once; None without any."""
    values = [_plain(gradient) for gradient in gradients]
    return nn.utils.get_total_norm([each.detach() for each in values], norm_type).cpu() if values else None


def _plain(gradient: Any) -> Tensor:
    mesh = getattr(gradient, "device_mesh", None)
    if mesh is None:
        values: Tensor = gradient.coalesce().values() if gradient.is_sparse else gradient
        return values
    if mesh.size() > 1:
        raise UsageError(
            f"gradients that are sharded over {mesh.size()} processes (DTensor) would count several times in a norm "
            "over all workers: clip them in those processes with torch.nn.utils.clip_grad_norm_, before the step"
        )
    local: Tensor = gradient.to_local()
    return local


def scale(gradients: Iterable[Tensor], factor: float) -> None:
    with torch.no_grad():
        for gradient in gradients:
            gradient.mul_(factor)


# Without the tracer


@known_as("DistributedOptimizer()")
def import_tracer() -> None:
    importlib.import_module(TRACER)


def may_import(make: Callable[..., Optimizer]) -> bool:
    """Return True if an optimizer made by `make` may import the tracer in spite of this."""
    if not (isinstance(make, type) and issubclass(make, Optimizer)):
        return True
    steps = {inspect.unwrap(vars(base)["step"]) for base in make.__mro__[:-1] if "step" in vars(base)}
    return len(steps - {Optimizer.step}) > 1


def _defer_import(wrapper: Any) -> None:
    """Make a wrapper of torch call the method that it wraps, until other code has imported the tracer."""
    method = wrapper.__wrapped__

    def call(*args: Any, **kwargs: Any) -> Any:
        if TRACER not in sys.modules:
            return method(*args, **kwargs)
        vars(method).pop(_CACHE, None)  # the wrapper fills it
        return wrapper(*args, **kwargs)

    # torch's wrapper calls the function that it finds here, and imports the tracer if there is none
    # (torch/_compile.py).
    setattr(method, _CACHE, call)


def step_of(optimizer: Optimizer) -> Callable[[], Any]:
    """Return `optimizer.step`, in a form that avoids the import if possible."""
    kind = type(optimizer)
    guarded: Any = getattr(kind.step, "__wrapped__", None)  # inside of the wrapper that runs the hooks
    if not hasattr(kind.step, "hooked") or not _asks(guarded):
        return optimizer.step

    # This does what torch's wrapper does around a step, without asking the tracer: it sets the grad mode, and
    # `profile_hook_step` runs the hooks and records the profiler's event.
    @functools.wraps(guarded.__wrapped__)
    def step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if TRACER in sys.modules:
            return guarded(self, *args, **kwargs)
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return guarded.__wrapped__(self, *args, **kwargs)

    return MethodType(Optimizer.profile_hook_step(step), optimizer)


def _asks(function: Any) -> bool:
    """Return True for a wrapper that imports the tracer."""
    return TRACER in getattr(getattr(function, "__code__", None), "co_names", ()) and hasattr(function, "__wrapped__")


for _wrapper in (Optimizer.state_dict, Optimizer.load_state_dict, Optimizer.add_param_group):
    if _asks(_wrapper):
        _defer_import(_wrapper)
