"""Tests of connections of strangers, and of workers with another key or certificate: errors and logs at both ends."""

import logging
import operator
import pathlib
import socket
import struct
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from telegrad import errors
from telegrad._core.security.handshake import Hello, Initiator
from telegrad._core.security.keyring import Keyring
from telegrad._core.security.tls import HANDSHAKE, TlsFiles
from telegrad._core.worker.current import Worker
from tests.cluster import agents, wait_until
from tests.strangers.door import knock, wait_closed
from tests.transport.test_tls import DAY, Authority

HTTP = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.fixture
def worker() -> Iterator[tuple[Worker, Worker]]:
    with agents(2, transport="tcp", key="the key of the group") as (a, b):
        yield a, b


HELLO = Initiator(Keyring([b"another key"]), Hello("w0", 0, "x", ""), "x").start()


@pytest.mark.parametrize(
    ("tls", "said"),
    [(False, b""), (True, b""), (False, HELLO), (True, HANDSHAKE)],
    ids=["", "tls", "message", "tls-part"],
)
def test_a_connection_that_ends_before_its_handshake_logs_debug_lines_only(
    tls: bool, said: bytes, certificates: list[TlsFiles], caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.DEBUG, "telegrad"),
        agents(1, transport="tcp", tls=certificates[0] if tls else None) as (b,),
        knock(b) as sock,
    ):
        sock.sendall(said)
        sock.shutdown(socket.SHUT_WR)
        wait_closed(sock, 10)
    assert [r for r in caplog.records if "before the handshake was complete" in r.getMessage()]
    assert not [r for r in caplog.records if r.levelno >= logging.INFO]


def test_a_connection_reset_in_its_handshake_logs_no_warning(
    worker: tuple[Worker, Worker], caplog: pytest.LogCaptureFixture
) -> None:
    """A worker that leaves while it connects does so: its kernel resets a connection with unread bytes."""
    _, b = worker
    end = Initiator(Keyring([b"the key of the group"]), Hello("w0", 0, "x", ""), b.agent.incarnation)
    with caplog.at_level(logging.DEBUG, "telegrad"):
        with knock(b) as sock:
            sock.sendall(end.start())
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            assert sock.recv(1)
        wait_until(lambda: any("reset by peer" in r.getMessage() for r in caplog.records))
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


def test_a_wrong_key_is_reported_at_both_ends(worker: tuple[Worker, Worker], caplog: pytest.LogCaptureFixture) -> None:
    _, b = worker
    end = Initiator(Keyring([b"another key"]), Hello("w0", 0, "x", ""), b.agent.incarnation)
    with knock(b) as sock, caplog.at_level(logging.WARNING, "telegrad"):
        sock.sendall(end.start())
        sock.sendall(end.receive(sock.recv(4096)))
        refusal = sock.recv(4096)
        with pytest.raises(errors.AuthenticationFailed, match="TELEGRAD_KEY"):
            end.receive(refusal)
    assert any("keys differ" in r.getMessage() for r in caplog.records)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> list[TlsFiles]:
    """Return the certificates of two workers, each with an authority of its own."""
    folder = tmp_path_factory.mktemp("tls")
    return [Authority(folder, name).files("worker") for name in ("ours", "theirs")]


def test_tls_between_workers(certificates: list[TlsFiles]) -> None:
    with agents(2, transport="tcp", tls=certificates[0]) as (a, _):
        for size in (10, 3_000_000):
            assert a.agent.call("w1", torch.add, (torch.ones(size), 1), None).sum() == 2 * size
        futures = [a.agent.call_async("w1", operator.add, (i, 1), None) for i in range(500)]
        assert [future.wait() for future in futures] == list(range(1, 501))


def test_tls_refuses_the_certificate_of_another_authority(certificates: list[TlsFiles]) -> None:
    mine, theirs = certificates
    mixed = TlsFiles(theirs.certificate, theirs.private_key, mine.authority)
    with agents(2, transport="tcp", tls=mine) as (a, b):
        a.agent._connections.settings = a.agent.settings._replace(tls=mixed)
        with pytest.raises(errors.PeerError, match="w1"):
            a.agent.call("w1", operator.add, (1, 2), None)
        with knock(b) as sock:  # no TLS at all
            sock.sendall(HTTP)
            wait_closed(sock, 10)


