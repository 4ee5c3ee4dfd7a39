"""The roles of `telegrad run`, from a file or from options, and the policy by which their workers are restarted.

grace = 10                       # options of the run: logs and grace
[learner]                        # each table is a role
command = "python learner.py"
[actor]
count = 4

A worker WAITS for its start, RUNS, is ENDING after it was asked to end, and has ENDED. A worker fails if its exit code
is not 0. It is then restarted, alone or with its whole role, at most `restarts` times `within` a time; otherwise the
group ends. Starts are at least PAUSES apart, which prevents a tight loop if a worker fails at once. A worker that has
run for LONG is restarted at once.

The group ends normally when all workers have ended with 0, except those that serve until then. Those are ended through
the store (`EndServing`), then by SIGTERM, then by SIGKILL, with `grace` between. A signal of the user is forwarded to
the workers that do not serve; the others end after them. A second signal kills all. On a failure all workers are asked
to end at once.

Events take the current time and return actions. `due` is when to call `look`; `code` is the exit code once all have
ended. There is no I/O and no clock here, so `tests/supervision/test_policy.py` can simulate thousands of runs.
"""

import shlex
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from math import inf
from typing import Any, NamedTuple

from telegrad.errors import UsageError
from telegrad.ext.feedback import checks, did_you_mean
from telegrad.ext.host import describe_exit
from telegrad.ext.joining import check_name, check_role

RESTART, RESTART_ROLE, END = "restart", "restart-role", "end"
POLICIES = (RESTART, RESTART_ROLE, END)
SERVE = ("python", "-m", "telegrad", "worker")  # the default command

MOST = 10_000  # workers of a role on one host; each is a process

WAITS, RUNS, ENDING, ENDED = "waits", "runs", "is ending", "has ended"
PAUSES = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)  # minimum seconds between two starts, by quick failures in a row
LONG = 5.0  # seconds; a shorter run is a quick failure
NOT_FOUND = 127  # the exit code if a command could not be started, as in shells
SIGINT, SIGKILL, SIGTERM = 2, 9, 15  # of POSIX


# Roles


@dataclass(frozen=True)
class Role:
    """Workers that run the same command."""

    name: str
    command: tuple[str, ...] = SERVE
    count: int = 1
    env: Mapping[str, str] = field(default_factory=dict)
    restarts: int = 3  # of each worker, or of the whole role if it restarts together
    within: float = 300.0  # seconds
    on_failure: str = RESTART
    serves: bool = True  # until the others have ended
    node: int | None = None  # the host that runs the role, of several; None: each host


KEYS = tuple(each.name for each in fields(Role))[1:]


class WorkerSlot(NamedTuple):
    """A worker of this host, across the restarts of its process."""

    name: str
    number: int
    role: Role

    def filled_in(self, text: str) -> str:
        return text.replace("{name}", self.name).replace("{number}", str(self.number))


class RunConfig(NamedTuple):
    roles: tuple[Role, ...]
    logs: str = "logs"
    grace: float = 10.0  # seconds for workers to end after they were asked to

    def slots(self, node: int) -> list[WorkerSlot]:
        """Return the workers of the host of that number. Numbers in names continue from host to host."""
        return [
            WorkerSlot(f"{role.name}{number}", number, role) for role in self.roles for number in _numbers(role, node)
        ]


def _numbers(role: Role, node: int) -> range:
    if role.node is not None:
        return range(role.count if role.node == node else 0)
    return range(node * role.count, (node + 1) * role.count)


