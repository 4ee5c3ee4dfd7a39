"""Idempotent calls at their callee: which have begun here, and what came of them. Pure.

Each has a key: the life of its caller, and a number of that. The first that comes with a key is run; one that comes
later under the same key is the same call once more, and gets what came of the first.

An entry stays until the caller says that it has the answer (`settled`), or the time of the call is over, after which
nobody repeats it. A call that has not ended keeps its entry in any case.
"""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

LONGEST = 3600.0  # seconds for which the outcome of a call without a time limit is kept


class Key(NamedTuple):
    """Which call it is."""

    caller: str  # its incarnation
    number: int


class Settled(NamedTuple):
    """The word of a caller that it has the answer to the call of that number, or wants none."""

    number: int


T = TypeVar("T")


class Entry(Generic[T]):
    """A call that was begun here."""

    def __init__(self, outcome: T) -> None:
        self.outcome = outcome  # what becomes of it: for the driver
        self.until = 0.0  # nobody asks for it any more
        self.ended = False
        self.settled = False


class Ledger(Generic[T]):
    """Those of one worker."""

    def __init__(self) -> None:
        self._entries: dict[Key, Entry[T]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, key: Key, left: float, now: float) -> Entry[T] | None:
        """The call of that key, if it has come before; it comes now with so much time `left`, 0 for no limit."""
        entry = self._entries.get(key)
        if entry is not None:
            entry.until = max(entry.until, now + (left or LONGEST))
        return entry

    def begin(self, key: Key, outcome: T, left: float, now: float) -> None:
        """A call has come for the first time, and is to be run."""
        entry = self._entries[key] = Entry(outcome)
        entry.until = now + (left or LONGEST)

    def ended(self, key: Key) -> Entry[T] | None:
        """A call has run; its entry, where that is forgotten."""
        self._entries[key].ended = True
        return self._forget_if_over(key)

    def settled(self, key: Key) -> Entry[T] | None:
        """The caller has the answer, or wants none; the entry, where that is forgotten."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        entry.settled = True
        return self._forget_if_over(key)

    def _forget_if_over(self, key: Key) -> Entry[T] | None:
        entry = self._entries[key]
        return self._entries.pop(key) if entry.ended and entry.settled else None

    def expire(self, now: float) -> list[Entry[T]]:
        """Forget what nobody will ask for; those entries."""
        over = [key for key, entry in self._entries.items() if entry.ended and entry.until <= now]
        return [self._entries.pop(key) for key in over]

    def __repr__(self) -> str:
        running = sum(not entry.ended for entry in self._entries.values())
        return f"<Ledger: {running} run, {len(self) - running} answers kept>"
