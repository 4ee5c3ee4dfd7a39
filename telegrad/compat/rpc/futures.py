"""The futures of calls. Errors in their callbacks are converted like torch's."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.futures

from telegrad._core.calls import futures

T = TypeVar("T")
S = TypeVar("S")


_NO_SCHEMA = "received an invalid combination of arguments"


def translated(error: BaseException) -> BaseException:
    """Return the error of a call as torch reports it: a RuntimeError if torch's own code raised it."""
    if isinstance(error, TypeError) and _NO_SCHEMA in str(error):
        return RuntimeError(f"Overloaded torch operator invoked from Python failed to match any schema: {error}")
    if isinstance(error, torch.jit.Error) and not isinstance(error, RuntimeError):
        return RuntimeError(str(error))
    return error


class Future(futures.Future[T]):
    """A future of a call's value."""

    def set_exception(self, result: Any) -> None:
        super().set_exception(translated(result))  # type: ignore[arg-type]

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
    collected: Future[list[torch.futures.Future[T]]] = Future()
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
