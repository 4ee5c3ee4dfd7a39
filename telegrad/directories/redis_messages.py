"""The URL of a Redis server, the settings that it needs to hold a directory, and the replies of on_redis.lua. No I/O.

Each fault in the settings can lose acknowledged data, or lets two servers answer:

- Without an append-only file, or if it is written to disk after the reply is sent, a crash loses the newest writes:
  revisions decrease and a fencing token is issued twice. `no-appendfsync-on-rewrite yes` has this effect while the file
  is rewritten.
- An eviction policy `allkeys-*` deletes keys of the directory when memory is full. The `volatile-*` policies delete
  only keys with an expiry, which the directory does not use.
- A replica answers with the data it has received so far.
- A node of a Redis Cluster has only some of the keys, and which ones may change.

Other programs can write to the keys of a group, so a reply may contain anything. Content that no worker can have
written raises RedisMalformed, which names the key.
"""

import math
import re
import urllib.parse
from collections.abc import Mapping
from typing import Any, NamedTuple

from telegrad.errors import InvalidArgument
from telegrad.ext.host import bracketed
from telegrad.ext.joining import Entry, Event

DURABLE = {"appendonly": "yes", "appendfsync": "always", "no-appendfsync-on-rewrite": "no"}
OLDEST = (6, 2)  # the first version that has XRANGE with exclusive bounds and ZADD GT
RIGHTS = "+info +config|get +select +eval +evalsha +time +del +@hash +@sortedset +@stream ~telegrad:*"
_TLS = {"ssl_ca_certs", "ssl_certfile", "ssl_keyfile"}  # the names of redis-py
_FORM = "redis://[USER:PASSWORD@]HOST[:PORT][/DB], or rediss:// for TLS"
_FAILED = (b"reset", b"lease lost", b"compacted")
_RECORD = re.compile(rb"(\d{1,19}) (\d{1,19}) (\d{1,19}) (.*)", re.DOTALL)  # as written by write() of on_redis.lua
_FAILURES = re.compile("WRONGTYPE|not an integer|not a valid float|would overflow|attempt to|equal or smaller")


class Address(NamedTuple):
    host: str
    port: int
    db: int
    login: tuple[str, ...]  # the arguments of AUTH: nothing, (password,) or (user, password)
    tls: dict[str, str] | None  # paths for SSLConnection; None for a connection without TLS

    def __str__(self) -> str:
        """Return the URL without the password."""
        return f"{'redis' if self.tls is None else 'rediss'}://{bracketed(self.host)}:{self.port}/{self.db}"


