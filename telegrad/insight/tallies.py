"""Counts of what a worker's layers tell, by few words: a listener for `instruments.add`.

What is counted by grows no further than MOST_FUNCTIONS and MOST_PEERS: each further name is "other".
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

from telegrad import instruments
from telegrad.insight.labels import Names, without_object
from telegrad.instruments import Event

MOST_FUNCTIONS = 100
MOST_PEERS = 256
MOST_OUTCOMES = 32
FINE = "ok"  # the outcome where nothing failed
BOUNDS = (50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 50e-3, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Durations:
    """How long things took."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS) + 1)  # up to each bound and above the one before, the last without a bound
        self.sum = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS, seconds)] += 1
        self.sum += seconds

    def buckets(self) -> list[tuple[str, float]]:
        """How many took at most so long."""
        total, found = 0, []
        for bound, count in zip((*map(str, BOUNDS), "+Inf"), self.counts, strict=True):
            total += count
            found.append((bound, float(total)))
        return found


class Tallies:
    """What has happened; each is under its labels."""

    def __init__(self) -> None:
        # Guards all below. A thread that holds it may be interrupted by a signal, whose handler may make calls.
        self.lock = threading.RLock()
        self.calls: Counter[tuple[str, ...]] = Counter()  # function, peer, outcome
        self.call_bytes: Counter[tuple[str, ...]] = Counter()  # function
        self.call_durations: defaultdict[str, Durations] = defaultdict(Durations)  # function
        self.served: Counter[tuple[str, ...]] = Counter()  # function, peer, outcome
        self.served_durations: defaultdict[str, Durations] = defaultdict(Durations)  # function
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
            instruments.CALLED: self._called,
            instruments.RAN: self._ran,
            instruments.CONNECTED: self._connected,
            instruments.LOST: self._lost,
            instruments.MADE: self._made,
            instruments.FREED: self._freed,
            instruments.PASSED: self._passed,
            instruments.STAGED: self._staged,
            instruments.STEPPED: self._stepped,
        }

    def __call__(self, event: Event) -> None:
        kind, begun, ended, *told = event
        count = self._count.get(kind)
        if count is not None:
            with self.lock:
                count(ended - begun, *told)

    def _called(self, lasted: float, peer: str, _: int, function: str, size: int, failure: str) -> None:
        function = self._function(function)
        self.calls[function, self._peers[peer], self._outcome(failure)] += 1
        self.call_durations[function].add(lasted)
        if size:
            self.call_bytes[(function,)] += size

    def _ran(self, lasted: float, caller: str, _: int, function: str, failure: str) -> None:
        function = self._function(function)
        self.served[function, self._peers[caller], self._outcome(failure)] += 1
        self.served_durations[function].add(lasted)

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

    def _function(self, name: str) -> str:
        return self._functions[without_object(name)]

    def _outcome(self, failure: str) -> str:
        return self._outcomes[failure] if failure else FINE
