"""Connections to one Redis server, for many threads: each is checked before its first use, and waits have limits.

redis-py brings the protocol and the sockets. Its pool is not used: its limits are for each step alone, not for an
operation, and it does not tell whether a command that failed had been sent. Both matter here, since a compare-and-set
must not be sent twice.
"""

from __future__ import annotations

import contextlib
import random
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from telegrad import forks
from telegrad.directory.protocol import DirectoryLost, DirectoryRefused
from telegrad.directory.redis_settings import RIGHTS, Address, find_faults, parse_info
from telegrad.errors import StoreUntrusted, UsageError
from telegrad.private_files import reason
from telegrad.transport.tls import load_own

try:
    import redis
    from redis import exceptions
except ImportError as error:
    raise ImportError("the directory on Redis needs redis-py: pip install 'telegrad[redis]'") from error

ScriptFailed, ScriptUnknown = exceptions.ResponseError, exceptions.NoScriptError
_BROKEN = (exceptions.ConnectionError, exceptions.TimeoutError, OSError)
_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 0.5  # seconds between attempts to connect


class Session:
    """One connection, for the time of one operation."""

    def __init__(self, connection: redis.Connection, deadline: float) -> None:
        self._connection = connection
        self._deadline = deadline

    def ask(self, *command: bytes | str | int) -> Any:
        """Send a command and return its reply: bytes, numbers, None and lists of these.

        The deadline holds for the beginning of the reply. The socket's own limit, which is the patience as well, holds
        for sending and for gaps in a reply, so a server that stops in the middle of one is noticed a patience later.
        """
        self._connection.send_command(*command)
        if not self._connection.can_read(max(0.0, self._deadline - time.monotonic())):
            raise exceptions.TimeoutError("no reply")
        return self._connection.read_response()


class Answer(NamedTuple):
    """The result of an operation."""

    sent: float  # monotonic time: not after the server has got the operation
    reply: Any


