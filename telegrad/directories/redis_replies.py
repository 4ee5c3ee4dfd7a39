"""Check and parse the replies of on_redis.lua. No I/O.

Other programs can write to the keys of a group, so a reply may contain anything. Content that no worker can have
written raises Malformed, which names the key.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from telegrad.ext.directories import Entry, Event

_FAILED = (b"reset", b"lease lost", b"compacted")
_RECORD = re.compile(rb"(\d{1,19}) (\d{1,19}) (\d{1,19}) (.*)", re.DOTALL)  # as written by write() of on_redis.lua
_FAILURES = re.compile("WRONGTYPE|not an integer|not a valid float|would overflow|attempt to|equal or smaller")


class RedisMalformed(Exception):
    """A key has a content that no worker can have written."""

    def __init__(self, key: str, field: str = "") -> None:
        """`key`: the last part of the key's name; `*` if it may be any key of the group."""
        super().__init__(f"{key} {field}")
        self.key, self.field = key, field


class Changes(NamedTuple):
    """The content of a reply to a watch."""

    since: int
    events: list[Event]
    milliseconds: int  # until the next lease ends; -1: no lease


class RedisReply(NamedTuple):
    """A reply of the script."""

    status: bytes
    revision: int
    content: Any = None  # the result of the operation, if it was executed


def read_reply(operation: str, about: object, reply: object) -> RedisReply:
    """Parse the reply to an operation; `about` is its first argument.

    Raises:
        Malformed: other programs have written to the group's keys.
    """
    if not isinstance(reply, list) or len(reply) < 2:
        raise RedisMalformed("state")
    status, revision, content = reply[0], _number(reply[1], "state"), reply[2:]
    if status in _FAILED:
        return RedisReply(status, revision)
    if operation in ("write", "delete") and status in (b"done", b"differs"):
        record = _only(content, "entries")
        return RedisReply(
            status, revision, None if record is None else _entry(_name(about, "entries"), record, "entries")
        )
    if status != b"done":
        raise RedisMalformed("state")
    read = _READERS.get(operation)
    found = read(content) if read else None
    if isinstance(found, Changes) and found.since > revision:
        raise RedisMalformed("history")  # each change raises the revision, so another program wrote this one
    return RedisReply(status, revision, found)


def is_of_malformed_keys(error: str) -> bool:
    """Return True if the script meets this error of Redis or Lua only when a key has a wrong content."""
    return _FAILURES.search(error) is not None


def _incarnation(content: list[Any]) -> bytes:
    found = _only(content, "state")
    if not isinstance(found, bytes):
        raise RedisMalformed("state", "incarnation")
    return found


def _lease(content: list[Any]) -> int:
    return _number(_only(content, "state"), "state")


def _entries(content: list[Any]) -> tuple[Entry, ...]:
    found = _only(content, "order")
    if not isinstance(found, list):
        raise RedisMalformed("order")
    entries = []
    for each in found:
        name, record = each if isinstance(each, list) and len(each) == 2 else (None, None)
        entries.append(_entry(_name(name, "order"), record, "entries"))
    return tuple(entries)


def _changes(content: list[Any]) -> Changes:
    if len(content) != 3 or not isinstance(content[1], list) or type(content[2]) is not int:
        raise RedisMalformed("history")
    return Changes(_number(content[0], "history"), [_event(each) for each in content[1]], content[2])


def _event(change: object) -> Event:
    if not isinstance(change, list) or not 2 <= len(change) <= 3:
        raise RedisMalformed("history")
    revision, name = _number(change[0], "history"), _name(change[1], "history")
    record = change[2] if len(change) == 3 else None
    return Event(revision, name, None if record is None else _entry(name, record, "history"))


_READERS: dict[str, Callable[[list[Any]], Any]] = {
    "attach": _incarnation,
    "grant": _lease,
    "list": _entries,
    "watch": _changes,
}


def _entry(name: str, record: object, key: str) -> Entry:
    parts = _RECORD.fullmatch(record) if isinstance(record, bytes) else None
    if parts is None:
        raise RedisMalformed(key, name)
    revision, created, lease = map(int, parts.groups()[:3])
    return Entry(name, parts[4], revision, created, lease)


def _only(content: list[Any], key: str) -> Any:
    if len(content) != 1:
        raise RedisMalformed(key)
    return content[0]


def _number(value: object, key: str) -> int:
    if type(value) is not int or value < 0:
        raise RedisMalformed(key)
    return value


def _name(name: object, key: str) -> str:
    if not isinstance(name, bytes):
        raise RedisMalformed(key)
    return name.decode("utf-8", "backslashreplace")  # a key that no worker wrote has no seal either, and is skipped
