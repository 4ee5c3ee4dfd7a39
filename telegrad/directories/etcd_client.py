"""Requests to an etcd cluster over its JSON gateway: HTTP with a deadline for each exchange, and a user's token."""

from __future__ import annotations

import contextlib
import io
import json
import socket
import ssl
import threading
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPException, HTTPResponse
from time import monotonic
from typing import Any, NamedTuple

from telegrad.directories import MOST_BYTES
from telegrad.directories import etcd_messages as messages
from telegrad.directories.etcd_messages import EtcdRefused, EtcdSettings, Header, Json
from telegrad.errors import UsageError
from telegrad.ext.host import read_secret, tune_tcp
from telegrad.ext.joining import (
    DirectoryRefused,
    DirectoryReset,
    Sessions,
    SocketSession,
    Unanswered,
    Unsent,
    left,
    load_own,
)

LINEARIZABLE = ("/v3/kv/range", "/v3/kv/txn")
PASSWORD_BYTES = 4096
# The ends of messages of errors after which etcd has not executed the request:
OUTDATED = "revision of auth store is old"  # the token has to be requested again
NOT_STARTED = ("too many requests", "no leader")


class EtcdAnswer(NamedTuple):
    content: Json
    header: Header
    sent: float  # when the request was sent, or a little earlier


class _Timed(io.RawIOBase):
    """The socket given to http.client: each read and write ends at the deadline of its session. The socket's own
    timeout would apply to each read, so a server that sends a byte now and then would block its caller for ever."""

    def __init__(self, sock: socket.socket, session: EtcdSession) -> None:
        self._sock, self._session = sock, session

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._sock.settimeout(left(self._session.deadline))
        return self._sock.recv_into(buffer)

    def sendall(self, data: bytes) -> None:
        self._sock.settimeout(left(self._session.deadline))
        self._sock.sendall(data)

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(self)

    def close(self) -> None:
        """Leave the socket open: `EtcdSession.close` closes it."""
        # http.client closes its file at the end of each response, but the connection serves further requests.


class EtcdSession(SocketSession):
    def __init__(self, host: str, port: int, context: ssl.SSLContext | None) -> None:
        self.deadline = 0.0  # of the current exchange
        self._address, self._context = (host, port), context
        self._http = HTTPConnection(host, port)
        self._http.auto_open = 0  # automatic opening would connect without the deadline

    def open(self, deadline: float) -> None:
        self._sock = sock = socket.create_connection(self._address, left(deadline))
        tune_tcp(sock, 0.0)  # each exchange has its own limit
        if self._context:
            sock.settimeout(left(deadline))
            try:
                self._sock = sock = self._context.wrap_socket(sock, server_hostname=self._address[0])
            except ssl.SSLCertVerificationError as error:
                raise DirectoryRefused(
                    f"etcd at {messages.describe([self._address])} sent a certificate that is not accepted "
                    f"({error.verify_message}): give the file of its certificate authority as ?ca=FILE in the address "
                    "of etcd"
                ) from None
        self._http.sock = _Timed(sock, self)

    def usable(self) -> bool:
        # http.client drops the socket if the server closes the connection after a response.
        return self._http.sock is not None and super().usable()

    def ask(self, path: str, body: Json, token: str, deadline: float) -> tuple[int, bytes]:
        """Send a request; return the status and the body of the response. Raises Unanswered."""
        with _broken():
            response = self._post(path, body, token, deadline)
            # A response without a length may be of any size. `read` with a size does not notice that one is cut off.
            content = response.read(MOST_BYTES + 1) if response.length is None else b""
            if max(len(content), response.length or 0) > MOST_BYTES:
                raise Unanswered(f"the server sent more than {MOST_BYTES} bytes")
            return response.status, content or response.read()

    def lines(self, path: str, body: Json, token: str, deadline: float) -> Iterator[tuple[int, bytes]]:
        """Yield the lines of a streamed response as they arrive, each with the status; the last one may be empty. The
        connection cannot be used again. Raise TimeoutError after the deadline, and Unanswered if it broke."""
        with _broken():
            response = self._post(path, body, token, deadline)
            # `usable` looks at this, so a session with unread data of a stream is not used again. The response has a
            # file of its own for the socket.
            self._http.sock = None
            while line := response.readline(MOST_BYTES):
                yield response.status, line
            yield response.status, b""

    def _post(self, path: str, body: Json, token: str, deadline: float) -> HTTPResponse:
        self.deadline = deadline
        headers = {"Grpc-Metadata-hasleader": "true"}  # a member without a leader returns an error instead of waiting
        if token:
            headers["Authorization"] = token
        self._http.request("POST", path, json.dumps(body).encode(), headers)
        return self._http.getresponse()


