"""Gathers one object of each worker at all of them, by way of a leader. The caller has the remote calls made."""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from telegrad._core.atfork import renewed


class AllGatherStates:
    """One gathering on one worker; programs make them for gatherings of their own, too."""

    def __init__(self) -> None:
        self.gathered_objects: dict[str, Any] = {}  # at the leader what has come, at the others what it made known
        self.proceed_signal = threading.Event()  # set once these are all


class Round(AllGatherStates):
    """One of Telegrad's own gatherings."""

    def __init__(self) -> None:
        super().__init__()
        self.expected: set[str] | None = None  # known at the leader, once it has begun this round itself
        self.error: Exception | None = None


class Rounds:
    """All gatherings that this worker takes part in."""

    def __init__(self) -> None:
        self._lock = renewed(threading.Lock())  # guards what follows, and the rounds
        self._numbers: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
        self._rounds: dict[str, Round] = {}

    def begin(self, names: set[str]) -> tuple[str, Round]:
        """This worker's next round among these workers; equal on all that take part."""
        who = ",".join(sorted(names))
        with self._lock:
            key = f"{who}#{next(self._numbers[who])}"
            return key, self._rounds.setdefault(key, Round())

    def bring(self, key: str, name: str, value: Any, expected: set[str] | None) -> None:
        """An object has come to the leader; the leader's own tells who else is expected."""
        with self._lock:
            round_ = self._rounds.setdefault(key, Round())
            round_.gathered_objects[name] = value
            round_.expected = expected or round_.expected
            if round_.expected is not None and round_.expected <= round_.gathered_objects.keys():
                round_.proceed_signal.set()

    def missing(self, round_: Round) -> list[str]:
        with self._lock:
            return sorted((round_.expected or set()) - round_.gathered_objects.keys())

    def announce(self, key: str, objects: dict[str, Any], error: Exception | None) -> None:
        """The leader has made known what was gathered, or why that failed."""
        with self._lock:
            round_ = self._rounds.setdefault(key, Round())
            round_.gathered_objects, round_.error = objects, error
            round_.proceed_signal.set()

    def end(self, key: str) -> None:
        with self._lock:
            self._rounds.pop(key, None)
