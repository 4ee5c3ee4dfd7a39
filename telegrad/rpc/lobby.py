"""Calls that wait until their worker is there: which are released when, and what is done to find out. Pure.

For each worker that is waited for there is a door. Behind it stand the calls, and one look at a time is made for all of
them whether the worker can be called, by whoever uses this: as the first one comes, and then after pauses that grow.

    there       those go on whose own pause is over; the others wait for it
    not there   those fail that do not wait for a return; the others stay
    time        a call that is out of time has failed, door or no door

What a failure means for a call says `verdict`.
"""

from __future__ import annotations

from enum import Enum
from math import inf
from typing import Generic, NamedTuple, Protocol, TypeVar

FIRST_PAUSE, LONGEST_PAUSE = 0.02, 0.25  # seconds between two looks for one worker
FIRST_REST, LONGEST_REST = 0.05, 2.0  # seconds before a call is made once more that may have run, from its second time


class Manner(NamedTuple):
    """How a call is made that does not fail at once."""

    waits: bool  # for its worker, while that is not there
    repeats: bool  # where it may have run


class Fate(Enum):
    """What is known of a call that has failed."""

    NOT_RUN = "its worker was not there"
    MAY_HAVE_RUN = "its worker was lost, or the way to it"
    OVER = "it has run, is out of time, or cannot be made"


def verdict(manner: Manner, fate: Fate, may_have_run: bool) -> bool:
    """Whether a call that has failed so is made once more; `may_have_run`: an earlier failure has left that open."""
    if fate is Fate.NOT_RUN:
        return manner.waits and (manner.repeats or not may_have_run)
    return fate is Fate.MAY_HAVE_RUN and manner.repeats


def rest(repeats: int) -> float:
    """Seconds before a call is made once more that may have run, and was repeated so often before."""
    return 0.0 if not repeats else min(FIRST_REST * 2.0 ** (repeats - 1), LONGEST_REST)


class Waiter(Protocol):
    """A call that waits."""

    @property
    def to(self) -> str | int: ...

    @property
    def waits(self) -> bool:
        """Whether it stays where the worker is not there."""

    @property
    def until(self) -> float:
        """When its time is over."""

    @property
    def rests_until(self) -> float: ...

    def __hash__(self) -> int: ...


W = TypeVar("W", bound=Waiter)


class _Door(Generic[W]):
    def __init__(self, now: float) -> None:
        self.waiters: dict[W, None] = {}
        self.looking = False
        self.pause = FIRST_PAUSE
        self.due = now


class Lobby(Generic[W]):
    """All calls of one worker that wait."""

    def __init__(self) -> None:
        self._doors: dict[str | int, _Door[W]] = {}
        self._closed = False

    def __len__(self) -> int:
        return sum(len(door.waiters) for door in self._doors.values())

    @property
    def empty(self) -> bool:
        return not self._doors

    def enter(self, waiter: W, now: float) -> bool:
        """A call begins to wait; False where none can any more."""
        if self._closed:
            return False
        door = self._doors.get(waiter.to)
        if door is None:
            door = self._doors[waiter.to] = _Door(now)
        door.waiters[waiter] = None
        return True

    def leave(self, waiter: W) -> bool:
        """A call is over; whether it waited."""
        door = self._doors.get(waiter.to)
        if door is None or waiter not in door.waiters:
            return False
        del door.waiters[waiter]
        self._close_if_empty(waiter.to, door)
        return True

    def looks(self, now: float) -> list[str | int]:
        """The workers for whom to look now; `there` or `not_there` must follow for each."""
        due = [to for to, door in self._doors.items() if not door.looking and door.due <= now]
        for to in due:
            self._doors[to].looking = True
        return due

    def there(self, to: str | int, now: float) -> list[W]:
        """A worker has answered: the calls that go on."""
        door = self._doors.get(to)
        if door is None:
            return []
        ready = [waiter for waiter in door.waiters if waiter.rests_until <= now]
        for waiter in ready:
            del door.waiters[waiter]
        door.looking, door.pause = False, FIRST_PAUSE
        door.due = min((waiter.rests_until for waiter in door.waiters), default=inf)
        self._close_if_empty(to, door)
        return ready

    def not_there(self, to: str | int, now: float, hopeless: bool = False) -> list[W]:
        """A worker cannot be called: the calls that fail; where it never can be, all."""
        door = self._doors.get(to)
        if door is None:
            return []
        failed = [waiter for waiter in door.waiters if hopeless or not waiter.waits]
        for waiter in failed:
            del door.waiters[waiter]
        door.looking, door.due = False, now + door.pause
        door.pause = min(2 * door.pause, LONGEST_PAUSE)
        self._close_if_empty(to, door)
        return failed

    def expired(self, now: float) -> list[W]:
        """The calls that are out of time."""
        late = [waiter for door in self._doors.values() for waiter in door.waiters if waiter.until <= now]
        for waiter in late:
            self.leave(waiter)
        return late

    def next(self) -> float:
        """When there will be something to do, if nothing happens before."""
        doors = self._doors.values()
        looks = min((door.due for door in doors if not door.looking), default=inf)
        return min([looks, *(waiter.until for door in doors for waiter in door.waiters)])

    def close(self) -> list[W]:
        """Nobody waits from here on: the calls that fail."""
        self._closed = True
        waiting = [waiter for door in self._doors.values() for waiter in door.waiters]
        self._doors.clear()
        return waiting

    def _close_if_empty(self, to: str | int, door: _Door[W]) -> None:
        if not door.waiters:
            del self._doors[to]

    def __repr__(self) -> str:
        waiting = ", ".join(f"{len(door.waiters)} for {to!r}" for to, door in self._doors.items())
        return f"<Lobby: {waiting or 'nobody waits'}>"
