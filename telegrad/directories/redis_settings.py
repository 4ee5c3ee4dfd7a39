"""The settings in the URL of a Redis server, and the settings that a server needs to hold a directory.

Each fault can lose acknowledged data, or lets two servers answer:

- Without an append-only file, or if it is written to disk after the reply is sent, a crash loses the newest writes:
  revisions decrease and a fencing token is issued twice. `no-appendfsync-on-rewrite yes` has this effect while the file
  is rewritten.
- An eviction policy `allkeys-*` deletes keys of the directory when memory is full. The `volatile-*` policies delete
  only keys with an expiry, which the directory does not use.
- A replica answers with the data it has received so far.
- A node of a Redis Cluster has only some of the keys, and which ones may change.
"""

from __future__ import annotations

import urllib.parse
from collections.abc import Mapping
from typing import NamedTuple

from telegrad.errors import InvalidArgument

DURABLE = {"appendonly": "yes", "appendfsync": "always", "no-appendfsync-on-rewrite": "no"}
OLDEST = (6, 2)  # the first version that has XRANGE with exclusive bounds and ZADD GT
RIGHTS = "+info +config|get +select +eval +evalsha +time +del +@hash +@sortedset +@stream ~telegrad:*"
_TLS = {"ssl_ca_certs", "ssl_certfile", "ssl_keyfile"}  # the names of redis-py
_FORM = "redis://[USER:PASSWORD@]HOST[:PORT][/DB], or rediss:// for TLS"


class Address(NamedTuple):
    """The address of a server, and the login."""

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
    """Parse a URL. With `rediss://` the query may give `ssl_ca_certs`, `ssl_certfile` and `ssl_keyfile`.

    Raises:
        InvalidArgument: the URL is wrong. The message does not repeat it, because it may contain a password.
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
            f"the URL of a Redis server cannot have {', '.join(sorted(unknown))}: its query may "
            f"have {', '.join(sorted(_TLS))}, and only with rediss://"
        )
    if parts.username and parts.password is None:
        raise InvalidArgument(f"the URL of the Redis server at {parts.hostname} has a user but no password: {_FORM}")
    login = tuple(urllib.parse.unquote(part) for part in (parts.username, parts.password) if part)
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
