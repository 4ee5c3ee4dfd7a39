"""Sessions with one Redis server. Each session checks the server before its first operation, and each operation has a
deadline.

redis-py provides the protocol and the sockets. Its pool is not used: its timeouts apply to single steps, not to an
operation, and it does not report whether a failed command was sent. A compare-and-set must not be sent twice, so both
matter.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable
from typing import Any

from telegrad.directories.redis_settings import RIGHTS, Address, find_faults, parse_info
from telegrad.errors import TelegradError, UsageError
from telegrad.ext.directories import DirectoryRefused, Unanswered, Unsent
from telegrad.ext.files import reason
from telegrad.ext.joining import load_own

try:
    import redis
    from redis import exceptions
except ImportError as error:
    raise ImportError("the directory on Redis needs redis-py: pip install 'telegrad[redis]'") from error

ServerError = exceptions.RedisError  # an error reply, such as OOM, READONLY or BUSY
ScriptFailed, ScriptUnknown = exceptions.ResponseError, exceptions.NoScriptError
_BROKEN = (exceptions.ConnectionError, exceptions.TimeoutError, OSError)


class RedisSession:
    """A connection to the server."""

    def __init__(self, address: Address, patience: float, attach: Callable[[RedisSession, str], None]) -> None:
        """`attach` is the first operation, and gets the server's `run_id`."""
        self.deadline = 0.0  # of the current operation
        self._address, self._attach = address, attach
        self._is_checked = False
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

    def open(self, deadline: float) -> None:
        """Connect and check the server, which may be another one than before or have other settings."""
        self.deadline = deadline
        self._connection.socket_connect_timeout = max(0.001, deadline - time.monotonic())
        try:
            self._connection.connect()
            self._attach(self, self._check())
            self._is_checked = True
        except TelegradError:  # before the next clauses: some TelegradErrors are OSErrors
            raise
        except exceptions.AuthenticationError as error:
            raise DirectoryRefused(
                f"the Redis server at {self._address} refuses the login ({error}): give its user and password in the "
                "URL"
            ) from None
        except _BROKEN as error:
            raise Unsent(str(error)) from None
        except exceptions.RedisError as error:
            if isinstance(error, exceptions.NoPermissionError) or "unknown command" in str(error):
                raise DirectoryRefused(
                    f"the Redis server at {self._address} refuses a command that a directory needs ({error}): allow "
                    f"the user {RIGHTS} with ACL SETUSER. A server without CONFIG cannot be used, because it cannot be "
                    "checked"
                ) from None
            raise

    def usable(self) -> bool:
        try:
            return not self._connection.can_read()
        except _BROKEN:
            return False

    def interrupt(self) -> None:
        """Do nothing: no command waits longer than a second."""

    def close(self) -> None:
        self._connection.disconnect()

    def ask(self, *command: bytes | str | int) -> Any:
        """Send a command and return its reply: bytes, numbers, None and lists of these.

        The deadline applies until the reply begins. The socket's own timeout, which equals the patience, applies to
        sending and to gaps in a reply. So a server that stops in the middle of a reply is noticed one patience later.

        Raises:
            Unanswered: no reply arrived.
            ServerError: the server refuses the command.
        """
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
    """Load the client's certificate like redis-py does, and check it.

    redis-py does not check who else may read the key, and would prompt for a passphrase.
    """
    tls = address.tls or {}
    if certificate := tls.get("ssl_certfile"):
        private_key = tls.get("ssl_keyfile", certificate)
        try:
            load_own(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), certificate, private_key)
        except OSError as error:
            raise UsageError(
                f"the certificate {certificate!r} for Redis with key {private_key!r} cannot be used: {reason(error)}"
            ) from error