class Connections:
    """Make, check and keep connections; run operations on them, at most `patience` seconds each."""

    def __init__(self, address: Address, patience: float, attach: Callable[[Session, str], None]) -> None:
        tls = address.tls or {}
        if certificate := tls.get("ssl_certfile"):
            _check_own(certificate, tls.get("ssl_keyfile", certificate))
        self._address = address
        self._patience = patience
        self._attach = attach  # the first operation on each connection, given the server's `run_id`
        self._made_at = forks.depth
        self._closed = threading.Event()
        self._idle: deque[redis.Connection] = deque()  # whose own methods threads may call at once

    def run(self, operation: Callable[[Session], Any], repeat: bool) -> Answer:
        """Run an operation on a connection, and wait for a server that is down, is started or cannot be reached.

        `repeat` tells whether the operation may be sent again when the connection broke under it.

        Raises:
            DirectoryLost: the patience is over, the connections are closed, or the operation may have been done.
            DirectoryRefused: the server is not fit for a directory.
            StoreUntrusted: what the operation raises.
            NotInitialized: this process was forked from the one that has made them.
        """
        forks.check(self._made_at)
        deadline = time.monotonic() + self._patience
        pause = _FIRST_PAUSE
        while True:
            sent = None
            try:
                connection = self._take(deadline)
                with self._lend(connection):
                    sent = time.monotonic()
                    return Answer(sent, operation(Session(connection, deadline)))
            except StoreUntrusted:  # an OSError as well, but one that comes again
                raise
            except _BROKEN as error:
                failure: Exception = error
            except exceptions.RedisError as error:  # a reply, such as OOM, READONLY or BUSY
                raise self._lost(f"answers with an error ({error})") from error
            left = deadline - time.monotonic()
            if sent is not None and not repeat:
                raise self._lost(f"was lost while it wrote, so the outcome is unknown ({failure})") from failure
            if left <= 0:
                raise self._lost(f"did not answer within {self._patience:g} s ({failure})") from failure
            self._closed.wait(min(left, pause * random.uniform(0.5, 1)))
            pause = min(2 * pause, _LONGEST_PAUSE)

    def close(self) -> None:
        """Close what is idle now, and the rest when its operation ends."""
        self._closed.set()
        while connection := self._pop_idle():
            connection.disconnect()

    def _lost(self, what: str) -> DirectoryLost:
        return DirectoryLost(
            f"the directory on Redis at {self._address} {what}. Check that the server runs, that it has memory and "
            "disk left, and that this host reaches it"
        )

    def _take(self, deadline: float) -> redis.Connection:
        """Return a connection on which nothing waits to be read: one that the server has closed has its end to read."""
        while not self._closed.is_set():
            connection = self._pop_idle()
            if connection is None:
                return self._connect(deadline)
            with contextlib.suppress(*_BROKEN):
                if not connection.can_read():
                    return connection
            connection.disconnect()
        raise DirectoryLost(f"the connection to the directory on Redis at {self._address} was closed here")

    def _pop_idle(self) -> redis.Connection | None:
        with contextlib.suppress(IndexError):
            return self._idle.pop()
        return None

    @contextlib.contextmanager
    def _lend(self, connection: redis.Connection) -> Iterator[None]:
        """Keep the connection for the next operation, unless this one fails."""
        try:
            yield
        except BaseException:
            connection.disconnect()
            raise
        self._idle.append(connection)
        if self._closed.is_set():  # perhaps since the operation began, and then perhaps before it was idle
            self.close()

    def _connect(self, deadline: float) -> redis.Connection:
        """Make a connection and check the server: it may be another one than before, or have other settings."""
        address = self._address
        options: dict[str, Any] = {
            "host": address.host,
            "port": address.port,
            "protocol": 2,
            "socket_timeout": self._patience,
            "socket_connect_timeout": max(0.001, deadline - time.monotonic()),
            "driver_info": None,  # else redis-py tells it to the server at once, for which the deadline would not hold
        }
        if address.tls is None:
            connection = redis.Connection(**options)
        else:
            options |= {"ssl_cert_reqs": "required", "ssl_check_hostname": True, **address.tls}
            connection = redis.SSLConnection(**options)
        session = Session(connection, deadline)
        try:
            connection.connect()
            self._attach(session, self._check(session))
        except BaseException as error:
            connection.disconnect()
            if isinstance(error, exceptions.AuthenticationError):
                raise DirectoryRefused(
                    f"the Redis server at {address} refuses the login ({error}): give its user and password in the URL"
                ) from None
            if isinstance(error, exceptions.NoPermissionError) or "unknown command" in str(error):
                raise DirectoryRefused(
                    f"the Redis server at {address} refuses what a directory needs ({error}): allow the user {RIGHTS} "
                    "by ACL SETUSER. A server that has no CONFIG cannot be used, since it cannot be checked"
                ) from None
            raise
        return connection

    def _check(self, session: Session) -> str:
        """Log in, and return the `run_id` of a server that can hold a directory."""
        if self._address.login:
            session.ask("AUTH", *self._address.login)
        if self._address.db:
            session.ask("SELECT", self._address.db)
        info = parse_info(session.ask("INFO").decode(errors="replace"))
        settings = [text.decode(errors="replace") for text in session.ask("CONFIG", "GET", "*append*")]
        if faults := find_faults(info, dict(zip(settings[::2], settings[1::2], strict=True))):
            raise DirectoryRefused(f"the Redis server at {self._address} cannot hold a directory: {'; '.join(faults)}")
        return info["run_id"]


def _check_own(certificate: str, private_key: str) -> None:
    """Load them as redis-py will: it does not look who else may read the key, and would ask for a passphrase."""
    try:
        load_own(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), certificate, private_key)
    except OSError as error:
        raise UsageError(
            f"the certificate {certificate!r} for Redis with key {private_key!r} cannot be used: {reason(error)}"
        ) from error
