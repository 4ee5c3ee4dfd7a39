"""Awaiting results that other threads set, on any asyncio event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from telegrad._core.pickling.exceptions import ORIGINAL
from telegrad._core.pickling.remote_text import remote_traceback_of
from telegrad.errors import CallCancelled, GroupError

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

    awaited.add_done_callback(lambda _: run_on(loop, wake))
    return waiter


def check_knows_threads(callback: Callable[..., Any]) -> None:
    """Raise TypeError if `callback` comes from `asyncio.wait`, whose futures no other thread may complete."""
    if getattr(callback, "__module__", None) == "asyncio.tasks":
        raise TypeError("asyncio.wait takes tasks, not futures of calls: give it asyncio.ensure_future(future)")


def make_known_to_asyncio(error: BaseException) -> None:
    """Turn a cancellation error into an `asyncio.CancelledError`, which cancels the task that awaits the call."""
    if _tells_of_cancelling(error):
        error.__class__ = _CANCELLING.get(type(error), type(error))


def _tells_of_cancelling(error: BaseException) -> bool:
    if isinstance(error, GroupError):
        return all(map(_tells_of_cancelling, error.errors.values()))
    return isinstance(error, CallCancelled) and not remote_traceback_of(
        error
    )  # otherwise another worker's call was cancelled