def read(text: str, changes: Mapping[str, Any]) -> RunConfig:
    """Return the configuration of a file with `changes` of its form; raise UsageError if it is inconsistent."""
    told = _changed(_parsed(text), changes)
    tables = {key: value for key, value in told.items() if isinstance(value, Mapping)}
    rest = {key: value for key, value in told.items() if key not in tables}
    _check_keys(rest, ("logs", "grace"), "the file")
    plan = RunConfig(tuple(_role(name, table) for name, table in tables.items()), **rest)
    if not plan.roles:
        raise UsageError("there is no role to run: give a file with tables such as [actor], or a command after --")
    _check(isinstance(plan.logs, str) and "\0" not in plan.logs, "logs must be the name of a folder", plan.logs)
    _check(checks.is_real(plan.grace) and plan.grace >= 0, "grace must be a number of seconds, 0 or more", plan.grace)
    return plan


def _changed(told: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    tables = {key: _changed(told.get(key, {}), value) for key, value in changes.items() if isinstance(value, Mapping)}
    return {**told, **changes, **tables}


def _parsed(text: str) -> dict[str, Any]:
    if not text:
        return {}
    import tomllib

    try:
        told: dict[str, Any] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"it is not valid TOML: {error}; a command goes after --") from error
    return told


def _role(name: str, table: Mapping[str, Any]) -> Role:
    check_role(name or " ")  # the empty name would mean no role
    of = f"role {name!r}"
    _check_keys(table, KEYS, of)
    given = dict(table)
    own = "command" in given
    if own:
        given["command"] = _command(given["command"], of)
    env = given.get("env", {})
    plain = isinstance(env, Mapping) and all(
        name and "=" not in name and (isinstance(value, str) or checks.is_real(value)) for name, value in env.items()
    )
    _check(plain, f'{of}: env must be a table of variables, such as {{ DEBUG = "1" }}', env)
    given["env"] = {key: str(value) for key, value in env.items()}
    role = Role(name, **{"serves": not own, **given})
    is_count = checks.is_whole(role.count) and 1 <= role.count <= MOST
    is_node = role.node is None or (checks.is_whole(role.node) and role.node >= 0)
    for key, holds, rule in (
        ("count", is_count, f"the number of its workers, from 1 to {MOST}"),
        ("restarts", checks.is_whole(role.restarts) and role.restarts >= 0, "a number, 0 for none"),
        ("within", checks.is_real(role.within) and role.within > 0, "a number of seconds"),
        ("on_failure", role.on_failure in POLICIES, f"one of {', '.join(POLICIES)}"),
        ("serves", isinstance(role.serves, bool), "true or false"),
        ("node", is_node, "the number of the host that runs it, from 0 on"),
    ):
        _check(holds, f"{of}: {key} must be {rule}", getattr(role, key))
    check_name(f"{name}{role.count}")
    return role


def _command(given: Any, of: str) -> tuple[str, ...]:
    try:
        words = shlex.split(given) if isinstance(given, str) else given
    except ValueError as error:
        raise UsageError(f"{of}: command {checks.short_repr(given)} cannot be split into words: {error}") from None
    is_valid = isinstance(words, list) and words and all(isinstance(word, str) for word in words)
    _check(bool(is_valid), f"{of}: command must be a string or a list of strings, and not empty", given)
    # After `--`, Python does not read the name of the file as an option.
    return (*(["python", "--"] if words[0].endswith(".py") else []), *words)


def _check_keys(given: Mapping[str, Any], known: tuple[str, ...], of: str) -> None:
    for key in given:
        if key not in known:
            below = "; the keys of a role go below its table, such as [actor]" if key in KEYS else ""
            raise UsageError(
                f"{of} has a key {key!r} that is not one of {', '.join(known)}{below or did_you_mean(key, known)}"
            )


def _check(holds: bool, rule: str, given: Any) -> None:
    if not holds:
        raise UsageError(f"{rule}, not {checks.short_repr(given)}")


# Restarts


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


