"""A directory on etcd v3: `etcd://HOST:PORT[,HOST:PORT...][/PREFIX]`.

Decision: Telegrad has its own client, which uses etcd's JSON gateway. Each etcd server since 3.4 has the gateway, and
the client needs only HTTP, so users install nothing. A request takes 0.3 to 1 ms, a renewal 0.7 to 1, and an event
arrives 1.2 to 1.7 ms after its write began (etcd 3.4.23, one member on the same host). The alternatives: `aetcd` 1.0
and `pyetcd` 0.0.7 need grpcio, which is compiled and runs its own threads; the two cannot share a process, and `aetcd`
needs an event loop. `etcd3gw` uses the gateway too, but its watch hangs silently when the server dies. The gateway does
not support users named by a client certificate. It also takes no second message in a watch, such as a progress request,
so a silent watch is reopened. Reconsider if an etcd drops the gateway, or if the gateway's requests cost a group more
than its writes.

Rules of this engine, in addition to `telegrad/_core/stores/directory.py`:

- Revisions are etcd's revisions, which other users of the same cluster increase too. All keys of one lease are deleted
  at one revision.
- Reads are linearizable. A read, grant, renewal or revocation without a response is sent to the next endpoint. If the
  response to a grant is lost, its lease expires. A compare-and-set is sent to the next endpoint only if it certainly
  did not start.
- TTLs are whole seconds, rounded up. etcd raises 1 to 2, and raises it further if its election timeout is long.
  `Lease.ttl` is the TTL that etcd granted. Each new leader restarts the TTL of all leases, so keys outlive their owner
  by up to one TTL plus an election.
- A leader that resumes after a stop (SIGSTOP, a slow disk) renews leases that another leader has ended (etcd issue
  15247). So a renewal counts only if a later read reports the same term: see `renew`.
  Such a leader of etcd before 3.4.31 or 3.5.13 also ends leases that their holders renew at other members: in 2 of 20
  stops of a leader, each up to 4 s, an owner lost a claim 1.8 s before `Lease.ends`. No client can prevent that. The
  fencing token of the next owner is still higher. Clients with several endpoints warn about these versions.
- A watch is a stream that stays open until it has returned events. A watch that is silent for SILENCE is reopened from
  the same revision. A member that is stopped or cut off from its leader refuses or does not answer, and then the next
  endpoint is asked. A watch of a prefix without changes keeps its revision, and eventually ends with Compacted.
- `Continuity` detects a cluster that has lost its data. etcd before 3.4.32 and 3.5.14 has bugs that lose events or
  decrease revisions after a compaction; use later versions.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import math
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPResponse
from time import monotonic
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

from telegrad.directories import MOST_BYTES
from telegrad.directories import etcd_messages as messages
from telegrad.directories.etcd_messages import EtcdMalformed, EtcdRefused, EtcdSettings, Header, Json
from telegrad.errors import StoreUntrusted, UsageError
from telegrad.ext.feedback import hint
from telegrad.ext.host import read_secret, tune_tcp
from telegrad.ext.joining import (
    ABSENT,
    Compacted,
    DirectoryLost,
    DirectoryRefused,
    DirectoryReset,
    Events,
    Lease,
    LeaseLost,
    Listing,
    Sessions,
    SocketSession,
    Swap,
    Unanswered,
    Unsent,
    check_key,
    check_ttl,
    check_value,
    left,
    load_own,
)

P = ParamSpec("P")
T = TypeVar("T")

SILENCE = 3.0  # seconds without an event before a watch is reopened: its member may be stopped or cut off
OPENING = 0.5  # seconds that a stream may take to open, also if the watch has a shorter timeout
SHORTEST = 0.01  # seconds to wait for the first event after opening
PAUSE = 0.05  # seconds between two renewals while the leader changes
LINEARIZABLE = ("/v3/kv/range", "/v3/kv/txn")
PASSWORD_BYTES = 4096
# The ends of messages of errors after which etcd has not executed the request:
OUTDATED = "revision of auth store is old"  # the token has to be requested again
NOT_STARTED = ("too many requests", "no leader")


def connect(url: str, patience: float = 10.0) -> EtcdDirectory:
    """Return a directory on the etcd cluster of a URL. Nothing is sent yet. Raise UsageError if the URL, or a file
    named in it, is wrong."""
    return EtcdDirectory(messages.parse_url(url), patience)


def _translated(method: Callable[Concatenate[EtcdDirectory, P], T]) -> Callable[Concatenate[EtcdDirectory, P], T]:
    """Make a method raise errors of directories for refusals of etcd, and for answers that etcd cannot have sent."""

    @functools.wraps(method)
    def translated(self: EtcdDirectory, /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(self, *args, **kwargs)
        except EtcdMalformed as error:
            raise StoreUntrusted(
                f"etcd at {self._client.name} sent an invalid answer for the keys under {self.scope!r} "
                f"({error}): check whether another server has its address, or a proxy changes its answers"
            ) from None
        except EtcdRefused as error:
            raise _refused(error) from None

    return translated


class EtcdDirectory:
    """The `Directory` of a group on an etcd cluster."""

    def __init__(self, settings: EtcdSettings, patience: float) -> None:
        self.scope = settings.prefix  # distinguishes this directory from those of other groups
        self._prefix = settings.prefix.encode()
        self._client = EtcdClient(settings, patience)
        self._endpoints = len(settings.endpoints)
        self._is_checked = self._endpoints == 1  # a single member has no former leader

    @_translated
    def grant(self, ttl: float) -> Lease:
        check_ttl(ttl)
        until = monotonic() + self._client.sessions.patience
        answer = self._client.ask("/v3/lease/grant", {"TTL": str(math.ceil(ttl))}, until)
        number, seconds = messages.lease_of(answer.content), messages.ttl_of(answer.content)
        self._check_version(until)
        return Lease(number, seconds, answer.sent + seconds)

    @_translated
    def renew(self, lease: Lease) -> Lease:
        """See `Directory.renew`.

        etcd's leader renews without asking a majority, so a former leader that does not know it was replaced accepts
        renewals too. The response has the term that the member had applied before it forwarded the renewal, so the
        leader that renewed was of that term or a later one. The read that follows is answered only by a member that has
        applied every entry committed by the current leader, including the first one of its term. So if both terms are
        equal, the current leader did the renewal. Each later leader restarts the TTL.

        The limit per request ensures that etcd members that are unreachable, or cannot reach their leader, do not use
        up the lease's time.
        """
        sessions = self._client.sessions
        limit = min(self._client.limit, lease.ttl / (2 * self._endpoints))
        until = monotonic() + sessions.patience
        while True:
            # The renewal comes first: between a read and a later renewal, the leader could be replaced.
            renewal = self._client.ask("/v3/lease/keepalive", {"ID": str(lease.id)}, until, limit=limit)
            read = self._client.ask("/v3/kv/range", messages.confirm_request(self._prefix), until, limit=limit)
            if renewal.header.term == read.header.term:
                break
            sessions.wait(PAUSE)
            if monotonic() >= until:
                raise sessions.lost(
                    "keeps changing its leader, so it is unknown whether the lease was renewed: check the load "
                    "of its members and the network between them",
                    {},
                )
        seconds = messages.ttl_of(renewal.content)
        # etcd answers with a TTL of 0 for a lease that has ended, and with no error.
        if not seconds:
            raise LeaseLost(
                f"lease {lease.id:x} has ended, and its keys are deleted: stop what depends on them, or begin a new "
                "lease"
            )
        return Lease(lease.id, seconds, renewal.sent + seconds)

    @_translated
    def revoke(self, lease: Lease) -> None:
        try:
            self._client.ask("/v3/lease/revoke", {"ID": str(lease.id)})
        except EtcdRefused as error:
            # The lease has ended, possibly by an earlier attempt of this request whose response was lost.
            if not isinstance(_refused(error), LeaseLost):
                raise

    @_translated
    def swap(self, key: str, value: bytes | None, expected: int = ABSENT, lease: Lease | None = None) -> Swap:
        name = self._prefix + check_key(key)
        check_value(key, value or b"")
        request = messages.swap_request(name, value, expected, lease.id if lease else 0)
        return messages.swap_of(self._client.ask("/v3/kv/txn", request, repeat=False).content, self._prefix)

    @_translated
    def list(self, prefix: str) -> Listing:
        request = messages.list_request(self._prefix + prefix.encode())
        return messages.listing_of(self._client.ask("/v3/kv/range", request).content, self._prefix)

    @_translated
    def watch(self, prefix: str, since: int, timeout: float) -> tuple[int, Events]:
        name = self._prefix + prefix.encode()
        sessions, began = self._client.sessions, monotonic()
        ends = began + timeout
        silence = min(SILENCE, sessions.patience / 2)
        while True:
            now = monotonic()
            # `until` limits all attempts to open the stream, `now + silence` the wait for events on the one that is
            # open.
            until = min(now + sessions.patience, max(ends, began + OPENING))
            follow = partial(self._follow, name, since, min(now + silence, ends))
            events = sessions.run(follow, until=until, limit=self._client.limit).value
            if events:
                # Not the header's revision: when a watch catches up, that one is later than these events.
                return events[-1].revision, events
            if monotonic() >= ends:
                return since, []

    def close(self) -> None:
        self._client.sessions.close()

    def _follow(self, name: bytes, since: int, ends: float, session: EtcdSession, opening: float) -> Events:
        """Open a stream by `opening`; return its next events, or none if `ends` comes first."""
        client = self._client
        lines = session.lines("/v3/watch", messages.watch_request(name, since), client.token(session, opening), opening)
        is_open = False
        try:
            for status, line in lines:
                # Unanswered and TimeoutError make `Sessions.run` ask the next endpoint, which continues from the same
                # revision.
                if not line:
                    raise Unanswered("the watch was closed")
                message = client.read(status, line)
                if compacted := messages.compacted_of(message):
                    raise Compacted(f"etcd was compacted up to revision {compacted}: list again, and watch from there")
                if message.get("canceled"):
                    raise Unanswered(message.get("cancel_reason") or "the watch was cancelled")
                header = messages.header_of(message)
                # A member that lags behind may report an old revision in a watch, so that is no sign of lost data.
                client.check(header, 0, linearizable=False)
                if events := messages.events_of(message, self._prefix):
                    return events
                if not is_open and header.revision < since:
                    # The member lags behind, or the cluster has lost data: a linearizable read shows which.
                    read = client.ask("/v3/kv/range", messages.confirm_request(self._prefix), opening)
                    client.check(read.header, since, linearizable=True)
                is_open = True
                session.deadline = max(ends, monotonic() + SHORTEST)
        # Without a first line, the member did not even confirm the watch, and another endpoint must be asked. With one,
        # nothing has changed in time, which is a result.
        except TimeoutError:
            if not is_open:
                raise
        return []

    def _check_version(self, until: float) -> None:
        """Warn once if a leader that resumes after a stop can end leases that are still renewed."""
        if self._is_checked:
            return
        self._is_checked = True
        try:
            version = str(self._client.ask("/v3/maintenance/status", {}, until).content.get("version"))
        except (DirectoryLost, EtcdRefused):  # the user may have no permission to read it
            return
        if messages.ends_live_leases(version):
            hint(
                "etcd",
                f"etcd {version} at {self._client.name} can end the leases of workers that renew them, after one of "
                "its members was stopped for a while or had a slow disk: install 3.4.31, 3.5.13 or newer",
            )


def _refused(error: EtcdRefused) -> Exception:
    if error.code == messages.NOT_FOUND and "lease" in error.message:
        return LeaseLost(f"the lease has ended, and its keys are deleted ({error.message}): begin another one")
    if error.code == messages.RESOURCE_EXHAUSTED:
        return DirectoryRefused(
            f"etcd refuses to write ({error.message}): if its space is used up, compact and defragment it, and clear "
            "the alarm with `etcdctl alarm disarm`"
        )
    return DirectoryRefused(
        f"etcd refuses the request ({error.message}): if it requires a user, give ?user=NAME&password_file=FILE in its "
        "address; the user needs read and write access to all keys under the prefix"
    )


# The client: HTTP with a deadline for each exchange, and a user's token


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
        try:
            self._password = read_secret(settings.password_file, PASSWORD_BYTES).decode().strip() if self._user else ""
        except (OSError, ValueError) as error:
            raise UsageError(f"the password of etcd cannot be read from {settings.password_file!r}: {error}") from error
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


def _tls(settings: EtcdSettings) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=None if settings.ca == "system" else settings.ca)
        if settings.cert:
            load_own(context, settings.cert, settings.key)
    except OSError as error:  # ssl.SSLError is an OSError
        files = ", ".join(repr(each) for each in (settings.ca, settings.cert, settings.key) if each)
        raise UsageError(f"the certificates for etcd cannot be used ({files}): {error}") from error
    return context
