"""Checks and conversions of what users give to a call: the worker, the function and its arguments.

Values and references are converted according to the annotations of the callee:

    given    annotated    sent
    T        T            the value
    T        RRef[T]      a reference that the caller owns
    RRef[T]  T            the value: from the caller if it owns the value, else the callee fetches it from the owner
    RRef[T]  RRef[T]      the reference

A parameter without an annotation, or with one that fits both, gets the argument unchanged.
"""

import inspect
import logging
import operator
import types
import typing
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from telegrad._core import checks
from telegrad._core.agent.pending_call import PreparedCall
from telegrad._core.membership.members import WorkerInfo
from telegrad._core.rpc.rref import RRef, new_tuple
from telegrad._core.worker import current
from telegrad._core.worker.value_access import with_values
from telegrad.errors import InvalidArgument, UnknownWorker

_REFERENCE, _VALUE = "reference", "value"
log = logging.getLogger("telegrad")
_BOUND = (type, types.MethodType)  # the caller does not pass their first parameter

WHAT = "the name of a worker, its rank, or its WorkerInfo"


def target(to: Any, parameter: str = "to") -> str | int:
    """Return the name or the rank by which an agent finds a worker. Raise InvalidArgument if it is none of the three,
    and UnknownWorker if name and rank of a `WorkerInfo` are not those of one worker."""
    if type(to) is str:
        return to
    if isinstance(to, WorkerInfo):
        return _agreeing(to, parameter)
    return named(to, parameter)


def named(to: Any, parameter: str = "to") -> str | int:
    """As `target`, but ignore the rank of a `WorkerInfo`: the worker may return with another rank."""
    if isinstance(to, WorkerInfo):
        to = to.name
    if isinstance(to, str):
        return to if to else checks.raise_invalid(parameter, WHAT, to)
    if not checks.is_whole(to):
        checks.raise_invalid(parameter, WHAT, to)
    return operator.index(to)


def several(workers: Any, parameter: str) -> list[str | int]:
    """Return the names and ranks of a list of workers."""
    if isinstance(workers, WorkerInfo):
        checks.raise_invalid(parameter, "a list of workers", workers)
    return [target(worker, parameter) for worker in checks.several(parameter, workers, "a list of workers")]


def _agreeing(info: WorkerInfo, parameter: str) -> str:
    name = info.name
    if not isinstance(name, str):
        checks.raise_invalid(parameter, WHAT, info)
    rank = current.agent().identify(name).id
    if rank != info.id:
        raise UnknownWorker(
            f"{parameter} is {checks.short_repr(info)}, but worker {checks.short_repr(name)} has rank {rank} "
            "in this group: get its new WorkerInfo from rpc.get_worker_info or rpc.workers"
        )
    return name


class _Plan(NamedTuple):
    """The target of the conversion for each parameter."""

    positional: list[str]
    rest: str  # for further positional arguments
    named: dict[str, str]
    others: str  # for names without a parameter


# By function. Weak: functions may be temporary, such as closures and those of notebooks. No lock: two threads may make
# the same plan.
_plans: weakref.WeakKeyDictionary[Any, _Plan | None] = weakref.WeakKeyDictionary()


def convert(function: Any, args: Any, kwargs: Any) -> PreparedCall:
    """Return the call with converted arguments; raise InvalidArgument if one of the three is of another type."""
    if args is not None and type(args) is not tuple:
        if not isinstance(args, tuple | list):
            raise InvalidArgument(
                f"args must be a tuple with the arguments of the function, not {_shown(args)}; for one argument write "
                "args=(x,), with the comma"
            )
        args = tuple(args)
    if kwargs is not None and (kwargs or type(kwargs) is not dict):
        kwargs = as_dict(kwargs)
    kind = type(function)
    if kind is types.BuiltinFunctionType or (
        kind is types.FunctionType and not (function.__annotations__ and (args or kwargs))
    ):
        # The fast path of `_plan_of`: nothing to convert.
        return new_tuple(PreparedCall, (function, args, kwargs, None, None))
    plan = _plan_of(function)
    if plan is None or not (args or kwargs):
        return PreparedCall(function, args, kwargs)
    args, kwargs = args or (), kwargs or {}
    wanted = plan.positional + [plan.rest] * (len(args) - len(plan.positional))
    lent: list[RRef[Any]] = []
    new_args = tuple(_convert(target, each, lent) for target, each in zip(wanted, args, strict=False))
    new_kwargs = {name: _convert(plan.named.get(name, plan.others), each, lent) for name, each in kwargs.items()}
    if lent:
        return PreparedCall(with_values, (function, *new_args), new_kwargs, lent, function)
    return PreparedCall(function, new_args, new_kwargs)


