"""The future that an asynchronous call returns: a torch future that can also be interrupted and awaited.

Any asyncio event loop can await results that other threads set.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Generator
from contextvars import copy_context
from functools import partial
from math import inf
from time import perf_counter
from typing import Any, Protocol, TypeVar

import torch

from telegrad._core import checks, forks
from telegrad._core.calls.call_names import not_compiled
from telegrad._core.calls.unretrieved import UnretrievedError
from telegrad._core.forks import process
from telegrad._core.interrupts import SLEEP, raise_later, raised_by_handler
from telegrad._core.pickling.exceptions import ORIGINAL, fresh, without_frames
from telegrad._core.pickling.pickling import encode
from telegrad._core.pickling.remote_text import fold, remote_traceback_of
from telegrad.errors import CallCancelled, GroupError, UsageError

T = TypeVar("T")
S = TypeVar("S")

log = logging.getLogger("telegrad")

_CANCELLING: dict[type, type] = {  # replacements that asyncio recognises as cancellation
    kind: type(kind.__name__, (kind, asyncio.CancelledError), {"__module__": kind.__module__, ORIGINAL: kind})
    for kind in (CallCancelled, GroupError)
}


def run_on(loop: asyncio.AbstractEventLoop, callback: Callable[[], object]) -> None:
    """Schedule `callback` on the loop, from any thread. Do nothing if the loop is closed."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(callback)


def completion_of(awaited: Any) -> asyncio.Future[None]:
    """Return a future of the running loop that completes when `awaited` does."""
    loop = asyncio.get_running_loop()
    waiter: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not waiter.done():
            waiter.set_result(None)

    tell = lambda _: run_on(loop, wake)  # noqa: E731
    awaited.add_done_callback(tell)
    waiter.add_done_callback(lambda _: forget(awaited, tell))  # it may be cancelled
    return waiter


def _tells_of_cancelling(error: BaseException) -> bool:
    if isinstance(error, GroupError):
        return all(map(_tells_of_cancelling, error.errors.values()))
    # With a remote traceback, it is the call of another worker that was cancelled.
    return isinstance(error, CallCancelled) and not remote_traceback_of(error)


_devices: list[torch.device] = []  # that values of futures may use; per process, since a future knows no worker


def may_lie_on(device: torch.device) -> None:
    """Let values of new futures have tensors on that device. Waiting for such a future also waits for the device."""
    if device not in _devices:
        _devices.append(device)


class Outcome(Protocol):
    """Receives the result of a call: a future, or bookkeeping of a higher layer."""

    quick: bool  # no user code runs on completion, so the thread that reads the response completes it
    call: Any
    about: str  # description of the call if it failed
    begun: float  # and when it began, by `perf_counter`

    def set_result(self, result: Any) -> None: ...

    def set_exception(self, result: Any) -> None: ...


class Helper(Protocol):
    """A call for which a waiting thread can do the work."""

    def help(self) -> None:
        """Wait until the future is done."""

    def cancel(self) -> bool:
        """Cancel the call and notify the callee; return False if the call is over."""


DEEPEST = 16  # futures of a chain of `then` that are completed one within another


class _Chain(threading.local):
    """The completions on one thread: each callback completes the next future of its chain within that of the last."""

    def __init__(self) -> None:
        self.depth = 0
        self.later: deque[Callable[[], None]] = deque()  # those that would be too deep, and exceed the recursion limit


_chain = _Chain()


def _complete(act: Callable[[], None]) -> None:
    """Complete a future of `then`, at once or, deep in a chain, by the outermost completion of this thread."""
    depth, later = _chain.depth, _chain.later
    if depth >= DEEPEST:
        later.append(act)
        return
    _chain.depth = depth + 1
    try:
        act()
        while not depth and later:
            later.popleft()()
    finally:
        _chain.depth = depth


_OF_A_CALL = "the future of a call is completed by its call: use `then`, or a Future of your own"


