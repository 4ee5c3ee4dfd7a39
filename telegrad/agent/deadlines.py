"""Which calls run out of time, and when: a table that costs two dictionary operations per call."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from math import inf
from typing import Any, Generic, TypeVar

from telegrad import checks

K = TypeVar("K", bound=Hashable)


KEPT = 16  # timeouts whose tables stay when they are empty: to make one again for each call takes longer
DEFAULT = -1.0  # a call's timeout: that of the options
_HINT = "; leave it out for the rpc_timeout of the options"


def limit_of(timeout: Any, default: float) -> float:
    """Return a timeout that a user gave, or the default where it was left out.

    Raises:
        InvalidArgument: it is no number of seconds.
    """
    if type(timeout) in (float, int) and timeout == DEFAULT:
        return default
    found: float = checks.seconds("timeout", timeout, hint=_HINT)
    return found


def check_timeout(timeout: Any) -> None:
    """Raise InvalidArgument for a timeout that no call could have; for what is given now and used later."""
    if timeout is not DEFAULT:
        limit_of(timeout, DEFAULT)


class Deadlines(Generic[K]):
    """Keys with a deadline each. Those of one timeout expire in the order they were added."""

    def __init__(self) -> None:
        self._by_timeout: dict[float, dict[K, float]] = {}

    def add(self, key: K, timeout: float, when: float) -> bool:
        """A key that is due at `when`, `timeout` after this moment; whether no other of its timeout is before it."""
        table = self._by_timeout.get(timeout)
        if table is None:
            table = self._by_timeout[timeout] = {}
        table[key] = when
        return len(table) == 1

    def remove(self, key: K, timeout: float) -> None:
        """Forget `key`, if it is still there."""
        table = self._by_timeout.get(timeout, {})
        table.pop(key, None)
        if not table and len(self._by_timeout) > KEPT:
            self._by_timeout.pop(timeout, None)

    def next(self) -> float:
        """When the first key expires; infinity where there is none."""
        return min((when for table in self._tables() for when in _first(table)), default=inf)

    def due(self, now: float) -> list[K]:
        """Take out the keys that have expired."""
        expired: list[K] = []
        for timeout, table in list(self._by_timeout.items()):
            while any(when <= now for when in _first(table)):
                expired.append(_pop_first(table))
            if not table:
                del self._by_timeout[timeout]
        return expired

    def _tables(self) -> list[dict[K, float]]:
        return list(self._by_timeout.values())


def _first(table: dict[K, float]) -> Iterator[float]:
    for when in table.values():
        yield when
        return


def _pop_first(table: dict[K, float]) -> K:
    key = next(iter(table))
    del table[key]
    return key
