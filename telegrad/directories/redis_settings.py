"""The settings in the URL of a Redis server, and those that a server must have to hold a directory.

Each fault names a way to lose what the server has acknowledged, or to have two servers answer:

- without an append-only file, or with one that is written to the disk later than the reply is sent, a crash takes the
  newest writes with it: revisions go backwards and a fencing token is given twice. `no-appendfsync-on-rewrite yes` is
  the same for as long as the file is rewritten;
- an eviction policy `allkeys-*` deletes keys of the directory when memory is full. The `volatile-*` ones delete keys
  that have an expiry alone, and the directory has none;
- a replica answers with what it has got so far;
- a node of a Redis Cluster has a part of the keys alone, and which part may change.
"""

from __future__ import annotations

import urllib.parse
from collections.abc import Mapping
from typing import NamedTuple

from telegrad.errors import InvalidArgument

DURABLE = {"appendonly": "yes", "appendfsync": "always", "no-appendfsync-on-rewrite": "no"}
OLDEST = (6, 2)  # has XRANGE with exclusive bounds and ZADD GT
RIGHTS = "+info +config|get +select +eval +evalsha +time +del +@hash +@sortedset +@stream ~telegrad:*"
_TLS = {"ssl_ca_certs", "ssl_certfile", "ssl_keyfile"}  # as redis-py names them
_FORM = "redis://[USER:PASSWORD@]HOST[:PORT][/DB], or rediss:// for TLS"


class Address(NamedTuple):
    """Where a server is, and how a client logs in."""

    host: str
    port: int
    db: int
    login: tuple[str, ...]  # the arguments of AUTH: nothing, (password,) or (user, password)
    tls: dict[str, str] | None  # paths for SSLConnection; None for a connection without TLS

    def __str__(self) -> str:
        """Return the URL without the password."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'redis' if self.tls is None else 'rediss'}://{host}:{self.port}/{self.db}"


def parse(url: str) -> Address:
    """Read a URL, whose query may give `ssl_ca_certs`, `ssl_certfile` and `ssl_keyfile` for `rediss://`.

    Raises:
        InvalidArgument: it is no such URL. The message does not repeat it, since it may hold a password.
    """
    try:
        parts = urllib.parse.urlsplit(url)
        port = parts.port or 6379
        db = int(parts.path.strip("/") or 0)
        query = dict(urllib.parse.parse_qsl(parts.query, strict_parsing=bool(parts.query)))
    except ValueError as error:
        raise InvalidArgument(f"the URL of a Redis server has the form {_FORM}: {error}") from None
    if parts.scheme not in ("redis", "rediss") or not parts.hostname or parts.fragment or db < 0:
        raise InvalidArgument(f"the URL of a Redis server has the form {_FORM}")
    if unknown := query.keys() - (_TLS if parts.scheme == "rediss" else set()):
        raise InvalidArgument(
            f"the URL of a Redis server cannot have {', '.join(sorted(unknown))}: its query has "
            f"{', '.join(sorted(_TLS))}, and only behind rediss://"
        )
    if parts.username and parts.password is None:
        raise InvalidArgument(f"the URL of the Redis server at {parts.hostname} has a user but no password: {_FORM}")
    login = tuple(urllib.parse.unquote(part) for part in (parts.username, parts.password) if part)
    return Address(parts.hostname, port, db, login, query if parts.scheme == "rediss" else None)


def parse_info(text: str) -> dict[str, str]:
    """Read the reply to INFO."""
    lines = (line.partition(":") for line in text.splitlines() if not line.startswith("#"))
    return {name: value for name, colon, value in lines if colon}


def find_faults(info: Mapping[str, str], config: Mapping[str, str]) -> list[str]:
    """Return what is wrong with a server, each with what to do; nothing for a server that can hold a directory."""
    faults = []
    version = info.get("redis_version", "0")
    if tuple(int(part) for part in version.split(".")[:2] if part.isdigit()) < OLDEST:
        faults.append(f"it is Redis {version}: install {'.'.join(map(str, OLDEST))} or newer")
    if info.get("redis_mode") == "cluster":
        faults.append("it is a node of a Redis Cluster: use a server that runs alone (cluster-enabled no)")
    if info.get("role") != "master":
        master = f" at {info['master_host']}:{info['master_port']}" if "master_host" in info else ""
        faults.append(f"it is a replica: use the address of its master{master}")
    if wrong := {name: wanted for name, wanted in DURABLE.items() if config.get(name) != wanted}:
        now = ", ".join(f"{name} is {config.get(name, 'unknown')}" for name in wrong)
        faults.append(
            f"a crash would lose writes that it has acknowledged ({now}): set "
            + ", ".join(f"`{name} {wanted}`" for name, wanted in wrong.items())
            + " in redis.conf, or by CONFIG SET and CONFIG REWRITE"
        )
    if info.get("maxmemory_policy", "").startswith("allkeys-"):
        faults.append(
            f"it deletes keys when memory is full (maxmemory-policy {info['maxmemory_policy']}): "
            "set `maxmemory-policy noeviction`"
        )
    return faults
