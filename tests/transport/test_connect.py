"""Connecting: options of sockets, full queues, and ends that close during the handshake."""

import os
import pathlib
import random
import re
import socket
import sys
import threading

import pytest

from telegrad._core.security.handshake import UNIX, Acceptor, Hello, StreamId
from telegrad._core.security.keyring import Keyring, new_key
from telegrad._core.security.tls import server_context
from telegrad._core.sockets import HAS_UNIX, tune_tcp, unix_address
from telegrad._core.transport.connect import Target, connect
from telegrad.errors import AuthenticationFailed, HandshakeError, PeerUnreachable
from tests.cluster import PATIENCE, in_threads, wait_until
from tests.transport.test_tls import Authority

ME, OTHER = Hello("w0", 0, "life of w0", ""), Hello("w1", 1, "life of w1", "")


@pytest.mark.parametrize("seed", range(20))
def test_a_worker_that_closes_during_the_handshake_is_unreachable(seed: int) -> None:
    """The worker has died or is dying; the error must not blame the protocol."""
    keys, chance = Keyring([new_key()]), random.Random(seed)
    answers = chance.randrange(3)  # of three messages
    part = chance.randrange(10)  # bytes of the next message
    server = socket.create_server(("127.0.0.1", 0))
    target = Target("w1", OTHER.incarnation, "", server.getsockname(), StreamId(""))

    def die() -> None:
        with server, server.accept()[0] as sock:
            sock.settimeout(PATIENCE)
            end = Acceptor(keys, OTHER)
            for _ in range(answers):
                sock.sendall(end.receive(sock.recv(4096)))
            sock.sendall(end.receive(sock.recv(4096))[:part])

    def reach() -> None:
        with pytest.raises(PeerUnreachable, match=r"'w1' broke off the handshake \(.*\)$") as raised:
            connect(target, keys, ME, None, "tcp", PATIENCE, 0.0)
        assert not isinstance(raised.value, HandshakeError)

    in_threads(die, reach)


@pytest.mark.parametrize("shakes_hands", [False, True])
def test_a_worker_that_closes_during_the_tls_handshake_may_refuse_the_certificate(
    shakes_hands: bool, tmp_path: pathlib.Path
) -> None:
    """With TLS 1.3 the handshake of the client may be over by then."""
    files = Authority(tmp_path, "ours").files("w")
    server = socket.create_server(("127.0.0.1", 0))
    target = Target("w1", OTHER.incarnation, "", server.getsockname(), StreamId(""))

    def die() -> None:
        with server, server.accept()[0] as sock:
            if shakes_hands:
                server_context(files).wrap_socket(sock, server_side=True).close()

    def reach() -> None:
        told = r"'w1' closed the connection during the TLS handshake .*has ended, or it refuses .* of one authority\?"
        with pytest.raises(PeerUnreachable, match=told):
            connect(target, Keyring([new_key()]), ME, files, "tcp", PATIENCE, 0.0)

    in_threads(die, reach)


@pytest.mark.parametrize(
    ("alert", "told"),
    [
        (20, "with worker 'w1' failed (it sent the alert 'bad record mac'): perhaps it is no worker"),
        (40, "with worker 'w1' failed (it sent the alert 'handshake failure'): the two ends allow no common"),
        (70, "with worker 'w1' failed (it sent the alert 'protocol version'): the two ends allow no common"),
        (48, "failed: worker 'w1' refuses the certificate of this worker"),
        (None, "WRONG_VERSION_NUMBER"),
    ],
)
def test_an_alert_of_tls_is_told_as_what_it_is(alert: int | None, told: str, tmp_path: pathlib.Path) -> None:
    files = Authority(tmp_path, "ours").files("w")
    server = socket.create_server(("127.0.0.1", 0))
    target = Target("w1", OTHER.incarnation, "", server.getsockname(), StreamId(""))

    def refuse() -> None:
        with server, server.accept()[0] as sock:
            sock.recv(1 << 16)
            sock.sendall(b"HTTP/1.1 400 Bad Request\r\n" if alert is None else bytes([21, 3, 3, 0, 2, 2, alert]))

    def reach() -> None:
        with pytest.raises(AuthenticationFailed, match=re.escape(told)) as raised:
            connect(target, Keyring([new_key()]), ME, files, "tcp", PATIENCE, 0.0)
        assert ("certificate" in str(raised.value)) is (alert == 48)

    in_threads(refuse, reach)


@pytest.mark.skipif(not HAS_UNIX, reason="there are no such sockets here")
def test_connecting_waits_for_a_full_queue_of_a_unix_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    keys, name = Keyring([new_key()]), f"telegrad-test-{os.getpid()}"
    target = Target("w1", OTHER.incarnation, name, ("127.0.0.1", 1), StreamId(""))
    server, waiting, full = socket.socket(socket.AF_UNIX), [], threading.Event()
    server.bind(unix_address(name))
    server.listen(0)
    while True:
        waiting.append(socket.socket(socket.AF_UNIX))
        waiting[-1].setblocking(False)
        if waiting[-1].connect_ex(unix_address(name)):
            break

    def accept(_: float) -> None:
        full.set()
        wait_until(lambda: not waiting)

    def serve() -> None:
        assert full.wait(PATIENCE)
        for _ in waiting[:-1]:
            server.accept()[0].close()
        while waiting:
            waiting.pop().close()
        with server, server.accept()[0] as sock:
            sock.settimeout(PATIENCE)
            end = Acceptor(keys, OTHER, UNIX)
            while not end.done:
                sock.sendall(end.receive(sock.recv(4096)))

    monkeypatch.setattr("telegrad._core.transport.connect.sleep", accept)
    channel, _ = in_threads(lambda: connect(target, keys, ME, None, "auto", PATIENCE, 0.0), serve)
    assert channel.shared
    channel.sock.close()


LINEAR, LONGEST = 16, 44  # TCP_THIN_LINEAR_TIMEOUTS; TCP_RTO_MAX_MS, since Linux 6.15


def setting(sock: socket.socket, number: int) -> int | None:
    """Return the option, or None if this kernel does not have it."""
    try:
        return sock.getsockopt(socket.IPPROTO_TCP, number)
    except OSError:
        return None


@pytest.mark.skipif(sys.platform != "linux", reason="options of Linux")
@pytest.mark.parametrize("silence", [0.0, 10.0])
def test_tcp_is_tuned_for_fast_retransmission(silence: float) -> None:
    with socket.socket() as sock:
        has_longest = setting(sock, LONGEST) is not None
        tune_tcp(sock, silence)
        assert (setting(sock, LINEAR), setting(sock, LONGEST)) == (1, 1000 if has_longest else None)
