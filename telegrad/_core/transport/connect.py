"""Connects to another worker by the best transport, performs the handshake, and has the errors of the connection.

A worker's connection to itself, `LoopEnd`, has no socket.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import ssl
from collections.abc import Callable, Iterable
from time import monotonic, sleep
from typing import Any, NamedTuple

from telegrad._core import processes
from telegrad._core.memory.device_streams import copied
from telegrad._core.pickling.exceptions import fresh
from telegrad._core.processes import Stops, stopped
from telegrad._core.security.handshake import ITSELF, ONE_SIDED, TCP, TLS, UNIX, Acceptor, Hello, Initiator, StreamId
from telegrad._core.security.keyring import Keyring
from telegrad._core.security.noise import Ciphers
from telegrad._core.security.tls import (
    CHECK,
    TlsFiles,
    alert_of,
    client_context,
    is_one_sided,
    own_digest,
    peer_digest,
    refusal,
)
from telegrad._core.sockets import HAS_UNIX, process_at, stranger_at, tune_tcp, tune_unix, unix_address
from telegrad._core.transport.silence import Silence
from telegrad._core.wire.messages import BYE, MOVED, OVER, SILENT, Message
from telegrad._core.wire.tensors import DeviceBlob
from telegrad.errors import (
    AuthenticationFailed,
    GenerationOver,
    HandshakeError,
    LeftEarly,
    PeerError,
    PeerLost,
    PeerSilent,
    PeerStopped,
    PeerUnreachable,
    ShutDown,
    UsageError,
)

FULL = 0.01  # seconds until a retry if the queue of a Unix socket is full: the kernel does not report room in it


class Target(NamedTuple):
    """A worker and its addresses; `unix` is empty if it runs on another host."""

    name: str
    incarnation: str
    unix: str
    tcp: tuple[str, int]
    stream_id: StreamId = ITSELF


class OpenedChannel(NamedTuple):
    """A connection after its handshake."""

    sock: socket.socket
    shared: bool  # both ends can share memory
    leftover: bytes  # bytes received after the handshake
    ciphers: Ciphers | None  # encrypt all further data; None if TLS or the kernel protects it

    @classmethod
    def behind(cls, sock: socket.socket, end: Initiator | Acceptor) -> OpenedChannel:
        return cls(sock, end.carrier == UNIX, end.leftover, end.ciphers if end.carrier == TCP else None)


def connect(
    target: Target, keys: Keyring, mine: Hello, tls: TlsFiles | None, transport: str, timeout: float, silence: float
) -> OpenedChannel:
    """Connect and perform the handshake.

    If the other end does not know this worker's first key, try the next one on a new connection.

    Raises:
        PeerUnreachable: no process answers at the address, or another worker does.
        HandshakeError: the process that answers is not of this group.
    """
    attempt = 0
    while True:
        sock, carrier = _reach(target, tls, transport, timeout, silence)
        pid = process_at(sock) if carrier == UNIX else 0
        end = Initiator(keys, mine, target.incarnation, carrier, target.stream_id, attempt)
        try:
            _shake_hands(sock, end, monotonic() + timeout, pid, silence if pid else 0.0)
            return OpenedChannel.behind(sock, end)
        except (HandshakeError, PeerUnreachable) as error:
            sock.close()
            # While a key is being replaced, the two workers may know different keys. A refusal ends the connection, so
            # the next key needs a new one.
            if not end.has_other_key:
                raise type(error)(f"worker {target.name!r}: {error}") from error.__cause__
            attempt += 1
        except PeerSilent as silent:
            sock.close()
            why = f"worker {target.name!r} is silent: {silent}"
            raise PeerUnreachable(why) from PeerSilent(why)
        except OSError as error:
            alert = alert_of(sock, error)
            sock.close()
            if alert is not None and tls is not None:
                raise AuthenticationFailed(refusal(alert, tls, target.name)) from alert
            raise _broken_off(target, error, tls) from error


def one_sided(name: str) -> AuthenticationFailed:
    return AuthenticationFailed(f"worker {name!r}: {ONE_SIDED}")


def _reach(
    target: Target, tls: TlsFiles | None, transport: str, timeout: float, silence: float
) -> tuple[socket.socket, bytes]:
    """Connect by the best transport that both ends support. Return the socket and its carrier."""
    if target.unix and HAS_UNIX and transport != "tcp" and tls is None:
        sock = _reach_here(target, transport, timeout)
        if sock is not None:
            return sock, UNIX
    elif transport == "unix":
        raise PeerUnreachable(
            f'transport="unix" cannot reach worker {target.name!r}: one of the two workers has no Unix sockets, as its '
            "platform lacks them or it uses another transport or TLS, or they run on different hosts"
        )
    try:
        sock = socket.create_connection(target.tcp, timeout)
    except OSError as error:
        host, port = target.tcp
        raise PeerUnreachable(
            f"worker {target.name!r} does not answer at {host}:{port} ({error}): it has ended, maybe without calling "
            "shutdown(), or cannot be reached from here"
        ) from error
    tune_tcp(sock, silence)
    return (sock, TCP) if tls is None else _secure(sock, target, tls)


def _reach_here(target: Target, transport: str, timeout: float) -> socket.socket | None:
    """Connect to the Unix socket of a worker; return None if TCP must be used instead."""
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.settimeout(timeout)
        until = monotonic() + timeout
        while (fault := sock.connect_ex(unix_address(target.unix))) == errno.EAGAIN and monotonic() < until:
            sleep(FULL)
        if fault:
            raise OSError(fault, os.strerror(fault))
    except OSError as error:
        sock.close()
        if isinstance(error, (ConnectionRefusedError, BlockingIOError)) or transport == "unix":
            raise PeerUnreachable(
                f"worker {target.name!r} does not answer on this host ({error}): it has ended, maybe without calling "
                "shutdown(), or accepts no connections"
            ) from error
        return None
    stranger = stranger_at(sock)
    if not stranger:
        tune_unix(sock)
        return sock
    sock.close()
    if transport == "unix":
        raise AuthenticationFailed(
            f"worker {target.name!r}: its Unix socket belongs to {stranger}. Workers of different users reach each "
            'other by TCP: use transport="auto"'
        )
    return None


def _secure(sock: socket.socket, target: Target, tls: TlsFiles) -> tuple[socket.socket, bytes]:
    """Wrap a TCP connection in TLS; the digests of both certificates are part of the carrier."""
    try:
        secured = client_context(tls).wrap_socket(sock)  # refuses files that are no certificates, so it comes first
        return secured, TLS + own_digest(tls) + peer_digest(secured)
    except (OSError, UsageError) as error:
        sock.close()
        if not isinstance(error, OSError):
            raise
        if not isinstance(error, ssl.SSLError) or isinstance(error, ssl.SSLEOFError):
            raise _broken_off(target, error, tls) from error
        if is_one_sided(error):
            raise one_sided(target.name) from None
        raise AuthenticationFailed(refusal(error, tls, target.name)) from error


def _broken_off(target: Target, error: OSError, tls: TlsFiles | None) -> PeerUnreachable:
    what = f"worker {target.name!r} broke off the handshake ({error})"
    if tls is not None and isinstance(error, (ConnectionError, ssl.SSLEOFError)):
        what = (
            f"worker {target.name!r} closed the connection during the TLS handshake ({error}): its program has ended, "
            f"or it refuses this worker and logs why ({CHECK})"
        )
    return PeerUnreachable(what)


def _shake_hands(sock: socket.socket, end: Initiator, deadline: float, pid: int, silence: float) -> None:
    """Complete the handshake; raise PeerSilent if the other process `pid` is stopped for `silence` seconds."""
    sock.sendall(end.start())
    silent, process, begun = Silence(silence), Stops(pid), monotonic()
    # The first look comes at once: the time of a handshake may end just before a stopped process is known to be silent,
    # and the call would then fail as one whose handshake was broken off. While the process is stopped, `silence` is the
    # limit.
    stands = bool(silence) and process.look()
    silent.look(begun, not stands)
    while not end.done:
        now = monotonic()
        if now >= deadline and not stands:
            raise TimeoutError(f"no answer for {now - begun:.0f} s")
        sock.settimeout(silent.pause if stands else min(deadline - now, silent.pause))
        try:
            data = sock.recv(4096)
        except TimeoutError:
            stands = bool(silence) and process.look()
            if silent.look(monotonic(), not stands):
                raise PeerSilent(f"for {silence:g} s {stopped(pid)}") from None
            continue
        if not data:
            raise ConnectionResetError("it closed the connection")
        try:
            answer = end.receive(data)
        except (HandshakeError, PeerUnreachable):
            with contextlib.suppress(OSError):  # the other end need not learn the reason
                sock.sendall(end.last_bytes)
            raise
        if answer:
            sock.sendall(answer)


def part(link: Any, reason: PeerError, how: str) -> None:
    """Close a connection and send the reason `how`. Without it, the other worker would declare this one lost."""
    with contextlib.suppress(PeerError):
        link.send(Message(BYE, body=how.encode()))
    link.close(reason)


class LoopEnd:
    """An end of a connection within a process; it creates the other end. Has the interface of `Link` that agents use.

    Nothing is read here: the sending thread delivers the message.
    """

    is_congested = False

    def __init__(
        self,
        peer: str,
        arrive: Callable[[LoopEnd, Iterable[Message]], None],
        arrive_back: Callable[[LoopEnd, Iterable[Message]], None],
        on_closed: Callable[[LoopEnd, PeerError], None],
        other: LoopEnd | None = None,
    ) -> None:
        """`arrive` processes, at the other end, messages sent at this one; `on_closed` is called when this closes."""
        self.peer = peer
        self.closed: PeerError | None = None
        self._arrive = arrive
        self._on_closed = on_closed
        self._other: LoopEnd = other or LoopEnd(peer, arrive_back, arrive, lambda *_: None, self)

    def send(self, message: Message, later: bool = False) -> bool:
        """Deliver a message now. `later` is ignored: there is no outbox."""
        if self.closed is not None:
            raise fresh(self.closed)
        blobs = [copied(blob) if isinstance(blob, DeviceBlob) else blob.clone() for blob in message.blobs]
        arrived = Message(message.kind, message.id, message.flags, message.head, message.meta, message.body, blobs)
        self._arrive(self._other, [arrived])
        return True

    def when_drained(self, act: Callable[[], None]) -> None:
        act()

    def close(self, reason: PeerError) -> None:
        for end in (self, self._other):
            if end.closed is None:
                end.closed = reason
                end._on_closed(end, reason)

    def fail(self, error: BaseException) -> None:
        """Close the connection because a message could not be sent (no memory, ...): no response will come."""
        self.close(PeerLost(f"a message of worker {self.peer!r} to itself failed ({error!r})"))


def advised(error: Exception) -> Exception:
    """Return the error of calls that could not be sent; if no worker answered, with advice on how to call it."""
    if type(error) is not PeerUnreachable:
        return error
    kind = PeerStopped if isinstance(error.__cause__, PeerSilent) else PeerUnreachable
    advice = "Where workers are restarted, call rpc_sync or rpc_async with wait_for_worker=True"
    advised = kind(f"{error}; the call has not run. {advice}")
    advised.__cause__ = error.__cause__
    return advised


def departed_error(peer: str, how: str) -> PeerError:
    """Return the error for calls to a worker that announced the end of the connection; `how` says why."""
    uncertain, advice = "calls in flight to it may or may not have run", ""
    if how == SILENT:
        return PeerLost(
            f"worker {peer!r} closed the connection, because this worker gave no sign of life for too long (options "
            f"silence and heartbeat); {uncertain}. While this worker is in the group, the next call connects again"
        )
    kind: type[ShutDown] = ShutDown
    departure = f"worker {peer!r} shut down"
    if how == MOVED:
        kind, departure = GenerationOver, f"worker {peer!r} has moved to the next generation of its group"
        advice = ". Call it again after rendezvous_again()"
    elif how == OVER:
        departure += " together with its group"
    elif how:
        kind, departure = LeftEarly, f"worker {peer!r} left without the others: {how}"
    error = kind(f"{departure}; {uncertain}{advice}")
    error._how, error._departure = how, departure
    return error


def broken(peer: str, error: Exception, why: str) -> PeerLost:
    """Return the error if `error` ended the connection, because of `why` unless this process lacks a resource."""
    cause = error.__cause__ or error
    if processes.out_of_files(cause):
        lacks = "file descriptor"
    elif processes.out_of_memory(cause):
        lacks = "memory"
    else:
        return lost(peer, why)
    return PeerLost(
        f"this process has no {lacks} left for the data of worker {peer!r}, and has closed the connection to it: "
        f"{processes.error_text(cause) or type(cause).__name__}; calls in flight to that worker may or may not "
        "have run"
    )


def lost(peer: str, why: str) -> PeerLost:
    return PeerLost(
        f"worker {peer!r} was lost: {why}; calls in flight to it may or may not have run. "
        "If that worker is still alive, the next call connects again"
    )