@contextlib.contextmanager
def _broken() -> Iterator[None]:
    try:
        yield
    except HTTPException as error:
        raise Unanswered(f"the server sent no complete HTTP response ({str(error) or type(error).__name__})") from None


class EtcdClient:
    """Client of one cluster. All methods may be called from any thread."""

    def __init__(self, settings: EtcdSettings, patience: float) -> None:
        """`patience`: seconds for all attempts of one request together."""
        # An endpoint that does not answer uses up to `limit` of the patience; the other endpoints have the rest. A
        # write waits longer, for a slow disk, because its caller has to read again after a failure. A write forwarded
        # to a dead leader gets no response.
        self.limit = min(2.0, patience / 2)
        self._write_limit = patience if len(settings.endpoints) == 1 else min(4.0, patience / 2)
        self.name = messages.describe(settings.endpoints)
        self._user = settings.user
        self._password = _read_password(settings) if settings.user else ""
        context = _tls(settings) if settings.ca else None
        self.sessions = Sessions(
            lambda endpoint: EtcdSession(*settings.endpoints[endpoint], context),
            [messages.describe([each]) for each in settings.endpoints],
            patience,
            f"etcd at {self.name}",
            "Is a majority of its members running, can it be reached from here, and does its address have ?ca=FILE if "
            "it uses TLS?",
        )
        self._lock = threading.Lock()  # guards `_continuity`
        self._continuity = messages.Continuity()
        self._token = ""

    def ask(
        self, path: str, body: Json, until: float | None = None, repeat: bool = True, limit: float | None = None
    ) -> EtcdAnswer:
        """Send a request to one endpoint after another until one answers, within the patience or until `until`.
        `repeat`: the request may be executed twice. Without it, no other attempt follows once etcd may have received
        it. `limit`: seconds for one endpoint. Raise DirectoryLost if no endpoint answered, or etcd may have executed a
        request that must not be repeated, and EtcdRefused if etcd refuses the request, now and later."""
        if limit is None:
            limit = self.limit if repeat else self._write_limit

        def attempt(session: EtcdSession, deadline: float) -> EtcdAnswer:
            token = self.token(session, deadline)
            # Both must be from before the request. A linearizable response may be older than one that arrived while it
            # was under way, but not older than one that arrived before. And the holder of a lease counts from when it
            # sent the renewal.
            floor, sent = self._continuity.revision, monotonic()
            content = self.read(*session.ask(path, body, token, deadline))
            header = messages.header_of(content)
            self.check(header, floor, path in LINEARIZABLE)
            return EtcdAnswer(content, header, sent)

        return self.sessions.run(attempt, repeat, until, limit).value

    def read(self, status: int, body: bytes) -> Json:
        """Return the content of a response. Raises Unsent, Unanswered, Refused."""
        try:
            return messages.answer_of(status, body)
        except EtcdRefused as error:
            # Unsent lets even a compare-and-set go to the next endpoint. So it is raised only for errors after which
            # etcd has certainly not executed the request. PASSING errors do not tell, so they are Unanswered.
            is_outdated = error.code == messages.UNAUTHENTICATED or error.message.endswith(OUTDATED)
            if is_outdated and self._user:
                self._token = ""
            elif not error.message.endswith(NOT_STARTED):
                if error.code in messages.PASSING:
                    raise Unanswered(error.message) from None
                raise
            raise Unsent(error.message) from None

    def token(self, session: EtcdSession, deadline: float) -> str:
        """Return the user's token, and request one if there is none; "" without a user."""
        # No lock is needed: at worst, two threads request a token each.
        if self._user and not self._token:
            body = {"name": self._user, "password": self._password}
            try:
                self._token = messages.token_of(self.read(*session.ask("/v3/auth/authenticate", body, "", deadline)))
            except (Unanswered, OSError) as error:  # the request itself was not sent
                raise Unsent(str(error)) from None
        return self._token

    def check(self, header: Header, floor: int, linearizable: bool) -> None:
        """Raise DirectoryReset if etcd has lost data."""
        with self._lock:
            wrong = self._continuity.check(header, floor, linearizable)
        if wrong:
            raise DirectoryReset(wrong)


def _read_password(settings: EtcdSettings) -> str:
    try:
        return read_secret(settings.password_file, PASSWORD_BYTES).decode().strip()
    except (OSError, ValueError) as error:
        raise UsageError(f"the password of etcd cannot be read from {settings.password_file!r}: {error}") from error


def _tls(settings: EtcdSettings) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=None if settings.ca == "system" else settings.ca)
        if settings.cert:
            load_own(context, settings.cert, settings.key)
    except OSError as error:  # ssl.SSLError is an OSError
        files = ", ".join(repr(each) for each in (settings.ca, settings.cert, settings.key) if each)
        raise UsageError(f"the certificates for etcd cannot be used ({files}): {error}") from error
    return context
