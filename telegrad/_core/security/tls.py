"""TLS between workers: both ends present a certificate signed by the group's authority."""

from __future__ import annotations

import hashlib
import re
import socket
import ssl
from functools import partial
from typing import NamedTuple, NoReturn

from telegrad._core.host.private_files import open_regular, reason
from telegrad._core.host.secret_files import read_secret
from telegrad.errors import UsageError

# The fatal alert `inappropriate_fallback`: the reply of a worker without TLS. Workers use it for nothing else.
ALERT_NO_TLS = bytes.fromhex("15 03 01 00 02 02 56")
HANDSHAKE = b"\x16\x03"  # first bytes of each TLS connection

LARGEST = 1 << 20  # limit for the file of a private key
ALERT_WAIT = 1.0  # seconds to wait for an alert sent before the connection was closed
# the first one is presented
_CERTIFICATE = re.compile("-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)


class TlsFiles(NamedTuple):
    """Paths of PEM files: this worker's certificate and its private key, and the authority that signed all workers'.

    Example:
        >>> files = rpc.TlsFiles("worker.pem", "worker.key", "authority.pem")
        >>> options = rpc.TelegradOptions(tls=files, transport="tcp")
    """

    certificate: str
    private_key: str
    authority: str


def load_own(context: ssl.SSLContext, certificate: str, private_key: str) -> None:
    """Make a context present this certificate.

    Raises:
        UsageError: the key needs a passphrase.
        OSError: a file is missing or is no certificate or key, or other users may read or write the key.
    """
    open_regular(certificate).close()  # OpenSSL would block on a FIFO
    read_secret(private_key, LARGEST)
    context.load_cert_chain(certificate, private_key, partial(_refuse_passphrase, private_key))


def own_digest(files: TlsFiles) -> bytes:
    """Return the hash of this worker's certificate; the other end computes the same by `peer_digest`.

    Raises:
        UsageError: the file contains no certificate.
    """
    try:
        with open_regular(files.certificate) as file:
            found = _CERTIFICATE.search(file.read().decode("ascii", "replace"))
    except OSError as error:
        raise UsageError(f"the TLS certificate {files.certificate!r} cannot be read: {error}") from error
    if found is None:
        raise UsageError(
            f"the TLS certificate {files.certificate!r} cannot be used: the file has no certificate in PEM format"
        )
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(found[0])).digest()


def peer_digest(sock: ssl.SSLSocket) -> bytes:
    return hashlib.sha256(sock.getpeercert(binary_form=True) or b"").digest()


def is_one_sided(error: ssl.SSLError) -> bool:
    return "INAPPROPRIATE_FALLBACK" in (error.reason or "")


def alert_of(sock: socket.socket, error: OSError) -> ssl.SSLError | None:
    """Return the TLS error of a connection that failed with `error`; None if there is none.

    With TLS 1.3 the client completes its handshake before the server has checked the client's certificate. So the alert
    may arrive while the client is sending, and the send fails because the server has closed the connection.
    """
    if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError):
        return error
    if isinstance(sock, ssl.SSLSocket) and isinstance(error, (ConnectionError, ssl.SSLEOFError)):
        try:
            # The alert was sent before the connection was closed, so it is in the receive buffer or about to arrive.
            sock.settimeout(ALERT_WAIT)
            sock.recv(1)
        except ssl.SSLError as alert:
            return alert
        except OSError:
            pass
    return None


_FOREIGN = range(18, 22)  # OpenSSL's codes for chains that do not end at a certificate of `authority`


def refused_certificate(error: ssl.SSLError, name: str, files: TlsFiles) -> str:
    """Return whose certificate was refused, why, and advice; "" if the error is not about a certificate.

    `name` is the worker at the other end, which accepted the connection, `files` are those of this one.
    """
    # The files of this worker are read for each connection that it makes. A file that was renewed on the other's disk
    # does not count until it restarts.
    since = f"Worker {name!r} uses its TLS files as they were when it started: restart it if they were renewed since"
    if isinstance(error, ssl.SSLCertVerificationError):
        why = error.verify_message
        if error.verify_code in _FOREIGN:
            why = f"another authority has signed it ({why})"
        said = f"this worker refuses the certificate of worker {name!r}: {why}"
        return f"{said}. {_advice(why, f'of worker {name!r}')}. {since}"
    if "_ALERT_" not in (error.reason or ""):
        return ""
    why = error.reason.partition("_ALERT_")[2].lower().replace("_", " ")
    said = f"worker {name!r} refuses the certificate of this worker, {files.certificate!r}: {why}"
    return f"{said}. {_advice(why, 'of this worker')}. {since}"


def _advice(why: str, whose: str) -> str:
    if "expired" in why:
        return f"Renew the certificate {whose}"
    if "not yet valid" in why:
        return "Compare the clocks of the two hosts"
    return "Give all workers certificates of one authority, and that authority's certificate as `authority`"


def _context(protocol: int, files: TlsFiles) -> ssl.SSLContext:
    """Return a context that checks no host names: the handshake authenticates the worker; raise UsageError if a file is
    missing or is no certificate or key, or other users may read or write the key."""
    context = ssl.SSLContext(protocol)
    # Any certificate of the authority is accepted, whatever name it has. The handshake inside of TLS decides whether
    # the other end is the wanted worker. Its prologue has the digests of both certificates, so it cannot be relayed to
    # another TLS connection.
    context.check_hostname = False
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        load_own(context, files.certificate, files.private_key)
    except OSError as error:  # includes SSLError
        raise UsageError(
            f"the TLS certificate {files.certificate!r} with key {files.private_key!r} cannot be used: {reason(error)}"
        ) from error
    try:
        open_regular(files.authority).close()
        context.load_verify_locations(files.authority)
    except OSError as error:
        raise UsageError(f"the TLS authority {files.authority!r} cannot be used: {error}") from error
    return context


server_context, client_context = (
    partial(_context, each) for each in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT)
)


def _refuse_passphrase(private_key: str) -> NoReturn:
    """Raise, because OpenSSL would ask for the passphrase on the terminal and block the worker."""
    raise UsageError(f"the TLS key {private_key!r} needs a passphrase: give a key without one (`openssl pkey`)")
