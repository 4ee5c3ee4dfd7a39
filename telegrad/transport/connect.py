"""Makes a connection to another worker: the best way there is, then the handshake."""

from __future__ import annotations

import contextlib
import socket
import ssl
from time import monotonic
from typing import NamedTuple

from telegrad.errors import AuthenticationFailed, HandshakeError, PeerSilent, PeerUnreachable, ProtocolViolation
from telegrad.transport.handshake import ITSELF, Claim, Initiator, StreamId
from telegrad.transport.processes import Stops, process_at, stopped
from telegrad.transport.silence import Silence
from telegrad.transport.sockets import HAS_UNIX, tune_tcp, tune_unix, unix_address
from telegrad.transport.tls import TlsFiles, client_context


class Target(NamedTuple):
    """Whom to reach, and where: `unix` is empty where it lives on another host."""

    name: str
    incarnation: str
    unix: str
    tcp: tuple[str, int]
    stream_id: StreamId = ITSELF


def connect(
    target: Target,
    key: bytes,
    mine: Claim,
    tls: TlsFiles | None,
    transport: str,
    timeout: float,
    silence: float,
) -> tuple[socket.socket, bool, bytes]:
    """A connection past its handshake, whether it can share memory, and bytes that came behind the handshake.

    Raises:
        PeerUnreachable: nobody answers there, or another worker does.
        HandshakeError: who answers is not of this group.
    """
    sock, shared = _reach(target, tls, transport, timeout, silence)
    pid = process_at(sock) if shared else 0
    try:
        end = Initiator(key, mine, target.incarnation, stream_id=target.stream_id)
        return sock, shared, _shake_hands(sock, end, monotonic() + timeout, pid, silence if pid else 0.0)
    except (HandshakeError, PeerUnreachable) as error:
        sock.close()
        raise type(error)(f"worker {target.name!r}: {error}") from error.__cause__
    except PeerSilent as silent:
        sock.close()
        why = f"worker {target.name!r} does not answer: {silent}"
        raise PeerUnreachable(f"{why}; the call has not run") from PeerSilent(why)
    except OSError as error:
        sock.close()
        raise PeerUnreachable(
            f"worker {target.name!r} broke off the handshake ({error}); the call has not run"
        ) from error


def _reach(
    target: Target, tls: TlsFiles | None, transport: str, timeout: float, silence: float
) -> tuple[socket.socket, bool]:
    if target.unix and HAS_UNIX and transport != "tcp":
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.settimeout(timeout)
            sock.connect(unix_address(target.unix))
        except OSError as error:
            sock.close()
            if isinstance(error, ConnectionRefusedError) or transport == "unix":
                raise PeerUnreachable(
                    f"worker {target.name!r} does not answer on this host ({error}): it has ended, maybe without "
                    "calling shutdown(); the call has not run"
                ) from error
        else:
            tune_unix(sock)
            return sock, True
    elif transport == "unix":
        raise PeerUnreachable(f'worker {target.name!r} lives on another host; transport="unix" does not reach it')
    try:
        sock = socket.create_connection(target.tcp, timeout)
    except OSError as error:
        host, port = target.tcp
        raise PeerUnreachable(
            f"worker {target.name!r} does not answer at {host}:{port} ({error}): it has ended, maybe without calling "
            "shutdown(), or cannot be reached from here; the call has not run"
        ) from error
    tune_tcp(sock, silence)
    if tls is not None:
        try:
            return client_context(tls).wrap_socket(sock), False
        except ssl.SSLError as error:
            sock.close()
            raise AuthenticationFailed(
                f"worker {target.name!r}: TLS was refused ({error}); do all workers have certificates of one authority?"
            ) from error
        except OSError as error:
            sock.close()
            raise PeerUnreachable(
                f"worker {target.name!r} broke off the handshake ({error}); the call has not run"
            ) from error
    return sock, False


def _shake_hands(sock: socket.socket, end: Initiator, deadline: float, pid: int, silence: float) -> bytes:
    """What came behind the handshake; PeerSilent where the other's process `pid` is stopped for so many seconds."""
    sock.sendall(end.start())
    silent, process = Silence(silence), Stops(pid)
    while not end.done:
        remaining = deadline - monotonic()
        if remaining <= 0:
            raise TimeoutError("timed out")
        sock.settimeout(min(remaining, silent.pause))
        try:
            data = sock.recv(4096)
        except TimeoutError:
            if silence and silent.look(monotonic(), not process.look()):
                raise PeerSilent(stopped(pid)) from None
            continue
        if not data:
            raise ProtocolViolation("the connection was closed during the handshake")
        try:
            answer = end.receive(data)
        except (HandshakeError, PeerUnreachable):
            with contextlib.suppress(OSError):  # it need not hear why
                sock.sendall(end.parting)
            raise
        if answer:
            sock.sendall(answer)
    return end.leftover