def as_dict(kwargs: Any) -> dict[str, Any]:
    """Return arguments by name as a dictionary; raise InvalidArgument if they are no mapping, or a key is no name."""
    if isinstance(kwargs, Mapping):
        for name in kwargs:
            if not isinstance(name, str):
                raise InvalidArgument(f"the names of arguments in kwargs must be strings, not {_shown(name)}")
        return kwargs if type(kwargs) is dict else dict(kwargs)
    raise InvalidArgument(
        f"kwargs must be a dictionary from argument names to values, not {_shown(kwargs)}; write "
        "kwargs={'name': x}, and args=(x,) for arguments without a name"
    )


def _check_callable(function: Any) -> None:
    if callable(function):
        return
    advice = ""
    if isinstance(function, str):
        advice = "; give the function itself, without quotes. To call a method of a reference: rref.rpc_sync().method()"
    elif isinstance(function, types.GeneratorType | types.AsyncGeneratorType):
        advice = "; give the function that yields, and its arguments as args: rpc_stream(to, f, args=(x,))"
    elif type(function).__module__ != "builtins":
        advice = "; to call one of its methods, give the method, such as thing.method"
    raise InvalidArgument(f"the function to call should be callable, but {_shown(function)} is not{advice}")


def _shown(value: Any) -> str:
    """Return a value for a message: as it is if that is short, otherwise its type."""
    text = "" if isinstance(value, Tensor) else checks.short_repr(value)
    kind = type(value).__qualname__
    return f"{text} ({kind})" if 0 < len(text) <= 40 else f"a {kind}"


def _convert(target: str, given: Any, lent: list[RRef[Any]]) -> Any:
    if target == _REFERENCE and not isinstance(given, RRef) and given is not None:
        return RRef(given)
    if target == _VALUE and isinstance(given, RRef):
        if given.is_owner():
            return given.local_value()
        lent.append(given)
        return given._lent()
    return given


def _plan_of(function: Any) -> _Plan | None:
    """Return the conversions of a function, or None if it has none."""
    bound = isinstance(function, _BOUND)
    if bound:
        function = function.__init__ if isinstance(function, type) else function.__func__  # type: ignore[misc]
    if type(function) is not types.FunctionType:
        _check_callable(function)
        return None
    if not function.__annotations__:
        return None
    try:
        return _plans[function]
    except KeyError:
        plan = _plans[function] = _make_plan(function, bound)
        return plan


def _make_plan(function: Callable[..., Any], bound: bool) -> _Plan | None:
    try:
        hints = typing.get_type_hints(function)
        parameters = list(inspect.signature(function).parameters.values())[bound:]
    except Exception as error:  # e.g. an annotation has a name that only type checkers know
        log.debug("telegrad: no conversion for %r: %s", function, error)
        return None
    targets = [(each, _wish(hints.get(each.name, Any))) for each in parameters]
    plan = _Plan(
        [target for each, target in targets if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)],
        next((target for each, target in targets if each.kind is each.VAR_POSITIONAL), ""),
        {each.name: target for each, target in targets if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)},
        next((target for each, target in targets if each.kind is each.VAR_KEYWORD), ""),
    )
    return plan if any((*plan.positional, plan.rest, *plan.named.values(), plan.others)) else None


def _wish(annotation: Any) -> str:
    if _is_reference(annotation):
        return _REFERENCE
    if annotation in (Any, object, None, type(None)) or isinstance(annotation, typing.TypeVar):
        return ""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        arms = [arm for arm in typing.get_args(annotation) if arm is not type(None)]
        return "" if any(_is_reference(arm) or not _wish(arm) for arm in arms) else _VALUE
    return _VALUE


def _is_reference(annotation: Any) -> bool:
    origin = typing.get_origin(annotation) or annotation
    return isinstance(origin, type) and issubclass(origin, RRef)
