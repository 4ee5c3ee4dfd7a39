"""Operations of several workers at once."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from telegrad._core.calls.futures import Future
from telegrad._core.interrupts import raised_by_handler
from telegrad._core.membership.members import listed
from telegrad._core.progress import Wait
from telegrad._core.rpc.stalls import StallWatch
from telegrad._core.worker import current
from telegrad.errors import WorkersFailed

S = TypeVar("S")
T = TypeVar("T")


def call_all(
    shares: Mapping[str, S],
    call: Callable[[str, S], Future[T]],
    doing: str = "",
    sizes: Mapping[str, int] | None = None,
    limit: float = 0,
) -> dict[str, T]:
    """Call each worker with its share, all at once, and wait for all; return their values.

    If `doing` is given, such as "checkpoint.save: writing", log the progress, with bytes if `sizes` has those of each
    worker. `limit` is the limit of one step in seconds, 0 for none: see `StallWatch`.

    Raises:
        WorkersFailed: more than one failed; where only one did, its own error is raised.
    """
    calls: dict[str, Future[T]] = {}
    values: dict[str, T] = {}
    errors: dict[str, BaseException] = {}
    for worker, share in shares.items():
        try:
            calls[worker] = call(worker, share)
        except Exception as error:  # still call the others, as if this one had failed later
            if raised_by_handler(error):
                raise
            errors[worker] = error
    watch = StallWatch(calls, limit)
    if doing or limit:
        _follow(doing, calls, sizes or {}, watch)
    for worker, future in calls.items():
        try:
            values[worker] = future.wait()
        except Exception as error:
            if raised_by_handler(error):
                raise
            errors[worker] = watch.errors.get(worker, error)
    if len(errors) == 1:
        raise next(iter(errors.values()))
    if errors:
        failed = WorkersFailed(summary(f"{len(errors)} of {len(shares)} workers failed:", errors), errors)
        raise failed from next(iter(errors.values()))
    return values


def _follow(doing: str, calls: Mapping[str, Future[Any]], sizes: Mapping[str, int], watch: StallWatch) -> None:
    """Wait until all calls are done or make no progress; log the unfinished workers if `doing` is given."""
    done = threading.Semaphore(0)
    for future in calls.values():
        future.add_done_callback(lambda _: done.release())

    def missing() -> list[str]:
        return [worker for worker, future in calls.items() if not future.done()]

    def text() -> str:
        late = missing()
        written = _written(sizes, late)
        names = listed([repr(worker) for worker in late])
        return f"{doing}: {len(calls) - len(late)} of {len(calls)} workers are done{written}; waiting for {names}"

    with contextlib.ExitStack() as stack:
        looks: list[Wait | StallWatch] = [watch]
        if doing:
            agent = current.agent()
            looks.append(stack.enter_context(Wait(doing.partition(":")[0], text, missing, worker=agent.name)))
            stack.enter_context(agent.waiting())
        for _ in calls:
            while not done.acquire(timeout=min(each.left for each in looks)):
                for each in looks:
                    each.look()


def _written(sizes: Mapping[str, int], late: list[str]) -> str:
    total = sum(sizes.values())
    if not total:
        return ""
    unit, name = (1e9, "GB") if total >= 1e9 else (1e6, "MB")
    return f", with {(total - sum(sizes.get(worker, 0) for worker in late)) / unit:.1f} of {total / unit:.1f} {name}"


def summary(first_line: str, errors: Mapping[Any, BaseException]) -> str:
    """Return the text of an error of several workers, or of several items with these numbers."""
    lines = [first_line]
    for key, error in errors.items():
        said = str(error).partition("\n")[0]
        lines.append(f"  {key if isinstance(key, str) else f'item {key}'}: {type(error).__name__}: {said}")
    return "\n".join(lines)
