"""Calls that have come and are not wanted any more: what is known of that here, and what follows from it.

A call is unwanted once its caller has cancelled it, was interrupted, gave up at its timeout, or has gone. What has not
begun does not begin then, what can be ended is ended, and the calls that were made for its sake are cancelled in turn.
A plain function goes on, and may look whether it is worth the while.

No lock is needed between who cancels and who goes on: each stores first and then looks. `cancelled` is set, then looked
at what there is to end; what there is to end is stored, then `cancelled` looked at.
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

from telegrad._core.atfork import in_child, renewed
from telegrad._core.calls import call_context
from telegrad.errors import CallCancelled

MUST_FINISH = "_telegrad_must_finish"  # of a function that is not to be cancelled; or what tells it from the arguments

FINISHING: set[CodeType] = set()  # of coroutines that are not to be cancelled

_lock = renewed(threading.Lock())  # guards that `Served.nested` is made once


class Nested(call_context.Described, Protocol):
    """A call of this worker."""

    done: bool
    parent: Served | None
    timeout: float

    def limit(self, timeout: float) -> None: ...

    def cancel(self, why: str = "") -> bool: ...


class Served:
    """A call that has come, as far as it may be cancelled."""

    # Set by who makes one, since they are many: not cancelled, nothing nested, nothing to stop.
    __slots__ = ("cancelled", "nested", "stop")

    cancelled: bool
    nested: set[Nested] | None  # calls that were made for its sake; no lock: each use is one operation of a set
    stop: Callable[[], Any] | None  # ends what runs, by asking it to

    @property
    def described(self) -> str:
        """Which call it is, in the midst of a sentence."""
        raise NotImplementedError

    def check_begins(self, finishes: bool) -> None:
        """Raise CallCancelled for a call that is cancelled and has not begun, unless it is one that `finishes`."""
        if not finishes:
            raise CallCancelled(f"{self.described} was cancelled before it began")

    def admit(self, call: Nested) -> None:
        """A call is about to begin for its sake: it has no more time than this one.

        Raises:
            CallCancelled: this one is not wanted any more.
            CallTimeout: it has no time left.
        """
        if self.cancelled:
            raise CallCancelled(f"{call.described} was not called: {self._reason}")
        if call_context.limits:
            call.limit(call_context.within(call.timeout, call))

    @property
    def _reason(self) -> str:
        return f"{self.described}, for which it was, is not wanted any more: it was cancelled, or its caller gave up"

    def hold(self, call: Nested) -> None:
        """A call was begun for its sake."""
        if self.nested is None:
            with _lock:
                if self.nested is None:
                    self.nested = set()
        call.parent = self
        self.nested.add(call)
        if call.done:
            self.nested.discard(call)
        elif self.cancelled:
            call.cancel(self._reason)

    def ended(self, call: Nested) -> None:
        """A call that was begun for its sake is over."""
        if self.nested is not None:
            self.nested.discard(call)

    def end(self) -> None:
        """It is cancelled: end what there is of it. By a thread that may run code of users."""
        stop, nested = self.stop, self.nested
        if stop is not None:
            stop()  # before what it waits for ends, since it shall not see that
        for call in nested.copy() if nested is not None else ():
            call.cancel(self._reason)


serving: ContextVar[Served | None] = ContextVar("telegrad_serving", default=None)


@in_child
def _serve_none() -> None:
    """The call that the forking thread serves is the parent's."""
    serving.set(None)


def cancelled() -> bool:
    """Whether the call that this code serves is not wanted any more; False where it serves none.

    For long functions, which look at it now and then. What is marked with `functions.must_finish` need not.

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
    """Whether a function is not to be cancelled."""
    mark = getattr(function, MUST_FINISH, False)
    return bool(mark(*args) if callable(mark) else mark)


F = TypeVar("F", bound=Callable[..., Any])


def finishing(function: F) -> F:
    """The function, to be run to its end in any case."""
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
    """Inside, this code serves no call that may be cancelled or run out of time."""
    call = serving.get()
    if call is None:
        with call_context.unlimited():
            yield
        return
    stop, call.stop = call.stop, None
    serving.set(None)
    try:
        with call_context.unlimited():
            yield
    finally:
        serving.set(call)
        call.stop = stop
        if stop is not None and call.cancelled:
            stop()
