"""Calls whose values stay at the callee, as the caller sees them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from telegrad._core.calls.futures import Future
from telegrad._core.calls.unretrieved import UnretrievedError
from telegrad._core.pickling.exceptions import fresh
from telegrad._core.references.control_messages import Id
from telegrad.errors import CallCancelled, CallTimeout, PeerError


class Creation:
    """A call of this worker that creates the value of a reference; the outcome of that call."""

    __slots__ = ("_told", "about", "call", "cut_off", "done", "error", "fork", "future", "owner", "ref", "used")

    quick = True

    def __init__(self, ref: Id, fork: Id, owner: str, told: Callable[[Creation], None]) -> None:
        self.ref = ref
        self.fork = fork
        self.owner = owner
        self.call: Any = None
        self.error: BaseException | None = None
        self.cut_off = False  # it ended without an answer, which may still come
        self.done = False
        self.used = False  # the program has requested the value, or learns of a failure otherwise
        self.about = ""
        self.future: Future[None] | None = None  # for the user, if one was requested
        self._told = told

    def set_result(self, result: Any) -> None:
        self._told(self)

    def set_exception(self, result: BaseException) -> None:
        self.error = fresh(result)
        self.cut_off = isinstance(result, CallCancelled | CallTimeout)
        self._told(self)

    def cancel(self) -> bool:
        """Cancel the call; return False if it is over."""
        call = self.call
        return call is not None and bool(call.cancel())

    def dropped(self) -> None:
        """Handle the end of the last handle: log an error that the program has not seen."""
        if self.error is not None and not self.used:
            UnretrievedError(self.about, self.error)


def tell_user(creation: Creation) -> None:
    future = creation.future
    assert future is not None
    future.follows = None
    if creation.error is not None:
        future.set_exception(creation.error)  # type: ignore[arg-type]
    else:
        future.set_result(None)


def failed(error: BaseException) -> BaseException:
    """Return the error for a value that was not created: the exception of the function, or the failure of the call."""
    again = fresh(error)
    if isinstance(again, (CallCancelled, CallTimeout, PeerError)):
        again.args = (f"RRef creation failed, the value may not exist: {error}",)
    return again
