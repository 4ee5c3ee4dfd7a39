"""Gather one object of each worker at all workers, through a leader. The caller does the remote calls."""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from telegrad._core.forks import renewed


class AllGatherStates:
    """One gathering on one worker. Programs create instances for their own gatherings, too."""

    def __init__(self) -> None:
        # At the leader the objects received so far, at the others the leader's result.
        self.gathered_objects: dict[str, Any] = {}
        self.proceed_signal = threading.Event()  # set when all objects are there


class Round(AllGatherStates):
    """A gathering of Telegrad's own functions."""

    def __init__(self) -> None:
        super().__init__()
        self.expected: set[str] | None = None  # set at the leader once it has begun this round itself
        self.error: Exception | None = None


class Rounds:
    """All gatherings in which this worker takes part."""

    def __init__(self) -> None:
        self._lock = renewed(threading.Lock())  # guards the next two, and the rounds
        self._numbers: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
        self._rounds: dict[str, Round] = {}

    def clear(self) -> None:
        with self._lock:
            self._numbers.clear()
            self._rounds.clear()

    def begin(self, names: set[str]) -> tuple[str, Round]:
        """Return the key and the round of this worker's next gathering with these workers. The key is equal on all of
        them."""
        who = ",".join(sorted(names))
        with self._lock:
            key = f"{who}#{next(self._numbers[who])}"
            return key, self._rounds.setdefault(key, Round())

    def bring(self, key: str, name: str, value: Any, expected: set[str] | None) -> None:
        """Store an object at the leader; the leader's own object comes with the names that are expected."""
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
        """Store the result, or the error, that the leader broadcast."""
        with self._lock:
            round_ = self._rounds.setdefault(key, Round())
            round_.gathered_objects, round_.error = objects, error
            round_.proceed_signal.set()

    def end(self, key: str) -> None:
        with self._lock:
            self._rounds.pop(key, None)
