"""The configuration of `telegrad run`: roles, from a file or from options.

grace = 10                       # options of the run: logs and grace
[learner]                        # each table is a role
command = "python learner.py"
[actor]
count = 4
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from telegrad.errors import UsageError
from telegrad.ext.arguments import short_repr
from telegrad.ext.joining import check_name, check_role
from telegrad.ext.texts import did_you_mean

RESTART, RESTART_ROLE, END = "restart", "restart-role", "end"
POLICIES = (RESTART, RESTART_ROLE, END)
SERVE = ("python", "-m", "telegrad", "worker")  # the default command


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
    """The configuration of a run."""

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
    """Parse a file, apply the changes of the options, and return the configuration. `changes` has the form of the file.

    Raises:
        UsageError: the file is invalid or inconsistent.
    """
    told = _changed(_parsed(text), changes)
    tables = {key: value for key, value in told.items() if isinstance(value, Mapping)}
    rest = {key: value for key, value in told.items() if key not in tables}
    _check_keys(rest, ("logs", "grace"), "the file")
    plan = RunConfig(tuple(_role(name, table) for name, table in tables.items()), **rest)
    if not plan.roles:
        raise UsageError("there is no role to run: give a file with tables such as [actor], or a command after --")
    _check(isinstance(plan.logs, str), "logs must be the name of a folder", plan.logs)
    _check(_is_number(plan.grace) and plan.grace >= 0, "grace must be a number of seconds", plan.grace)
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
    given["env"] = _env(given.get("env", {}), of)
    role = Role(name, **{"serves": not own, **given})
    _check(
        _is_whole(role.count) and role.count >= 1,
        f"{of}: count must be the number of its workers, at least 1",
        role.count,
    )
    check_name(f"{name}{role.count}")
    _check(
        _is_whole(role.restarts) and role.restarts >= 0, f"{of}: restarts must be a number, 0 for none", role.restarts
    )
    _check(_is_number(role.within) and role.within > 0, f"{of}: within must be a number of seconds", role.within)
    _check(role.on_failure in POLICIES, f"{of}: on_failure must be one of {', '.join(POLICIES)}", role.on_failure)
    _check(isinstance(role.serves, bool), f"{of}: serves must be true or false", role.serves)
    whole = role.node is None or (_is_whole(role.node) and role.node >= 0)
    _check(whole, f"{of}: node must be the number of the host that runs it, from 0 on", role.node)
    return role


def _command(given: Any, of: str) -> tuple[str, ...]:
    try:
        words = shlex.split(given) if isinstance(given, str) else list(given)
    except (TypeError, ValueError):
        words = []
    _check(
        bool(words) and all(isinstance(word, str) for word in words), f"{of}: command must be a string or a list", given
    )
    return (*(["python"] if words[0].endswith(".py") else []), *words)


def _env(given: Any, of: str) -> dict[str, str]:
    plain = isinstance(given, Mapping) and all(isinstance(value, str) or _is_number(value) for value in given.values())
    _check(plain, f'{of}: env must be a table of variables, such as {{ DEBUG = "1" }}', given)
    return {key: str(value) for key, value in given.items()}


def _check_keys(given: Mapping[str, Any], known: tuple[str, ...], of: str) -> None:
    for key in given:
        if key not in known:
            raise UsageError(f"{of} has a key {key!r} that is not one of {', '.join(known)}{did_you_mean(key, known)}")


def _check(holds: bool, rule: str, given: Any) -> None:
    if not holds:
        raise UsageError(f"{rule}, not {short_repr(given)}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
