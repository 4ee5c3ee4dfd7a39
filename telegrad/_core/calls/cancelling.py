"""Cancelling calls that this worker serves.

A call is cancelled if its caller cancels it, is interrupted, times out, or leaves the group. A call that has not begun
is then dropped, a running call is stopped if that is possible, and the nested calls that it made are cancelled. A plain
function continues, and can check `cancelled()`.

The cancelling thread and the serving thread need no lock: each stores first and then looks. The former sets `cancelled`
and then looks for work to stop; the latter stores its work and then checks `cancelled`.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from inspect import iscoroutinefunction
from types import CodeType
from typing import Any, Protocol, TypeVar

from telegrad._core.calls import call_context
from telegrad._core.calls.call_context import seen
from telegrad._core.forks import in_child, renewed
from telegrad.errors import CallCancelled

MUST_FINISH = "_telegrad_must_finish"  # of functions that must not be cancelled: True, or a test of the arguments

FINISHING: set[CodeType] = set()  # code of coroutines that must not be cancelled

_lock = renewed(threading.Lock())  # guards the creation of `Served.nested`


class Nested(Protocol):
    """A call that this worker makes."""

    done: bool
    parent: Served | None
    timeout: float

    def limit(self, timeout: float) -> None: ...

    def cancel(self, why: str = "") -> bool: ...

    @property
    def described(self) -> str: ...


class Served:
    """A call that this worker serves; the part that concerns cancelling."""

    # The creator sets these fields without an `__init__`, for speed: calls are many. Initially False, None and None.
    __slots__ = ("cancelled", "nested", "stop")

    cancelled: bool
    nested: set[Nested] | None  # calls made for this one; no lock: each use is one set operation
    stop: Callable[[], Any] | None  # asks the running function to stop

    @property
    def described(self) -> str:
        """A description of the call for the middle of a sentence."""
        raise NotImplementedError

    def check_begins(self, finishes: bool) -> None:
        """Raise CallCancelled for a call that was cancelled before it began, unless it must finish."""
        if not finishes:
            raise CallCancelled(f"{self.described} was cancelled before it began")

    def admit(self, call: Nested) -> None:
        """Limit the timeout of a nested call that is about to begin to the time left of this call; raise CallTimeout if
        there is none, or CallCancelled if this call was cancelled."""
        if self.cancelled:
            raise CallCancelled(f"{call.described} was not called: {self._reason}")
        if seen.deadline:
            call.limit(call_context.remaining_timeout(call.timeout, call))

    @property
    def _reason(self) -> str:
        return f"it belongs to {self.described}, which was cancelled or whose caller gave up"

    def hold(self, call: Nested) -> None:
        """Register a nested call that has begun."""
        if self.nested is None:
            with _lock:
                if self.nested is None:
                    self.nested = set()
        call.parent = self
        # Store, then look, on both sides. A thread that ends the call sets `done` and then removes it from here: one of
        # the two removes it. A thread that cancels this call sets `cancelled` and then goes through the set: one of the
        # two cancels it.
        self.nested.add(call)
        if call.done:
            self.nested.discard(call)
        elif self.cancelled:
            call.cancel(self._reason)

    def ended(self, call: Nested) -> None:
        if self.nested is not None:
            self.nested.discard(call)

    def end(self) -> None:
        """Stop a cancelled call and its nested calls. Call this on a thread that may run user code."""
        stop, nested = self.stop, self.nested
        if stop is not None:
            stop()  # before its nested calls end: the function must not see their errors
        for call in nested.copy() if nested is not None else ():
            call.cancel(self._reason)


serving: ContextVar[Served | None] = ContextVar("telegrad_serving", default=None)


in_child(lambda: serving.set(None))  # the call that the forking thread serves belongs to the parent


def cancelled() -> bool:
    """Return True if the call that this code serves was cancelled; False if the code serves none.

    Long functions can check this periodically. Functions marked with `functions.must_finish` need not.

    Example:
        >>> def search(steps):
        ...     for step in range(steps):
        ...         if rpc.cancelled():
        ...             return "given up"
        ...     return "done"
        >>> rpc.rpc_sync("worker1", search, (5,))
        'done'
    """
    call = serving.get()
    return call is not None and call.cancelled


def finishes(function: Any, args: Any) -> bool:
    mark = getattr(function, MUST_FINISH, False)
    return bool(mark(*args) if callable(mark) else mark)


F = TypeVar("F", bound=Callable[..., Any])


def finishing(function: F) -> F:
    """Return a wrapper of the function that always runs to its end."""
    if iscoroutinefunction(function):

        @functools.wraps(function)
        async def marked(*args: Any, **kwargs: Any) -> Any:
            with _apart():
                return await function(*args, **kwargs)

        FINISHING.add(marked.__code__)  # type: ignore[attr-defined]
    else:

        @functools.wraps(function)
        def marked(*args: Any, **kwargs: Any) -> Any:
            with _apart():
                return function(*args, **kwargs)

    setattr(marked, MUST_FINISH, True)
    return marked  # type: ignore[return-value]


@contextmanager
def _apart() -> Iterator[None]:
    """Run the block as if it served no call: without cancellation or deadline."""
    # Without `stop`, a cancellation that comes during the block finds nothing to stop. It is made up for after the
    # block.
    call, stop = serving.get(), None
    if call is not None:
        stop, call.stop = call.stop, None
        serving.set(None)
    try:
        with call_context.unlimited():
            yield
    finally:
        if call is not None:
            serving.set(call)
            call.stop = stop
            if stop is not None and call.cancelled:
                stop()
