"""Resolves an argument to a worker, by its name, its rank, or its `WorkerInfo`."""

from __future__ import annotations

import operator
from typing import Any

from telegrad._core import checks
from telegrad._core.membership.members import WorkerInfo
from telegrad._core.worker import current
from telegrad.errors import UnknownWorker

WHAT = "the name of a worker, its rank, or its WorkerInfo"


def target(to: Any, parameter: str = "to") -> str | int:
    """Return the name or the rank by which an agent finds a worker.

    Raises:
        InvalidArgument: it is none of the three.
        UnknownWorker: name and rank of a `WorkerInfo` are not those of one worker.
    """
    if type(to) is str:
        return to
    if isinstance(to, WorkerInfo):
        return _agreeing(to, parameter)
    return named(to, parameter)


def named(to: Any, parameter: str = "to") -> str | int:
    """As `target`, but ignore the rank of a `WorkerInfo`: the worker may return with another rank."""
    if isinstance(to, WorkerInfo):
        to = to.name
    if isinstance(to, str):
        return to if to else checks.raise_invalid(parameter, WHAT, to)
    if isinstance(to, bool) or not hasattr(type(to), "__index__") or hasattr(to, "ndim"):
        checks.raise_invalid(parameter, WHAT, to)
    return operator.index(to)


def several(workers: Any, parameter: str) -> list[str | int]:
    """Return the names and ranks of a list of workers."""
    if isinstance(workers, WorkerInfo):
        checks.raise_invalid(parameter, "a list of workers", workers)
    return [target(worker, parameter) for worker in checks.several(parameter, workers, "a list of workers")]


def _agreeing(info: WorkerInfo, parameter: str) -> str:
    name = info.name
    if not isinstance(name, str):
        checks.raise_invalid(parameter, WHAT, info)
    rank = current.agent().identify(name).id
    if rank != info.id:
        raise UnknownWorker(
            f"{parameter} is {checks.short_repr(info)}, but worker {checks.short_repr(name)} has rank {rank} "
            "in this group: get its new WorkerInfo from rpc.get_worker_info or rpc.workers"
        )
    return name
