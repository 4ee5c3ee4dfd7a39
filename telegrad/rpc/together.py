"""One thing that several workers do at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from telegrad.agent.futures import Future
from telegrad.errors import WorkersFailed

S = TypeVar("S")
T = TypeVar("T")


def together(shares: Mapping[str, S], call: Callable[[str, S], Future[T]]) -> dict[str, T]:
    """Call each worker with its share, all at once, and wait for all; their values.

    Raises:
        WorkersFailed: more than one failed; where only one did, its own error is raised.
    """
    calls: dict[str, Future[T]] = {}
    values: dict[str, T] = {}
    errors: dict[str, BaseException] = {}
    for worker, share in shares.items():
        try:
            calls[worker] = call(worker, share)
        except Exception as error:  # the others shall be called all the same, as if this one had failed later
            errors[worker] = error
    for worker, future in calls.items():
        try:
            values[worker] = future.wait()
        except Exception as error:
            errors[worker] = error
    if len(errors) == 1:
        raise next(iter(errors.values()))
    if errors:
        raise _summary(errors, len(shares))
    return values


def _summary(errors: dict[str, Any], asked: int) -> WorkersFailed:
    first_lines = ((worker, type(error).__name__, str(error).partition("\n")[0]) for worker, error in errors.items())
    lines = [f"  {worker}: {kind}: {said}" for worker, kind, said in first_lines]
    summary = WorkersFailed("\n".join([f"{len(errors)} of {asked} workers failed:", *lines]), errors)
    summary.__cause__ = next(iter(errors.values()))
    return summary
