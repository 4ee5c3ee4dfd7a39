"""Marks of functions: their names for users, in errors, timeouts and the log; and that `torch.compile` skips them.

`torch.compile` breaks its graph at a remote call, and does not compile the code that the call runs.
"""

import atexit
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from types import BuiltinFunctionType, CoroutineType, FunctionType, MethodType
from typing import Any, TypeVar

from torch._C._dynamo import eval_frame

from telegrad._core.pickling.function_names import keep_name, name_of
from telegrad._core.pickling.remote_text import short

F = TypeVar("F", bound=Callable[..., Any])

KNOWN_AS = "_telegrad_known_as"  # attribute of a function of this package: the user's name for it
NOTED_AS = "_telegrad_noted_as"  # attribute of a class of this package: a shorter name for its instances
RUNS = "_telegrad_runs"  # of a function or object: computes the name from arguments, or from a method's name
# The reader of a stream calls for its next items before it needs them, and cancels that at the end: this is no failure.
NEXT_ITEMS = "the next items of"
NAMED = (FunctionType, BuiltinFunctionType)  # types of the functions in `shown_names`
shown_names: dict[Any, str] = {}  # of such functions, if arguments do not affect the name
atexit.register(shown_names.clear)  # see `_own` in main_modules.py


def known_as(name: str) -> Callable[[F], F]:

    def mark(function: F) -> F:
        setattr(function, KNOWN_AS, name)
        return function

    return mark


def runs_as(function: Callable[..., Any], name: Callable[..., str]) -> None:
    """Name a function of this package after its arguments on the callee."""
    setattr(function, RUNS, name)


def user_name(function: Any, args: Sequence[Any] | None = None) -> str:
    """Return the user's name for a function; never raise. The callee can pass the arguments for a more precise name."""
    try:
        known = shown_names.get(function) if type(function) in NAMED else None
        return known or short(_name(function, args))
    except Exception:
        return short(type(function).__qualname__)


def _name(function: Any, args: Sequence[Any] | None) -> str:
    if isinstance(function, str):
        return function
    if args and hasattr(function, RUNS) and not isinstance(function, type):
        return str(getattr(function, RUNS)(*args))
    name = getattr(function, KNOWN_AS, None)
    if not isinstance(name, str):
        if isinstance(function, MethodType) and hasattr(function.__self__, RUNS):
            return str(getattr(function.__self__, RUNS)(function.__name__))
        if isinstance(function, CoroutineType):
            return function.__qualname__
        if (importable := name_of(function, True)) is None:
            return getattr(function, "__qualname__", type(function).__qualname__)
        name = importable.replace(":", ".")
    shown = short(name)
    if type(function) in NAMED and not hasattr(function, RUNS):
        keep_name(shown_names, function, shown)
    return shown


def users_call(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, tuple[Any, ...], Any]:
    """Return a call as the user knows it, for errors.

    A function of this package that runs another one has the parameters `function`, `args` and `kwargs` for it, or all
    of them in `optimizer_maker`. Its other parameters have the names that users know.
    """
    if not str(getattr(function, "__module__", "")).startswith("telegrad."):
        return function, tuple(args), kwargs
    if hasattr(function, "__wrapped__"):
        return users_call(function.__wrapped__, args, kwargs)
    try:
        form = signature(function)
        own = dict(form.bind(*args, **kwargs).arguments)
    except (TypeError, ValueError):  # a wrong call; or the function has no signature
        return function, tuple(args), kwargs
    for each in form.parameters.values():
        if each.kind is each.VAR_KEYWORD and each.name != "kwargs":
            own.update(own.pop(each.name, {}))
    own.update(zip(("function", "args", "kwargs"), own.pop("optimizer_maker", ()), strict=False))
    asked, args, kwargs = own.pop("function", None), own.pop("args", None) or (), own.pop("kwargs", None) or {}
    if asked is not None:
        function, args, kwargs = users_call(asked, args, kwargs)
    return function, tuple(args), own | dict(kwargs)


# The effect of `torch.compiler.disable`, without its import of the compiler (seconds) and without a wrapper.
_SKIP = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)


def not_compiled(function: F) -> F:
    """Mark a function that users call: `torch.compile` compiles neither the function nor its callees."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = "a remote call cannot be part of a graph"  # type: ignore[attr-defined]
    eval_frame.set_code_exec_strategy(function.__code__, _SKIP)
    return function