class Future(torch.futures.Future[T]):
    """A `torch.futures.Future` whose `wait` may be interrupted by Ctrl-C, and that asyncio can await.

    A future that fails, and is dropped without a wait or a callback, leaves an error in the log.

    Args:
        devices: for a future of one's own: on which devices its value may lie.

    Example:
        >>> future = rpc.rpc_async("worker1", pow, (2, 5))
        >>> future.wait()
        32
        >>> import asyncio
        >>> async def ask():
        ...     return await rpc.rpc_async("worker1", pow, (2, 6))
        >>> asyncio.run(ask())
        64
    """

    # Slots, since a dictionary is one more object for the garbage collector to visit. Only `call` and `depth`, which a
    # forked child compares with its own depth, are always set. `about` describes the call, `heeded` means that failures
    # are handled elsewhere, and `follows` is the object to cancel if that is not the future's own call.
    __slots__ = ("about", "begun", "call", "depth", "failure", "follows", "heeded")

    quick = False
    about: str
    begun: float
    failure: UnretrievedError
    follows: Any
    heeded: bool

    def __init__(self, *, devices: Any = None) -> None:
        self.call: Helper | None = None  # set while the call is in flight
        self.depth: int = process.depth
        if devices is None:
            torch._C.Future.__init__(self, _devices)  # as torch's own constructor, without its check of each device
        else:
            super().__init__(devices=devices)

    def __repr__(self) -> str:
        if not self.done():
            if self.depth != process.depth:
                return "<Future of the process that this one was forked from: not done>"
            return f"<Future of {self.call!r}>" if self.call is not None else "<Future: not done>"
        failure = getattr(self, "failure", None)
        return "<Future: done>" if failure is None else f"<Future: {failure!r}>"

    @not_compiled
    def wait(self) -> T:
        """Wait for the value and return it.

        Raises:
            Exception: the error of the call, if it failed.
        """
        try:
            if not self.done():
                forks.check(self.depth)
                # Loaded once: the thread that completes the call clears it.
                call = self.call
                if call is not None:
                    call.help()  # the waiting thread reads the response itself, where it can
                else:
                    wait_for(self)
            value: T = _uncovered(super().wait())
        except BaseException as error:
            fold(error)
            raise
        return value

    def cancel(self) -> bool:
        """Cancel the call, with CallCancelled; return True if it was cancelled. Callbacks run before this returns.

        The callee is notified: a call that has not begun there is dropped, an `async def` function is cancelled, and so
        are the calls that this one made. Cancelling a future returned by `then` cancels the original call.
        """
        if not self.done():
            forks.check(self.depth)
        cause = getattr(self, "follows", None) or self.call
        return cause is not None and cause.cancel()

    def set_result(self, result: T) -> None:
        """Complete the future with a value. Where values may be on devices, torch finds its tensors by pickling it.

        Args:
            result: the value that waiting threads get.

        Raises:
            UsageError: this is the future of a call that is in flight, which completes it.
        """
        if self.call is not None:  # a call clears this before it completes its future
            raise UsageError(_OF_A_CALL)
        if _devices and not isinstance(result, torch.Tensor) and not _can_be_searched(result):
            result = _Covered(result)  # type: ignore[assignment]
        torch._C.Future.set_result(self, result)

    def set_exception(self, result: T) -> None:
        """Complete the future with an error; each wait raises a fresh copy of the error.

        The garbage collector cannot see the error inside torch's future, so frames in the traceback that refer to the
        future would never be collected. The traceback is therefore kept as text.

        Args:
            result: an exception.

        Raises:
            UsageError: this is the future of a call that is in flight, which completes it.
        """
        if self.call is not None:
            raise UsageError(_OF_A_CALL)
        assert isinstance(result, BaseException)
        failure = self.failure = UnretrievedError(
            getattr(self, "about", "the operation of a future"), result, getattr(self, "begun", 0.0)
        )
        # torch calls this function in each wait, with the value of the future. A failure is a value for torch; the
        # function raises it, and so marks it as retrieved.
        self._set_unwrap_func(lambda error: failure.raise_fresh(_uncovered(error)))
        self.set_result(without_frames(result))  # type: ignore[arg-type]
        if hasattr(self, "heeded"):  # checked last: a callback that is added after this finds the failure
            failure.seen = True

    def _another(self) -> Future[Any]:
        return type(self)()

    @not_compiled
    def then(self, callback: Callable[[torch.futures.Future[T]], S]) -> Future[S]:
        """Call a function when this future is done, and return a future of the function's result.

        Args:
            callback: a function that is called with this completed future.

        Returns:
            A future of the result of `callback`; it fails with the exception of `callback`.
        """
        if not callable(callback):
            raise TypeError(f"then(): incompatible function arguments. {callback!r} is not callable")
        child: Future[S] = self._another()
        if self.call is not None or getattr(self, "follows", None) is not None:
            child.follows = self

        def run(done: torch.futures.Future[T]) -> None:
            child.follows = None
            try:
                value = callback(done)
            except BaseException as error:
                forks.exit_if_user_code_ended()
                child.about = "a callback passed to `then`"
                _complete(partial(child.set_exception, error))  # type: ignore[arg-type]
                if raised_by_handler(error):
                    raise
            else:
                _complete(partial(child.set_result, value))

        self.add_done_callback(run)
        return child

    @not_compiled
    def add_done_callback(self, callback: Callable[[torch.futures.Future[T]], None]) -> None:
        """Add a function to be called once this is done, in the current context variables.

        Args:
            callback: a function of this future.
        """
        checks.function("callback", callback, "a function that takes the future")
        if getattr(callback, "__module__", None) == "asyncio.tasks":  # no other thread may complete its futures
            raise TypeError("asyncio.wait takes tasks, not futures of calls: give it asyncio.ensure_future(future)")
        if not self.done():
            forks.check(self.depth)
        self.heed()
        context = copy_context()

        def run(future: torch.futures.Future[T]) -> None:
            try:
                context.run(callback, future)
            except BaseException as error:
                forks.exit_if_user_code_ended()
                if not raise_later(error):  # torch would print it
                    fold(error)
                    log.error("telegrad: a callback passed to `add_done_callback` failed", exc_info=error)

        super().add_done_callback(run)

    def heed(self) -> None:
        """Declare that a failure of this future is handled elsewhere and needs no log message."""
        self.heeded = True
        if hasattr(self, "failure"):
            self.failure.seen = True

    def __await__(self) -> Generator[Any, None, T]:
        if not self.done():
            forks.check(self.depth)
            in_turn = getattr(self.call, "in_turn", None)
            waiter = completion_of(self)
            try:
                yield from waiter.__await__() if in_turn is None else in_turn.awaiting(waiter)
            except asyncio.CancelledError:
                self.cancel()
                raise
        try:
            return self.value()
        except BaseException as error:
            # As an `asyncio.CancelledError`, it cancels the task that awaits the call.
            if isinstance(error, (CallCancelled, GroupError)) and _tells_of_cancelling(error):
                error.__class__ = _CANCELLING.get(type(error), type(error))
            fold(error)
            raise

    @not_compiled
    def value(self) -> T:
        """Return the value of a future that is done."""
        if not self.done():
            forks.check(self.depth)
            raise UsageError("this future is not done: call wait(), which returns its value as soon as it is")
        value: T = _uncovered(super().wait())
        return value


