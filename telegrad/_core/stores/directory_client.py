"""A client of the embedded directory, and the pool of connections that the clients of all engines use.

The pool is thread-safe: it connects on demand, retries, and closes all connections at once. An attempt of an operation
ends with a result or with one of

- `Unsent`: the engine has not begun the operation, so it is retried, at the next endpoint if there are several;
- `Unanswered`, or an OSError: the engine may have done it, so only repeatable operations are retried;
- any other error, and each error of this package: it is raised.

If a handshake fails before the directory has ever answered, the operation fails at once: the key or the address is
wrong. Later, it counts as a broken connection, because bytes may have been altered on the way, or another server may
have the port for a while.
"""

from __future__ import annotations

import contextlib
import random
import secrets
import socket
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Generic, NamedTuple, Protocol, TypeVar

from telegrad._core import forks
from telegrad._core.security.handshake import Hello, Initiator
from telegrad._core.security.keyring import Keyring
from telegrad._core.security.noise import DecryptionFailed
from telegrad._core.sockets import bracketed, shut, tune_tcp
from telegrad._core.stores import directory_requests as requests
from telegrad._core.stores.directory import (
    ABSENT,
    DirectoryLost,
    DirectoryReset,
    Events,
    Lease,
    Listing,
    Swap,
    check_key,
    check_ttl,
    check_value,
)
from telegrad._core.stores.directory_requests import Channel, Reply, Request
from telegrad._core.texts import safe
from telegrad._core.threads import LONGEST_WAIT
from telegrad.errors import HandshakeError, InvalidArgument, PeerUnreachable, ProtocolViolation, TelegradError

KEPT = 4  # idle sessions of one endpoint
FIRST_PAUSE, LONGEST_PAUSE = 0.025, 0.5  # seconds after a round in which no endpoint answered
_random = random.SystemRandom()  # forked processes would share the state of other generators
PATIENCE = 10.0  # default seconds of one operation
HANDSHAKE = 10.0  # seconds for connecting and the handshake: all workers of a group may connect at once
SILENCE = 10.0  # seconds after which the kernel declares the server's host lost
LONGEST = 1 << 30  # bytes of a reply
PIECE = 1 << 18


class Unsent(Exception):
    """The engine has not begun the operation."""


class Unanswered(Exception):
    """The engine may have done the operation."""


class Session(Protocol):
    """A connection, used by one thread at a time."""

    def open(self, deadline: float) -> None:
        """Connect. Raises OSError, Unsent or Unanswered if the engine does not answer."""

    def usable(self) -> bool:
        """Return False if the other end has closed the connection, or has sent unrequested bytes."""

    def interrupt(self) -> None:
        """Wake the thread that uses the connection, which gets an OSError. Call it from any thread."""

    def close(self) -> None: ...


class SocketSession:
    """The socket of a session, once it is open."""

    _sock: socket.socket | None = None

    def usable(self) -> bool:
        return self._sock is not None and is_quiet(self._sock)

    def interrupt(self) -> None:
        if self._sock is not None:
            shut(self._sock)

    def close(self) -> None:
        if self._sock is not None:
            self._sock.close()


S = TypeVar("S", bound=Session)
T = TypeVar("T")


class Result(NamedTuple, Generic[T]):
    """The result of an operation, and a time not later than the engine's receipt of the request."""

    sent: float
    value: T


