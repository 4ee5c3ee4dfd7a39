"""Decorators that control how the callee runs a function: `telegrad.rpc.functions`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

import torch

from telegrad._core import checks
from telegrad._core.agent.call_server import ASYNC_MARK
from telegrad._core.calls.cancelling import finishing
from telegrad._core.pickling.function_names import home_of_script
from telegrad._core.pickling.global_names import lookups_of
from telegrad._core.pickling.remote_text import folded
from telegrad._core.worker.batching import batch
from telegrad.errors import InvalidArgument

__all__ = ["async_execution", "batch", "by_value", "must_finish"]

F = TypeVar("F", bound=Callable[..., object])


@folded
def async_execution(fn: F) -> F:
    """Mark a function that returns a `torch.futures.Future`: the caller gets the future's value once it is done.

    The callee's thread is free meanwhile. With `@staticmethod` or `@classmethod` this decorator is the inner one, with
    `@torch.jit.script` the outer one. An `async def` needs no mark.

    Args:
        fn: a function that returns a future; otherwise its caller gets a UsageError.

    Returns:
        The function, marked.

    Example:
        >>> @functions.async_execution
        ... def add_elsewhere(x, y):
        ...     from telegrad import rpc
        ...     return rpc.rpc_async("worker0", pow, (x, y)).then(lambda future: future.wait() + 1)
        >>> rpc.rpc_sync("worker1", add_elsewhere, (2, 3))
        9
    """

    checks.function("fn", fn, classes=False)

    @functools.wraps(fn)
    def marked(*args: object, **kwargs: object) -> object:
        return fn(*args, **kwargs)

    if isinstance(fn, torch.jit.ScriptFunction):  # its name is stored elsewhere
        marked.__module__, marked.__qualname__ = home_of_script(fn)
    setattr(marked, ASYNC_MARK, True)
    return marked  # type: ignore[return-value]


@folded
def must_finish(fn: F) -> F:
    """Mark a function that always runs to its end, even if its caller cancels the call or dies.

    The function runs even if its call was cancelled in the queue. An `async def` is not interrupted. The calls that the
    function makes are neither cancelled with it nor limited by its caller's deadline. With other decorators this one is
    the inner one.

    Args:
        fn: any function.

    Returns:
        The function, marked.

    Example:
        >>> @functions.must_finish
        ... def settle(amount):
        ...     return f"settled {amount}"
        >>> rpc.rpc_sync("worker1", settle, (3,))
        'settled 3'
    """
    checks.function("fn", fn, classes=False)
    return finishing(fn)


class ByValue:
    """A function that is sent as its code."""

    def __init__(self, function: FunctionType) -> None:
        self.function = function
        self._telegrad_known_as = f"{function.__module__}.{function.__qualname__} (by value)"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _itself, (_without_name(self.function, {}),)


def by_value(fn: F) -> F:
    """Send a function as its code even if the callee can import it, for functions that were edited or defined again.

    The functions of the same module that it uses are sent with it. Classes and objects of other modules are sent by
    name.

    Args:
        fn: a function made by `def` or `lambda`.

    Returns:
        The function to pass to a call.

    Raises:
        InvalidArgument: it is no such function.

    Example:
        >>> def step(x):
        ...     return x + 1
        >>> rpc.rpc_sync("worker1", functions.by_value(step), (1,))
        2
    """
    if type(fn) is not FunctionType:
        raise InvalidArgument(f"fn: by_value takes a function defined by def or lambda, not {checks.short_repr(fn)}")
    return ByValue(fn)  # type: ignore[return-value, arg-type]


def _itself(function: F) -> F:
    return function


def _without_name(function: FunctionType, made: dict[FunctionType, FunctionType]) -> FunctionType:
    """Return a copy that cannot be found by name, and that uses such copies of the functions of its module."""
    if function in made:
        return made[function]
    scope: dict[str, Any] = {"__name__": function.__module__}
    # Stored before the globals are filled, since functions may refer to each other in a circle.
    copy = made[function] = FunctionType(
        function.__code__, scope, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__dict__.update(function.__dict__)
    copy.__module__, copy.__doc__ = function.__module__, function.__doc__
    copy.__annotations__, copy.__kwdefaults__ = function.__annotations__, function.__kwdefaults__
    # A function with such a name cannot be imported, so it is sent as its code.
    copy.__qualname__ = f"by_value.<locals>.{function.__qualname__}"
    for name in lookups_of(function.__code__).read & function.__globals__.keys():
        value = function.__globals__[name]
        value = value.function if isinstance(value, ByValue) else value
        near = type(value) is FunctionType and value.__module__ == function.__module__
        scope[name] = _without_name(value, made) if near else value
    return copy
