"""TLS accepts only certificates of the group's authority that are valid today."""

import datetime
import ipaddress
import os
import pathlib
import socket
import ssl
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, NoEncryption, PrivateFormat

from telegrad._core.security.tls import TlsFiles, client_context, server_context
from telegrad._core.sockets import shut
from telegrad.errors import UsageError

DAY = datetime.timedelta(days=1)


class Authority:
    """Signs certificates and keeps them as files in a folder."""

    def __init__(self, folder: pathlib.Path, name: str) -> None:
        self.folder, self.name = folder / name, x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        self.folder.mkdir()
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.path = self._write("authority", self._sign(self.name, self.key, authority=True))

    def files(
        self,
        worker: str,
        begins: datetime.timedelta = -DAY,
        ends: datetime.timedelta = DAY,
        encryption: BestAvailableEncryption | None = None,
    ) -> TlsFiles:
        """Return the files of a worker whose certificate is valid between these times."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, worker)])
        text = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption or NoEncryption())
        certificate = self._write(worker, self._sign(name, key, begins, ends))
        return TlsFiles(certificate, self._write(f"{worker}-key", text), self.path)

    def _sign(
        self,
        name: x509.Name,
        key: ec.EllipticCurvePrivateKey,
        begins: datetime.timedelta = -DAY,
        ends: datetime.timedelta = DAY,
        authority: bool = False,
    ) -> bytes:
        now = datetime.datetime.now(datetime.UTC)
        builder = x509.CertificateBuilder(self.name, name, key.public_key(), x509.random_serial_number())
        builder = builder.not_valid_before(now + begins).not_valid_after(now + ends)
        builder = builder.add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        for extension in (  # Python 3.13 requires all but the first
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]),
            x509.SubjectKeyIdentifier.from_public_key(key.public_key()),
            x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()),
            x509.KeyUsage(True, False, False, False, False, authority, False, False, False),
        ):
            builder = builder.add_extension(extension, critical=False)
        return builder.sign(self.key, hashes.SHA256()).public_bytes(Encoding.PEM)

    def _write(self, name: str, text: bytes) -> str:
        path = self.folder / f"{name}.pem"
        path.write_bytes(text)
        path.chmod(0o600)
        return str(path)


class End:
    """An end of a connection in memory."""

    def __init__(self, context: ssl.SSLContext, server_side: bool) -> None:
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self.incoming, self.outgoing, server_side=server_side)
        self.received = b""

    def step(self) -> None:
        """Process the bytes that have arrived."""
        try:
            self.tls.do_handshake()
            self.received += self.tls.read()
        except ssl.SSLWantReadError:
            pass


def converse(client_context: ssl.SSLContext, server_context: ssl.SSLContext) -> tuple[bytes, bytes] | None:
    """Have each end send its role to the other; return the bytes that each received.

    Raises:
        SSLError: one end refused the other.
    """
    client, server = End(client_context, False), End(server_context, True)
    said = False
    while True:
        client.step()
        to_server = client.outgoing.read()
        server.incoming.write(to_server)
        server.step()
        to_client = server.outgoing.read()
        client.incoming.write(to_client)
        if not to_server and not to_client:
            if said:
                return client.received, server.received
            said = True
            client.tls.write(b"client")
            server.tls.write(b"server")


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"), "ours")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"), "theirs")


def test_workers_of_one_authority_connect(ours: Authority) -> None:
    ends = client_context(ours.files("a")), server_context(ours.files("b"))
    assert converse(*ends) == (b"server", b"client")


def test_versions_before_tls_1_2_are_refused(ours: Authority) -> None:
    client, server = client_context(ours.files("a")), server_context(ours.files("b"))
    assert client.minimum_version == server.minimum_version == ssl.TLSVersion.TLSv1_2


def test_a_worker_of_another_authority_is_refused_by_both(ours: Authority, theirs: Authority) -> None:
    """Both directions fail even if the stranger trusts the authority of the group."""
    stranger = theirs.files("a")
    for files in (stranger, TlsFiles(stranger.certificate, stranger.private_key, ours.path)):
        with pytest.raises(ssl.SSLCertVerificationError):
            converse(client_context(files), server_context(ours.files("b")))
        with pytest.raises(ssl.SSLCertVerificationError):
            converse(client_context(ours.files("b")), server_context(files))


def test_a_client_without_a_certificate_is_refused(ours: Authority) -> None:
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.load_verify_locations(ours.path)
    with pytest.raises(ssl.SSLError, match="PEER_DID_NOT_RETURN_A_CERTIFICATE"):
        converse(client, server_context(ours.files("b")))


def test_a_server_that_asks_for_no_certificate_passes_tls(ours: Authority) -> None:
    """The handshake above TLS stops it, as it does not have the key."""
    server = server_context(ours.files("b"))
    server.verify_mode = ssl.CERT_NONE
    assert converse(client_context(ours.files("a")), server) == (b"server", b"client")


@pytest.mark.parametrize(("begins", "ends"), [(-2 * DAY, -DAY), (DAY, 2 * DAY)], ids=["expired", "not_yet"])
def test_a_certificate_that_is_not_valid_today_is_refused(
    ours: Authority, begins: datetime.timedelta, ends: datetime.timedelta
) -> None:
    late, good = ours.files("late", begins, ends), ours.files("good")
    for client, server in ((late, good), (good, late)):
        with pytest.raises(ssl.SSLCertVerificationError, match=r"expired|not yet valid"):
            converse(client_context(client), server_context(server))


@pytest.mark.parametrize("make", [client_context, server_context])
@pytest.mark.parametrize("field", TlsFiles._fields)
@pytest.mark.parametrize("content", [None, b"", b"no certificate"], ids=["missing", "empty", "text"])
def test_errors_name_unusable_files(
    ours: Authority, tmp_path: pathlib.Path, make: Callable[..., Any], field: str, content: bytes | None
) -> None:
    path = tmp_path / "bad.pem"
    if content is not None:
        path.write_bytes(content)
    files = ours.files("a")._replace(**{field: str(path)})
    with pytest.raises(UsageError, match=r"bad\.pem.* cannot be used") as caught:
        make(files)
    assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.parametrize("mode", [0o644, 0o660, 0o602])
def test_a_private_key_that_others_may_read_or_write_is_refused(ours: Authority, mode: int) -> None:
    files = ours.files("open")
    os.chmod(files.private_key, mode)
    for make in (server_context, client_context):
        with pytest.raises(UsageError, match=r"with key '.*open-key.*' cannot be used: .*chmod 600"):
            make(files)


def test_a_key_of_another_certificate_is_refused(ours: Authority) -> None:
    files = TlsFiles(ours.files("a").certificate, ours.files("b").private_key, ours.path)
    with pytest.raises(UsageError, match=r"a\.pem.*b-key\.pem"):
        client_context(files)


def test_a_key_with_a_passphrase_is_refused_without_a_prompt(ours: Authority) -> None:
    files = ours.files("locked", encryption=BestAvailableEncryption(b"secret"))
    with pytest.raises(UsageError, match="passphrase"):
        client_context(files)


def test_shutting_a_connection_does_not_fall_back_to_plain_text(ours: Authority) -> None:
    here, there = socket.socketpair()
    with ThreadPoolExecutor(1) as other:
        accepted = other.submit(server_context(ours.files("b")).wrap_socket, there, server_side=True)
        with client_context(ours.files("a")).wrap_socket(here) as mine, accepted.result():
            shut(mine)
            assert mine.version()
            with pytest.raises((ConnectionError, ssl.SSLError)):
                mine.sendall(b"in plain")
