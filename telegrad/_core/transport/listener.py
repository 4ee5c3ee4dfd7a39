"""Accepts connections, and admits only those that prove to be of the group."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import ssl
import threading
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from math import inf
from time import monotonic

from telegrad._core.processes import error_text
from telegrad._core.security import handshake
from telegrad._core.security.handshake import Refusals, host_of, to_give_way
from telegrad._core.security.keyring import Keyring
from telegrad._core.security.tls import TlsFiles, own_digest, peer_digest, refusal, server_context
from telegrad._core.sockets import (
    HAS_UNIX,
    NOT_NOW,
    family_of,
    process_at,
    socket_address,
    stranger_at,
    tune_tcp,
    tune_unix,
    unix_address,
)
from telegrad._core.transport.connect import OpenedChannel
from telegrad._core.transport.poller import Poller, Source
from telegrad.errors import HandshakeError, PeerUnreachable, ProtocolViolation, UsageError

PATIENCE = 5.0  # seconds that a handshake may take
# Seconds. Ticks come at least once a second, so two that are further apart show that this worker did not run meanwhile.
HELD = 2.0
MOST_STRANGERS = 256  # concurrent handshakes; above it, the oldest one of the host with the most is refused
WARN_EVERY = 60.0  # seconds between two warnings that connections cannot be accepted
MOST_FOREIGN = 256  # refused processes of other users that are remembered
HERE = "this host"
BACKLOG = 512
MOST_CONNECTIONS = 4  # of one worker, which needs one, not counting lanes; above it, its oldest is closed

Accepted = Callable[[OpenedChannel, handshake.Hello, handshake.StreamId], None]

log = logging.getLogger("telegrad")


class Listener:
    """The listening sockets of a worker: TCP, and a Unix socket where available and without TLS."""

    def __init__(
        self, address: str, tls: TlsFiles | None, transport: str, silence: float, poller: Poller, accepted: Accepted
    ) -> None:
        """Listen; no connection is accepted before `serve`. Raise UsageError if the TLS files cannot be used, or TLS is
        requested together with only Unix sockets."""
        if tls is not None and transport == "unix":
            raise UsageError('tls=... protects TCP connections, but transport="unix" uses none: leave one of them out')
        self._poller = poller
        self._accepted = accepted
        self._silence = silence
        self._files = tls
        self._tls = server_context(tls) if tls is not None else None
        self.digest = own_digest(tls) if tls is not None else b""  # of this worker's certificate
        self._lock = threading.Lock()  # guards _strangers, and that the poller watches them
        self._strangers: dict[_Handshake, None] = {}  # oldest first
        self._refusals = Refusals()  # guarded by _lock, like _foreign
        self._foreign: deque[int] = deque(maxlen=MOST_FOREIGN)  # processes of other users that were refused
        self.patience, self.most_strangers = PATIENCE, MOST_STRANGERS
        self._serves: tuple[Keyring, handshake.Hello] | None = None  # the group's keys, and this worker's claim
        self._shut = False  # no descriptor is free for new connections
        self._warned = -inf  # when that was logged last
        self._ticked = inf
        self._doors: list[_ListeningSocket] = []
        self.unix = ""
        if HAS_UNIX and transport != "tcp" and tls is None:
            self.unix = f"telegrad-{os.getpid()}-{secrets.token_hex(8)}"  # insight finds the process by this name
            door = socket.socket(socket.AF_UNIX)
            door.bind(unix_address(self.unix))
            self._doors.append(_ListeningSocket(door, self, True))
        door = socket.socket(family_of(address))
        door.bind(socket_address(address, 0))
        self.tcp: tuple[str, int] = (address, door.getsockname()[1])
        self._doors.append(_ListeningSocket(door, self, False))
        for each in self._doors:
            each.sock.setblocking(False)
            each.sock.listen(BACKLOG)

    def serve(self, keys: Keyring, mine: handshake.Hello) -> None:
        """Accept connections that prove to hold one of `keys`. Earlier ones have waited in the kernel's queue.

        A second call replaces the keys and the claim for later connections.
        """
        self._serves = keys, mine
        for door in self._doors:
            self._poller.watch(door, read=True)

    def greet(self, sock: socket.socket, origin: str, shared: bool) -> None:
        assert self._serves is not None
        sock.setblocking(False)
        if shared:
            other_user = stranger_at(sock)
            if other_user:
                self._refuse_user(sock, other_user)
                return
            tune_unix(sock)
        else:
            tune_tcp(sock, self._silence)
            if self._tls is not None:
                sock = self._tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        end = handshake.Acceptor(*self._serves, handshake.UNIX if shared else handshake.TCP)
        stranger = _Handshake(sock, self, end, origin)
        with self._lock:
            crowded = len(self._strangers) >= self.most_strangers
            waiting = list(self._strangers) if crowded else []
            oldest = waiting[to_give_way(each.origin for each in waiting)] if crowded else None
            # Registered and watched in one step. `_dismiss` undoes both under this lock, so a connection that was
            # dismissed is not watched again afterwards.
            self._strangers[stranger] = None
            self._poller.watch(stranger, read=True)
        if oldest is not None:  # a member finishes in milliseconds: it is rarely the oldest
            self.turn_away(oldest, ProtocolViolation("it has not completed its handshake, and many others wait"))

    def _refuse_user(self, sock: socket.socket, user: str) -> None:
        """Refuse a Unix connection of another user of this host; log one warning for each process."""
        process = process_at(sock)
        with self._lock:
            is_new = process not in self._foreign
            if is_new:
                self._foreign.append(process)
            is_told = is_new and self._refusals.should_log(HERE, monotonic())
        if is_told:
            log.warning(
                "telegrad: connections from process %d of this host are refused: it belongs to %s; workers of other "
                "users connect by TCP",
                process,
                user,
            )
        with contextlib.suppress(OSError):
            sock.send(handshake.refusal(handshake.OTHER_USER))
        sock.close()

    def known(self, stranger: _Handshake) -> None:
        end = stranger.end
        assert end.peer is not None
        if self._dismiss(stranger):
            self._accepted(OpenedChannel.behind(stranger.sock, end), end.peer, end.stream_id)

    def turn_away(self, stranger: _Handshake, why: Exception) -> None:
        if not self._dismiss(stranger):
            return
        if isinstance(why, (_HungUp, ConnectionResetError, BrokenPipeError)):  # the other end has closed it
            log.debug("telegrad: a connection from %s was refused: %s", stranger.origin, why)
        else:
            with self._lock:
                is_told = self._refusals.should_log(host_of(stranger.origin), monotonic())
            if is_told:
                told = refusal(why, self._files) if self._files and isinstance(why, ssl.SSLError) else why
                log.warning("telegrad: a connection from %s was refused: %s", stranger.origin, told)
        with contextlib.suppress(OSError, ValueError):
            if stranger.end.last_bytes:
                stranger.part()
        stranger.sock.close()

    def _dismiss(self, stranger: _Handshake) -> bool:
        """Remove a connection from the handshakes; return False if another thread has removed it."""
        with self._lock:
            if stranger not in self._strangers:
                return False
            del self._strangers[stranger]
            # The poller may have returned an event of this connection already, to a leader that has not come to it so
            # far. `on_readable` then finds `dismissed`: the socket has another owner, or is closed.
            self._poller.forget(stranger)
            stranger.dismissed = True
            return True

    def shut(self, error: OSError) -> None:
        """Accept no connection until the next tick, because of this error."""
        if monotonic() - self._warned > WARN_EVERY:
            self._warned = monotonic()
            log.warning("telegrad: a connection could not be accepted: %s", error_text(error))
        for door in self._doors:
            self._poller.forget(door)
        # Set last: a tick before that watches nothing, and the next one watches all doors again. If it were set first,
        # a tick could clear it before the doors are forgotten, and no tick would watch them again.
        self._shut = True

    def tick(self, now: float) -> None:
        """Refuse connections whose handshake takes too long."""
        # `shut` stopped watching because no descriptor was free. The poller is level-triggered: while it watched, it
        # would report the waiting connection again and again, and the leader would do nothing else.
        if self._shut:
            self._shut = False
            for door in self._doors:
                self._poller.watch(door, read=True)
        was_held, self._ticked = now - self._ticked > HELD, now
        with self._lock:
            for stranger in self._strangers if was_held else ():
                # This worker was stopped, or its interpreter was held, and has not read their messages. That time is
                # not theirs.
                stranger.since = now
            left_out = self._refusals.left_out(now)
            late = [stranger for stranger in self._strangers if now - stranger.since > self.patience]
        for host, count in left_out:
            log.warning("telegrad: %d more connections from %s were refused in the last minute", count, host)
        for stranger in late:
            self.turn_away(
                stranger, ProtocolViolation(f"it has not completed its handshake within {self.patience:g} s")
            )

    def close(self) -> None:
        for door in self._doors:
            self._poller.forget(door)
        with self._lock:
            strangers = list(self._strangers)
        self.abandon([stranger for stranger in strangers if self._dismiss(stranger)])

    def abandon(self, strangers: Iterable[_Handshake] = ()) -> None:
        """Only close the descriptors."""
        for sock in [door.sock for door in self._doors] + [each.sock for each in strangers or self._strangers]:
            sock.close()


class _HungUp(ProtocolViolation):
    """The end of a probe of a waiting worker or a load balancer, or of a worker that ends between two messages."""

    def __init__(self) -> None:
        super().__init__("it closed the connection before the handshake was complete")


class _ListeningSocket(Source):
    def __init__(self, sock: socket.socket, listener: Listener, shared: bool) -> None:
        self.sock = sock
        self._listener = listener
        self._shared = shared

    def fileno(self) -> int:
        return self.sock.fileno()

    def on_readable(self) -> bool:
        try:
            sock, address = self.sock.accept()
        except NOT_NOW:
            return False
        except OSError as error:
            if self.sock.fileno() >= 0:
                self._listener.shut(error)  # as a rule no descriptor is free: an immediate retry would fail again
            return False
        try:
            self._listener.greet(sock, HERE if self._shared else f"{address[0]}:{address[1]}", self._shared)
        except OSError:
            sock.close()  # the other end has closed it
        return True


class _Handshake(Source):
    """A connection in its handshake."""

    def __init__(self, sock: socket.socket, listener: Listener, end: handshake.Acceptor, origin: str) -> None:
        self.sock = sock
        self.end = end
        self.since = monotonic()
        self.dismissed = False
        self._listener = listener
        self._tls_done = not isinstance(sock, ssl.SSLSocket)
        self.origin = origin

    def fileno(self) -> int:
        return self.sock.fileno()

    def on_readable(self) -> bool:
        if self.dismissed:
            return False
        try:
            if not self._tls_done:
                assert isinstance(self.sock, ssl.SSLSocket)
                self._check_uses_tls()
                self.sock.do_handshake()
                self.end.carrier = handshake.TLS + peer_digest(self.sock) + self._listener.digest
                self._tls_done = True
            data = self.sock.recv(4096)
            if not data:
                raise ProtocolViolation("it closed the connection in a message") if self.end.leftover else _HungUp()
            answer = self.end.receive(data)
            if answer:
                self.sock.send(answer)  # fits the empty buffer of a new connection
        except NOT_NOW:
            return False
        except ssl.SSLEOFError:
            self._listener.turn_away(self, _HungUp())
            return False
        except (HandshakeError, PeerUnreachable, OSError, ValueError) as error:
            self._listener.turn_away(self, error)
            return False
        if self.end.done:
            self._listener.known(self)
        return True

    def _check_uses_tls(self) -> None:
        """Raise AuthenticationFailed if the other end is a worker that does not use TLS."""
        if handshake.is_hello(socket.socket.recv(self.sock, handshake.LONGEST, socket.MSG_PEEK)):
            socket.socket.recv(self.sock, handshake.LONGEST)  # else closing the socket would discard the answer
            raise self.end.refuse_without_tls()

    def part(self) -> None:
        """Send the reason of the refusal; unencrypted before TLS is established."""
        send = self.sock.send if self._tls_done else partial(socket.socket.send, self.sock)
        send(self.end.last_bytes)
