"""Counts of what a worker's layers tell, by few words: a listener for `instruments.add`.

What is counted by grows no further than MOST_FUNCTIONS and MOST_PEERS: each further name is "other".
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import Any

from telegrad import instruments
from telegrad.atfork import renewed
from telegrad.insight.labels import Names, without_object
from telegrad.instruments import Event

MOST_FUNCTIONS = 100
MOST_PEERS = 256
MOST_OUTCOMES = 32
MOST_FOUND = 10_000
FINE = "ok"  # the outcome where nothing failed
BOUNDS = (50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 50e-3, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Durations:
    """How long things took, and how many bytes they had."""

    __slots__ = ("counts", "size", "sum")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS) + 1)  # up to each bound and above the one before, the last without a bound
        self.sum = 0.0
        self.size = 0

    @property
    def count(self) -> int:
        return sum(self.counts)

    def add(self, seconds: float, size: int = 0) -> None:
        self.counts[bisect_left(BOUNDS, seconds)] += 1
        self.sum += seconds
        self.size += size

    def join(self, other: Durations) -> None:
        """Those of the other are of the same kind."""
        self.counts = [mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)]
        self.sum += other.sum
        self.size += other.size

    def buckets(self) -> list[tuple[str, float]]:
        """How many took at most so long."""
        return list(zip((*map(str, BOUNDS), "+Inf"), map(float, accumulate(self.counts)), strict=True))


def by_function(calls: Mapping[tuple[str, ...], Durations]) -> dict[str, Durations]:
    """Those of each function, which is the first label."""
    found: defaultdict[str, Durations] = defaultdict(Durations)
    for (function, *_), each in calls.items():
        found[function].join(each)
    return found


class Tallies:
    """What has happened; each is under its labels."""

    def __init__(self) -> None:
        # Guards all below. A thread that holds it may be interrupted by a signal, whose handler may make calls.
        self.lock = renewed(threading.RLock())
        self.calls: defaultdict[tuple[str, ...], Durations] = defaultdict(Durations)  # function, peer, outcome
        self.served: defaultdict[tuple[str, ...], Durations] = defaultdict(Durations)  # the same
        self._found: dict[tuple[str, ...], Durations] = {}  # those of either, by what the events say
        self.connected: Counter[tuple[str, ...]] = Counter()  # how
        self.lost: Counter[tuple[str, ...]] = Counter()  # peer
        self.made: Counter[tuple[str, ...]] = Counter()  # peer, of references
        self.freed: Counter[tuple[str, ...]] = Counter()  # all under ()
        self.passes: Counter[tuple[str, ...]] = Counter()  # outcome
        self.pass_durations: defaultdict[str, Durations] = defaultdict(Durations)  # all under ""
        self.stage_actions: Counter[tuple[str, ...]] = Counter()  # stage, action
        self.stage_seconds: Counter[tuple[str, ...]] = Counter()  # the same
        self.step_durations: defaultdict[str, Durations] = defaultdict(Durations)  # optimizer
        self._functions = Names(MOST_FUNCTIONS)
        self._peers = Names(MOST_PEERS)
        self._outcomes = Names(MOST_OUTCOMES)
        self._count: dict[str, Callable[..., None]] = {
            instruments.CONNECTED: self._connected,
            instruments.LOST: self._lost,
            instruments.MADE: self._made,
            instruments.FREED: self._freed,
            instruments.PASSED: self._passed,
            instruments.STAGED: self._staged,
            instruments.STEPPED: self._stepped,
        }

    def __call__(self, event: Event) -> None:
        kind = event[0]
        if kind == instruments.CALLED:
            _, begun, ended, peer, _, function, size, failure = event
        elif kind == instruments.RAN:
            _, begun, ended, peer, _, function, failure = event
            size = 0
        else:
            self._tell(*event)
            return
        key = kind, function, peer, failure
        with self.lock:
            durations = self._found.get(key) or self._find(key)
            durations.add(ended - begun, size)

    def _tell(self, kind: str, begun: float, ended: float, *told: Any) -> None:
        count = self._count.get(kind)
        if count is not None:
            with self.lock:
                count(ended - begun, *told)

    def _find(self, key: tuple[str, str, str, str]) -> Durations:
        """Where calls are counted of which such is said."""
        kind, function, peer, failure = key
        labels = self._functions[without_object(function)], self._peers[peer], self._outcome(failure)
        found = (self.calls if kind == instruments.CALLED else self.served)[labels]
        if len(self._found) >= MOST_FOUND:
            self._found.clear()
        self._found[key] = found
        return found

    def _connected(self, _: float, __: str, how: str) -> None:
        self.connected[(how,)] += 1

    def _lost(self, _: float, peer: str, __: str) -> None:
        self.lost[(self._peers[peer],)] += 1

    def _made(self, _: float, owner: str, __: Any) -> None:
        self.made[(self._peers[owner],)] += 1

    def _freed(self, _: float, *__: Any) -> None:
        self.freed[()] += 1

    def _passed(self, lasted: float, _: int, __: int, failure: str) -> None:
        self.passes[(self._outcome(failure),)] += 1
        self.pass_durations[""].add(lasted)

    def _staged(self, lasted: float, _: Any, action: Any, stage: int, __: int) -> None:
        self.stage_actions[str(stage), str(action)] += 1
        self.stage_seconds[str(stage), str(action)] += lasted  # type: ignore[assignment]  # a sum of seconds

    def _stepped(self, lasted: float, _: int, optimizer: str) -> None:
        self.step_durations[self._functions[optimizer]].add(lasted)

    def _outcome(self, failure: str) -> str:
        return self._outcomes[failure] if failure else FINE
