"""Idempotent calls at their callee: which have begun here, and what came of them. Pure.

Each has a key: the life of its caller, and a number of that. The first that comes with a key is run; one that comes
later under the same key is the same call once more, and gets what came of the first.

An entry stays until the caller says that it has the answer (`settled`), or the time of the call is over, after which
nobody repeats it. A call that has not ended keeps its entry in any case.

Answers take at most MOST_OF_CALLER bytes for each caller, and MOST in all, beside the newest, which may have more. The
oldest go first. Of those only the number is kept, so that the call is not run again where it is repeated. Where these
numbers become too many for one caller, all of its calls up to the highest number that was let go count as such.
Nothing is kept for a caller that is known to have died or left.
"""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

LONGEST = 3600.0  # seconds for which the outcome of a call without a time limit is kept
MOST_OF_CALLER = 256 << 20  # bytes
MOST = 1 << 30  # bytes
ENTRY = 1 << 10  # bytes that are counted for an answer beside those of its value
MOST_FORGOTTEN = 1 << 14  # numbers of one caller
MOST_DEAD = 1 << 10  # callers that died or left last


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
        self.weight = 0  # bytes, once it has ended


class _Caller(Generic[T]):
    """The answers that are kept for one caller, and the numbers of those that were dropped."""

    def __init__(self) -> None:
        self.kept = 0  # bytes
        self.answers: dict[Key, Entry[T]] = {}  # the oldest first
        self.forgotten: dict[int, float] = {}  # calls whose answers were let go, and how long they may be repeated
        self.floor = 0  # calls up to this number that are not known may have been such


class Ledger(Generic[T]):
    """Those of one worker."""

    def __init__(self) -> None:
        self._entries: dict[Key, Entry[T]] = {}
        self._answers: dict[Key, Entry[T]] = {}  # those of the entries that have ended, the oldest first
        self._callers: dict[str, _Caller[T]] = {}
        self._dead: dict[str, None] = {}
        self.kept = 0  # bytes of the answers

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, key: Key, left: float, now: float) -> Entry[T] | None:
        """The call of that key, if it has come before; it comes now with so much time `left`, 0 for no limit."""
        entry = self._entries.get(key)
        if entry is not None:
            entry.until = max(entry.until, now + (left or LONGEST))
        return entry

    def has_forgotten(self, key: Key) -> bool:
        """Return True for a call that may have run before, and whose answer is not kept."""
        if key.caller in self._dead:
            return True
        caller = self._callers.get(key.caller)
        return caller is not None and (key.number <= caller.floor or key.number in caller.forgotten)

    def begin(self, key: Key, outcome: T, left: float, now: float) -> None:
        """A call has come for the first time, and is to be run."""
        entry = self._entries[key] = Entry(outcome)
        entry.until = now + (left or LONGEST)

    def ended(self, key: Key, weight: int = 0) -> list[Entry[T]]:
        """Note that a call has run, and the bytes of its value; return the entries that are dropped."""
        entry = self._entries[key]
        entry.ended = True
        if entry.settled or key.caller in self._dead:
            return [self._entries.pop(key)]
        caller = self._callers.setdefault(key.caller, _Caller())
        entry.weight = weight + ENTRY
        caller.kept += entry.weight
        self.kept += entry.weight
        caller.answers[key] = self._answers[key] = entry
        over = []
        while caller.kept > MOST_OF_CALLER and len(caller.answers) > 1:
            over.append(self._forget(next(iter(caller.answers))))
        while self.kept > MOST and len(self._answers) > 1:
            over.append(self._forget(next(iter(self._answers))))
        return over

    def _forget(self, key: Key) -> Entry[T]:
        """Drop an answer for lack of room."""
        caller = self._callers[key.caller]
        caller.forgotten[key.number] = self._entries[key].until
        if len(caller.forgotten) > MOST_FORGOTTEN:
            first = next(iter(caller.forgotten))
            del caller.forgotten[first]
            caller.floor = max(caller.floor, first)
        return self._take_out(key)

    def _take_out(self, key: Key) -> Entry[T]:
        """Remove a call that has ended."""
        entry, caller = self._entries.pop(key), self._callers[key.caller]
        del caller.answers[key], self._answers[key]
        caller.kept -= entry.weight
        self.kept -= entry.weight
        self._drop_if_empty(key.caller, caller)
        return entry

    def _drop_if_empty(self, name: str, caller: _Caller[T]) -> None:
        if not (caller.answers or caller.forgotten or caller.floor):
            del self._callers[name]

    def settled(self, key: Key) -> Entry[T] | None:
        """Note that the caller has the answer, or wants none; return the entry, where that is dropped."""
        entry = self._entries.get(key)
        if entry is None:
            caller = self._callers.get(key.caller)
            if caller is not None and caller.forgotten.pop(key.number, None) is not None:
                self._drop_if_empty(key.caller, caller)
            return None
        entry.settled = True
        return self._take_out(key) if entry.ended else None

    def expire(self, now: float) -> list[Entry[T]]:
        """Drop the answers that nobody will ask for; return their entries."""
        for name, caller in list(self._callers.items()):
            caller.forgotten = {number: until for number, until in caller.forgotten.items() if until > now}
            self._drop_if_empty(name, caller)
        return [self._take_out(key) for key, entry in list(self._answers.items()) if entry.until <= now]

    def died(self, name: str) -> list[Entry[T]]:
        """Note that a caller has died or left; return the entries of its calls that have ended."""
        self._dead[name] = None
        if len(self._dead) > MOST_DEAD:
            del self._dead[next(iter(self._dead))]
        caller = self._callers.get(name)
        if caller is None:
            return []
        caller.forgotten, caller.floor = {}, 0
        over = [self._take_out(key) for key in list(caller.answers)]
        self._callers.pop(name, None)
        return over

    def __repr__(self) -> str:
        return f"<Ledger: {len(self) - len(self._answers)} run, {len(self._answers)} answers kept>"