def _can_be_searched(value: Any) -> bool:
    try:
        torch._jit_internal._extract_tensors(value)  # type: ignore[no-untyped-call]
    except Exception:  # most likely an object without a name
        return False
    return True


class _Covered:
    """Wraps a value that torch cannot pickle, and shows torch only its tensors."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (encode(self.value, True).tensors,)


def _uncovered(value: Any) -> Any:
    return value.value if type(value) is _Covered else value


class Signal:
    """An internal future: completes once, or fails."""

    __slots__ = ("_callbacks", "_error", "_happened", "_lock", "_value")

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards _callbacks and changes of _happened; _happened is read without it
        self._happened = False
        self._value: Any = None  # stored before _happened is set, as is
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[Any], None]] | tuple[()] = ()

    def done(self) -> bool:
        return self._happened

    def set_result(self, result: Any = None) -> None:
        # Callbacks run without the lock, since they may add callbacks or complete other signals. A callback that is
        # added meanwhile finds `_happened` and runs on the thread that adds it.
        self._value = result
        with self._lock:
            self._happened = True
            callbacks, self._callbacks = self._callbacks, ()
        for callback in callbacks:
            callback(self)

    def set_exception(self, error: BaseException) -> None:
        self._error = without_frames(error)
        self.set_result()

    @not_compiled
    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        with self._lock:
            if not self._happened:
                self._callbacks = callbacks = self._callbacks or []
                callbacks.append(callback)
                return
        callback(self)

    @not_compiled
    def wait(self) -> Any:
        """Return the value, or raise the error; the signal must be done."""
        if self._error is not None:
            raise fresh(self._error)
        return self._value


def complete(outcome: Any, make: Callable[..., object], *args: Any) -> None:
    """Complete a future, a signal or the like with the result of a function, or with its exception."""
    try:
        result = make(*args)
    except Exception as error:
        outcome.set_exception(error)
    else:
        outcome.set_result(result)


def forget(future: Any, callback: Callable[[Any], None]) -> None:
    """Remove a callback from a signal that may be waited for again and again; no other future can do so."""
    if isinstance(future, Signal) and not future.done():
        with future._lock:
            future._callbacks = [each for each in future._callbacks if each is not callback]


def wait_for(future: torch.futures.Future[Any] | Signal, timeout: float = -1) -> bool:
    """Wait until `future` is done or the timeout expires; return True if it is done. Signals interrupt the wait."""
    if not future.done():
        # A lock and not the future's own `wait`: torch waits in C++, where no signal handler runs before the future is
        # done.
        begun = perf_counter()  # also shown in stack dumps
        until = begun + timeout if timeout >= 0 else inf
        told = threading.Lock()
        told.acquire()
        tell = lambda _: told.release()  # noqa: E731
        future.add_done_callback(tell)
        while not told.acquire(timeout=max(0.0, min(until - perf_counter(), SLEEP))):
            if perf_counter() >= until:
                forget(future, tell)
                return False
    return True