class Sessions(Generic[S]):
    def __init__(
        self, make: Callable[[int], S], endpoints: Sequence[str], patience: float, what: str, advice: str
    ) -> None:
        """`make` returns a session of an endpoint, not open yet; `what` and `advice` are for errors."""
        self.patience = patience
        self.current = _random.randrange(len(endpoints))  # the endpoint to ask next
        self._make, self._endpoints, self._what, self._advice = make, endpoints, what, advice
        self._made_at = forks.process.depth
        self._closed = threading.Event()
        self._lock = threading.Lock()  # guards the two below
        self._idle: dict[int, list[S]] = defaultdict(list)
        self._used: set[S] = set()

    def run(
        self,
        operation: Callable[[S, float], T],
        repeat: bool = True,
        until: float | None = None,
        limit: float = float("inf"),
    ) -> Result[T]:
        """Run an operation at one endpoint after the other, until one answers or the time is over. It gets a session
        and the time at which the attempt ends, after at most `limit` seconds. `repeat`: it may be sent again when it
        may have been done. The last attempt ends at `until`, by default after `patience` seconds. Raise DirectoryLost
        if no endpoint answered, or if the operation may have been done and must not be done twice."""
        begun = monotonic()
        until = begun + self.patience if until is None else until
        failures: dict[int, str] = {}  # the last one of each endpoint
        count = 0
        while True:
            endpoint = self.current
            deadline = min(until, monotonic() + limit)
            try:
                session = self._borrow(endpoint, deadline)
                sent = monotonic()
                try:
                    value = operation(session, deadline)
                except BaseException:
                    self._drop(session)
                    raise
                self._put_back(endpoint, session)
                return Result(sent, value)
            except Unsent as error:
                failures[endpoint] = str(error)
            except (Unanswered, OSError) as error:
                if isinstance(error, TelegradError):  # some are OSErrors, too
                    raise
                self._check_open()
                failures[endpoint] = _text(error)
                if not repeat:
                    self._mark_failed(endpoint)
                    how = "did not confirm the write, so its outcome is unknown: read the key again"
                    raise self.lost(how, failures) from None
            self._mark_failed(endpoint)
            count += 1
            rounds, rest = divmod(count, len(self._endpoints))
            # Random, so that all clients of a server that was lost do not come back at the same moment.
            pause = 0.0 if rest else min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** min(rounds, 5)) * (0.5 + _random.random())
            self.wait(max(0.0, min(pause, until - monotonic())))
            if monotonic() >= until:
                raise self.lost(f"did not answer within {until - begun:.3g} s", failures)

    def lost(self, how: str, failures: dict[int, str]) -> DirectoryLost:
        """Return the error for an operation that failed at these endpoints."""
        several = len(self._endpoints) > 1
        texts = {each: safe(text) for each, text in failures.items()}  # they may be from other programs
        why = "; ".join(f"{self._endpoints[each]}: {text}" if several else text for each, text in texts.items())
        return DirectoryLost(f"{self._what} {how} ({why}). {self._advice}" if why else f"{self._what} {how}")

    def wait(self, seconds: float) -> None:
        """Wait. Raises DirectoryLost if the client is closed meanwhile."""
        self._closed.wait(min(seconds, LONGEST_WAIT))
        self._check_open()

    def close(self) -> None:
        """Close all connections. Waiting operations raise DirectoryLost."""
        if forks.process.depth != self._made_at:  # the connections belong to the parent
            return
        self._closed.set()
        with self._lock:
            for session in self._used:
                session.interrupt()
            idle = [session for sessions in self._idle.values() for session in sessions]
            self._idle.clear()
        for session in idle:
            session.close()

    def _borrow(self, endpoint: int, deadline: float) -> S:
        """Return a session that no other thread uses until `_put_back` or `_drop`."""
        self._check_open()
        while True:
            with self._lock:
                idle = self._idle[endpoint]
                is_new = not idle
                session = self._make(endpoint) if is_new else idle.pop()
                self._used.add(session)
            try:
                if is_new:
                    session.open(deadline)
                # A restarted engine has closed the session: a write to it would have an unknown outcome.
                is_usable = is_new or session.usable()
                # `close` sets its flag before it interrupts the sessions in use. It may have run while this one had no
                # socket yet, which it could not interrupt.
                self._check_open()
            except BaseException as error:
                self._drop(session)
                # UnicodeError: no host can have that name.
                if isinstance(error, (Unanswered, OSError, UnicodeError)) and not isinstance(error, TelegradError):
                    self._check_open()
                    raise Unsent(_text(error)) from None
                raise
            if is_usable:
                return session
            self._drop(session)

    def _put_back(self, endpoint: int, session: S) -> None:
        is_usable = session.usable()
        with self._lock:
            self._used.discard(session)
            # `close` sets its flag before it takes the lock: either the flag is seen here, or `close` finds this
            # session in the list.
            keeps = is_usable and len(self._idle[endpoint]) < KEPT and not self._closed.is_set()
            if keeps:
                self._idle[endpoint].append(session)
        if not keeps:
            session.close()

    def _drop(self, session: S) -> None:
        with self._lock:
            self._used.discard(session)
            # Only after it has left `_used`: otherwise `close` could interrupt another connection that has got the
            # number of the closed descriptor.
            session.close()

    def _mark_failed(self, endpoint: int) -> None:
        # Another thread may have failed at it before, and moved on already.
        if endpoint == self.current:
            self.current = (endpoint + 1) % len(self._endpoints)

    def _check_open(self) -> None:
        """Raise DirectoryLost after `close`, and NotInitialized in a forked process."""
        forks.check(self._made_at)
        if self._closed.is_set():
            raise DirectoryLost(f"this client of {self._what} was closed: create another one")


