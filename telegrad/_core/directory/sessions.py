"""A thread-safe pool of a client's connections to a directory: connects on demand, retries, closes all at once.

An attempt of an operation ends with a result or with one of

- `Unsent`: the engine has not begun the operation, so it is retried, at the next endpoint if there are several;
- `Unanswered`, or an OSError: the engine may have done it, so only repeatable operations are retried;
- any other error, and each error of this package: it is raised.
"""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Generic, NamedTuple, Protocol, TypeVar

from telegrad._core import forks
from telegrad._core.directory.directory import DirectoryLost
from telegrad._core.threads import LONGEST_WAIT
from telegrad.errors import TelegradError

KEPT = 4  # idle sessions of one endpoint
FIRST_PAUSE, LONGEST_PAUSE = 0.025, 0.5  # seconds after a round in which no endpoint answered
_random = random.SystemRandom()  # forked processes would share the state of other generators


class Unsent(Exception):
    """The engine has not begun the operation."""


class Unanswered(Exception):
    """The engine may have done the operation."""


class Session(Protocol):
    """One connection, used by one thread at a time."""

    def open(self, deadline: float) -> None:
        """Connect. Raises OSError, Unsent or Unanswered if the engine does not answer."""

    def usable(self) -> bool:
        """Return False if the other end has closed the connection, or has sent unrequested bytes."""

    def interrupt(self) -> None:
        """Wake the thread that uses the connection, which gets an OSError. Call it from any thread."""

    def close(self) -> None: ...


S = TypeVar("S", bound=Session)
T = TypeVar("T")


class Result(NamedTuple, Generic[T]):
    """The result of an operation, and a time not later than the engine's receipt of the request."""

    sent: float
    value: T


class Sessions(Generic[S]):
    """All connections of one client."""

    def __init__(
        self, make: Callable[[int], S], endpoints: Sequence[str], patience: float, what: str, advice: str
    ) -> None:
        """`make` returns a session of an endpoint, not open yet; `what` and `advice` are for errors."""
        self.patience = patience
        self.current = _random.randrange(len(endpoints))  # the endpoint to ask next
        self._make, self._endpoints, self._what, self._advice = make, endpoints, what, advice
        self._made_at = forks.depth
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
        """Run an operation at one endpoint after the other, until one answers or the time is over.

        Args:
            operation: called with a session and the time at which the attempt ends.
            repeat: True if it may be sent again when it may have been done.
            until: when the last attempt ends; after `patience` seconds if not given.
            limit: seconds of one attempt.

        Raises:
            DirectoryLost: no endpoint answered, or the operation may have been done and must not be done twice.
            NotInitialized: this process was forked from the one that made this client.
        """
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
            pause = 0.0 if rest else min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** min(rounds, 5)) * (0.5 + _random.random())
            self.wait(max(0.0, min(pause, until - monotonic())))
            if monotonic() >= until:
                raise self.lost(f"did not answer within {until - begun:.3g} s", failures)

    def lost(self, how: str, failures: dict[int, str]) -> DirectoryLost:
        """Return the error for an operation that failed at these endpoints."""
        several = len(self._endpoints) > 1
        why = "; ".join(f"{self._endpoints[each]}: {text}" if several else text for each, text in failures.items())
        return DirectoryLost(f"{self._what} {how} ({why}). {self._advice}" if why else f"{self._what} {how}")

    def wait(self, seconds: float) -> None:
        """Wait. Raises DirectoryLost if the client is closed meanwhile."""
        self._closed.wait(min(seconds, LONGEST_WAIT))
        self._check_open()

    def close(self) -> None:
        """Close all connections. Waiting operations raise DirectoryLost."""
        if forks.depth != self._made_at:  # the connections belong to the parent
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
                self._check_open()  # `close` may have run before the connection was open
            except BaseException as error:
                self._drop(session)
                if isinstance(error, (Unanswered, OSError)) and not isinstance(error, TelegradError):
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
            keeps = is_usable and len(self._idle[endpoint]) < KEPT and not self._closed.is_set()
            if keeps:
                self._idle[endpoint].append(session)
        if not keeps:
            session.close()

    def _drop(self, session: S) -> None:
        with self._lock:
            self._used.discard(session)
            session.close()  # under the lock: `close` must not interrupt another connection that got the descriptor

    def _mark_failed(self, endpoint: int) -> None:
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
