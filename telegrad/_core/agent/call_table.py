"""The calls in flight to one worker: their number, size, and deadlines."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any, Generic, Protocol, TypeVar

SEARCH_PAUSE = 0.02  # seconds between two searches for expired calls: one search takes 1.6 ms for 32,768 calls


class Call(Protocol):
    """The part of a call that the table needs."""

    id: int
    weight: int  # bytes of its tensors
    deadline: float
    outcome: Any  # None if a thread waits for the call, which then checks the deadline itself


C = TypeVar("C", bound=Call)


class CallTable(Generic[C]):
    """The calls in flight. The peer's lock guards it."""

    def __init__(self, most_calls: int, most_bytes: int) -> None:
        self.in_flight: dict[int, C] = {}
        self.begun = 0  # calls so far; the number of each is its id
        # A lower bound of the deadlines. A sorted structure would cost more for each call than a search costs for all.
        self.next_due = inf
        self._most_calls = most_calls
        self._most_bytes = most_bytes
        self._weight = 0

    def add(self, call: C) -> bool:
        """Give a call its id and put it in flight; return True if its deadline is now the earliest."""
        self.begun += 1
        call.id = self.begun
        self.in_flight[call.id] = call
        self._weight += call.weight
        if call.outcome is None or call.deadline >= self.next_due:
            return False
        self.next_due = call.deadline
        return True

    def pop(self, id_: int) -> C | None:
        """Remove a call that has ended; return None if it was removed before."""
        call = self.in_flight.pop(id_, None)
        if call is not None:
            self._weight -= call.weight
        return call

    def pop_all(self, matches: Callable[[C], bool] = lambda _: True) -> list[C]:
        found = [call for call in self.in_flight.values() if matches(call)]
        for call in found:
            self.pop(call.id)
        return found

    def pop_expired(self, now: float) -> list[C]:
        """Remove and return the expired calls; set `next_due` to the time of the next search."""
        if now < self.next_due:
            return []
        expired = self.pop_all(lambda call: call.outcome is not None and call.deadline <= now)
        timed = (call.deadline for call in self.in_flight.values() if call.outcome is not None)
        self.next_due = max(min(timed, default=inf), now + SEARCH_PAUSE)
        return expired

    @property
    def is_full(self) -> bool:
        return len(self.in_flight) >= self._most_calls or self._weight >= self._most_bytes

    def __repr__(self) -> str:
        return f"{len(self.in_flight)} calls in flight"
