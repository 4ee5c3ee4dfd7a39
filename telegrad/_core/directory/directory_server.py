"""The process or thread that serves an embedded directory.

One thread and one selector serve all clients. One iteration of the loop reads received data, answers a few requests of
each client in turn, commits their changes, and only then sends: each fact in a reply is in the file. A client that
sends faster than others, or does not read its replies, waits; it takes neither memory nor time from the others.

`python -m telegrad._core.directory.directory_server FD` serves the directory that the pipe FD describes
(`server_process.py`). When that process ends, the pipe is closed. The server then runs until no lease is left, and
removes the file. A server that cannot use its file writes the reason to its output and ends.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import selectors
import socket
import sys
from collections import deque
from functools import partial
from time import monotonic
from typing import NamedTuple

from telegrad._core.directory.channel import INCARNATION, Channel, name_of
from telegrad._core.directory.directory_service import Service
from telegrad._core.directory.lease_table import DEFAULT, Limits, Table, remove
from telegrad._core.directory.requests import LONGEST_REQUEST
from telegrad._core.security.handshake import Acceptor, Claim
from telegrad._core.security.keyring import Keyring
from telegrad._core.security.noise import DecryptionFailed
from telegrad._core.security.refusals import Refusals, host_of, to_give_way
from telegrad._core.sockets import NOT_NOW, tune_tcp
from telegrad.errors import HandshakeError, PeerUnreachable, ProtocolViolation, TelegradError

BACKLOG = 4096  # connections waiting to be accepted; all workers of a group may connect at once
PIECE = 1 << 16  # bytes read from one client in an iteration
REQUESTS = 16  # answered for one client in an iteration
REPLIES = 1 << 18  # bytes of replies to one client in an iteration
ACCEPTS = 64  # connections accepted in an iteration
QUEUED = 4 << 20  # queued bytes of replies to one client; above it, its requests wait
MOST_QUEUED = 64 << 20  # above it, its connection is closed
MOST_STRANGERS = 1024  # concurrent handshakes; above it, the oldest one of the host with the most is refused
MOST_OF_ONE = 64  # connections of one client, one for each request in flight; above it, its oldest is closed
INTRODUCTION = 10.0  # seconds that a handshake may take
SILENCE = 30.0  # seconds after which the kernel declares the host of a client lost
TICK = 0.5  # seconds; the longest sleep
STOPPED = 1.0  # seconds beyond a tick: the process did not run, and could take no renewals
PAUSE = 0.5  # seconds without accepting if no descriptor is free
SPARE = 64  # descriptors reserved for other uses than connections

log = logging.getLogger("telegrad")
Closed = (OSError, ProtocolViolation, DecryptionFailed)


class Config(NamedTuple):
    """The configuration of a serving process."""

    parent: int  # the process that started it
    listener: int  # the descriptor of a listening socket
    keys: Keyring
    path: str
    limits: Limits


class Server:
    """A directory on a listening socket. `run` serves in the calling thread; any thread may call `stop`."""

    def __init__(
        self, listener: socket.socket, keys: Keyring, path: str = ":memory:", limits: Limits = DEFAULT
    ) -> None:
        """Open the directory's file.

        Raises:
            UsageError: the file cannot be used.
        """
        self._table = Table(path, limits, monotonic())
        self._service = Service(self._table)
        self._keys = keys
        self._claim = Claim(name_of(path) + self._table.identity, 0, INCARNATION, "")
        self._listener = listener
        listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._ear, self._voice = socket.socketpair()
        self._connections: dict[int, _Connection] = {}
        self._strangers: dict[_Connection, None] = {}  # oldest first
        self._clients: dict[str, list[_Connection]] = {}
        self._busy: dict[_Connection, None] = {}  # have waiting requests
        self._changed: dict[_Connection, None] = {}  # have replies not sent in this iteration
        self._count = 0
        self._refusals = Refusals()
        self._accepts_at: float | None = None  # when to accept again
        self._most = _descriptors() - SPARE
        self._is_over = False
        self._keeper_left = False

    def run(self, pipe: int | None = None, parent: int = 0) -> None:
        """Serve until `stop`. With a pipe: until the keeper has closed it or has ended, and no lease is left."""
        register = self._selector.register
        try:
            register(self._listener, selectors.EVENT_READ, self._accept)
            register(self._ear, selectors.EVENT_READ, self._stop_serving)
            if pipe is not None:
                register(pipe, selectors.EVENT_READ, partial(self._note_keeper_left, pipe))
            last = monotonic()
            while not self._is_over:
                last = self._turn(last)
                # Processes that the parent has forked hold the pipe, too.
                if (self._keeper_left or (parent and os.getppid() != parent)) and not self._table.has_leases:
                    break
        finally:
            for connection in list(self._connections.values()):
                self._drop(connection)
            self._selector.close()
            self._listener.close()
            self._ear.close()
            self._voice.close()
            self._table.file.close()

    def stop(self) -> None:
        """Make `run` return. Call it from any thread."""
        with contextlib.suppress(OSError):
            self._voice.send(b"\0")

    def _stop_serving(self, _: int) -> None:
        self._is_over = True

    def _note_keeper_left(self, pipe: int, _: int) -> None:
        self._keeper_left = True
        self._selector.unregister(pipe)

    def _turn(self, last: float) -> float:
        """Wait for events and process them; return the time. `last` is the time of the last iteration."""
        service = self._service
        wait = 0.0 if self._busy else TICK
        due = service.next_at()
        if due is not None:
            wait = min(wait, max(0.0, due - monotonic()))
        ready = self._selector.select(wait)
        now = monotonic()
        if now - last > TICK + STOPPED:
            self._table.extend_leases(now - last)
        for key, events in ready:
            key.data(events)
        for connection in list(self._busy):
            self._answer(connection, now)
        for number, reply in service.collect(now):
            if number in self._connections:
                self._queue(self._connections[number], reply)
        self._commit()
        self._check_strangers(now)
        return now

    def _commit(self) -> None:
        """Commit the changes of this iteration, then send the replies."""
        self._table.file.commit(self._table.revision)
        changed, self._changed = self._changed, {}
        for connection in changed:
            if connection.number in self._connections:
                self._send(connection)

    # Connections

    def _accept(self, _: int) -> None:
        for _ in range(ACCEPTS):
            try:
                sock, address = self._listener.accept()
            except NOT_NOW:
                return
            except OSError as error:  # as a rule no descriptor is free: an immediate retry would fail again
                log.warning("telegrad: the directory cannot accept connections: %s", error)
                self._selector.unregister(self._listener)
                self._accepts_at = monotonic() + PAUSE
                return
            origin = f"{address[0]}:{address[1]}" if isinstance(address, tuple) else "this host"
            if len(self._connections) >= self._most:
                sock.close()
                self._log_refusal(origin, f"it has {self._most} connections: raise the limit of open files (ulimit -n)")
                continue
            self._greet(sock, origin)

    def _greet(self, sock: socket.socket, origin: str) -> None:
        self._count += 1
        connection = _Connection(self._count, sock, origin, Acceptor(self._keys, self._claim))
        sock.setblocking(False)
        with contextlib.suppress(OSError):  # closed already, which the next read finds; or not a TCP socket
            tune_tcp(sock, SILENCE)
        self._connections[connection.number] = connection
        self._strangers[connection] = None
        self._selector.register(sock, selectors.EVENT_READ, partial(self._ready, connection))
        if len(self._strangers) > MOST_STRANGERS:
            waiting = list(self._strangers)
            self._refuse(waiting[to_give_way(each.origin for each in waiting)], "many wait to introduce themselves")

    def _ready(self, connection: _Connection, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._changed[connection] = None
        if events & selectors.EVENT_READ and not connection.requests:
            self._read(connection)

    def _read(self, connection: _Connection) -> None:
        try:
            connection.receive()
        except NOT_NOW:
            return
        except (HandshakeError, PeerUnreachable, *Closed) as error:
            if connection in self._strangers and connection.has_spoken:  # otherwise a probe of the port
                self._refuse(connection, error)
            else:
                self._drop(connection, error)
            return
        if connection.unsent:
            self._changed[connection] = None
        if connection in self._strangers and connection.channel is not None:
            self._admit(connection)
        if connection.requests:
            self._busy[connection] = None

    def _admit(self, connection: _Connection) -> None:
        """Register a connection that has completed its handshake."""
        del self._strangers[connection]
        own = self._clients.setdefault(connection.client, [])
        own.append(connection)
        if len(own) > MOST_OF_ONE:
            self._drop(own[0])

    def _answer(self, connection: _Connection, now: float) -> None:
        """Answer a few requests of a client."""
        requests = connection.requests
        most = min(len(connection.unsent) + REPLIES, QUEUED)
        for _ in range(min(REQUESTS, len(requests))):
            if len(connection.unsent) > most or connection.number not in self._connections:
                break
            try:
                reply = self._service.answer(connection.number, connection.client, requests.popleft(), now)
            except ProtocolViolation as error:
                self._drop(connection, error)
                return
            if reply is not None:
                self._queue(connection, reply)
        if not requests or len(connection.unsent) > QUEUED:
            self._busy.pop(connection, None)

    def _queue(self, connection: _Connection, reply: bytes) -> None:
        if len(connection.unsent) > MOST_QUEUED:
            self._drop(connection, "it does not read what it has asked for")
        elif connection.channel is not None:
            connection.unsent += connection.channel.encrypt(reply)
            self._changed[connection] = None

    def _send(self, connection: _Connection) -> None:
        try:
            connection.send()
        except OSError as error:
            self._drop(connection, error)
            return
        is_full = len(connection.unsent) > QUEUED
        if connection.requests and not is_full:
            self._busy[connection] = None
        events = (0 if is_full else selectors.EVENT_READ) | (selectors.EVENT_WRITE if connection.unsent else 0)
        if events != connection.events:
            connection.events = events
            self._selector.modify(connection.sock, events, partial(self._ready, connection))

    def _drop(self, connection: _Connection, why: object = None) -> None:
        if self._connections.pop(connection.number, None) is None:
            return
        if why is not None:
            log.debug("telegrad: a connection of the directory with %s has ended: %s", connection.origin, why)
        self._service.leave(connection.number)
        for group in (self._strangers, self._busy, self._changed):
            group.pop(connection, None)
        own = self._clients.get(connection.client, [])
        if connection in own:
            own.remove(connection)
            if not own:
                del self._clients[connection.client]
        self._selector.unregister(connection.sock)
        connection.sock.close()

    def _refuse(self, connection: _Connection, why: object) -> None:
        with contextlib.suppress(OSError):
            connection.sock.send(connection.acceptor.parting)
        self._log_refusal(connection.origin, why)
        self._drop(connection)

    def _log_refusal(self, origin: str, why: object) -> None:
        if self._refusals.should_log(host_of(origin), monotonic()):
            log.warning("telegrad: the directory has refused a connection from %s: %s", origin, why)

    def _check_strangers(self, now: float) -> None:
        while self._strangers and now - (oldest := next(iter(self._strangers))).since > INTRODUCTION:
            self._refuse(oldest, f"it has not introduced itself within {INTRODUCTION:g} s")
        for host, count in self._refusals.left_out(now):
            log.warning("telegrad: the directory has refused %d more connections from %s in a minute", count, host)
        if self._accepts_at is not None and now >= self._accepts_at:
            self._accepts_at = None
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)


class _Connection:
    """A connection of a client, or one in its handshake."""

    def __init__(self, number: int, sock: socket.socket, origin: str, acceptor: Acceptor) -> None:
        self.number, self.sock, self.origin, self.acceptor = number, sock, origin, acceptor
        self.since = monotonic()
        self.has_spoken = False
        self.client = ""  # its authenticated name
        self.channel: Channel | None = None  # after the handshake
        self.requests: deque[bytes] = deque()
        self.unsent = bytearray()
        self.events = selectors.EVENT_READ  # registered with the selector

    def receive(self) -> None:
        """Read available data once. Raises NOT_NOW, or the reason to close the connection."""
        data = self.sock.recv(PIECE)
        if not data:
            raise ConnectionResetError("it closed the connection")
        self.has_spoken = True
        if self.channel is not None:
            self.requests.extend(self.channel.decrypt(data))
            return
        end = self.acceptor
        self.unsent += end.receive(data)
        if end.done:
            assert end.ciphers is not None
            assert end.peer is not None
            self.client = end.peer.name
            self.channel = Channel(end.ciphers, LONGEST_REQUEST, end.leftover)
            self.requests.extend(self.channel.decrypt(b""))

    def send(self) -> None:
        """Send as much as the socket accepts."""
        with contextlib.suppress(*NOT_NOW):
            while self.unsent:
                del self.unsent[: self.sock.send(self.unsent)]


def _descriptors() -> int:
    """Return how many descriptors this process may open."""
    try:
        import resource
    except ImportError:  # Windows
        return 1024
    return min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], 1 << 20)


def _raise_limit() -> None:
    """Raise the limit of open descriptors as far as permitted."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def main(pipe: int) -> None:
    """Serve the directory that the pipe describes."""
    _raise_limit()
    size = int.from_bytes(_read_all(pipe, 4), "little")
    config = Config(*pickle.loads(_read_all(pipe, size)))  # written by the process that started this one
    listener = socket.socket(fileno=config.listener)
    try:
        Server(listener, config.keys, config.path, config.limits).run(pipe, config.parent)
    except TelegradError as error:  # the file's disk may be that of the log, and full
        with contextlib.suppress(OSError):  # the keeper has ended
            os.write(sys.stdout.fileno(), str(error).encode())
        raise
    remove(config.path)  # no lease is left, so no later group needs the file


def _read_all(pipe: int, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = os.read(pipe, size - len(data))
        if not piece:
            raise SystemExit(1)  # the process that started this one has ended
        data += piece
    return data


if __name__ == "__main__":
    main(int(sys.argv[1]))
