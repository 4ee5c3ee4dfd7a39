"""A stranger that listens at a worker's address: connecting ends soon with a documented error."""

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from telegrad._core.security.handshake import PROTOCOL, Acceptor, Hello
from telegrad._core.security.keyring import Keyring
from telegrad._core.security.tls import TlsFiles
from telegrad._core.transport.connect import Target, connect
from telegrad.errors import AuthenticationFailed, PeerUnreachable, ProtocolViolation, VersionMismatch
from tests.cluster import PATIENCE, in_background, takes_less_than
from tests.transport.test_tls import Authority

KEY = Keyring([b"the key of the group"])
ME, OTHER = Hello("w0", 0, "x", ""), Hello("w1", 1, "y", "")
TIMEOUT = 0.4
NAMED = (AuthenticationFailed, PeerUnreachable, ProtocolViolation, VersionMismatch)
ABORT = struct.pack("ii", 1, 0)


def reach(behave: Callable[..., Any], tls: TlsFiles | None = None) -> None:
    """Connect to a listener that behaves like this.

    Raises:
        PeerError: the error that a caller would get.
    """
    over = threading.Event()

    def run() -> None:
        with contextlib.suppress(OSError):
            sock, _ = door.accept()
            with sock:
                behave(sock, over)

    with socket.create_server(("127.0.0.1", 0)) as door, in_background(run):
        try:
            target = Target(OTHER.name, OTHER.incarnation, "", door.getsockname())
            timeout = TIMEOUT if behave in (say_nothing, drip) else PATIENCE
            connect(target, KEY, ME, tls, "tcp", timeout, 10.0).sock.close()
        finally:
            over.set()


def say_nothing(sock: socket.socket, over: threading.Event) -> None:
    over.wait()


def close(sock: socket.socket, over: threading.Event) -> None:
    sock.recv(4096)


def reset(sock: socket.socket, over: threading.Event) -> None:
    sock.recv(10)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, ABORT)


def speak_http(sock: socket.socket, over: threading.Event) -> None:
    sock.recv(4096)
    sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    over.wait()


def speak_http_and_reset(sock: socket.socket, over: threading.Event) -> None:
    sock.recv(4096)
    sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, ABORT)


def drip(sock: socket.socket, over: threading.Event) -> None:
    """Send a byte often enough that no single read has to wait long."""
    sock.sendall(struct.pack("<H", 2048) + b"C")
    end = time.monotonic() + 4 * TIMEOUT
    while not over.wait(TIMEOUT / 4) and time.monotonic() < end:
        sock.sendall(b"x")


def mirror(sock: socket.socket, over: threading.Event) -> None:
    sock.sendall(sock.recv(4096).replace(b"H", b"C", 1))
    first = sock.recv(4096)
    sock.sendall(first[:2] + b"2" + first[3:])
    over.wait()


def hold_another_key(sock: socket.socket, over: threading.Event) -> None:
    end = Acceptor(Keyring([b"another key"]), OTHER)
    sock.sendall(end.receive(sock.recv(4096)))
    with contextlib.suppress(AuthenticationFailed):
        end.receive(sock.recv(4096))
    sock.sendall(end.last_bytes)


def speak_another_version(sock: socket.socket, over: threading.Event) -> None:
    said = bytearray(Acceptor(KEY, OTHER).receive(sock.recv(4096)))
    struct.pack_into("<H", said, 7, PROTOCOL.oldest - 1)
    sock.sendall(said)
    over.wait()


def claim_without_proof(sock: socket.socket, over: threading.Event) -> None:
    sock.sendall(Acceptor(KEY, OTHER).receive(sock.recv(4096)))
    sock.recv(4096)
    text = b'["w1", 1, "y", ""]'
    sock.sendall((33 + len(text)).to_bytes(2, "little") + b"2" + bytes(range(32)) + text)
    over.wait()


@pytest.mark.parametrize(
    ("behave", "error"),
    [
        (say_nothing, PeerUnreachable),
        (close, PeerUnreachable),
        (reset, PeerUnreachable),
        (speak_http, ProtocolViolation),
        (speak_http_and_reset, ProtocolViolation),  # although its last message is lost
        (mirror, AuthenticationFailed),
        (hold_another_key, AuthenticationFailed),
        (speak_another_version, VersionMismatch),
        (claim_without_proof, AuthenticationFailed),
    ],
)
def test_an_impostor_is_an_error_that_names_the_worker(behave: Callable[..., Any], error: type[BaseException]) -> None:
    with pytest.raises(error, match="w1"):
        reach(behave)


def test_connecting_to_a_slow_impostor_times_out() -> None:
    with takes_less_than(3 * TIMEOUT), pytest.raises(NAMED):
        reach(drip)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    return Authority(tmp_path_factory.mktemp("tls"), "ours").files("w0")


def test_an_impostor_without_tls_is_refused(certificate: TlsFiles) -> None:
    with pytest.raises(AuthenticationFailed, match="w1"):
        reach(speak_http, certificate)


@pytest.mark.parametrize("behave", [say_nothing, reset, close])
def test_the_error_names_a_worker_that_breaks_off_tls(behave: Callable[..., Any], certificate: TlsFiles) -> None:
    with pytest.raises(PeerUnreachable, match="w1"):
        reach(behave, certificate)
