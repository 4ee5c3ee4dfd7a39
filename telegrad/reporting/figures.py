"""Figures of workers: their rates, how urgent their troubles are, and the series of the last ten minutes.

No I/O: times are part of the states and points.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from telegrad.reporting import WorkerState

LONGEST = 600.0  # seconds that are kept
LATEST = 60.0  # seconds of which each look is kept
PART = 10.0  # seconds of a point before that
LONG = 10.0  # seconds after which an outgoing call is a sign of trouble
MOST = 600  # points of the latest time: looks may be more frequent than those of the dashboard

# A time, calls served, calls failed, bytes sent and received (all per second), resident bytes, processors used.
TIME, CALLS, FAILED, BYTES, MEMORY, PROCESSOR = range(6)
Point = list[float]


class Rate(NamedTuple):
    """The rates of a worker, per second."""

    calls: float  # calls served for other workers
    sent: float  # bytes
    received: float
    processor: float | None = None  # processors in use; None: unknown


def rate_between(old: WorkerState, new: WorkerState, seconds: float) -> Rate:
    """Return the rates between two states of a process; those of a counter that started again are 0."""
    known = "processor" in new and "processor" in old
    return Rate(
        max(0, new["calls_done"] - old["calls_done"]) / seconds,
        max(0, sum(new["bytes_out"].values()) - sum(old["bytes_out"].values())) / seconds,
        max(0, sum(new["bytes_in"].values()) - sum(old["bytes_in"].values())) / seconds,
        (new["processor"] - old["processor"]) / seconds if known else None,
    )


def trouble(account: WorkerState) -> float:
    """Return how urgent a worker is: 0 if it has no trouble, at most 1e11."""
    if account["missing"]:
        return 1e11  # it waits for others to join or leave
    if account["busy"] >= account["slots"] > 0:
        return 1e10
    oldest = oldest_call(account)
    return oldest if oldest >= LONG else 0.0


def oldest_call(account: WorkerState) -> float:
    """Return the age of the oldest outgoing call; 0 without calls."""
    return max((call["age"] for call in account["calls_out"]), default=0.0)


class Series:
    """Ten minutes of a worker's figures: each look of the last minute, and one point for each ten seconds before."""

    def __init__(self) -> None:
        self._latest: deque[Point] = deque(maxlen=MOST)
        self._before: deque[Point] = deque(maxlen=int((LONGEST - LATEST) / PART))

    def add(self, point: Point) -> None:
        """Add the newest point, and merge points that are older than LATEST."""
        self._latest.append(point)
        # Whole parts of the clock are merged at a time, so that the points of different workers have the same limits.
        # The mean is taken of rates; of memory the largest value, since a mean would hide a short peak.
        while (part := self._latest[0][TIME] // PART) < (point[TIME] - LATEST) // PART:
            merged: list[Point] = []
            while self._latest[0][TIME] // PART == part:
                merged.append(self._latest.popleft())
            means = [sum(values) / len(merged) for values in zip(*merged, strict=True)]
            means[TIME], means[MEMORY] = merged[-1][TIME], max(each[MEMORY] for each in merged)
            self._before.append(means)

    @property
    def newest(self) -> Point:
        return self._latest[-1]

    def after(self, time: float) -> list[Point]:
        """Return the points after a time. Merged points have the time of their last one, so none comes again."""
        since = max(time, self.newest[TIME] - LONGEST)
        return [each for each in (*self._before, *self._latest) if each[TIME] > since]
