"""Requests to an etcd cluster: connections, endpoints, attempts, the token of a user.

An attempt is one request to one endpoint. It ends in an answer, or in one of

- `Unsent`: etcd has not begun with the request, so any request may go to the next endpoint;
- `Unanswered`: etcd may have done it, so only requests that can be repeated go to the next endpoint;
- `Refused`: etcd has answered with an error.
"""

from __future__ import annotations

import json
import random
import ssl
import threading
import time
from collections import defaultdict
from typing import NamedTuple

from telegrad import forks
from telegrad.directory import etcd_messages as messages
from telegrad.directory.etcd_messages import Header, Json, Refused, Settings
from telegrad.directory.http_stream import Connection
from telegrad.directory.protocol import DirectoryLost, DirectoryRefused, DirectoryReset
from telegrad.errors import UsageError
from telegrad.secret_files import read_secret
from telegrad.transport.tls import load_own

KEPT = 4  # connections to one endpoint that wait for the next request
LINEARIZABLE = ("/v3/kv/range", "/v3/kv/txn")
PASSWORD_BYTES = 4096
_random = random.SystemRandom()  # processes that were forked have one state of the others


class Unsent(Exception):
    """etcd has not begun with the request."""


class Unanswered(Exception):
    """No answer came; etcd may have done what the request asks for."""


class Answer(NamedTuple):
    """An answer of etcd."""

    content: Json
    header: Header
    sent: float  # when the request was sent, or a little earlier


class Client:
    """Ask one cluster. All methods may be called from any thread."""

    def __init__(self, settings: Settings, patience: float) -> None:
        """`patience`: seconds of all attempts of one request together."""
        self.patience = patience
        # An endpoint that does not answer costs as much of the patience; the others have the rest. A write waits
        # longer, for a slow disk, because its caller has to read again; one forwarded to a dead leader gets no answer.
        self.limit = min(2.0, patience / 2)
        self._write_limit = patience if len(settings.endpoints) == 1 else min(4.0, patience / 2)
        self.name = messages.describe(settings.endpoints)
        self._addresses = settings.endpoints
        self._user = settings.user
        self._password = _read_password(settings) if settings.user else ""
        self._context = _tls(settings) if settings.ca else None
        self._endpoints = messages.Endpoints(len(settings.endpoints), _random.randrange(len(settings.endpoints)))
        self._continuity = messages.Continuity()
        self._token = ""
        self._closed = threading.Event()
        self._made_at = forks.depth
        self._lock = threading.Lock()  # guards the two below, and `_continuity`
        self._idle: dict[int, list[Connection]] = defaultdict(list)
        self._used: set[Connection] = set()

    def ask(
        self, path: str, body: Json, ends: float | None = None, repeat: bool = True, limit: float | None = None
    ) -> Answer:
        """Ask one endpoint after the other until one answers, within the patience, or until `ends`.

        `repeat`: the request may be done twice. Without it there is no other attempt once etcd may have it.
        `limit`: seconds for one endpoint.

        Raises:
            DirectoryLost: none answered, or etcd may have done what must not be done twice.
            Refused: etcd will not do it, now or later.
        """
        attempts = self.begin(ends)
        if limit is None:
            limit = self.limit if repeat else self._write_limit
        while True:
            endpoint = self._endpoints.current
            try:
                return self.attempt(endpoint, path, body, min(attempts.ends, time.monotonic() + limit))
            except Unsent as error:
                attempts.next(endpoint, str(error))
            except Unanswered as error:
                if not repeat:
                    self._endpoints.mark_failed(endpoint)
                    raise DirectoryLost(
                        f"etcd at {self.name_of(endpoint)} did not say whether the write was done ({error}): read the "
                        "key again to know"
                    ) from None
                attempts.next(endpoint, str(error))

    def share(self, seconds: float) -> float:
        """Return the limit of one endpoint with which all can be asked in half of these seconds."""
        return min(self.limit, seconds / (2 * len(self._addresses)))

    def begin(self, ends: float | None = None) -> Attempts:
        """Begin a series of attempts."""
        latest = time.monotonic() + self.patience
        return Attempts(self, latest if ends is None else min(latest, ends))

    def attempt(self, endpoint: int, path: str, body: Json, deadline: float) -> Answer:
        """Ask one endpoint once.

        Raises:
            Unsent, Unanswered, Refused: as above.
        """
        floor, sent = self._continuity.revision, time.monotonic()
        connection = self.send(endpoint, path, body, deadline)
        try:
            status, text = connection.read_all(deadline)
        except BaseException as error:
            self.drop(connection)
            if isinstance(error, OSError):
                raise Unanswered(self._why(error)) from None
            raise
        self._put_back(endpoint, connection)
        try:
            content = messages.answer_of(status, text)
        except Refused as error:
            if error.needs_token() and self._user:
                self._token = ""
                raise Unsent(error.message) from None
            if error.was_turned_away():
                raise Unsent(error.message) from None
            if error.is_passing():
                raise Unanswered(error.message) from None
            raise
        header = messages.header_of(content)
        self.check(header, floor, path in LINEARIZABLE)
        return Answer(content, header, sent)

    def check(self, header: Header, floor: int, linearizable: bool) -> None:
        """Raise DirectoryReset if etcd has lost data."""
        with self._lock:
            wrong = self._continuity.check(header, floor, linearizable)
        if wrong:
            raise DirectoryReset(wrong)

    def send(self, endpoint: int, path: str, body: Json, deadline: float) -> Connection:
        """Send a request to one endpoint, and return the connection, for the caller to read and to `drop`.

        Raises:
            Unsent: etcd has not got it.
            Unanswered: it may have.
        """
        headers = {"Grpc-Metadata-hasleader": "true"}  # a member without a leader says so, in place of waiting
        if self._user and path != "/v3/auth/authenticate":
            headers["Authorization"] = self._token or self._authenticate(endpoint, deadline)
        connection = self._take(endpoint, deadline)
        try:
            connection.post(path, json.dumps(body).encode(), headers, deadline)
        except BaseException as error:
            self.drop(connection)
            if isinstance(error, OSError):
                raise Unanswered(self._why(error)) from None
            raise
        return connection

    def drop(self, connection: Connection) -> None:
        """Close a connection that `send` has returned."""
        with self._lock:
            self._used.discard(connection)
            connection.close()

    def name_of(self, endpoint: int) -> str:
        return messages.describe([self._addresses[endpoint]])

    def current(self) -> int:
        """Return the endpoint that is asked next."""
        return self._endpoints.current

    def next_pause(self, endpoint: int, failures: int) -> float:
        """Take note that an endpoint failed; return how long to wait before the next attempt."""
        self._endpoints.mark_failed(endpoint)
        return self._endpoints.pause(failures, _random.random())

    def wait(self, seconds: float) -> None:
        """Wait, and raise DirectoryLost where the client is closed meanwhile."""
        self._closed.wait(seconds)
        self.check_open()

    def is_inherited(self) -> bool:
        """Return True in a forked process: the connections are those of the parent, and locks may be held for ever."""
        return forks.depth != self._made_at

    def is_closed(self) -> bool:
        return self._closed.is_set()

    def check_open(self) -> None:
        """Raise what a client says that is closed, or that belongs to the process from which this one was forked."""
        forks.check(self._made_at)
        if self._closed.is_set():
            raise DirectoryLost("this connection to the directory is closed: make another one")

    def close(self) -> None:
        """Close all connections; what waits raises DirectoryLost."""
        self._closed.set()
        with self._lock:
            for each in self._used:
                each.interrupt()
            for connections in self._idle.values():
                for each in connections:
                    each.close()
            self._idle.clear()

    def _take(self, endpoint: int, deadline: float) -> Connection:
        """Return a connection that is open, or a new one."""
        self.check_open()
        while connection := self._take_idle(endpoint):
            # A server that was restarted has closed it. A write on it would have an unknown outcome for no reason.
            if connection.is_usable():
                return connection
            self.drop(connection)
        try:
            connection = Connection(*self._addresses[endpoint], self._context, deadline)
        except ssl.SSLCertVerificationError as error:
            raise DirectoryRefused(
                f"etcd at {self.name_of(endpoint)} shows a certificate that is not accepted ({error.verify_message}): "
                "give the file of its authority as ?ca=FILE in the address of etcd"
            ) from None
        except OSError as error:
            raise Unsent(self._why(error)) from None
        with self._lock:
            self._used.add(connection)
        if self._closed.is_set():  # `close` may have looked before the connection was there
            self.drop(connection)
            self.check_open()
        return connection

    def _take_idle(self, endpoint: int) -> Connection | None:
        with self._lock:
            if not self._idle[endpoint]:
                return None
            connection = self._idle[endpoint].pop()
            self._used.add(connection)
            return connection

    def _put_back(self, endpoint: int, connection: Connection) -> None:
        with self._lock:
            self._used.discard(connection)
            if connection.keeps and len(self._idle[endpoint]) < KEPT and not self._closed.is_set():
                self._idle[endpoint].append(connection)
            else:
                connection.close()

    def _authenticate(self, endpoint: int, deadline: float) -> str:
        """Return a new token of the user."""
        try:
            answer = self.attempt(
                endpoint, "/v3/auth/authenticate", {"name": self._user, "password": self._password}, deadline
            )
        except Unanswered as error:  # the request itself was not sent
            raise Unsent(str(error)) from None
        self._token = messages.token_of(answer.content)
        return self._token

    def _why(self, error: OSError) -> str:
        self.check_open()
        if isinstance(error, TimeoutError):
            return "no answer in time"
        return error.strerror or str(error) or type(error).__name__


