"""The three call functions and their futures, with the errors of torch's. The legacy profiler records the calls."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NoReturn, TypeVar

import torch
import torch.futures

from telegrad._core.agent.pending_call import PreparedCall
from telegrad._core.calls import futures, profiling
from telegrad._core.calls.call_context import Modes, has_no_mode
from telegrad._core.calls.call_names import not_compiled
from telegrad._core.calls.futures import Future
from telegrad._core.membership.members import WorkerInfo
from telegrad._core.pickling.exceptions import as_runtime_error
from telegrad._core.pickling.remote_text import fold, remote_traceback_of
from telegrad._core.rpc import remote_calls
from telegrad._core.rpc.conversion import convert, target
from telegrad._core.rpc.remote_calls import UNSET_RPC_TIMEOUT
from telegrad._core.rpc.rref import RRef
from telegrad._core.worker import current
from telegrad.compat import profiler
from telegrad.compat.profiler import ProfilerSession, fetch_report, profile_and_run
from telegrad.errors import TelegradError, UnknownWorker, UsageError

To = str | int | WorkerInfo
T = TypeVar("T")
S = TypeVar("S")

_UNICODE_ERRORS = UnicodeDecodeError, UnicodeEncodeError, UnicodeTranslateError  # not made from a single text


def is_operator(function: Any) -> bool:
    """Return True for a function that torch's RPC calls as an operator in C++, such as `torch.add` or `math.sqrt`."""
    return torch.jit._builtins._find_builtin(function) is not None  # type: ignore[no-untyped-call]


def translated(error: BaseException, of_operator: bool = False) -> BaseException:
    """Return the error of a call as torch reports it: a RuntimeError if torch's own code raised it."""
    if of_operator and remote_traceback_of(error) and not isinstance(error, RuntimeError):
        # torch compares the arguments with the operator's schemas, and raises RuntimeErrors only.
        if isinstance(error, TypeError):
            return RuntimeError(f"Overloaded torch operator invoked from Python failed to match any schema: {error}")
        return as_runtime_error(error)
    if isinstance(error, torch.jit.Error) and not isinstance(error, RuntimeError):
        return RuntimeError(str(error))
    # torch raises the error of a call from C++, which keeps only these types, and only of errors that it could make
    # again from a text. `to_here` raises the error's own type.
    is_kept = isinstance(error, RuntimeError | TypeError | ValueError) and not isinstance(error, _UNICODE_ERRORS)
    return error if is_kept or not remote_traceback_of(error) else as_runtime_error(error)


def raise_translated(error: Exception, of_operator: bool = False) -> NoReturn:
    """Raise the error of a call, which is being handled, as torch reports it."""
    fold(error)
    if (shown := translated(error, of_operator)) is error:
        raise
    raise shown from None


class CallFuture(futures.Future[T]):
    """A future of a call's value."""

    modes: Modes | None = None  # of the caller: its callbacks run in them
    of_operator = False  # the called function is one

    def set_result(self, result: T) -> None:
        with nullcontext() if self.modes is None else self.modes.applied():
            super().set_result(result)

    def set_exception(self, result: Any) -> None:
        with nullcontext() if self.modes is None else self.modes.applied():
            super().set_exception(translated(result, self.of_operator))  # type: ignore[arg-type]

    def then(self, callback: Callable[[torch.futures.Future[T]], S]) -> futures.Future[S]:
        """Do the same as torch's `then`, but convert an exception of `callback` to a RuntimeError that contains it."""
        if not callable(callback):
            return super().then(callback)

        def run(done: torch.futures.Future[T]) -> S:
            try:
                return callback(done)
            except RuntimeError:
                raise
            except Exception as error:
                raise RuntimeError(f"{type(error).__name__}: {error}") from error

        return super().then(run)


def collect_all(futures: Sequence[torch.futures.Future[T]]) -> torch.futures.Future[list[torch.futures.Future[T]]]:
    """Return a future of all these. It is done when the last one is, or when the first one fails, like torch's."""
    collected: CallFuture[list[torch.futures.Future[T]]] = CallFuture()
    # `left` is set to 0 by a failure, and later ends make it negative. So it reaches 0 by counting only once, without a
    # failure.
    lock = threading.Lock()  # guards left
    left = len(futures)

    def look(done: torch.futures.Future[T]) -> None:
        nonlocal left
        try:
            done.wait()
        except Exception as error:
            with lock:
                first, left = left > 0, 0
            if first:
                collected.set_exception(error)
            return
        with lock:
            left -= 1
            last = left == 0
        if last:
            collected.set_result(list(futures))

    for future in futures:
        future.add_done_callback(look)
    if not futures:
        collected.set_result([])
    return collected


def wait_all(futures: Sequence[torch.futures.Future[T]]) -> list[T]:
    """Return the values of all these; raise as soon as one has failed."""
    return [future.wait() for future in collect_all(futures).wait()]


