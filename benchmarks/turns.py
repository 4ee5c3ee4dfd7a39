"""All libraries take turns in each round, so that changes in the machine's speed affect all of them.

If a library crashes or hangs in a row, its group is killed and the next row starts a new one.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Protocol

from benchmarks.groups import HOSTS, Group
from benchmarks.limits import LIMITS
from benchmarks.measuring import LIBRARIES, PIPELINING, TELEGRAD, TORCH, Row
from benchmarks.processes import Failed
from benchmarks.results import Result
from benchmarks.targets import OfLimit
from tests.hosts import why_not

ROUNDS, QUICK_ROUNDS = 5, 2


class Side(Protocol):
    """One of the sides that take turns. Its processes start when first needed, and again after a failure."""

    def measure(self, row: Row) -> float: ...

    def close(self) -> None:
        """Let the processes leave."""

    def kill(self) -> None: ...


class Workers:
    """The workers of one library, for one group size and transport."""

    def __init__(self, library: str, way: str, workers: int, threads: int | None = None) -> None:
        self._library, self._way, self._workers, self._threads = library, way, workers, threads
        self._group: Group | None = None

    def measure(self, row: Row) -> float:
        if row.alone:
            return row.measure(self._library, self._way)
        if self._group is None:
            self._group = Group(self._library, self._way, self._workers, self._threads)
        try:
            return self._group.measure(row.measure, row.patience)
        except BaseException:
            self._group.kill()
            self._group = None
            raise

    def close(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None

    def kill(self) -> None:
        if self._group is not None:
            self._group.kill()


def take_turns(
    row: Row, sides: Sequence[Side], rounds: int, after_each: Callable[[], None] = lambda: None
) -> tuple[list[list[float]], list[str]]:
    """Return the figures of each side, and the reason for missing figures."""
    figures: list[list[float]] = [[] for _ in sides]
    failures = ["" for _ in sides]
    for _ in range(min(rounds, row.rounds)):
        for index, side in enumerate(sides):
            if not failures[index]:
                try:
                    figures[index].append(side.measure(row))
                except Failed as failed:
                    failures[index] = str(failed)
        after_each()
    return figures, failures


@contextlib.contextmanager
def closed(sides: Sequence[Side]) -> Iterator[None]:
    """Close all sides at the end, or kill them after an error."""
    try:
        yield
        for side in sides:
            side.close()
    finally:
        for side in sides:
            side.kill()


def measure_limits(names: Iterable[str], into: dict[str, list[float]]) -> None:
    for name in names:
        into.setdefault(name, []).append(LIMITS[name].measure())


def take_all(rows: list[Row], rounds: int, limits: dict[str, list[float]]) -> list[Result]:
    """Measure all rows, grouped by workers, and with each row the limits of the host that its targets use."""
    results = []
    for way, workers, threads in dict.fromkeys((way, row.workers, row.threads) for row in rows for way in row.ways):
        if way == HOSTS and (why := why_not()):
            print(f"no rows between hosts: {why}", file=sys.stderr)
            continue
        sides = {library: Workers(library, way, workers, threads) for library in LIBRARIES}
        with closed(list(sides.values())):
            for row in rows:
                if way in row.ways and (row.workers, row.threads) == (workers, threads):
                    print(f"\r{way}: {row.name:45}", end="", file=sys.stderr, flush=True)
                    needed = [each.limit for each in row.targets if isinstance(each, OfLimit) and each.limit in LIMITS]
                    own = [sides[library] for library in row.libraries]
                    found = take_turns(row, own, rounds, partial(measure_limits, needed, limits))
                    results.append(_result(row, way, *found))
    print(file=sys.stderr)
    return results


def _result(row: Row, way: str, figures: list[list[float]], failures: list[str]) -> Result:
    of = dict(zip(row.libraries, figures, strict=True))
    why = dict(zip(row.libraries, failures, strict=True))
    return Result(
        row.name,
        way,
        row.unit,
        row.higher_is_better,
        ours=of.get(TELEGRAD, []),
        theirs=of.get(TORCH, []),
        targets=row.targets,
        ours_failed=why.get(TELEGRAD, ""),
        theirs_failed=why.get(TORCH, ""),
        pipelining=of.get(PIPELINING, []),
        pipelining_failed=why.get(PIPELINING, ""),
    )
