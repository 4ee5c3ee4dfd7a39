"""The restart policy: which workers are restarted and when, and how the group ends.

A worker WAITS for its start, RUNS, is ENDING after it was asked to end, and has ENDED. A worker fails if its exit code
is not 0. It is then restarted, alone or with its whole role, at most `restarts` times `within` a time; otherwise the
group ends. Starts are at least PAUSES apart, which prevents a tight loop if a worker fails at once. A worker that has
run for LONG is restarted at once.

The group ends normally when all workers have ended with 0, except those that serve until then. Those are ended through
the store (`EndServing`), then by SIGTERM, then by SIGKILL, with `grace` between. A signal of the user is forwarded to
the workers that do not serve; the others end after them. A second signal kills all. On a failure all workers are asked
to end at once.

Events take the current time and return actions. `due` is when to call `look`; `code` is the exit code once all have
ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from math import inf
from typing import NamedTuple

from telegrad.ext.processes import describe_exit
from telegrad.launch.roles import END, RESTART_ROLE, Role, WorkerSlot

WAITS, RUNS, ENDING, ENDED = "waits", "runs", "is ending", "has ended"
PAUSES = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)  # minimum seconds between two starts, by quick failures in a row
LONG = 5.0  # seconds; a shorter run is a quick failure
NOT_FOUND = 127  # the exit code if a command could not be started, as in shells
SIGINT, SIGKILL, SIGTERM = 2, 9, 15  # of POSIX


class StartProcess(NamedTuple):
    """Start a worker; `restarts` counts its earlier starts."""

    name: str
    restarts: int


class SendSignal(NamedTuple):
    """Send a signal to a worker's process group."""

    name: str
    number: int


class EndServing(NamedTuple):
    """Notify the serving workers that the group has ended."""


class Log(NamedTuple):
    """Show a text to the user."""

    text: str


Action = StartProcess | SendSignal | EndServing | Log


class WorkerStatus(NamedTuple):
    """The state of a worker, for the user."""

    name: str
    state: str
    since: float
    restarts: int


class _RestartBudget:
    """The number of failures that a worker or a role may still have, and the delay of its next start."""

    def __init__(self, role: Role) -> None:
        self._role = role
        self._failures: deque[float] = deque()
        self._quick = 0  # quick failures in a row

    def spend(self, begun: float, now: float) -> float | None:
        """Record a failure of a run that began at `begun`; return when the next start may be, or None if no restart is
        left."""
        while self._failures and self._failures[0] <= now - self._role.within:
            self._failures.popleft()
        if len(self._failures) >= self._role.restarts:
            return None
        self._failures.append(now)
        self._quick = 1 if now - begun >= LONG else self._quick + 1
        return max(now, begun + PAUSES[min(self._quick, len(PAUSES)) - 1])

    def __str__(self) -> str:
        return f"{len(self._failures)} of {self._role.restarts} within {self._role.within:g} s"


class _WorkerState:
    """The state of one worker."""

    def __init__(self, slot: WorkerSlot, budget: _RestartBudget) -> None:
        self.name = slot.name
        self.role = slot.role
        self.budget = budget  # of the worker, or shared by its role
        self.state = WAITS
        self.since = 0.0  # when it entered this state
        self.begun = 0.0
        self.starts = 0
        self.due = inf  # when it is to be started, or the next step to end it is due

    def become(self, state: str, now: float, due: float = inf) -> None:
        self.state, self.since, self.due = state, now, due


