"""TLS between workers: both ends present a certificate signed by the group's authority."""

import hashlib
import re
import socket
import ssl
from functools import partial
from typing import NamedTuple, NoReturn

from telegrad._core.private_files import open_regular, reason
from telegrad._core.security.keyring import read_secret
from telegrad.errors import UsageError

# The fatal alert `inappropriate_fallback`: the reply of a worker without TLS. Workers use it for nothing else.
ALERT_NO_TLS = bytes.fromhex("15 03 01 00 02 02 56")
HANDSHAKE = b"\x16\x03"  # first bytes of each TLS connection

LARGEST = 1 << 20  # limit for the file of a private key
CHECK = "do all workers have certificates of one authority?"
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
    """Make a context present this certificate; raise UsageError if the key needs a passphrase, or OSError if a file is
    missing or is no certificate or key, or other users may read or write the key."""
    open_regular(certificate).close()  # OpenSSL would block on a FIFO
    read_secret(private_key, LARGEST)
    context.load_cert_chain(certificate, private_key, partial(_refuse_passphrase, private_key))


def own_digest(files: TlsFiles) -> bytes:
    """Return the hash of this worker's certificate, as `peer_digest` at the other end; raise UsageError without one."""
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
    """Return the TLS alert by which the other end has refused a connection that failed with `error`, or None.

    With TLS 1.3 the client completes its handshake before the server has checked the client's certificate. So the alert
    may arrive while the client is sending, and the send fails because the server has closed the connection.
    """
    if isinstance(sock, ssl.SSLSocket) and isinstance(error, (ConnectionError, ssl.SSLEOFError)):
        try:
            # The alert was sent before the connection was closed, so it is in the receive buffer or about to arrive.
            sock.settimeout(ALERT_WAIT)
            sock.recv(1)
        except OSError as later:
            error = later
    return error if isinstance(error, ssl.SSLError) and _ALERT in (error.reason or "") else None


_ALERT = "_ALERT_"  # in OpenSSL's reasons that are alerts of the other end
_OF_CERTIFICATES = re.compile("CERTIFICATE|UNKNOWN_CA")  # reasons of either end, as below
_NOTHING_COMMON = re.compile("PROTOCOL|CIPHER|HANDSHAKE_FAILURE|INSUFFICIENT|SIGNATURE_ALGORITHM")
_FOREIGN = range(18, 22)  # OpenSSL's codes for chains that do not end at a certificate of `authority`


def refusal(error: ssl.SSLError, files: TlsFiles, name: str = "") -> str:
    """Return why a TLS handshake failed, with advice, and the owner of the certificate if one was refused.

    `files` are those of this worker; `name` is the worker that accepted the connection, "" if this one did.
    """
    # `since`: a worker reads its files for each connection that it makes. For those that it accepts, a file that was
    # renewed on disk does not count until it restarts.
    other, acceptor = (f"worker {name!r}", f"Worker {name!r}") if name else ("the other end", "This worker")
    code = error.reason or ""
    alert = code.partition(_ALERT)[2].lower().replace("_", " ")
    if isinstance(error, ssl.SSLCertVerificationError):
        why, whose = error.verify_message, f"of {other}"
        if error.verify_code in _FOREIGN:
            why = f"another authority has signed it ({why})"
        said = f"this worker refuses the certificate of {other}"
    elif alert and _OF_CERTIFICATES.search(code):
        why, whose = alert, "of this worker"
        said = f"{other} refuses the certificate of this worker, {files.certificate!r}"
    else:
        told = f"the TLS handshake with {other} failed ({f'it sent the alert {alert!r}' if alert else error}): "
        if _OF_CERTIFICATES.search(code):
            return told + CHECK
        if _NOTHING_COMMON.search(code):
            return told + "the two ends allow no common TLS version or cipher; compare the OpenSSL settings of both"
        return told + "perhaps it is no worker with TLS, or a proxy changes the data; check what is between the hosts"
    since = f"{acceptor} uses its TLS files as they were when it started: restart it if they were renewed since"
    return f"the TLS handshake failed: {said}: {why}. {_advice(why, whose)}. {since}"


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
