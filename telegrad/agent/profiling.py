"""Remote calls as events of `torch.profiler`: `rpc_sync#add(worker0 -> worker1)`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.autograd.profiler import record_function

from telegrad.agent.futures import Future

T = TypeVar("T")

enabled: Callable[[], bool] = torch.autograd._profiler_enabled  # type: ignore[attr-defined]


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


def recorded(name: str, call: Callable[..., T], *args: Any) -> T:
    """The value of `call(*args)`, as one event."""
    with record_function(name):
        return call(*args)


def recorded_async(name: str, call: Callable[..., Future[T]], *args: Any) -> Future[T]:
    """The future that `call(*args)` gives, as an event that ends with it."""
    return recorded_until_done(name, lambda: call(*args), lambda future: future)[1]


def recorded_creation(name: str, call: Callable[..., T], *args: Any) -> T:
    """The reference that `call(*args)` gives, as an event that ends when its value exists."""
    made: Any = recorded_until_done(name, lambda: call(*args), lambda made: made.future())[0]  # type: ignore[attr-defined]
    return made  # type: ignore[no-any-return]


def recorded_until_done(name: str, call: Callable[[], T], ending: Callable[[T], Future[Any]]) -> tuple[T, Future[Any]]:
    """The value of `call()`, as an event that ends with a future; and one that is done once the event is complete."""
    with record_function(name) as record:
        value = call()
        future = ending(value)
        ended = record._call_end_callbacks_on_future(future)
    recorded: Future[Any] = Future()

    def pass_on(_: Any) -> None:
        try:
            recorded.set_result(future.value())
        except Exception as error:
            recorded.set_exception(error)

    ended.add_done_callback(pass_on)
    if value is not future:  # nobody needs to look at the future of something else
        recorded.heed()
    return value, recorded
