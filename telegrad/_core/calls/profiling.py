"""Events of remote calls, for `torch.profiler` (such as `rpc_sync#add(worker0 -> worker1)`) and for followers.

A follower, such as a tracer, wraps calls at the caller and at the callee. Its named strings (baggage) travel with the
calls (see `call_context`) and let it connect the two sides.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch.autograd.profiler import record_function

from telegrad._core import checks
from telegrad._core.calls.futures import Future, complete

T = TypeVar("T")


class CallEvent(NamedTuple):
    name: str  # as the profiler shows it
    function: Any  # the function that the user called, or its name
    here: str
    there: str


class CallTracer(Protocol):
    """Wraps calls, for tracing. The methods must be quick and must not raise."""

    def called(self, event: CallEvent, call: Callable[[], T]) -> T:
        """Run `call()`, which makes a call and waits for its value, and return that."""

    def begun(self, event: CallEvent, call: Callable[[], tuple[T, Future[Any]]]) -> T:
        """Run `call()`, which begins a call, and return its first result. Its second is done when the call ends."""

    def in_place_of(
        self, function: Callable[..., Any], args: Sequence[Any], here: str, caller: str
    ) -> Callable[..., Any]:
        """Return a replacement for `function`, which another worker called with `args`. Do not keep `args`."""

    def baggage(self) -> dict[str, str]:
        """Return the strings to send with a call of this thread."""

    def resumed(self, baggage: dict[str, str]) -> AbstractContextManager[Any]:
        """Return a context manager in whose block this thread continues a call that carried `baggage`."""


enabled: Callable[[], bool] = torch.autograd._profiler_enabled  # type: ignore[attr-defined]
wanted = enabled  # returns True if calls shall be events
follower: CallTracer | None = None


def follow(by: CallTracer | None) -> None:
    """Set the follower of this process, or remove it with None."""
    global follower, wanted
    follower, wanted = by, enabled if by is None else lambda: True


# Names


def event_name(kind: str, function: Any, here: str, there: str) -> str:
    """Return the name of a call's event; `kind` is "sync", "async" or "remote", as in the API's functions."""
    return f"rpc_{kind}#{function_name(function)}({here} -> {there})"


def function_name(function: Any) -> str:
    """Return a function's name; for torch operators the profiler's name, such as `aten::add`. Keep strings."""
    if isinstance(function, str):
        return function
    builtin: str | None = torch.jit._builtins._find_builtin(function)  # type: ignore[no-untyped-call]
    if builtin is not None:
        return builtin
    if isinstance(function, torch.jit.ScriptFunction):
        return str(torch._jit_internal._qualified_name(function))
    return getattr(function, "__qualname__", None) or checks.short_repr(function)


# Calls


def called(event: CallEvent, call: Callable[..., T], *args: Any) -> T:
    """Return the value of `call(*args)`, which makes a call and waits for it."""
    act = partial(recorded, event.name, call, *args) if enabled() else partial(call, *args)
    return act() if follower is None else follower.called(event, act)


def called_async(event: CallEvent, call: Callable[..., Future[T]], *args: Any) -> Future[T]:
    """Return the future of `call(*args)`; the event ends with the future."""

    def begin() -> tuple[Future[T], Future[Any]]:
        future = _recorded_until_done(event.name, call, args)[1] if enabled() else call(*args)
        return future, future

    return begin()[0] if follower is None else follower.begun(event, begin)


def called_creation(event: CallEvent, call: Callable[..., T], *args: Any) -> T:
    """Return the reference that `call(*args)` creates; the event ends when the value exists."""

    def begin() -> tuple[T, Future[Any]]:
        made: Any
        if enabled():
            made, ended = _recorded_until_done(event.name, call, args, lambda made: made.future())
        else:
            made = call(*args)
            ended = made.future()
        ended.heed()  # an internal future: its failure needs no log message
        return made, ended

    return begin()[0] if follower is None else follower.begun(event, begin)


CALLS: dict[str, Callable[..., Any]] = {"sync": called, "async": called_async, "remote": called_creation}


# Events of torch.profiler


def recorded(name: str, act: Callable[..., T], *args: Any) -> T:
    with record_function(name):
        return act(*args)


def _recorded_until_done(
    name: str, call: Callable[..., Any], args: Any, ending: Callable[[Any], Future[Any]] = lambda future: future
) -> tuple[Any, Future[Any]]:
    """Return the value of `call(*args)`, and a future that is done once the value's future and the event have ended."""
    with record_function(name) as record:
        value = call(*args)
        future = ending(value)
        ended = record._call_end_callbacks_on_future(future)
    recorded: Future[Any] = Future()
    recorded.follows = future

    def pass_on(_: Any) -> None:
        recorded.follows = None
        complete(recorded, future.value)

    ended.add_done_callback(pass_on)
    return value, recorded
