"""Unix sockets connect processes of one user only, and the handshake is bound to the certificates of TLS."""

import contextlib
import logging
import os
import pathlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from telegrad._core.security.handshake import Hello, Initiator
from telegrad._core.security.keyring import Keyring
from telegrad._core.security.tls import TlsFiles, client_context, server_context
from telegrad._core.sockets import HAS_UNIX, unix_address
from telegrad._core.transport.connect import Target, connect
from telegrad._core.transport.listener import Listener
from telegrad._core.transport.poller import Poller
from telegrad.errors import AuthenticationFailed, PeerUnreachable, UsageError
from tests.cluster import in_background
from tests.other_user import NOBODY, as_nobody, is_root
from tests.strangers.door import wait_closed
from tests.transport.test_tls import Authority

RING = Keyring([b"the key of the group"])
A, B = Hello("w0", 0, "incarnation of a", ""), Hello("w1", 1, "incarnation of b", "")

# Unix sockets, for this user only

needs_unix = pytest.mark.skipif(not HAS_UNIX, reason="the platform has no Unix sockets without files")


class Door:
    """A listener that a thread polls."""

    def __init__(self, transport: str = "auto", tls: TlsFiles | None = None) -> None:
        self.accepted: list[Any] = []
        self._poller = Poller()
        self.listener = Listener("127.0.0.1", tls, transport, 0.0, self._poller, lambda *given: self._accept(*given))
        self.listener.serve(RING, B)
        self._over = False
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def _accept(self, channel: Any, *_: object) -> None:
        self.accepted.append(channel)

    def _look(self) -> None:
        while not self._over:
            for source, _ in self._poller.poll(0.01):
                source.on_readable()

    def target(self, unix: str | None = None) -> Target:
        return Target("w1", B.incarnation, self.listener.unix if unix is None else unix, self.listener.tcp)

    def close(self) -> None:
        self._over = True
        self._thread.join()
        self.listener.close()
        self._poller.close()
        for channel in self.accepted:
            channel.sock.close()


@pytest.fixture
def door() -> Iterator[Door]:
    with contextlib.closing(Door()) as made:
        yield made


@needs_unix
def test_members_of_one_user_connect_over_the_unix_socket(door: Door) -> None:
    channel = connect(door.target(), RING, A, None, "unix", 10.0, 0.0)
    channel.sock.close()
    assert (channel.shared, channel.ciphers) == (True, None)


@needs_unix
@pytest.mark.parametrize("transport", ["auto", "unix"])
def test_a_unix_socket_of_another_user_is_not_used(
    door: Door, transport: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mine = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    if transport == "unix":
        with pytest.raises(AuthenticationFailed, match=f"uid {mine}, while this worker has uid {mine + 1}"):
            connect(door.target(), RING, A, None, transport, 10.0, 0.0)
        return
    channel = connect(door.target(), RING, A, None, transport, 10.0, 0.0)
    channel.sock.close()
    assert not channel.shared
    assert channel.ciphers is not None


@needs_unix
def test_another_user_at_the_unix_socket_is_refused(
    door: Door, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mine = os.geteuid()
    with caplog.at_level(logging.WARNING, "telegrad"), socket.socket(socket.AF_UNIX) as sock:
        monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
        sock.connect(unix_address(door.listener.unix))
        sock.settimeout(10.0)
        end = Initiator(RING, A, B.incarnation)
        with pytest.raises(AuthenticationFailed, match="another user"):
            end.receive(sock.recv(4096))
        assert wait_closed(sock) == b""
        for _ in range(20):  # the warning appears once in a process
            with socket.socket(socket.AF_UNIX) as again:
                again.connect(unix_address(door.listener.unix))
                assert wait_closed(again) == b"\x05\x00Ruser"
    (record,) = [record for record in caplog.records if "refused" in record.getMessage()]
    assert f"uid {mine}" in record.getMessage()
    assert door.accepted == []


@needs_unix
@pytest.mark.skipif(not is_root(), reason="only root can be another user")
def test_a_process_of_another_user_is_refused_on_both_sides(door: Door) -> None:
    def knock() -> None:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(unix_address(door.listener.unix))
            assert wait_closed(sock).endswith(b"Ruser")

    name, (reading, writing) = f"telegrad-{os.urandom(8).hex()}", os.pipe()

    def listen() -> None:
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(unix_address(name))
        listening.listen()
        if not os.fork():  # the child inherits the socket and continues
            os.read(reading, 1)
            os._exit(0)

    try:
        as_nobody(knock)
        assert door.accepted == []
        as_nobody(listen)
        channel = connect(door.target(name), RING, A, None, "auto", 10.0, 0.0)
        channel.sock.close()
        assert channel.ciphers is not None
        with pytest.raises(AuthenticationFailed, match=f"uid {NOBODY}"):
            connect(door.target(name), RING, A, None, "unix", 10.0, 0.0)
    finally:
        os.write(writing, b"x")
        os.close(reading)
        os.close(writing)


# TLS


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> list[TlsFiles]:
    """Return certificates of three workers, signed by one authority."""
    authority = Authority(tmp_path_factory.mktemp("tls"), "ours")
    return [authority.files(name) for name in ("w0", "w1", "attacker")]


def test_with_tls_there_is_no_unix_socket(certificates: list[TlsFiles]) -> None:
    with contextlib.closing(Door(tls=certificates[1])) as door, contextlib.closing(Door()) as plain:
        assert door.listener.unix == ""
        channel = connect(door.target(plain.listener.unix), RING, A, certificates[0], "auto", 10.0, 0.0)
        channel.sock.close()
        assert (channel.shared, channel.ciphers) == (False, None)  # TLS encrypts, so there are no ciphers
    with pytest.raises(UsageError, match='transport="unix"'):
        Door("unix", certificates[0])


def test_a_certificate_that_was_damaged_since_the_start_is_a_wrong_use(
    certificates: list[TlsFiles], tmp_path: pathlib.Path
) -> None:
    damaged = tmp_path / "damaged.pem"
    damaged.write_text("-----BEGIN CERTIFICATE-----\nabc\n-----END CERTIFICATE-----")
    files = certificates[0]._replace(certificate=str(damaged))
    with (
        contextlib.closing(Door(tls=certificates[1])) as door,
        pytest.raises(UsageError, match=r"damaged\.pem.* cannot be used"),
    ):
        connect(door.target(), RING, A, files, "tcp", 10.0, 0.0)


def test_a_certified_process_without_the_key_cannot_relay(certificates: list[TlsFiles]) -> None:
    """The attacker has a TLS connection with each of two members, and forwards their messages."""
    failures: list[Exception] = []
    with contextlib.closing(Door(tls=certificates[1])) as door, socket.create_server(("127.0.0.1", 0)) as between:

        def relay() -> None:
            near = server_context(certificates[2]).wrap_socket(between.accept()[0], server_side=True)
            far = client_context(certificates[2]).wrap_socket(socket.create_connection(door.listener.tcp))
            with near, far, contextlib.suppress(OSError):
                while said := near.recv(4096):
                    far.sendall(said)
                    near.sendall(far.recv(4096))

        with in_background(relay):
            target = Target("w1", B.incarnation, "", between.getsockname())
            try:
                connect(target, RING, A, certificates[0], "tcp", 10.0, 0.0)
            except (AuthenticationFailed, PeerUnreachable) as error:
                failures.append(error)
        assert ([type(error) for error in failures], door.accepted) == ([AuthenticationFailed], [])
