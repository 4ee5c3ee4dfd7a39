"""A client of the embedded directory.

If a handshake fails before the directory has ever answered, the operation fails at once: the key or the address is
wrong. Later, it counts as a broken connection, because bytes may have been altered on the way, or another server may
have the port for a while.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
from time import monotonic

from telegrad._core.directory import requests
from telegrad._core.directory.channel import INCARNATION, Channel, name_of
from telegrad._core.directory.directory import (
    ABSENT,
    Compacted,
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
from telegrad._core.directory.requests import Reply, Request, read_reply, write_request
from telegrad._core.directory.sessions import Result, Sessions, Unanswered, Unsent, is_quiet, left
from telegrad._core.directory.watches import LONGEST_WATCH
from telegrad._core.security.handshake import Hello, Initiator
from telegrad._core.security.keyring import Keyring
from telegrad._core.security.noise import DecryptionFailed
from telegrad._core.sockets import bracketed, shut, tune_tcp
from telegrad.errors import HandshakeError, InvalidArgument, LimitReached, PeerUnreachable, ProtocolViolation

PATIENCE = 10.0  # default seconds of one operation
HANDSHAKE = 10.0  # seconds for connecting and the handshake: all workers of a group may connect at once
SILENCE = 10.0  # seconds after which the kernel declares the server's host lost
LONGEST = 1 << 30  # bytes of a reply
PIECE = 1 << 18

_ERRORS = {requests.LEASE_LOST: LeaseLost, requests.COMPACTED: Compacted, requests.FULL: LimitReached}


class _ServerConnection:
    """The directory that a client is connected to."""

    def __init__(self, address: tuple[str, int], keys: Keyring, path: str) -> None:
        self.address, self.keys = address, keys
        self.at = f"the directory at {bracketed(address[0])}:{address[1]}"
        self.claim = Hello(secrets.token_hex(8), 0, "", "")
        self.identity = ""  # of the first directory that answered
        self._name = name_of(path) if path else ""

    def check(self, name: str) -> None:
        """Raise an error if this name belongs to another directory than before."""
        if not name.startswith(self._name):
            raise HandshakeError(f"{self.at} belongs to another group")
        self.identity = self.identity or name
        if name != self.identity:
            raise DirectoryReset(
                f"{self.at} was restarted without its data: its host was restarted, or its file was removed. The "
                "state of the group is lost; start the group again"
            )


class EmbeddedSession:
    """A connection that carries one request at a time."""

    def __init__(self, peer: _ServerConnection) -> None:
        self._peer = peer
        self._sock: socket.socket | None = None
        self._channel: Channel | None = None

    def open(self, deadline: float) -> None:
        """Connect and perform the handshake; with the next key if the directory does not know the first one."""
        peer, attempt = self._peer, 0
        deadline = min(deadline, monotonic() + HANDSHAKE)
        while True:
            end = Initiator(peer.keys, peer.claim, INCARNATION, attempt=attempt)
            try:
                self._sock = sock = socket.create_connection(peer.address, left(deadline))
                tune_tcp(sock, SILENCE)
                self._shake_hands(sock, end, deadline)
                break
            except (HandshakeError, PeerUnreachable) as error:
                self.close()
                if end.has_other_key:
                    attempt += 1
                elif isinstance(error, HandshakeError) and not peer.identity:
                    raise type(error)(f"{peer.at}: {error}") from error
                else:
                    raise Unsent(str(error)) from None
            except TimeoutError:
                raise Unsent("the handshake did not finish in time") from None
            except (OSError, ValueError) as error:  # ValueError: the address is invalid
                raise Unsent(f"the connection failed ({error})") from None
        assert end.peer is not None
        assert end.ciphers is not None
        peer.check(end.peer.name)
        self._channel = Channel(end.ciphers, LONGEST, end.leftover)

    def usable(self) -> bool:
        return self._sock is not None and is_quiet(self._sock)

    def interrupt(self) -> None:
        if self._sock is not None:
            shut(self._sock)

    def close(self) -> None:
        if self._sock is not None:
            self._sock.close()

    def ask(self, request: bytes, deadline: float) -> Reply:
        """Send a request, and return its reply.

        Raises:
            OSError: the connection broke, or the deadline passed.
            Unanswered: the other end is not a directory, or data was altered on the way.
        """
        sock, channel = self._sock, self._channel
        assert sock is not None
        assert channel is not None
        try:
            sock.settimeout(left(deadline))
            sock.sendall(channel.encrypt(request))
            while True:
                for message in channel.decrypt(_receive(sock, PIECE, deadline)):
                    return read_reply(message)
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
                    sock.sendall(end.parting)
                raise
            sock.sendall(answer)


class EmbeddedDirectory:
    """A `Directory` that `directory_server.py` serves. `directory.py` documents its methods."""

    def __init__(self, address: tuple[str, int], keys: Keyring, patience: float = PATIENCE, path: str = "") -> None:
        """Initialise. The first operation connects.

        Args:
            address: the address of the server.
            keys: the keys of the group.
            patience: seconds that an operation waits for the server.
            path: the directory's file. The directory of another group that has got the port since is refused.
        """
        peer = _ServerConnection(address, keys, path)
        self._sessions = Sessions(
            lambda _: EmbeddedSession(peer),
            [peer.at],
            patience,
            peer.at,
            "Check that the process that keeps it runs, is not stopped, and can be reached from here",
        )

    def grant(self, ttl: float) -> Lease:
        check_ttl(ttl)
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
        _, reply = self._ask(request, repeat=False)
        return Swap(reply.outcome == requests.DONE, reply.changes[0].entry if reply.changes else None)

    def list(self, prefix: str) -> Listing:
        _, reply = self._ask(Request(requests.LIST, prefix))
        return Listing(reply.revision, tuple(event.entry for event in reply.changes if event.entry is not None))

    def watch(self, prefix: str, since: int, timeout: float) -> tuple[int, Events]:
        _, reply = self._ask(Request(requests.WATCH, prefix, revision=since), min(max(0.0, timeout), LONGEST_WATCH))
        return reply.revision, reply.changes

    def close(self) -> None:
        self._sessions.close()

    def _ask(self, request: Request, timeout: float = 0.0, repeat: bool = True) -> Result[Reply]:
        ends = monotonic() + timeout
        written = write_request(request)

        def ask(session: EmbeddedSession, deadline: float) -> Reply:
            if not timeout:
                return session.ask(written, deadline)
            return session.ask(write_request(request._replace(seconds=max(0.0, ends - monotonic()))), deadline)

        result = self._sessions.run(ask, repeat, ends + self._sessions.patience)
        reply = result.value
        if reply.outcome not in (requests.DONE, requests.NOT_DONE):
            raise _ERRORS.get(reply.outcome, InvalidArgument)(reply.text)
        return result


def _receive(sock: socket.socket, most: int, deadline: float) -> bytes:
    """Return received bytes. Raises OSError if the deadline has passed or the connection has ended."""
    sock.settimeout(left(deadline))
    data = sock.recv(most)
    if not data:
        raise ConnectionResetError("the server ended or closed the connection")
    return data
