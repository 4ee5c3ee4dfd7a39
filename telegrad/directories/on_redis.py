"""The directory of a group on a Redis server, 6.2 or newer, or on a compatible one.

Every operation is one Lua script (on_redis.lua), which Redis runs atomically. A group has these keys, all under
`telegrad:GROUP:`. None of them has a Redis expiry:

    state     hash: `revision`, the number of leases so far, `incarnation` (random, set when this key is made), `run`
    entries   hash: key to record; a record has the revision, the revision of the creation, the lease and the value
    order     sorted set of the keys, for prefix queries
    ends      sorted set of the leases by their end, in microseconds of the server's clock
    ttls      hash: lease to microseconds
    held      sorted set of "LEASE\\0KEY": the keys that end with each lease
    history   stream of the changes, whose ids are revisions; the newest HISTORY are kept

Ends of leases. Redis would expire keys in no fixed order, and would give a deletion no revision. So each script first
deletes the keys of expired leases, oldest end first, each at its own revision: no reply shows an entry of an expired
lease. A watch waits in XREAD BLOCK at most until the next lease ends, and then runs the script again. A new entry wakes
all watches.

Clocks. All lease ends use the server's TIME, which is not monotonic. If it is set forward by J seconds, all leases end
up to J early. A holder may then act for J seconds beside its successor, until receivers that have seen the successor's
token refuse it. If it is set back by J, leases that are not renewed last J longer, and a watch that waits at that
moment raises DirectoryLost once. Configure the server's clock to be slewed, not stepped.

While a server restarts, no worker can renew. So the first connection to the new process gives every lease its full TTL
again (`run` is INFO's `run_id`; each connection compares it first). Each connection also refuses a server that would
lose acknowledged writes in a crash (`find_faults`). A later change of the settings is noticed by the next
connection.

Limits. Redis replicates after it has replied. When a replica replaces the master, acknowledged writes may be missing
there: a claim vanishes, a fencing token is issued twice, and for a while both servers may answer. The same holds for a
restored backup and for FLUSHALL. A client raises DirectoryReset if the revision is lower than one it has seen, or if
the incarnation differs. A client that joins later cannot detect it.

The keys of a group stay after the group has ended, so a later group of that name continues the revisions. They may be
deleted when no worker of that group runs.

redis-py provides the protocol and the sockets. Its pool is not used: its timeouts apply to single steps, not to an
operation, and it does not report whether a failed command was sent. A compare-and-set must not be sent twice, so both
matter.
"""

from __future__ import annotations

import hashlib
import importlib.resources
import math
import secrets
import ssl
import time
from collections.abc import Callable
from typing import Any, TypeVar

from telegrad.directories import MOST_BYTES
from telegrad.directories.redis_messages import (
    RIGHTS,
    Address,
    RedisMalformed,
    RedisReply,
    find_faults,
    is_of_malformed_keys,
    parse,
    parse_info,
    read_reply,
)
from telegrad.errors import StoreUntrusted, TelegradError, UsageError
from telegrad.ext.feedback import safe
from telegrad.ext.host import reason
from telegrad.ext.joining import (
    ABSENT,
    Compacted,
    DirectoryRefused,
    DirectoryReset,
    Events,
    Lease,
    LeaseLost,
    Listing,
    Result,
    Sessions,
    Swap,
    Unanswered,
    Unsent,
    check_key,
    check_ttl,
    check_value,
    load_own,
)

try:
    import redis
    from redis import exceptions
except ImportError as error:
    raise ImportError("the directory on Redis needs redis-py: pip install 'telegrad[redis]'") from error

T = TypeVar("T")

_BROKEN = (exceptions.ConnectionError, exceptions.TimeoutError, OSError)
HISTORY = 10_000  # changes that watches can still get: 80 s of 25 joins a second with 5 writes each
_BATCH = 100  # maximum number of changes in one reply
_SLICE = 1.0  # seconds after which a watch notices that `close` was called
_KEYS = ("state", "entries", "order", "ends", "ttls", "held", "history")
_SCRIPT = importlib.resources.files(__package__).joinpath("on_redis.lua").read_bytes()
_SHA = hashlib.sha1(_SCRIPT, usedforsecurity=False).hexdigest()


