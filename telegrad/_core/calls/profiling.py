"""Remote calls as events: of `torch.profiler`, such as `rpc_sync#add(worker0 -> worker1)`, and for who follows them.

A follower, such as a tracer, surrounds calls at the caller and at the callee. It has named strings travel with them
(see `scene`), by which it knows there what belongs together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch.autograd.profiler import record_function

from telegrad._core.calls.futures import Future

T = TypeVar("T")


class Event(NamedTuple):
    """A call that is made."""

    name: str  # in a profiler
    function: Any  # what the user has called, or its name
    here: str
    there: str


class Follower(Protocol):
    """Who follows calls. What it does must be quick and not raise."""

    def called(self, event: Event, call: Callable[[], T]) -> T:
        """What `call()` returns, which makes a call and waits for its value."""

    def begun(self, event: Event, call: Callable[[], tuple[T, Future[Any]]]) -> T:
        """The first of what `call()` returns, which begins a call; the second is done when that has ended."""

    def in_place_of(
        self, function: Callable[..., Any], args: Sequence[Any], here: str, caller: str
    ) -> Callable[..., Any]:
        """What to run where another worker has called `function` with `args`, which are not to be kept."""

    def baggage(self) -> dict[str, str]:
        """What travels with a call that this thread makes."""

    def resumed(self, baggage: dict[str, str]) -> AbstractContextManager[Any]:
        """Inside, this thread goes on with a call that had this with it."""


enabled: Callable[[], bool] = torch.autograd._profiler_enabled  # type: ignore[attr-defined]
wanted = enabled  # whether calls shall be events
follower: Follower | None = None


def follow(by: Follower | None) -> None:
    """Have calls followed, in this process, in the place of who does so now."""
    global follower, wanted
    follower, wanted = by, enabled if by is None else lambda: True


# Names


def event_name(kind: str, function: Any, here: str, there: str) -> str:
    """The name of the event of one call; `kind` is that of the API's functions: "sync", "async" or "remote"."""
    return f"rpc_{kind}#{function_name(function)}({here} -> {there})"


def function_name(function: Any) -> str:
    """That of torch's own operators is the profiler's, such as `aten::add`; a name stands for itself."""
    if isinstance(function, str):
        return function
    builtin: str | None = torch.jit._builtins._find_builtin(function)  # type: ignore[no-untyped-call]
    if builtin is not None:
        return builtin
    if isinstance(function, torch.jit.ScriptFunction):
        return str(torch._jit_internal._qualified_name(function))
    return getattr(function, "__qualname__", None) or repr(function)


# Calls


def called(event: Event, call: Callable[..., T], *args: Any) -> T:
    """The value of `call(*args)`, which makes a call and waits for it."""
    act = partial(recorded, event.name, call, *args) if enabled() else partial(call, *args)
    return act() if follower is None else follower.called(event, act)


def called_async(event: Event, call: Callable[..., Future[T]], *args: Any) -> Future[T]:
    """The future that `call(*args)` gives, whose event ends with it."""

    def begin() -> tuple[Future[T], Future[Any]]:
        future = _recorded_until_done(event.name, call, args)[1] if enabled() else call(*args)
        return future, future

    return begin()[0] if follower is None else follower.begun(event, begin)


def called_creation(event: Event, call: Callable[..., T], *args: Any) -> T:
    """The reference that `call(*args)` gives, whose event ends when its value exists."""

    def begin() -> tuple[T, Future[Any]]:
        made: Any
        if enabled():
            made, ended = _recorded_until_done(event.name, call, args, lambda made: made.future())
        else:
            made = call(*args)
            ended = made.future()
        ended.heed()  # nobody needs to look at the future of something else
        return made, ended

    return begin()[0] if follower is None else follower.begun(event, begin)


# Events of torch.profiler


def recorded(name: str, act: Callable[..., T], *args: Any) -> T:
    """The value of `act(*args)`, as one event."""
    with record_function(name):
        return act(*args)


def _recorded_until_done(
    name: str, call: Callable[..., Any], args: Any, ending: Callable[[Any], Future[Any]] = lambda future: future
) -> tuple[Any, Future[Any]]:
    """The value of `call(*args)`, as an event that ends with a future; and one that is done once that is complete."""
    with record_function(name) as record:
        value = call(*args)
        future = ending(value)
        ended = record._call_end_callbacks_on_future(future)
    recorded: Future[Any] = Future()
    recorded.follows = future

    def pass_on(_: Any) -> None:
        recorded.follows = None
        try:
            recorded.set_result(future.value())
        except Exception as error:
            recorded.set_exception(error)

    ended.add_done_callback(pass_on)
    return value, recorded
