"""The futures of calls, whose callbacks fail as the reference's do."""

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
    """The error of a call as the reference has it: what torch's own code raised is a RuntimeError."""
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
        """As ever, but what `callback` raises becomes a RuntimeError that tells of it."""
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
    """A future of all these, done when the last of them is, or the first has failed: as the reference's calls do."""
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
    """The values of all these; raises as soon as one has failed."""
    return [future.wait() for future in collect_all(futures).wait()]