class _LimitedSocket:
    """The socket given to redis-py, whose timeout is for each read: a reply in small pieces would never be too late."""

    def __init__(self, sock: Any, session: RedisSession) -> None:
        self._sock, self._session = sock, session

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)

    def recv(self, size: int) -> bytes:
        data: bytes = self._sock.recv(size)
        self._session.count(len(data))
        return data

    def recv_into(self, buffer: Any) -> int:  # called by hiredis
        size: int = self._sock.recv_into(buffer)
        self._session.count(size)
        return size


class RedisSession:
    def __init__(self, address: Address, patience: float, attach: Callable[[RedisSession, str], None]) -> None:
        """`attach` is the first operation, and gets the server's `run_id`."""
        self.deadline = 0.0  # of the current operation
        self._address, self._attach = address, attach
        self._is_checked = False
        self._patience = patience
        self._received = 0  # bytes of the current reply
        options: dict[str, Any] = {
            "host": address.host,
            "port": address.port,
            "protocol": 2,
            "socket_timeout": patience,
            "driver_info": None,  # otherwise redis-py sends it while connecting, without the deadline
        }
        if address.tls is None:
            self._connection = redis.Connection(**options)
        else:
            options |= {"ssl_cert_reqs": "required", "ssl_check_hostname": True, **address.tls}
            self._connection = redis.SSLConnection(**options)
        connection: Any = self._connection
        connect_once = connection._connect
        connection._connect = lambda: _LimitedSocket(connect_once(), self)

    def count(self, size: int) -> None:
        """Note that bytes of a reply have come. Raise TimeoutError if the reply takes too long or is too large."""
        self._received += size
        if time.monotonic() > self.deadline + self._patience or self._received > MOST_BYTES:
            raise TimeoutError

    def open(self, deadline: float) -> None:
        """Connect and check the server, which may be another one than before or have other settings."""
        self.deadline = deadline
        # A socket with a timeout of 0 would not wait at all, and a negative one is an error.
        self._connection.socket_connect_timeout = max(0.001, deadline - time.monotonic())
        try:
            self._connection.connect()
            self._attach(self, self._check())
            self._is_checked = True
        except TelegradError:  # before the next clauses: some TelegradErrors are OSErrors
            raise
        except exceptions.AuthenticationError as error:
            raise DirectoryRefused(
                f"the Redis server at {self._address} refuses the login ({safe(str(error))}): give its user and "
                "password in the URL"
            ) from None
        except _BROKEN as error:
            raise Unsent(str(error)) from None
        except exceptions.RedisError as error:
            if isinstance(error, exceptions.NoPermissionError) or "unknown command" in str(error):
                raise DirectoryRefused(
                    f"the Redis server at {self._address} refuses a command that a directory needs "
                    f"({safe(str(error))}): allow the user {RIGHTS} with ACL SETUSER. A server without CONFIG cannot "
                    "be used, because it cannot be checked"
                ) from None
            raise

    def usable(self) -> bool:
        self.deadline = math.inf  # bytes that come now are no reply, and redis-py would hide that they are late
        try:
            # The server sends nothing unasked. So an idle connection with something to read has ended, or is out of
            # step.
            return not self._connection.can_read()
        except _BROKEN:
            return False

    def interrupt(self) -> None:
        """Do nothing: no command waits longer than a second."""

    def close(self) -> None:
        self._connection.disconnect()

    def ask(self, *command: bytes | str | int) -> Any:
        """Send a command and return its reply: bytes, numbers, None and lists of these. The deadline applies until the
        reply begins. The socket's own timeout, which equals the patience, applies to sending and to gaps in a reply,
        and the whole reply may come one patience later. Raise Unanswered if no reply arrived, and RedisError if the
        server refuses the command, with a reply such as OOM, READONLY or BUSY."""
        self._received = 0
        try:
            self._connection.send_command(*command)
            if not self._connection.can_read(max(0.0, self.deadline - time.monotonic())):
                raise Unanswered("no reply")
            return self._connection.read_response()
        except exceptions.AuthenticationError as error:  # a subclass of redis-py's ConnectionError
            if self._is_checked:  # a password was set after the login
                raise Unsent(str(error)) from None
            raise
        except _BROKEN as error:
            raise Unanswered(str(error)) from None

    def _check(self) -> str:
        """Log in; return the `run_id` of a server that can hold a directory, or raise DirectoryRefused."""
        if self._address.login:
            self.ask("AUTH", *self._address.login)
        if self._address.db:
            self.ask("SELECT", self._address.db)
        info = parse_info(self.ask("INFO").decode(errors="replace"))
        settings = [text.decode(errors="replace") for text in self.ask("CONFIG", "GET", "*append*")]
        if faults := find_faults(info, dict(zip(settings[::2], settings[1::2], strict=True))):
            raise DirectoryRefused(f"the Redis server at {self._address} cannot hold a directory: {'; '.join(faults)}")
        return info["run_id"]