def parse(url: str) -> Address:
    """Parse a URL. With `rediss://` the query may give `ssl_ca_certs`, `ssl_certfile` and `ssl_keyfile`. Raise
    InvalidArgument if the URL is wrong. The message does not repeat it, because it may contain a password."""
    try:
        parts = urllib.parse.urlsplit(url)
        port = 6379 if parts.port is None else parts.port
        db = int(parts.path.strip("/") or 0)
        query = dict(urllib.parse.parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
    except ValueError as error:
        raise InvalidArgument(f"the URL of a Redis server has the form {_FORM}: {error}") from None
    if parts.scheme not in ("redis", "rediss") or not parts.hostname or parts.fragment or db < 0 or not port:
        raise InvalidArgument(f"the URL of a Redis server has the form {_FORM}")
    if unknown := query.keys() - (_TLS if parts.scheme == "rediss" else set()):
        raise InvalidArgument(
            f"the URL of a Redis server cannot have {', '.join(sorted(unknown))}: its query may "
            f"have {', '.join(sorted(_TLS))}, and only with rediss://"
        )
    if empty := [name for name, value in query.items() if not value]:
        raise InvalidArgument(f"the URL of a Redis server has an empty {empty[0]}")
    if parts.username and parts.password is None:
        raise InvalidArgument(f"the URL of the Redis server at {parts.hostname} has a user but no password: {_FORM}")
    given = (parts.username, parts.password) if parts.username else (parts.password,) if parts.password else ()
    login = tuple(urllib.parse.unquote(part or "") for part in given)
    return Address(parts.hostname, port, db, login, query if parts.scheme == "rediss" else None)


def parse_info(text: str) -> dict[str, str]:
    """Parse the reply to INFO."""
    lines = (line.partition(":") for line in text.splitlines() if not line.startswith("#"))
    return {name: value for name, colon, value in lines if colon}


def find_faults(info: Mapping[str, str], config: Mapping[str, str]) -> list[str]:
    """Return the faults of a server, each with its remedy; none if the server can hold a directory."""
    faults = []
    version = info.get("redis_version", "0")
    if tuple(int(part) for part in version.split(".")[:2] if part.isdigit()) < OLDEST:
        faults.append(f"it is Redis {version}: install {'.'.join(map(str, OLDEST))} or newer")
    if info.get("redis_mode") == "cluster":
        faults.append("it is a node of a Redis Cluster: use a standalone server (cluster-enabled no)")
    if info.get("role") != "master":
        master = f" at {info['master_host']}:{info['master_port']}" if "master_host" in info else ""
        faults.append(f"it is a replica: use the address of its master{master}")
    if wrong := {name: wanted for name, wanted in DURABLE.items() if config.get(name) != wanted}:
        now = ", ".join(f"{name} is {config.get(name, 'unknown')}" for name in wrong)
        faults.append(
            f"a crash would lose writes that it has acknowledged ({now}): set "
            + ", ".join(f"`{name} {wanted}`" for name, wanted in wrong.items())
            + " in redis.conf, or with CONFIG SET and CONFIG REWRITE"
        )
    if info.get("maxmemory_policy", "").startswith("allkeys-"):
        faults.append(
            f"it deletes keys when memory is full (maxmemory-policy {info['maxmemory_policy']}): "
            "set `maxmemory-policy noeviction`"
        )
    return faults


class RedisMalformed(Exception):
    """A key has a content that no worker can have written."""

    def __init__(self, key: str, field: str = "") -> None:
        """`key`: the last part of the key's name; `*` if it may be any key of the group."""
        super().__init__(f"{key} {field}")
        self.key, self.field = key, field


class Changes(NamedTuple):
    since: int
    events: list[Event]
    milliseconds: int  # until the next lease ends; -1: no lease


class RedisReply(NamedTuple):
    status: bytes
    revision: int
    content: Any = None  # the result of the operation, if it was executed


def read_reply(operation: str, about: object, reply: object) -> RedisReply:
    """Parse the reply to an operation; `about` is its first argument. Raise RedisMalformed if it has another form."""
    status, number, *content = _list(reply, "state", 2)
    revision = _number(number, "state")
    if status in _FAILED:
        return RedisReply(status, revision)
    writes = operation in ("write", "delete")
    if status != b"done" and not (writes and status == b"differs"):
        raise RedisMalformed("state")
    found: Any = None
    if writes:
        if (record := _only(content, "entries")) is not None:
            found = _entry(_name(about, "entries"), record, "entries")
    elif operation == "attach":
        found = _bytes(_only(content, "state"), "state", "incarnation")
    elif operation == "grant":
        found = _number(_only(content, "state"), "state")
    elif operation == "list":
        pairs = [_list(each, "order", 2, 2) for each in _list(_only(content, "order"), "order")]
        found = tuple(_entry(_name(name, "order"), record, "entries") for name, record in pairs)
    elif operation == "watch":
        since, changes, milliseconds = _list(content, "history", 3, 3)
        if type(milliseconds) is not int or _number(since, "history") > revision:
            raise RedisMalformed("history")  # each change raises the revision, so another program wrote this one
        found = Changes(since, [_event(each) for each in _list(changes, "history")], milliseconds)
    return RedisReply(status, revision, found)


def is_of_malformed_keys(error: str) -> bool:
    """Return True if the script meets this error of Redis or Lua only when a key has a wrong content."""
    return _FAILURES.search(error) is not None


def _event(change: object) -> Event:
    number, key, *record = _list(change, "history", 2, 3)
    revision, name = _number(number, "history"), _name(key, "history")
    return Event(revision, name, None if record in ([], [None]) else _entry(name, record[0], "history"))


def _entry(name: str, record: object, key: str) -> Entry:
    parts = _RECORD.fullmatch(record) if isinstance(record, bytes) else None
    if parts is None:
        raise RedisMalformed(key, name)
    revision, created, lease = map(int, parts.groups()[:3])
    return Entry(name, parts[4], revision, created, lease)


def _list(value: object, key: str, least: int = 0, most: float = math.inf) -> list[Any]:
    if not isinstance(value, list) or not least <= len(value) <= most:
        raise RedisMalformed(key)
    return value


def _only(content: list[Any], key: str) -> Any:
    return _list(content, key, 1, 1)[0]


def _number(value: object, key: str) -> int:
    if type(value) is not int or value < 0:
        raise RedisMalformed(key)
    return value


def _bytes(value: object, key: str, field: str = "") -> bytes:
    if not isinstance(value, bytes):
        raise RedisMalformed(key, field)
    return value


def _name(name: object, key: str) -> str:
    # a key that no worker wrote has no seal either, and is skipped
    return _bytes(name, key).decode("utf-8", "backslashreplace")