def left(deadline: float) -> float | None:
    """Return the seconds until a deadline, for `settimeout`. Raises TimeoutError if it has passed."""
    seconds = deadline - monotonic()
    if seconds <= 0:
        raise TimeoutError("no answer in time")
    return None if seconds > LONGEST_WAIT else seconds


def is_quiet(sock: socket.socket) -> bool:
    """Return True if a connection is open and has nothing to read."""
    with contextlib.suppress(OSError):
        sock.settimeout(0)
        try:
            socket.socket.recv(sock, 1, socket.MSG_PEEK)  # SSLSocket.recv takes no flags
        except BlockingIOError:
            return True
    return False


def _text(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return (error.strerror if isinstance(error, OSError) else "") or str(error) or type(error).__name__


class EmbeddedSession(SocketSession):
    """A connection that carries one request at a time."""

    def __init__(self, directory: EmbeddedDirectory) -> None:
        self._directory = directory
        self._channel: Channel | None = None

    def open(self, deadline: float) -> None:
        """Connect and perform the handshake; with the next key if the directory does not know the first one."""
        directory, attempt = self._directory, 0
        deadline = min(deadline, monotonic() + HANDSHAKE)
        while True:
            end = Initiator(directory.keys, directory.claim, requests.INCARNATION, attempt=attempt)
            try:
                self._sock = sock = socket.create_connection(directory.address, left(deadline))
                tune_tcp(sock, SILENCE)
                self._shake_hands(sock, end, deadline)
                break
            except (HandshakeError, PeerUnreachable) as error:
                self.close()
                if end.has_other_key:
                    attempt += 1
                elif isinstance(error, HandshakeError) and not directory.identity:
                    raise type(error)(f"{directory.at}: {error}") from error
                else:
                    raise Unsent(str(error)) from None
            except TimeoutError:
                raise Unsent("the handshake did not finish in time") from None
            except (OSError, ValueError) as error:  # ValueError: the address is invalid
                raise Unsent(f"the connection failed ({error})") from None
        assert end.peer is not None
        assert end.ciphers is not None
        directory.check(end.peer.name)
        self._channel = Channel(end.ciphers, LONGEST, end.leftover)

    def ask(self, request: bytes, deadline: float) -> Reply:
        """Send a request, and return its reply. Raise OSError if the connection broke, or the deadline passed;
        Unanswered if the other end is not a directory, or data was altered on the way."""
        sock, channel = self._sock, self._channel
        assert sock is not None
        assert channel is not None
        try:
            sock.settimeout(left(deadline))
            sock.sendall(channel.encrypt(request))
            while True:
                for message in channel.decrypt(_receive(sock, PIECE, deadline)):
                    return requests.read_reply(message)
        except (ProtocolViolation, DecryptionFailed) as error:
            raise Unanswered(str(error)) from None

    def _shake_hands(self, sock: socket.socket, end: Initiator, deadline: float) -> None:
        sock.sendall(end.start())
        while not end.done:
            data = _receive(sock, 4096, deadline)
            try:
                answer = end.receive(data)
            except (HandshakeError, PeerUnreachable):
                with contextlib.suppress(OSError):  # the server need not learn the reason
                    sock.sendall(end.last_bytes)
                raise
            sock.sendall(answer)


class EmbeddedDirectory:
    """A `Directory` that `directory_server.py` serves. `directory.py` documents its methods."""

    def __init__(self, address: tuple[str, int], keys: Keyring, patience: float = PATIENCE, path: str = "") -> None:
        """Initialise. The first operation connects. An operation waits `patience` seconds for the server. `path` is the
        directory's file. The directory of another group that has got the port since is refused."""
        self.address, self.keys = address, keys
        self.at = f"the directory at {bracketed(address[0])}:{address[1]}"
        self.claim = Hello(secrets.token_hex(8), 0, "", "")
        self.identity = ""  # of the first directory that answered
        self._name = requests.name_of(path) if path else ""
        self._sessions = Sessions(
            lambda _: EmbeddedSession(self),
            [self.at],
            patience,
            self.at,
            "Check that the process that keeps it runs, is not stopped, and can be reached from here",
        )

    def check(self, name: str) -> None:
        """Raise an error if this name, which the server has proved, belongs to another directory than before."""
        if not name.startswith(self._name):
            raise HandshakeError(f"{self.at} belongs to another group")
        self.identity = self.identity or name
        if name != self.identity:
            raise DirectoryReset(
                f"{self.at} was restarted without its data: its host was restarted, or its file was removed. The "
                "state of the group is lost; start the group again"
            )

    def grant(self, ttl: float) -> Lease:
        check_ttl(ttl)
        # A repeated grant may leave a lease that no client knows. It has no keys, and ends by itself.
        sent, reply = self._ask(Request(requests.GRANT, seconds=ttl))
        return Lease(reply.revision, ttl, sent + ttl)

    def renew(self, lease: Lease) -> Lease:
        sent, _ = self._ask(Request(requests.RENEW, lease=lease.id))
        return lease._replace(ends=sent + lease.ttl)

    def revoke(self, lease: Lease) -> None:
        self._ask(Request(requests.REVOKE, lease=lease.id))

    def swap(self, key: str, value: bytes | None, expected: int = ABSENT, lease: Lease | None = None) -> Swap:
        check_key(key)
        check_value(key, value or b"")
        request = Request(requests.SWAP, key, value, expected, lease.id if lease and value is not None else 0)
        # A second compare-and-set after an unanswered first one would fail with a changed revision although the first
        # was done.
        _, reply = self._ask(request, repeat=False)
        return Swap(reply.outcome == requests.DONE, reply.changes[0].entry if reply.changes else None)

    def list(self, prefix: str) -> Listing:
        _, reply = self._ask(Request(requests.LIST, prefix))
        return Listing(reply.revision, tuple(event.entry for event in reply.changes if event.entry is not None))

    def watch(self, prefix: str, since: int, timeout: float) -> tuple[int, Events]:
        _, reply = self._ask(
            Request(requests.WATCH, prefix, revision=since), min(max(0.0, timeout), requests.LONGEST_WATCH)
        )
        return reply.revision, reply.changes

    def close(self) -> None:
        self._sessions.close()

    def _ask(self, request: Request, timeout: float = 0.0, repeat: bool = True) -> Result[Reply]:
        ends = monotonic() + timeout
        written = requests.write_request(request)

        def ask(session: EmbeddedSession, deadline: float) -> Reply:
            if not timeout:
                return session.ask(written, deadline)
            return session.ask(requests.write_request(request._replace(seconds=max(0.0, ends - monotonic()))), deadline)

        result = self._sessions.run(ask, repeat, ends + self._sessions.patience)
        reply = result.value
        if reply.outcome not in (requests.DONE, requests.NOT_DONE):
            raise requests.ERRORS.get(reply.outcome, InvalidArgument)(reply.text)
        return result


def _receive(sock: socket.socket, most: int, deadline: float) -> bytes:
    """Return received bytes. Raises OSError if the deadline has passed or the connection has ended."""
    sock.settimeout(left(deadline))
    data = sock.recv(most)
    if not data:
        raise ConnectionResetError("the server ended or closed the connection")
    return data
