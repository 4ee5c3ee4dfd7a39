"""One thing that several workers do at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from telegrad.agent.futures import Future
from telegrad.errors import WorkersFailed

T = TypeVar("T")


def together(calls: Mapping[str, Future[T]]) -> dict[str, T]:
    """Wait for all calls, each known by its worker's name; their values.

    Raises:
        WorkersFailed: more than one failed; where only one did, its own error is raised.
    """
    values: dict[str, T] = {}
    errors: dict[str, BaseException] = {}
    for worker, call in calls.items():
        try:
            values[worker] = call.wait()
        except Exception as error:
            errors[worker] = error
    if len(errors) == 1:
        raise next(iter(errors.values()))
    if errors:
        raise _summary(errors, len(calls))
    return values


def _summary(errors: dict[str, Any], asked: int) -> WorkersFailed:
    lines = [f"  {worker}: {type(error).__name__}: {error}" for worker, error in errors.items()]
    summary = WorkersFailed("\n".join([f"{len(errors)} of {asked} workers failed:", *lines]), errors)
    summary.__cause__ = next(iter(errors.values()))
    return summary