class Attempts:
    """The attempts of one request: whom to ask next, when, and until when."""

    def __init__(self, client: Client, ends: float) -> None:
        self.ends = ends
        self._client = client
        self._began = time.monotonic()
        self._failures: dict[int, str] = {}  # the last one of each endpoint
        self._count = 0

    def next(self, endpoint: int, why: str) -> None:
        """Wait before the next attempt, which is at another endpoint where there is one.

        Raises:
            DirectoryLost: there is no time left.
        """
        self._failures[endpoint] = why
        self._count += 1
        pause = self._client.next_pause(endpoint, self._count)
        if time.monotonic() + pause >= self.ends:
            raise self.failed()
        self._client.wait(pause)

    def failed(self) -> DirectoryLost:
        found = "; ".join(f"{self._client.name_of(each)}: {why}" for each, why in self._failures.items())
        seconds = time.monotonic() - self._began
        return DirectoryLost(
            f"etcd at {self._client.name} did not answer in {seconds:.1f} s ({found}): is a majority of its members "
            "running, can it be reached from here, and does its address say ?ca=FILE if it uses TLS?"
        )


def _read_password(settings: Settings) -> str:
    try:
        return read_secret(settings.password_file, PASSWORD_BYTES).decode().strip()
    except (OSError, ValueError) as error:
        raise UsageError(f"the password of etcd cannot be read from {settings.password_file!r}: {error}") from error


def _tls(settings: Settings) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=None if settings.ca == "system" else settings.ca)
        if settings.cert:
            load_own(context, settings.cert, settings.key)
    except OSError as error:  # ssl.SSLError is one
        files = ", ".join(repr(each) for each in (settings.ca, settings.cert, settings.key) if each)
        raise UsageError(f"the certificates for etcd cannot be used ({files}): {error}") from error
    return context
