"""A client of the embedded directory: one connection, kept, for all threads of a process.

A thread of the client connects when something is first asked, reads the replies, and connects again when the
connection breaks: with a delay that doubles, and is random, so that the members of a group that lost its server do not
come back at one moment. Requests that wait are sent again over the next connection, but for a compare-and-set that may
have arrived.

A handshake that fails ends all requests at once as long as the directory has never answered: the key or the address is
wrong. Later it counts as a connection that broke, since bytes may have been altered on the way, or another server may
have the port for a while.
"""

from __future__ import annotations

import contextlib
import random
import secrets
import selectors
import socket
import threading
from time import monotonic

from telegrad import forks
from telegrad.addresses import bracketed
from telegrad.directory import messages
from telegrad.directory.channel import INCARNATION, Channel, name_of
from telegrad.directory.messages import Reply, Request
from telegrad.directory.protocol import (
    ABSENT,
    Compacted,
    DirectoryLost,
    DirectoryReset,
    Events,
    Lease,
    LeaseLost,
    Listing,
    Swap,
    check_key,
    check_ttl,
    check_value,
)
from telegrad.directory.watches import LONGEST_WATCH
from telegrad.errors import (
    HandshakeError,
    InvalidArgument,
    LimitReached,
    PeerUnreachable,
    ProtocolViolation,
    TelegradError,
)
from telegrad.keyring import Keyring
from telegrad.threads import Thread
from telegrad.transport.handshake import Claim, Initiator
from telegrad.transport.noise import DecryptionFailed
from telegrad.transport.sockets import NOT_NOW, shut, tune_tcp

PATIENCE = 10.0  # seconds for one operation, if nothing else is given
HANDSHAKE = 10.0  # seconds for a connection and its handshake: a whole group may come at once
SILENCE = 10.0  # seconds after which the kernel takes the server's host for lost
FIRST_DELAY, LONGEST_DELAY = 0.05, 1.0  # seconds between two connections, at most
LONGEST = 1 << 30  # bytes of a reply
PIECE = 1 << 18

_random = random.SystemRandom()  # processes that were forked have one state of the others


class _Call:
    """A request, and the thread that waits for its reply."""

    __slots__ = ("done", "ends", "error", "may_repeat", "reply", "request", "sent")

    def __init__(self, request: Request, ends: float, may_repeat: bool) -> None:
        self.request, self.may_repeat = request, may_repeat
        self.ends = ends  # of the watch that is asked for
        self.done = threading.Event()
        self.reply: Reply | None = None
        self.error: TelegradError | None = None
        self.sent = False

    def finish(self, reply: Reply | None, error: TelegradError | None = None) -> None:
        self.reply, self.error = reply, error
        self.done.set()


Calls = list[_Call]  # a name for it, since `list` is a method of what returns it


