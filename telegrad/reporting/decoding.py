"""Decode the answers of workers, and reject invalid ones.

An answer comes from another process, which may run another version or not be a worker at all; a file may be damaged. So
all answers pass through `decode`, which checks their form and sizes and sanitizes their texts. Code that uses the
result can rely on the types in `reporting/worker_state.py`, and print each text.
"""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Callable
from math import isfinite
from typing import Any, Union

from telegrad.ext.events import Event, events
from telegrad.ext.texts import safe
from telegrad.reporting.worker_state import WorkerState

ACCOUNT, GROUP, EVENTS, GROUP_EVENTS, DUMP = "account", "group", "events", "group events", "dump"  # topics
CALL = "call"
FILE = "file"  # the content of a file that `reporting/dump.py` writes

LONGEST_TEXT = 4096  # characters; longer texts are cut
MOST_ITEMS = 100_000  # in one list or dictionary
LARGEST_NUMBER = 1 << 64

_Check = Callable[[Any, str], Any]


class Malformed(ValueError):
    """An answer that no worker sends."""


def decode(topic: str, data: bytes) -> Any:
    """Decode the answer to a question about `topic`.

    Raises:
        Malformed: the answer has another form.
    """
    try:
        value = json.loads(data.decode(), parse_constant=_refuse)
    except Malformed:
        raise
    except (ValueError, RecursionError) as error:
        raise Malformed(f"it is not valid JSON: {safe(str(error))[:200]}") from None
    return checked(topic, value)


def checked(topic: str, value: Any) -> Any:
    """Check an answer that is already parsed, or this worker's own; return it with sanitized texts.

    Raises:
        Malformed: the answer has another form.
    """
    check: _Check = _CHECKS.get(topic, _none)  # a worker answers null to an unknown topic
    return check(value, topic)


def _refuse(name: str) -> None:
    raise Malformed(f"{name} is not a number")


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise Malformed(f"{where} is not a string")
    return safe(value if len(value) <= LONGEST_TEXT else f"{value[:LONGEST_TEXT]}...")


def _integer(value: Any, where: str) -> int:
    if not isinstance(value, int) or abs(value) > LARGEST_NUMBER:
        raise Malformed(f"{where} is not an integer")
    return value


def _number(value: Any, where: str) -> float:
    if isinstance(value, float) and isfinite(value):
        return value
    return _integer(value, where)


def _truth(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise Malformed(f"{where} is neither true nor false")
    return value


def _none(value: Any, where: str) -> None:
    if value is not None:
        raise Malformed(f"{where} has an unexpected type")


def _list_of(check: _Check) -> _Check:
    def checked(value: Any, where: str) -> list[Any]:
        if not isinstance(value, list) or len(value) > MOST_ITEMS:
            raise Malformed(f"{where} is not a list, or has more than {MOST_ITEMS} items")
        return [check(each, where) for each in value]

    return checked


def _dict_of(check: _Check) -> _Check:
    def checked(value: Any, where: str) -> dict[str, Any]:
        if not isinstance(value, dict) or len(value) > MOST_ITEMS:
            raise Malformed(f"{where} is not a dictionary, or has more than {MOST_ITEMS} items")
        return {_text(key, where): check(each, where) for key, each in value.items()}

    return checked


def _one_of(checks: list[_Check]) -> _Check:
    def checked(value: Any, where: str) -> Any:
        for check in checks[:-1]:
            try:
                return check(value, where)
            except Malformed:
                pass
        return checks[-1](value, where)

    return checked


def _fields(checks: dict[str, _Check], required: frozenset[str]) -> _Check:
    """Return a check of a TypedDict. It drops unknown fields, because newer versions send more."""

    def checked(value: Any, where: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise Malformed(f"{where} is not a dictionary")
        if missing := required - value.keys():
            raise Malformed(f"{where} has no {min(missing)}")
        return {name: check(value[name], f"{where}.{name}") for name, check in checks.items() if name in value}

    return checked


_PLAIN: dict[Any, _Check] = {str: _text, int: _integer, float: _number, bool: _truth, type(None): _none}


def _check_for(kind: Any) -> _Check:
    """Return the check for a type of `reporting/worker_state.py`."""
    if kind in _PLAIN:
        return _PLAIN[kind]
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is list:
        return _list_of(_check_for(inner[0]))
    if origin is dict:
        return _dict_of(_check_for(inner[1]))
    if origin in (Union, types.UnionType):
        return _one_of([_check_for(each) for each in inner])
    checks = {name: _check_for(each) for name, each in typing.get_type_hints(kind).items()}
    return _fields(checks, kind.__required_keys__)


# Events

_SCALAR = _one_of([_number, _none, _text])
_AFTER_TIMES: dict[str, tuple[_Check, ...]] = {  # the fields after the times, as in `_core/events.py`
    events.CALLED: (_text, _integer, _text, _integer, _text),
    events.RAN: (_text, _integer, _text, _text),
    events.CONNECTED: (_text, _text),
    events.LOST: (_text, _text),
    events.JOINED: (_text, _integer, _SCALAR),
    events.LEFT: (_text,),
    events.MADE: (_text, _SCALAR),
    events.FREED: (_SCALAR,),
    events.BACKWARD_PASS: (_SCALAR, _SCALAR, _text),
    events.BACKWARD_TASKS: (_SCALAR, _SCALAR, _SCALAR),
    events.STAGED: (_SCALAR, _text, _integer, _integer),
    events.STEPPED: (_SCALAR, _text),
    events.NOTED: (_text, _text),
}


def _events(value: Any, where: str) -> list[Event]:
    """Check events; drop unknown kinds."""
    if not isinstance(value, list) or len(value) > MOST_ITEMS:
        raise Malformed(f"{where} are not a list, or more than {MOST_ITEMS}")
    found = []
    for each in value:
        if not isinstance(each, list | tuple) or not each or not isinstance(each[0], str):
            raise Malformed(f"{where} have an item that is not an event")
        checks = _AFTER_TIMES.get(each[0])
        if checks is None:
            continue
        if len(each) < 3 + len(checks):
            raise Malformed(f"{where} have an event with too few fields")
        times = _number(each[1], where), _number(each[2], where)
        found.append((each[0], *times, *(check(part, where) for check, part in zip(checks, each[3:], strict=False))))
    return found


_account = _check_for(WorkerState)
_CHECKS: dict[str, _Check] = {
    ACCOUNT: _account,
    GROUP: _fields({"accounts": _list_of(_account), "silent": _dict_of(_text)}, frozenset(["accounts", "silent"])),
    EVENTS: _events,
    GROUP_EVENTS: _dict_of(_events),
    DUMP: _text,
    CALL: _text,
    FILE: _fields({"reason": _text, "account": _account, "events": _events}, frozenset(["account", "events"])),
}