BAD = {  # the signing authority, begin and end; texts at the refusing worker and at the other one, and advice
    "expired": ("ours", -2 * DAY, -DAY, "has expired", "certificate expired", "Renew the certificate"),
    "not yet": ("ours", DAY, 2 * DAY, "is not yet valid", "bad certificate", ""),
    "foreign": ("foreign", -DAY, DAY, "another authority has signed it", "unknown ca", "certificates of one authority"),
}


@pytest.mark.parametrize("shown_by", [0, 1])
@pytest.mark.parametrize("how", list(BAD))
def test_the_error_for_a_bad_certificate_says_what_is_wrong(
    how: str, shown_by: int, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Either worker may have it; the server reports a refusal by a TLS alert, and closes the connection."""
    ours = Authority(tmp_path, "ours")
    name, begins, ends, refused, shown, advice = BAD[how]
    signed = (ours if name == "ours" else Authority(tmp_path, name)).files("bad", begins, ends)
    bad = TlsFiles(signed.certificate, signed.private_key, ours.path)
    files = [ours.files("good"), ours.files("good")]
    files[shown_by] = bad
    with agents(2, transport="tcp", of_rank=lambda rank: {"tls": files[rank]}) as (a, _):
        for _ in range(5):
            with pytest.raises(errors.AuthenticationFailed) as caught:
                a.agent.call("w1", operator.add, (1, 2), None)
            said = str(caught.value)
            if shown_by == 0:
                assert f"worker 'w1' refuses the certificate of this worker, {bad.certificate!r}: {shown}" in said
            else:
                assert "this worker refuses the certificate of worker 'w1': " in said
                assert refused in said
            assert advice in said
        wait_until(lambda: "a connection from" in caplog.text)
        log = next(each for each in caplog.messages if "a connection from" in each)
        if shown_by == 0:
            assert "the TLS handshake failed: this worker refuses the certificate of the other end: " in log
            assert refused in log
        else:
            assert f"failed: the other end refuses the certificate of this worker, {bad.certificate!r}: {shown}" in log
        assert advice in log


def test_the_error_for_a_certificate_that_was_renewed_asks_for_a_restart(tmp_path: pathlib.Path) -> None:
    authority = Authority(tmp_path, "ours")
    files = [authority.files("good"), authority.files("renewed", -2 * DAY, -DAY)]
    with agents(2, transport="tcp", of_rank=lambda rank: {"tls": files[rank]}) as (a, b):
        assert authority.files("renewed") == files[1]
        told = "Renew the certificate of worker 'w1'. Worker 'w1' uses its TLS files as they were when it started: rest"
        with pytest.raises(errors.AuthenticationFailed, match=told):
            a.agent.call("w1", operator.add, (1, 2), None)
        assert b.agent.call("w0", operator.add, (1, 2), None) == 3  # with the renewed file


@pytest.mark.parametrize("with_tls", [0, 1])
def test_tls_on_one_side_only_is_reported_at_both_ends(
    with_tls: int, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    own: dict[int, dict[str, Any]] = {with_tls: {"tls": Authority(tmp_path, "authority").files("w")}}
    said = "one of the two workers uses TLS and the other does not: give tls=... to all workers, or to none"
    with agents(2, of_rank=lambda rank: {"transport": "tcp", "rpc_timeout": 10, **own.get(rank, {})}) as workers:
        for mine, other in (workers, workers[::-1]):
            with pytest.raises(errors.AuthenticationFailed, match=said):
                mine.agent.call(other.me.name, operator.add, (1, 2), None)
        wait_until(lambda: caplog.text.count(said) >= 2)
        workers[0].end("")  # as a program ends by that error
        for _ in range(2):
            with pytest.raises(errors.PeerError, match=said):
                workers[1].agent.call("w0", operator.add, (1, 2), None)