class EmbeddedDirectory:
    """A `Directory` that a server of `server.py` keeps. Its methods are documented in `protocol.py`."""

    def __init__(self, address: tuple[str, int], keys: Keyring, patience: float = PATIENCE, path: str = "") -> None:
        """Connect once something is asked.

        Args:
            address: where the server listens.
            keys: those of the group.
            patience: for how many seconds an operation waits for the server.
            path: of the directory's file: that of another group, which has got the port since, is refused.
        """
        self._name = name_of(path) if path else ""
        self._address, self._keys, self._patience = address, keys, patience
        self._claim = Claim(secrets.token_hex(8), 0, "", "")
        self._made_at = forks.depth
        self._at = f"the directory at {bracketed(address[0])}:{address[1]}"
        self._lock = threading.Lock()  # guards all below; nobody waits under it
        self._condition = threading.Condition(self._lock)  # of a call, or of the end
        self._calls: dict[int, _Call] = {}
        self._number = 0
        self._link: _Link | None = None  # behind its handshake
        self._connecting: socket.socket | None = None
        self._is_closed = False
        self._problem = "it has not answered yet"
        self._identity = ""  # of the directory that has answered first
        self._thread = Thread(target=self._run, name="telegrad-directory")
        self._thread.start()

    # Operations

    def grant(self, ttl: float) -> Lease:
        check_ttl(ttl)
        sent = monotonic()
        reply = self._ask(Request(messages.GRANT, seconds=ttl))
        return Lease(reply.revision, ttl, sent + ttl)

    def renew(self, lease: Lease) -> Lease:
        sent = monotonic()
        self._ask(Request(messages.RENEW, lease=lease.id))
        return lease._replace(ends=sent + lease.ttl)

    def revoke(self, lease: Lease) -> None:
        self._ask(Request(messages.REVOKE, lease=lease.id))

    def swap(self, key: str, value: bytes | None, expected: int = ABSENT, lease: Lease | None = None) -> Swap:
        check_key(key)
        check_value(key, value or b"")
        request = Request(messages.SWAP, key, value, expected, lease.id if lease and value is not None else 0)
        reply = self._ask(request, may_repeat=False)
        return Swap(reply.outcome == messages.DONE, reply.changes[0].entry if reply.changes else None)

    def list(self, prefix: str) -> Listing:
        reply = self._ask(Request(messages.LIST, prefix))
        return Listing(reply.revision, tuple(event.entry for event in reply.changes if event.entry is not None))

    def watch(self, prefix: str, since: int, timeout: float) -> tuple[int, Events]:
        reply = self._ask(Request(messages.WATCH, prefix, revision=since), min(max(0.0, timeout), LONGEST_WATCH))
        return reply.revision, reply.changes

    def close(self) -> None:
        if forks.depth != self._made_at:  # the connection is that of the parent
            return
        with self._lock:
            self._is_closed = True
            link, self._link = self._link, None
            connecting = self._connecting
            calls = self._take_calls()
            self._condition.notify_all()
        if link is not None:
            link.shut()
        if connecting is not None:
            shut(connecting)
        for call in calls:
            call.finish(None, DirectoryLost(f"this client of {self._at} was closed"))
        if threading.current_thread() is not self._thread:
            self._thread.join(1.0)

    # Calls

    def _ask(self, request: Request, timeout: float = 0.0, may_repeat: bool = True) -> Reply:
        """Send a request, now or over the next connection, and wait for its reply."""
        forks.check(self._made_at)
        messages.write_request(0, request)  # raises here, not in the client's thread
        call = _Call(request, monotonic() + timeout, may_repeat)
        with self._lock:
            if self._is_closed:
                raise DirectoryLost(f"this client of {self._at} was closed")
            self._number = number = (self._number + 1) & 0xFFFFFFFF
            self._calls[number] = call
            if self._link is not None:
                self._send(self._link, number, call)
            else:
                self._condition.notify_all()
        try:
            call.done.wait(timeout + self._patience)
        finally:  # also where a signal ends the wait
            with self._lock:
                self._calls.pop(number, None)
                problem = self._problem
        if not call.done.is_set():
            raise DirectoryLost(
                f"{self._at} did not answer for {timeout + self._patience:g} s: {problem}. Whether a write was done is "
                "unknown; see whether the process that keeps it runs, and can be reached from here"
            )
        if call.error is not None:
            raise call.error
        assert call.reply is not None
        return self._checked(call.reply)

    def _checked(self, reply: Reply) -> Reply:
        if reply.outcome in (messages.DONE, messages.NOT_DONE):
            return reply
        if reply.outcome == messages.LEASE_LOST:
            raise LeaseLost(reply.text)
        if reply.outcome == messages.COMPACTED:
            raise Compacted(reply.text)
        if reply.outcome == messages.FULL:
            raise LimitReached(reply.text)
        raise InvalidArgument(reply.text)

    def _send(self, link: _Link, number: int, call: _Call) -> None:
        """Send a request, under the lock; what the socket does not take, the client's thread sends."""
        request = call.request
        if request.operation == messages.WATCH:
            request = request._replace(seconds=max(0.0, call.ends - monotonic()))
        call.sent = True
        link.send(messages.write_request(number, request))

    def _take_calls(self) -> Calls:
        """Take all calls away, under the lock."""
        calls = list(self._calls.values())
        self._calls.clear()
        return calls

    # The client's thread

    def _run(self) -> None:
        delay = FIRST_DELAY
        while self._wait_for_calls():
            try:
                link = self._connect()
            except DirectoryReset as error:  # the same would come again
                self._fail_all(error)
            except (HandshakeError, PeerUnreachable) as error:
                self._problem = str(error)
                if isinstance(error, HandshakeError) and not self._identity:
                    self._fail_all(error)
            except (OSError, ValueError) as error:  # ValueError: the address is none
                self._problem = f"no connection could be made ({error})"
            else:
                delay = FIRST_DELAY
                self._serve(link)
            with self._lock:
                if not self._is_closed:
                    self._condition.wait_for(lambda: self._is_closed, _random.uniform(0.0, delay))
            delay = min(2 * delay, LONGEST_DELAY)

    def _wait_for_calls(self) -> bool:
        """Wait until there is something to ask; return False once the client is closed."""
        with self._lock:
            self._condition.wait_for(lambda: self._calls or self._is_closed)
            return not self._is_closed

    def _connect(self) -> _Link:
        attempt = 0
        while True:
            sock = socket.create_connection(self._address, HANDSHAKE)
            with self._lock:
                self._connecting = sock
                if self._is_closed:
                    shut(sock)
            end = Initiator(self._keys, self._claim, INCARNATION, attempt=attempt)
            try:
                tune_tcp(sock, SILENCE)
                _shake_hands(sock, end)
                self._check_identity(end)
                return _Link(sock, end)
            except (HandshakeError, PeerUnreachable) as error:
                sock.close()
                if not end.has_other_key:
                    raise type(error)(f"{self._at}: {error}") from error
                attempt += 1
            except BaseException:
                sock.close()
                raise
            finally:
                with self._lock:
                    self._connecting = None

    def _check_identity(self, end: Initiator) -> None:
        assert end.peer is not None
        if not end.peer.name.startswith(self._name):
            raise HandshakeError(f"{self._at} is that of another group")
        self._identity = self._identity or end.peer.name
        if end.peer.name != self._identity:
            raise DirectoryReset(
                f"{self._at} was started anew without what it knew: its host was restarted, or its file was removed. "
                "What the group knew of itself is lost; start the group again"
            )

    def _serve(self, link: _Link) -> None:
        """Send what waits, and hand replies to their calls, until the connection breaks."""
        with self._lock:
            self._link = link
            self._problem = "its process is stopped, or busy, or cannot be reached any more"
            for number, call in self._calls.items():
                self._send(link, number, call)
        try:
            while not self._is_closed:
                for message in link.receive(self._lock):
                    number, reply = messages.read_reply(message)
                    with self._lock:
                        waiting = self._calls.pop(number, None)
                    if waiting is not None:  # else its thread has not waited for it
                        waiting.finish(reply)
            raise ConnectionAbortedError("the client was closed")
        except (OSError, ValueError, ProtocolViolation, DecryptionFailed) as error:
            self._lose(link, error)

    def _lose(self, link: _Link, error: Exception) -> None:
        lost = []
        with self._lock:
            self._link = None
            self._problem = f"its connection broke ({error})"
            for number, call in list(self._calls.items()):
                if call.sent and not call.may_repeat:
                    lost.append(self._calls.pop(number))
                call.sent = False
        link.close()
        for call in lost:
            call.finish(
                None,
                DirectoryLost(
                    f"the connection to {self._at} broke ({error}) before it answered. Whether {call.request.key!r} "
                    "was written is unknown: read it again"
                ),
            )

    def _fail_all(self, error: TelegradError) -> None:
        with self._lock:
            calls = self._take_calls()
        for call in calls:
            call.finish(None, type(error)(str(error)))  # one for each thread that raises it