def check_own(address: Address) -> None:
    """Load the client's certificate like redis-py, but refuse a key that others may read, or with a passphrase."""
    tls = address.tls or {}
    if certificate := tls.get("ssl_certfile"):
        private_key = tls.get("ssl_keyfile", certificate)
        try:
            load_own(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), certificate, private_key)
        except OSError as error:
            raise UsageError(
                f"the certificate {certificate!r} for Redis with key {private_key!r} cannot be used: {reason(error)}"
            ) from error


def connect(url: str, patience: float = 10.0) -> RedisDirectory:
    """Return the directory of the only group in this database of a Redis server. Raise InvalidArgument for a wrong URL;
    DirectoryRefused for unsuitable settings, role or version, or a refused login; DirectoryLost without an answer."""
    return RedisDirectory(url, "group", patience)


class RedisDirectory:
    """A client of a directory on a Redis server. `telegrad/_core/stores/directory.py` documents its methods."""

    def __init__(self, url: str, group: str, patience: float = 10.0) -> None:
        """Connect and check the server. Groups of different names are isolated from each other. An operation waits
        `patience` seconds for the server. Raises the same errors as `connect`."""
        self._address = parse(url)
        check_own(self._address)
        self.scope = f"{self._address.db}/{group}"  # distinguishes this directory from those of other groups
        self._keys = [f"telegrad:{group}:{name}".encode() for name in _KEYS]
        # A watch runs the script and waits in one operation, whose deadline is one patience away.
        self._slice = min(_SLICE, patience / 2)
        self._seen = ABSENT  # a revision that the server has had; racing threads may store a lower one than the last
        self._incarnation = b""  # set by the first connection, before other threads use this object
        self._sessions = Sessions(
            lambda _: RedisSession(self._address, patience, self._attach),
            [str(self._address)],
            patience,
            f"the directory on Redis at {self._address}",
            "Check that the server runs, that it has memory and disk left, and that this host can reach it",
        )
        self._run_with(lambda session, deadline: None)

    def grant(self, ttl: float) -> Lease:
        check_ttl(ttl)
        sent, reply = self._run("grant", math.ceil(ttl * 1e6))
        return Lease(reply.content, ttl, sent + ttl)

    def renew(self, lease: Lease) -> Lease:
        sent, _ = self._run("renew", lease.id)
        return lease._replace(ends=sent + lease.ttl)

    def revoke(self, lease: Lease) -> None:
        self._run("revoke", lease.id)

    def swap(self, key: str, value: bytes | None, expected: int = ABSENT, lease: Lease | None = None) -> Swap:
        check_value(key, value or b"")
        what = (check_key(key), expected, lease.id if lease else 0)
        operation = ("delete", *what) if value is None else ("write", *what, value)
        _, reply = self._run(*operation, repeat=False)
        return Swap(reply.status == b"done", reply.content)

    def list(self, prefix: str) -> Listing:
        _, reply = self._run("list", _encode_prefix(prefix))
        return Listing(reply.revision, reply.content)

    def watch(self, prefix: str, since: int, timeout: float) -> tuple[int, Events]:
        ends = time.monotonic() + timeout
        while True:
            _, reply = self._run("watch", _encode_prefix(prefix), since, _BATCH, wait_until=ends)
            since, events, _ = reply.content
            if events or time.monotonic() >= ends:
                return since, events

    def close(self) -> None:
        self._sessions.close()  # a waiting watch raises within a second

    def _run(
        self, *operation: bytes | str | int, repeat: bool = True, wait_until: float = 0.0
    ) -> tuple[float, RedisReply]:
        """Run an operation of the script; return when it was sent, and the reply. Only a watch has a `wait_until`."""

        def ask(session: RedisSession, deadline: float) -> RedisReply:
            session.deadline = deadline
            return self._ask(session, operation, wait_until)

        answer = self._run_with(ask, repeat)
        self._check(answer.value)
        return answer

    def _run_with(self, operation: Callable[[RedisSession, float], T], repeat: bool = True) -> Result[T]:
        """Run an operation with a session. Raise StoreUntrusted if other programs have written to the group's keys, and
        DirectoryLost if the server refuses a command."""
        try:
            return self._sessions.run(operation, repeat)
        except RedisMalformed as error:
            field = f", field {error.field!r}," if error.field else ""
            raise self._untrusted(error.key, f"{field} has a value that no worker of the group wrote") from None
        except exceptions.RedisError as error:
            if isinstance(error, exceptions.ResponseError) and is_of_malformed_keys(str(error)):
                raise self._untrusted("*", f" cannot be used ({safe(str(error))})") from None
            raise self._sessions.lost("answers with an error", {0: str(error)}) from error

    def _ask(self, session: RedisSession, operation: tuple[bytes | str | int, ...], wait_until: float) -> RedisReply:
        """Run an operation. If it is a watch without events, wait for the next change or end of a lease."""
        name, *arguments = operation
        command = (len(self._keys), *self._keys, name, self._incarnation, self._seen, HISTORY, *arguments)
        # Only the hash of the script is sent. NOSCRIPT means that the server does not know the script, as after SCRIPT
        # FLUSH, and has run nothing. So the second command does not send a compare-and-set twice.
        try:
            raw = session.ask("EVALSHA", _SHA, *command)
        except exceptions.NoScriptError:
            raw = session.ask("EVAL", _SCRIPT, *command)
        reply = read_reply(str(name), arguments[0], raw)
        if name == "watch" and reply.status == b"done":
            since, events, milliseconds = reply.content
            # XREAD only wakes this thread, and its reply is not used. `watch` then runs the script again, which ends
            # expired leases before it reads the history. Redis itself would not notice that a lease ends, so the wait
            # ends no later than the next lease.
            left = min(wait_until - time.monotonic(), self._slice)
            left = min(left, milliseconds / 1000) if milliseconds >= 0 else left
            if not events and left > 0:
                history = self._keys[_KEYS.index("history")]
                session.ask("XREAD", "COUNT", 1, "BLOCK", math.ceil(left * 1000), "STREAMS", history, f"{since}-0")
        return reply

    def _attach(self, session: RedisSession, run: str) -> None:
        # The random text becomes the incarnation if the group has none so far. Later connections send the known
        # incarnation, and the script reports a reset if the server has another one.
        reply = self._ask(session, ("attach", run, secrets.token_hex(8)), 0.0)
        self._check(reply)
        self._incarnation = reply.content

    def _untrusted(self, key: str, why: str) -> StoreUntrusted:
        group = self._keys[0].decode().removesuffix(_KEYS[0])
        return StoreUntrusted(
            f"the key {group + key!r} of the Redis server at {self._address}{why}: another program writes to this "
            "database of the server. Keep other programs out of it, and start the group again in another database"
        )

    def _check(self, reply: RedisReply) -> None:
        """Raise the error that the status of a reply reports, and store its revision."""
        status, revision, _ = reply
        if status == b"reset":
            raise DirectoryReset(
                f"the Redis server at {self._address} has lost writes of this group that it had acknowledged: it is at "
                f"revision {revision}, and this worker has seen {self._seen}. A replica was promoted, a "
                "backup was restored, or keys were deleted. Its fencing tokens may repeat: end this group, and start "
                "it in another database of the server"
            )
        self._seen = max(self._seen, revision)
        if status == b"lease lost":
            raise LeaseLost("the lease was revoked, or not renewed in time: begin a new one, and claim its keys again")
        if status == b"compacted":
            raise Compacted(
                f"the directory on Redis keeps the newest {HISTORY} changes, and is at revision {revision}: list "
                "again, and watch from there"
            )


def _encode_prefix(prefix: str) -> bytes:
    return prefix.encode("utf-8", "surrogatepass")  # a prefix that is not valid UTF-8 matches no key