@not_compiled
def rpc_sync(
    to: To, func: Callable[..., Any], args: Any = None, kwargs: Any = None, timeout: float = UNSET_RPC_TIMEOUT
) -> Any:
    call = _call(to, func, args, kwargs)
    session = profiler.session()
    if session is not None:
        return _profiled("sync", to, call, session, lambda seen: _begin(to, seen, timeout)).wait()
    try:
        try:
            if profiling.wanted():
                perform = current.agent().perform
                return profiling.called(_event("sync", to, func), perform, target(to), call, timeout)
            return current.agent().perform(target(to), call, timeout)
        except Exception as error:
            raise_translated(error, is_operator(func))
    except BaseException as error:
        fold(error)
        raise


@not_compiled
def rpc_async(
    to: To, func: Callable[..., Any], args: Any = None, kwargs: Any = None, timeout: float = UNSET_RPC_TIMEOUT
) -> Future[Any]:
    call = _call(to, func, args, kwargs)
    session = profiler.session()
    if session is not None:
        return _profiled("async", to, call, session, lambda seen: _begin(to, seen, timeout))
    if profiling.wanted():
        return profiling.called_async(_event("async", to, func), _begin, to, call, timeout)
    return _begin(to, call, timeout)


def _begin(to: To, call: PreparedCall, timeout: float) -> Future[Any]:
    return current.agent().begin(target(to), call, timeout, partial(make_future, is_operator(call.users)))


def make_future(of_operator: bool = False) -> CallFuture[Any]:
    """Return a future of a call that this thread makes."""
    future: CallFuture[Any] = CallFuture()
    future.of_operator = of_operator
    if not has_no_mode():
        future.modes = Modes.here()
    return future


@not_compiled
def remote(
    to: To, func: Callable[..., Any], args: Any = None, kwargs: Any = None, timeout: float = UNSET_RPC_TIMEOUT
) -> RRef[Any]:
    call = _call(to, func, args, kwargs)
    session = profiler.session()
    create: Callable[..., RRef[Any]] = remote_calls.create
    made: list[RRef[Any]] = []
    if session is None and profiling.wanted():
        create = partial(profiling.called_creation, _event("remote", to, func), create)

    def begin(seen: PreparedCall) -> Future[Any]:
        made.append(create(to, seen, timeout))
        return made[0].future()

    if session is None:
        made.append(create(to, call, timeout))
    else:
        made_and_seen = _profiled("remote", to, call, session, begin)
        made[0]._set_profiling_future(made_and_seen)
    if is_operator(func) and hasattr(type(made[0]), "_of_operator"):  # not if `telegrad.rpc` has entered the group
        made[0]._of_operator = True  # type: ignore[attr-defined]
    return made[0]


def _event(kind: str, to: To, function: Any) -> profiling.CallEvent:
    """Return an event of `torch.profiler`, renamed because torch's tests require that no name contains `async`."""
    event = remote_calls.event_of(kind, to, function)
    return event._replace(name=event.name.replace(f"rpc_{kind}", _EVENTS[kind], 1))


_EVENTS = {"sync": "call", "async": "future", "remote": "reference"}


def _call(to: To, function: Any, args: Any, kwargs: Any) -> PreparedCall:
    if not callable(function):
        raise TypeError(f"function should be callable, {function!r} is not")
    if not isinstance(to, To):
        raise UnknownWorker(f"a worker is named by its name, its rank or its WorkerInfo, not by {to!r}")
    if isinstance(function, torch.jit.ScriptFunction):
        _check_arguments(function, args or (), kwargs or {})
    return convert(function, args, kwargs)


def _check_arguments(function: torch.jit.ScriptFunction[Any, Any], args: Any, kwargs: Any) -> None:
    """Raise the errors that calling the script function with these arguments would raise, before they are sent."""
    expected = [argument.name for argument in function.schema.arguments]  # type: ignore[attr-defined]
    given = len(args) + len(kwargs)
    if given > len(expected):
        raise UsageError(
            f"{function.name}() expected at most {len(expected)} argument(s) but received {given} argument(s)"
        )
    for name in kwargs:
        if name not in expected:
            raise UsageError(f"{function.name}() has no argument named {name!r}; it has {', '.join(expected)}")


def _profiled(
    kind: str, to: To, call: PreparedCall, session: ProfilerSession, begin: Callable[[PreparedCall], Future[Any]]
) -> Future[Any]:
    """Return a future that is done once the call is, and `session` has the callee's events."""
    name = remote_calls.event_of(kind, to, call.function).name
    # The events cannot travel with the result: it may be a reference, or the value of a future that the function
    # returned. So the callee keeps them under the token until a second call fetches them.
    token = secrets.token_hex(8)
    args = (token, session.options, call.function, *(call.args or ()))
    began = session.now()
    future = begin(PreparedCall(profile_and_run, args, call.kwargs, call.keeps, call.asked or call.function))
    complete: Future[Any] = CallFuture()

    def fetch(_: Any) -> None:
        try:
            report = current.agent().begin(target(to), PreparedCall(fetch_report, (token,)))
            report.add_done_callback(finish)
        except TelegradError:  # the callee has gone, and the call itself fails
            finish(None)

    def finish(report: Any) -> None:
        try:
            seen = report.wait() if report is not None else []
        except TelegradError:
            seen = []
        session.add_call(name, began, kind != "sync", seen)
        futures.complete(complete, future.value)

    # The thread that completes the future runs `fetch`, which only starts a call and does not wait for it.
    future.add_done_callback(fetch)
    return complete