class _Link:
    """A connection behind its handshake."""

    def __init__(self, sock: socket.socket, end: Initiator) -> None:
        assert end.ciphers is not None
        self._sock = sock
        sock.setblocking(False)
        self._channel = Channel(end.ciphers, LONGEST, end.leftover)
        self._unsent = bytearray()
        self._ear, self._voice = socket.socketpair()
        self._voice.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(sock, selectors.EVENT_READ)
        self._selector.register(self._ear, selectors.EVENT_READ)
        self._awaits_room = False

    def send(self, message: bytes) -> None:
        """Send a message as far as the socket takes it; under the client's lock, by any thread."""
        self._unsent += self._channel.encrypt(message)
        self._flush()
        if self._unsent and not self._awaits_room:
            with contextlib.suppress(OSError):
                self._voice.send(b"\0")

    def _flush(self) -> None:
        with contextlib.suppress(OSError):  # a connection that broke is found by the thread that reads
            while self._unsent:
                del self._unsent[: self._sock.send(self._unsent)]

    def receive(self, lock: threading.Lock) -> list[bytes]:
        """Return the messages that have come, after waiting for some bytes.

        Raises:
            OSError, ValueError: the connection has ended, or was closed.
            ProtocolViolation, DecryptionFailed: the other end is no directory, or something was altered on the way.
        """
        with lock:
            if bool(self._unsent) != self._awaits_room:
                self._awaits_room = bool(self._unsent)
                self._selector.modify(self._sock, selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0))
        for key, events in self._selector.select():
            if key.fileobj is self._ear:
                self._ear.recv(4096)
            else:
                if events & selectors.EVENT_WRITE:
                    with lock:
                        self._flush()
                if events & selectors.EVENT_READ:
                    return self._read()
        return []

    def _read(self) -> list[bytes]:
        try:
            data = self._sock.recv(PIECE)
        except NOT_NOW:
            return []
        if not data:
            raise ConnectionResetError("the server has ended, or has closed it")
        return self._channel.decrypt(data)

    def shut(self) -> None:
        """End the connection, by any thread: `receive` raises."""
        shut(self._sock)

    def close(self) -> None:
        """Close all descriptors, by the thread that reads, once no other one sends."""
        self._selector.close()
        for sock in (self._sock, self._ear, self._voice):
            sock.close()


def _shake_hands(sock: socket.socket, end: Initiator) -> None:
    ends = monotonic() + HANDSHAKE
    sock.sendall(end.start())
    while not end.done:
        left = ends - monotonic()
        if left <= 0:
            raise TimeoutError(f"the server accepted a connection and said nothing for {HANDSHAKE:g} s")
        sock.settimeout(left)
        data = sock.recv(4096)
        if not data:
            raise ConnectionResetError("the server closed it during the handshake")
        try:
            answer = end.receive(data)
        except (HandshakeError, PeerUnreachable):
            with contextlib.suppress(OSError):  # it need not hear why
                sock.sendall(end.parting)
            raise
        sock.sendall(answer)