class _RestartBudget:
    """The number of failures that a worker or a role may still have, and the delay of its next start."""

    def __init__(self, role: Role) -> None:
        self._role = role
        self._failures: deque[float] = deque()
        self._quick = 0  # quick failures in a row

    def spend(self, begun: float, now: float) -> float | None:
        """Record a failure of a run begun at `begun`; return when it may start again, None if no restart is left."""
        while self._failures and self._failures[0] <= now - self._role.within:
            self._failures.popleft()
        if len(self._failures) >= self._role.restarts:
            return None
        self._failures.append(now)
        self._quick = 1 if now - begun >= LONG else self._quick + 1
        # The pause counts from the start of the failed run, so a worker that took longer than the pause to fail is
        # restarted at once.
        return max(now, begun + PAUSES[min(self._quick, len(PAUSES)) - 1])

    def __str__(self) -> str:
        return f"{len(self._failures)} of {self._role.restarts} within {self._role.within:g} s"


class SlotState:
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
        self.slots: dict[str, SlotState] = {}
        shared: dict[str, _RestartBudget] = {}
        for slot in slots:
            budget = _RestartBudget(slot.role)
            if slot.role.on_failure == RESTART_ROLE:
                budget = shared.setdefault(slot.role.name, budget)
            self.slots[slot.name] = SlotState(slot, budget)
        self._grace = grace
        # By name of the role, while it restarts together: when its workers may start. Set by the failure that restarts
        # the role, removed once all of its workers have ended.
        self._due: dict[str, float] = {}
        self._ending: int | None = None  # the exit code, once the group is ending
        self._told = False  # True once EndServing was issued
        self.failed = ""  # the worker whose failure ended the group

    # State

    @property
    def code(self) -> int | None:
        return self._ending if all(one.state == ENDED for one in self.slots.values()) else None

    @property
    def due(self) -> float:
        return min(one.due for one in self.slots.values())

    def _in(self, *states: str) -> list[SlotState]:
        return [one for one in self.slots.values() if one.state in states]

    # Events

    def begin(self, now: float) -> None:
        """Schedule the start of all workers."""
        for one in self.slots.values():
            one.become(WAITS, now, now)

    def look(self, now: float) -> list[Action]:
        """Do what is due. Start at most one worker, because its start may fail and end the group."""
        # If the start fails, `could_not_start` comes before the next `look`, and ends the workers that wait. If several
        # starts were returned at once, the caller would carry out the later ones although the group ends.
        actions: list[Action] = []
        for one in self.slots.values():
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
                told = Log(f"{one.name} did not end within {self._grace:g} s and is killed")
                actions += [told, SendSignal(one.name, SIGKILL)]
        return actions

    def could_not_start(self, name: str, why: str, now: float) -> list[Action]:
        """Handle that a worker's command cannot be run, now or later."""
        self.slots[name].become(ENDED, now)
        if self._ending is not None:
            return self._end_serving(now)
        return self._fail(f"{name} could not be started: {why}", NOT_FOUND, now, name)

    def ended(self, name: str, code: int, now: float) -> list[Action]:
        """Handle the end of a worker's process; `code` is negative for a signal."""
        one = self.slots[name]
        # A worker that is asked to end before the group ends is restarted together with its role. Its exit code is then
        # no failure.
        asked = one.state == ENDING
        one.become(ENDED, now)
        if self._ending is not None:
            return self._end_serving(now)
        if asked:
            self._begin_together(one.role, now)
            return []
        if code == 0:
            return [Log(f"{name} ended with exit code 0{self._runs_on(one.role)}"), *self._end_if_done(now)]
        return self._after_failure(one, code, now)

    def signalled(self, number: int, now: float) -> list[Action]:
        """Handle a signal of the user: end the group; at the second signal kill it."""
        how = describe_exit(-number)
        if self._ending is not None:
            living = self._in(RUNS, ENDING)
            for one in living:
                one.become(ENDING, now)
            return [Log(f"{how}: all workers are killed"), *(SendSignal(one.name, SIGKILL) for one in living)]
        told = Log(f"{how}: the group ends; a second signal kills it")
        if all(one.role.serves for one in self._in(RUNS, ENDING)):
            return [told, *self._end(128 + number, number, now)]
        # The others may call the serving workers until they have ended. `ended` then issues EndServing.
        self._begin_to_end(128 + number, now)
        asked = [action for one in self._in(RUNS) if not one.role.serves for action in self._ask(one, number, now)]
        return [told, *asked]

    def abort(self, why: str, now: float) -> list[Action]:
        """End the group because it cannot run."""
        return [] if self._ending is not None else self._fail(why, 1, now)

    # Reactions

    def _ask(self, one: SlotState, number: int, now: float) -> list[Action]:
        one.become(ENDING, now, now + self._grace)
        return [SendSignal(one.name, number)]

    def _after_failure(self, one: SlotState, code: int, now: float) -> list[Action]:
        how = f"{one.name} ended with {describe_exit(code)} after {now - one.begun:.1f} s"
        if one.role.on_failure == END:
            return self._fail(how, code, now, one.name)
        due = one.budget.spend(one.begun, now)
        if due is None:
            often = f"{one.role.restarts} restarts within {one.role.within:g} s are used up"
            return self._fail(f"{how}, and {often if one.role.restarts else 'is not restarted'}", code, now, one.name)
        later = f" in {due - now:.1f} s" if due > now else ""
        if one.role.on_failure == RESTART_ROLE:
            text = f"{how}; all workers of role {one.role.name!r} are restarted{later} ({one.budget})"
            return [Log(text), *self._restart_role(one, due, now)]
        one.become(WAITS, now, due)
        return [Log(f"{how}; it is restarted{later} ({one.budget})")]

    def _restart_role(self, failed: SlotState, due: float, now: float) -> list[Action]:
        self._due[failed.role.name] = due
        actions: list[Action] = []
        for one in self._of(failed.role):
            if one.state == RUNS:
                actions += self._ask(one, SIGTERM, now)
            # A worker that has not started yet must not start alone: `_begin_together` waits until all have ended.
            elif one.state == WAITS:
                one.become(ENDED, now)
        self._begin_together(failed.role, now)
        return actions

    def _begin_together(self, role: Role, now: float) -> None:
        """Restart all workers of a role once none of them runs."""
        all_of_it = self._of(role)
        if all(one.state == ENDED for one in all_of_it):
            due = max(now, self._due.pop(role.name))
            for one in all_of_it:
                one.become(WAITS, now, due)

    def _of(self, role: Role) -> list[SlotState]:
        return [one for one in self.slots.values() if one.role is role]

    def _end_if_done(self, now: float) -> list[Action]:
        living = self._in(WAITS, RUNS, ENDING)
        # If all roles serve, no other worker decides the end of the group: it ends when all of them have ended.
        all_serve = all(one.role.serves for one in self.slots.values())
        if any(all_serve or not one.role.serves for one in living):
            return []
        self._begin_to_end(0, now)
        names = ", ".join(one.name for one in living)
        text = f"all work is done: {names} {'ends' if len(living) == 1 else 'end'}"
        return [*([Log(text)] if living else []), *self._end_serving(now)]

    def _runs_on(self, role: Role) -> str:
        """Once a role has ended, name the roles for which the group runs on."""
        needed = {one.role.name for one in self._in(WAITS, RUNS, ENDING) if not one.role.serves}
        if not needed or role.name in needed:
            return ""
        return f"; the group still waits for {' and '.join(sorted(needed))} (no `serves = true`)"

    def _end_serving(self, now: float) -> list[Action]:
        """Issue EndServing once, when only serving workers are left."""
        if self._told or any(not one.role.serves for one in self._in(RUNS, ENDING)):
            return []
        self._told = True
        # `look` sends SIGTERM to a worker that still RUNS at this time, and SIGKILL after the same time again.
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
        # On node 0 this also ends the serving workers of other hosts, to which this process sends no signals.
        actions: list[Action] = [EndServing()]
        for one in self._in(RUNS):
            actions += self._ask(one, number, now)
        return actions
