"""Decorators that control how the callee runs a function: `telegrad.rpc.functions`."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from contextvars import Context
from types import FunctionType
from typing import Any, TypeVar

import torch

from telegrad._core import checks
from telegrad._core.agent.call_server import ASYNC_MARK
from telegrad._core.calls.call_context import Modes, in_setting
from telegrad._core.calls.cancelling import finishing, serving
from telegrad._core.memory.device_streams import Streams
from telegrad._core.pickling.exceptions import without_frames
from telegrad._core.pickling.function_names import home_of_script
from telegrad._core.pickling.global_names import lookups_of
from telegrad._core.pickling.remote_text import folded
from telegrad._core.texts import plural
from telegrad.errors import InvalidArgument, UsageError

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


# Batches: one call of a function answers calls that arrive at about the same time

_MAINS = ("__main__", "__mp_main__")
_NO_RESULTS = (str, bytes, bytearray, Mapping, AbstractSet)  # iterables whose elements are not one for each call
Function = Callable[..., Awaitable[Iterable[Any]]]
Calls = list[tuple[tuple[Any, ...], asyncio.Future[Any]]]  # arguments and results


class Batched:
    """An async function of lists, called with single values. As a method, it has separate batches for each object."""

    _telegrad_batched = True  # see `value_access.BATCHED`

    def __init__(self, function: Function, max_size: int, max_wait: float, name: str = "", home: Any = None) -> None:
        plain = function.func if isinstance(function, functools.partial) else function
        functools.update_wrapper(self, plain)
        self._path = plain.__qualname__
        self._function = function
        self._signature = inspect.signature(function)
        self._max_size = max_size
        self._max_wait = max_wait
        self._name = name  # in its class
        self._home = home  # the object and the name of a bound method
        # By event loop and modes: the batch that waits for more calls, and the timer that starts it. A loop may end
        # before.
        self._waiting: dict[tuple[asyncio.AbstractEventLoop, Modes | None], tuple[Calls, asyncio.TimerHandle]] = {}
        self._running: set[asyncio.Task[None]] = set()  # strong references, since the loop keeps weak ones

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type | None = None) -> Batched:
        if instance is None:
            return self
        # Not the name of the method, by which Python would find the batches of an object also in its copies.
        key = f"{self._name} in batches"
        found: Batched | None = instance.__dict__.get(key)
        if found is None or found._home[0] is not instance:
            method = functools.partial(self._function, instance)
            bound = Batched(method, self._max_size, self._max_wait, home=(instance, self._name))
            if found is not None:
                instance.__dict__[key] = bound
            # Threads that make it at once get the same one.
            found = instance.__dict__.setdefault(key, bound)
        return found

    def __reduce__(self) -> Any:
        """Pickle a function by name, a method of a class that is sent by value by its code, a bound method by its
        object."""
        if self._home is not None:
            return getattr, self._home
        if self._name and (self.__module__ in _MAINS or "<locals>" in self._path):
            return Batched, (self._function, self._max_size, self._max_wait, self._name)
        return self._path

    async def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = self._signature.bind(*args, **kwargs)
        call.apply_defaults()
        loop = asyncio.get_running_loop()
        result = loop.create_future()
        modes = Modes.here() if serving.get() is not None else None
        # Only the thread of this loop uses the entries of this loop, so they need no lock. Entries of a closed loop are
        # removed, since their timers will never run; `copy` and `pop` are atomic.
        if (loop, modes) not in self._waiting:
            for ended in [each for each in self._waiting.copy() if each[0].is_closed()]:
                self._waiting.pop(ended, None)
            self._waiting[loop, modes] = [], loop.call_later(self._max_wait, self._begin, loop, modes)
        waiting, _ = self._waiting[loop, modes]
        waiting.append((call.args, result))
        if len(waiting) >= self._max_size:
            self._begin(loop, modes)
        return await result

    def _begin(self, loop: asyncio.AbstractEventLoop, modes: Modes | None) -> None:
        waiting, timer = self._waiting.pop((loop, modes))
        timer.cancel()
        calls = [each for each in waiting if not each[1].done()]  # the others are cancelled
        if not calls:
            return
        run = self._run(calls, modes)
        try:
            task = Context().run(loop.create_task, run)  # in an empty context: it has no single caller
        except BaseException as error:  # of the program's task factory, for example
            run.close()
            _fail(calls, error)
            return
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _run(self, calls: Calls, modes: Modes | None) -> None:
        try:
            run: Any = self._function(*(list(column) for column in zip(*(args for args, _ in calls), strict=True)))
            found = await (in_setting(run, modes.applied, Streams()) if modes else run)
            values = list(found) if checks.is_iterable(found) and not isinstance(found, _NO_RESULTS) else None
            if values is None or len(values) != len(calls):
                count = f"{checks.short_repr(found)}, not a list," if values is None else plural(len(values), "result")
                raise ValueError(f"{self._path} returned {count} for a batch of {plural(len(calls), 'call')}")
        except BaseException as error:
            _fail(calls, error)
            if not isinstance(error, Exception):
                raise
        else:
            for (_, result), value in zip(calls, values, strict=True):
                if not result.done():  # its caller may have given up
                    result.set_result(value)


def _fail(calls: Calls, error: BaseException) -> None:
    for _, result in calls:
        if not result.done():
            result.set_exception(without_frames(error))  # each raises its own copy


@folded
def batch(max_size: int, max_wait: float) -> Callable[[Function], Batched]:
    """Collect concurrent calls of an async function, and run it once for all of them.

    The function gets a list for each argument, and returns one, or a tensor, with the result of each call. It runs once
    `max_size` calls have arrived, or `max_wait` seconds after the first. Meant for serving, as a method of an object
    that other workers call with `policy_rref.rpc_sync().act(state)`. The function runs with the grad mode and autocast
    of its callers: a batch has callers of equal modes only. It runs outside of their autograd contexts, so its remote
    calls belong to none. Gradients go through it if all calls of a batch are of one context; if they are of several,
    `backward` raises UsageError. The results must not be views of memory that the next batch writes to.

    Args:
        max_size: the maximal number of calls in a batch.
        max_wait: how many seconds the first call waits for others.

    Returns:
        A decorator of an `async def`. For a method, each object has its own batches.

    Raises:
        UsageError: the numbers make no sense; the function is no `async def`, or has arguments by name only.

    Example:
        >>> class Policy:
        ...     @functions.batch(max_size=2, max_wait=0.05)
        ...     async def act(self, states):
        ...         return list(torch.stack(states) * 2)
        >>> import asyncio
        >>> async def both(policy):
        ...     return await asyncio.gather(policy.act(torch.ones(1)), policy.act(torch.zeros(1)))
        >>> asyncio.run(both(Policy()))
        [tensor([2.]), tensor([0.])]
    """
    checks.count("max_size", max_size, what="a number of calls")
    checks.seconds("max_wait", max_wait, "0 for the calls that are already waiting")

    def decorate(function: Function) -> Batched:
        if not inspect.iscoroutinefunction(function):
            raise UsageError(f"{checks.short_repr(function)} cannot run in batches: make it an `async def`")
        if any(each.kind is each.KEYWORD_ONLY for each in inspect.signature(function).parameters.values()):
            raise UsageError(f"{function!r} cannot run in batches: it has keyword-only arguments")
        return Batched(function, max_size, max_wait)

    return decorate
