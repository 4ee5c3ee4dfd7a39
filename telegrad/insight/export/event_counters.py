"""Counts of events by a few labels: a listener for `events.add` (`telegrad.ext.events`).

Each label has at most MOST different names: further names become "other".
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate
from operator import itemgetter
from typing import Any

from telegrad.ext.events import BACKWARD_PASS, CALLED, CONNECTED, FREED, LOST, MADE, RAN, STAGED, STEPPED, Event
from telegrad.ext.processes import renewed

OTHER = "other"
OK = "ok"  # the outcome of a successful event
MOST = {"function": 100, "peer": 256, "outcome": 32, "optimizer": 100}
MOST_FOUND = 10_000
BOUNDS = (50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 50e-3, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)

# By kind of event: its labels, and the getter of its kind and of their values.
KINDS: dict[str, tuple[tuple[str, ...], Any]] = {
    CALLED: (("function", "peer", "outcome"), itemgetter(0, 5, 3, 7)),
    RAN: (("function", "peer", "outcome"), itemgetter(0, 5, 3, 6)),
    CONNECTED: (("how",), itemgetter(0, 4)),
    LOST: (("peer",), itemgetter(0, 3)),
    MADE: (("peer",), itemgetter(0, 3)),
    FREED: ((), itemgetter(slice(0, 1))),
    BACKWARD_PASS: (("outcome",), itemgetter(0, 5)),
    STAGED: (("stage", "action"), itemgetter(0, 5, 4)),
    STEPPED: (("optimizer",), itemgetter(0, 4)),
}


class Histogram:
    """The durations and sizes of events."""

    __slots__ = ("counts", "size", "sum")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS) + 1)  # up to each bound and above the previous one; the last has no bound
        self.sum = 0.0
        self.size = 0

    @property
    def count(self) -> int:
        return sum(self.counts)

    def add(self, seconds: float, size: int = 0) -> None:
        self.counts[bisect_left(BOUNDS, seconds)] += 1
        self.sum += seconds
        self.size += size

    def join(self, other: Histogram) -> None:
        self.counts = [mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)]
        self.sum += other.sum
        self.size += other.size

    def buckets(self) -> list[tuple[str, float]]:
        return list(zip((*map(str, BOUNDS), "+Inf"), map(float, accumulate(self.counts)), strict=True))


class EventCounters:
    """Histograms of events, by kind and labels."""

    def __init__(self) -> None:
        # Guards all below. Reentrant: a signal handler that makes calls may interrupt a thread that holds it.
        self.lock = renewed(threading.RLock())
        self.events: dict[str, defaultdict[tuple[str, ...], Histogram]] = {
            kind: defaultdict(Histogram) for kind in KINDS
        }
        # A cache of the same histograms, by the raw values of events.
        self._found: dict[tuple[Any, ...], Histogram] = {}
        self._known: defaultdict[str, set[str]] = defaultdict(set)  # by label, the names that are not "other"

    def __call__(self, event: Event) -> None:
        kind = event[0]
        if (labels := KINDS.get(kind)) is not None:
            key = labels[1](event)
            with self.lock:
                found = self._found.get(key) or self._find(key)
                found.add(event[2] - event[1], event[6] if kind == CALLED else 0)

    def by(self, kind: str, names: Sequence[str]) -> dict[tuple[str, ...], Histogram]:
        """Merge the histograms of a kind that have the same values of some labels."""
        places = [KINDS[kind][0].index(name) for name in names]
        found: defaultdict[tuple[str, ...], Histogram] = defaultdict(Histogram)
        for labels, each in self.events[kind].items():
            found[tuple(labels[place] for place in places)].join(each)
        return found

    def _find(self, key: tuple[Any, ...]) -> Histogram:
        if len(self._found) >= MOST_FOUND:
            self._found.clear()
        kind, *values = key
        labels = tuple(map(self._label, KINDS[kind][0], values))
        return self._found.setdefault(key, self.events[kind][labels])

    def _label(self, name: str, value: Any) -> str:
        if value == "":
            return OK
        text, known = function_label(str(value)), self._known[name]
        if text not in known:
            if name in MOST and len(known) >= MOST[name]:
                return OTHER
            known.add(text)
        return text


def function_label(name: str) -> str:
    """Return the name of a function without its object: "to_here" of "to_here() of <RRef 1.2 on 'worker1'>"."""
    return name.partition("() of ")[0]