class Policy:
    """The state machine of one run."""

    def __init__(self, slots: Iterable[WorkerSlot], grace: float) -> None:
        self._all: dict[str, _WorkerState] = {}
        shared: dict[str, _RestartBudget] = {}
        for slot in slots:
            role = slot.role
            of_role = shared.setdefault(role.name, _RestartBudget(role))
            self._all[slot.name] = _WorkerState(
                slot, of_role if role.on_failure == RESTART_ROLE else _RestartBudget(role)
            )
        self._grace = grace
        self._due: dict[str, float] = {}  # when roles that restart together may start
        self._ending: int | None = None  # the exit code, once the group is ending
        self._told = False  # True once EndServing was issued
        self.failed = ""  # the worker whose failure ended the group

    # State

    @property
    def code(self) -> int | None:
        over = all(one.state == ENDED for one in self._all.values())
        return self._ending if over else None

    @property
    def due(self) -> float:
        return min(one.due for one in self._all.values())

    def statuses(self) -> list[WorkerStatus]:
        return [WorkerStatus(one.name, one.state, one.since, max(0, one.starts - 1)) for one in self._all.values()]

    def _in(self, *states: str) -> list[_WorkerState]:
        return [one for one in self._all.values() if one.state in states]

    # Events

    def begin(self, now: float) -> None:
        """Schedule the start of all workers."""
        for one in self._all.values():
            one.become(WAITS, now, now)

    def look(self, now: float) -> list[Action]:
        """Do what is due. Start at most one worker, because its start may fail and end the group."""
        actions: list[Action] = []
        for one in self._all.values():
            if one.due > now:
                continue
            if one.state == WAITS:
                one.become(RUNS, now)
                one.begun = now
                one.starts += 1
                return [*actions, StartProcess(one.name, one.starts - 1)]
            if one.state == RUNS:  # it has not ended after EndServing
                actions += self._ask(one, SIGTERM, now)
            elif one.state == ENDING:
                one.due = inf
                actions += [
                    Log(f"{one.name} did not end within {self._grace:g} s and is killed"),
                    SendSignal(one.name, SIGKILL),
                ]
        return actions

    def could_not_start(self, name: str, why: str, now: float) -> list[Action]:
        """Handle that a worker's command cannot be run, now or later."""
        one = self._all[name]
        one.become(ENDED, now)
        if self._ending is not None:
            return self._end_serving(now)
        return self._fail(f"{name} could not be started: {why}", NOT_FOUND, now, name)

    def ended(self, name: str, code: int, now: float) -> list[Action]:
        """Handle the end of a worker's process; `code` is negative for a signal."""
        one = self._all[name]
        asked = one.state == ENDING
        one.become(ENDED, now)
        if self._ending is not None:
            return self._end_serving(now)
        if asked:
            return self._begin_together(one.role, now)
        if code == 0:
            return [Log(f"{name} ended with exit code 0"), *self._end_if_done(now)]
        return self._after_failure(one, code, now)

    def signalled(self, number: int, now: float) -> list[Action]:
        """Handle a signal of the user: end the group; at the second signal kill it."""
        if self._ending is not None:
            living = self._in(RUNS, ENDING)
            for one in living:
                one.become(ENDING, now)
            return [Log("all workers are killed"), *(SendSignal(one.name, SIGKILL) for one in living)]
        if all(one.role.serves for one in self._in(RUNS, ENDING)):
            return self._end(128 + number, number, now)
        self._begin_to_end(128 + number, now)
        return [action for one in self._in(RUNS) if not one.role.serves for action in self._ask(one, number, now)]

    def abort(self, why: str, now: float) -> list[Action]:
        """End the group because it cannot run."""
        return [] if self._ending is not None else self._fail(why, 1, now)

    # Reactions

    def _ask(self, one: _WorkerState, number: int, now: float) -> list[Action]:
        one.become(ENDING, now, now + self._grace)
        return [SendSignal(one.name, number)]

    def _after_failure(self, one: _WorkerState, code: int, now: float) -> list[Action]:
        lasted = now - one.begun
        how = f"{one.name} ended with {describe_exit(code)} after {lasted:.1f} s"
        if one.role.on_failure == END:
            return self._fail(how, code, now, one.name)
        due = one.budget.spend(one.begun, now)
        if due is None:
            often = f"{one.role.restarts} restarts within {one.role.within:g} s are used up"
            why = f"{how}, and {often if one.role.restarts else 'is not restarted'}"
            return self._fail(why, code, now, one.name)
        later = f" in {due - now:.1f} s" if due > now else ""
        if one.role.on_failure == RESTART_ROLE:
            text = f"{how}; all workers of role {one.role.name!r} are restarted{later} ({one.budget})"
            return [Log(text), *self._restart_role(one, due, now)]
        one.become(WAITS, now, due)
        return [Log(f"{how}; it is restarted{later} ({one.budget})")]

    def _restart_role(self, failed: _WorkerState, due: float, now: float) -> list[Action]:
        self._due[failed.role.name] = due
        actions: list[Action] = []
        for one in self._of(failed.role):
            if one.state == RUNS:
                actions += self._ask(one, SIGTERM, now)
            elif one.state == WAITS:
                one.become(ENDED, now)
        return actions + self._begin_together(failed.role, now)

    def _begin_together(self, role: Role, now: float) -> list[Action]:
        """Restart all workers of a role once none of them runs."""
        all_of_it = self._of(role)
        if all(one.state == ENDED for one in all_of_it):
            due = max(now, self._due.pop(role.name))
            for one in all_of_it:
                one.become(WAITS, now, due)
        return []

    def _of(self, role: Role) -> list[_WorkerState]:
        return [one for one in self._all.values() if one.role is role]

    def _end_if_done(self, now: float) -> list[Action]:
        living = self._in(WAITS, RUNS, ENDING)
        if any(not one.role.serves for one in living) or (
            living and all(one.role.serves for one in self._all.values())
        ):
            return []
        self._begin_to_end(0, now)
        names = ", ".join(one.name for one in living)
        text = f"all work is done: {names} {'ends' if len(living) == 1 else 'end'}"
        return [*([Log(text)] if living else []), *self._end_serving(now)]

    def _end_serving(self, now: float) -> list[Action]:
        """Issue EndServing once, when only serving workers are left."""
        if self._told or any(not one.role.serves for one in self._in(RUNS, ENDING)):
            return []
        self._told = True
        for one in self._in(RUNS):
            one.due = now + self._grace
        return [EndServing()]

    def _begin_to_end(self, code: int, now: float) -> None:
        """Start no more workers; `code` is the future exit code."""
        self._ending = code
        for one in self._in(WAITS):
            one.become(ENDED, now)

    def _fail(self, why: str, code: int, now: float, failed: str = "") -> list[Action]:
        self.failed = failed
        return [Log(f"{why}: the group ends"), *self._end(128 - code if code < 0 else code, SIGTERM, now)]

    def _end(self, code: int, number: int, now: float) -> list[Action]:
        self._begin_to_end(code, now)
        self._told = True
        actions: list[Action] = [EndServing()]
        for one in self._in(RUNS):
            actions += self._ask(one, number, now)
        return actions
