"""Decides what becomes of workers: who is started again and when, and how the group ends.

A worker WAITS for its start, RUNS, is ENDING once it was asked to, and has ENDED. One that fails (its exit code is not
0) is started again, alone or with its whole role, at most `restarts` times `within` a time; or the group ends. A start
follows the one before by at least PAUSES, so that one which fails at once is not started in a circle; one that has run
for LONG comes back at once.

The group ends in order when the workers of all roles have ended with 0, but for those that serve until then: these are
told by the store (`EndStore`), then asked by SIGTERM, then killed, with `grace` between. A signal of the user is for
those that do not serve; the others are told after them. A second one kills. On a failure all are asked at once.

Events come with the time, and give what to do. `due` is when to call `look`, `code` the exit code, once all is over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from math import inf
from typing import NamedTuple

from telegrad.processes import named
from telegrad.supervision.roles import END, RESTART_ROLE, Role, Seat

WAITS, RUNS, ENDING, ENDED = "waits", "runs", "is ending", "has ended"
PAUSES = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)  # seconds from start to start, after so many quick failures
LONG = 5.0  # seconds of a run that did not fail quickly
NOT_FOUND = 127  # the exit code where a command could not be started, as shells have it
SIGINT, SIGKILL, SIGTERM = 2, 9, 15  # of POSIX


class Start(NamedTuple):
    """Start a worker, which was started again so often."""

    name: str
    restarts: int


class Signal(NamedTuple):
    """Send a worker, and what it has started, a signal."""

    name: str
    number: int


class EndStore(NamedTuple):
    """Tell those who serve that the group has ended."""


class Say(NamedTuple):
    """Tell the user."""

    text: str


Act = Start | Signal | EndStore | Say


class Standing(NamedTuple):
    """What there is to know of a worker."""

    name: str
    state: str
    since: float
    restarts: int


class _Budget:
    """How often something may still fail, and how long is to be waited after it did."""

    def __init__(self, role: Role) -> None:
        self._role = role
        self._failures: deque[float] = deque()
        self._quick = 0  # failures in a row, where runs were not long

    def spend(self, begun: float, now: float) -> float | None:
        """When what began at `begun` and has failed now may begin again; None where it may not."""
        while self._failures and self._failures[0] <= now - self._role.within:
            self._failures.popleft()
        if len(self._failures) >= self._role.restarts:
            return None
        self._failures.append(now)
        self._quick = 1 if now - begun >= LONG else self._quick + 1
        return max(now, begun + PAUSES[min(self._quick, len(PAUSES)) - 1])

    def __str__(self) -> str:
        return f"{len(self._failures)} of {self._role.restarts} within {self._role.within:g} s"


class _One:
    """A worker."""

    def __init__(self, seat: Seat, budget: _Budget) -> None:
        self.name = seat.name
        self.role = seat.role
        self.budget = budget  # of its own, or of its role
        self.state = WAITS
        self.since = 0.0  # when it came into this state
        self.begun = 0.0
        self.starts = 0
        self.due = inf  # when it is to be started, or is asked again to end

    def become(self, state: str, now: float, due: float = inf) -> None:
        self.state, self.since, self.due = state, now, due


class Policy:
    """The machine."""

    def __init__(self, seats: Iterable[Seat], grace: float) -> None:
        self._all: dict[str, _One] = {}
        shared: dict[str, _Budget] = {}
        for seat in seats:
            role = seat.role
            of_role = shared.setdefault(role.name, _Budget(role))
            self._all[seat.name] = _One(seat, of_role if role.on_failure == RESTART_ROLE else _Budget(role))
        self._grace = grace
        self._due: dict[str, float] = {}  # when roles that are restarted may begin again
        self._ending: int | None = None  # the exit code to come, once the group ends
        self._told = False  # those that serve, that the group has ended
        self.failed = ""  # the worker that ended it

    # What is known

    @property
    def code(self) -> int | None:
        over = all(one.state == ENDED for one in self._all.values())
        return self._ending if over else None

    @property
    def due(self) -> float:
        return min(one.due for one in self._all.values())

    def standings(self) -> list[Standing]:
        return [Standing(one.name, one.state, one.since, max(0, one.starts - 1)) for one in self._all.values()]

    def _in(self, *states: str) -> list[_One]:
        return [one for one in self._all.values() if one.state in states]

    # Events

    def begin(self, now: float) -> None:
        """All are to be started."""
        for one in self._all.values():
            one.become(WAITS, now, now)

    def look(self, now: float) -> list[Act]:
        """Time may have come for something; at most one is started, since that may fail and end all."""
        acts: list[Act] = []
        for one in self._all.values():
            if one.due > now:
                continue
            if one.state == WAITS:
                return [*acts, self._start(one, now)]
            if one.state == RUNS:  # it should have ended by itself
                acts += self._ask(one, SIGTERM, now)
            elif one.state == ENDING:
                one.due = inf
                acts += [
                    Say(f"{one.name} does not end within {self._grace:g} s and is killed"),
                    Signal(one.name, SIGKILL),
                ]
        return acts

    def could_not_start(self, name: str, why: str, now: float) -> list[Act]:
        """Its command cannot be run, now or later."""
        one = self._all[name]
        one.become(ENDED, now)
        if self._ending is not None:
            return self._end_serving(now)
        return self._fail(one, f"{name} could not be started: {why}", NOT_FOUND, now)

    def ended(self, name: str, code: int, now: float) -> list[Act]:
        """Its process has ended; `code` is negative for a signal."""
        one = self._all[name]
        asked = one.state == ENDING
        one.become(ENDED, now)
        if self._ending is not None:
            return self._end_serving(now)
        if asked:
            return self._begin_together(one.role, now)
        if code == 0:
            return [Say(f"{name} has ended with exit code 0"), *self._end_if_done(now)]
        return self._after_failure(one, code, now)

    def signalled(self, number: int, now: float) -> list[Act]:
        """The user wants an end; the second time at once."""
        if self._ending is not None:
            living = self._in(RUNS, ENDING)
            for one in living:
                one.become(ENDING, now)
            return [Say("all are killed"), *(Signal(one.name, SIGKILL) for one in living)]
        if all(one.role.serves for one in self._in(RUNS, ENDING)):
            return self._end(128 + number, number, now)
        self._ending = 128 + number
        self._begin_no_more(now)
        return [act for one in self._in(RUNS) if not one.role.serves for act in self._ask(one, number, now)]

    def given_up(self, why: str, now: float) -> list[Act]:
        """The group cannot be."""
        return [] if self._ending is not None else [Say(f"{why}: the group ends"), *self._end(1, SIGTERM, now)]

    # What follows

    def _start(self, one: _One, now: float) -> Start:
        one.become(RUNS, now)
        one.begun = now
        one.starts += 1
        return Start(one.name, one.starts - 1)

    def _ask(self, one: _One, number: int, now: float) -> list[Act]:
        one.become(ENDING, now, now + self._grace)
        return [Signal(one.name, number)]

    def _after_failure(self, one: _One, code: int, now: float) -> list[Act]:
        lasted = now - one.begun
        how = f"{one.name} ended with {named(code)} after {lasted:.1f} s"
        if one.role.on_failure == END:
            return self._fail(one, how, code, now)
        due = one.budget.spend(one.begun, now)
        if due is None:
            often = f"{one.role.restarts} restarts within {one.role.within:g} s are used up"
            return self._fail(
                one, f"{how}, and {often if one.role.restarts else 'is not to be started again'}", code, now
            )
        later = f" in {due - now:.1f} s" if due > now else ""
        if one.role.on_failure == RESTART_ROLE:
            text = f"{how}; all of role {one.role.name!r} are started again{later} ({one.budget})"
            return [Say(text), *self._restart_role(one, due, now)]
        one.become(WAITS, now, due)
        return [Say(f"{how}; it is started again{later} ({one.budget})")]

    def _restart_role(self, failed: _One, due: float, now: float) -> list[Act]:
        self._due[failed.role.name] = due
        acts: list[Act] = []
        for one in self._of(failed.role):
            if one.state == RUNS:
                acts += self._ask(one, SIGTERM, now)
            elif one.state == WAITS:
                one.become(ENDED, now)
        return acts + self._begin_together(failed.role, now)

    def _begin_together(self, role: Role, now: float) -> list[Act]:
        """Once none of a role runs any more, they are started again at once."""
        all_of_it = self._of(role)
        if all(one.state == ENDED for one in all_of_it):
            due = max(now, self._due.pop(role.name))
            for one in all_of_it:
                one.become(WAITS, now, due)
        return []

    def _of(self, role: Role) -> list[_One]:
        return [one for one in self._all.values() if one.role is role]

    def _end_if_done(self, now: float) -> list[Act]:
        living = self._in(WAITS, RUNS, ENDING)
        if any(not one.role.serves for one in living) or (
            living and all(one.role.serves for one in self._all.values())
        ):
            return []
        self._ending = 0
        if not living:
            return self._end_serving(now)
        self._begin_no_more(now)
        text = f"all work is done: {_listed(living)} {'is' if len(living) == 1 else 'are'} to end"
        return [Say(text), *self._end_serving(now)]

    def _end_serving(self, now: float) -> list[Act]:
        """Those that serve are told to end, once, when nobody else lives."""
        if self._told or any(not one.role.serves for one in self._in(RUNS, ENDING)):
            return []
        self._told = True
        for one in self._in(RUNS):
            one.due = now + self._grace
        return [EndStore()]

    def _begin_no_more(self, now: float) -> None:
        for one in self._in(WAITS):
            one.become(ENDED, now)

    def _fail(self, one: _One, why: str, code: int, now: float) -> list[Act]:
        self.failed = one.name
        return [Say(f"{why}: the group ends"), *self._end(128 - code if code < 0 else code, SIGTERM, now)]

    def _end(self, code: int, number: int, now: float) -> list[Act]:
        self._ending, self._told = code, True
        acts: list[Act] = [EndStore()]
        self._begin_no_more(now)
        for one in self._in(RUNS):
            acts += self._ask(one, number, now)
        return acts


def _listed(ones: Sequence[_One]) -> str:
    return ", ".join(one.name for one in ones)
