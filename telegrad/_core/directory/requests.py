"""The messages between a client and the server of the embedded directory, as bytes.

All operations have the same layouts of requests and replies. A connection carries one request at a time.

    request   operation, revision, lease, seconds, length of the key, whether there is a value; key; value
    reply     outcome, revision, number of changes; the changes, or a text if there are none
    change    length of the key, length of the value, revision, created, lease; key; value

After the handshake of a connection, each direction is a stream of encrypted records, with the messages in sequence. A
message is its length in four bytes, and its content. Records (`security/noise.py`) split that stream anywhere: a
message longer than a record is in several.
"""

from __future__ import annotations

import encodings.idna  # noqa: F401 see below
import hashlib
import struct
from collections.abc import Collection, Iterator
from typing import NamedTuple

# Otherwise imported at the first connection, by many forked processes that connect at the same moment.
from cryptography.hazmat.backends.openssl import backend as _backend  # noqa: F401

from telegrad._core.directory.directory import KEY_BYTES, VALUE_BYTES, Compacted, Entry, Event, Events, LeaseLost
from telegrad._core.security.noise import LONGEST, RECORD, TAG, Ciphers, RecordWriter
from telegrad.errors import InvalidArgument, LimitReached, ProtocolViolation, TelegradError

GRANT, RENEW, REVOKE, SWAP, LIST, WATCH = range(1, 7)  # operations
DONE, NOT_DONE, LEASE_LOST, COMPACTED, FULL, REFUSED = range(1, 7)  # outcomes
ERRORS: dict[int, type[TelegradError]] = {
    LEASE_LOST: LeaseLost,
    COMPACTED: Compacted,
    FULL: LimitReached,
    REFUSED: InvalidArgument,
}

_REQUEST = struct.Struct("<BQQdHB")
_REPLY = struct.Struct("<BQI")
_CHANGE = struct.Struct("<HIQQQ")
_DELETED = 0xFFFFFFFF  # instead of a value's length

LONGEST_WATCH = 3_600.0  # seconds
LONGEST_REQUEST = _REQUEST.size + KEY_BYTES + VALUE_BYTES

INCARNATION = "directory"  # of directories in handshakes; workers have others

_LENGTH = struct.Struct("<I")
_HEAD = _LENGTH.size


class Request(NamedTuple):
    """A request of a client; each operation uses some of the fields."""

    operation: int
    key: str = ""  # or a prefix
    value: bytes | None = None
    revision: int = 0
    lease: int = 0
    seconds: float = 0.0


class Reply(NamedTuple):
    outcome: int
    revision: int = 0  # or the id of a lease
    changes: Events = []  # noqa: RUF012 nobody changes it
    text: str = ""


def write_request(request: Request) -> bytes:
    """Return the request as bytes; raise InvalidArgument if a field has an invalid value."""
    operation, key, value, revision, lease, seconds = request
    try:
        name = key.encode()
        head = _REQUEST.pack(operation, revision, lease, seconds, len(name), value is not None)
    except (struct.error, UnicodeEncodeError) as error:
        raise InvalidArgument(
            f"the directory does not accept the key or prefix {key[:40]!r}, revision {revision!r}, lease {lease!r} "
            f"and {seconds!r} seconds: {error}"
        ) from None
    return head + name + (value or b"")


def read_request(data: bytes) -> Request:
    """Return the request. Raises ProtocolViolation if the data is none."""
    try:
        operation, revision, lease, seconds, size, has_value = _REQUEST.unpack_from(data)
        start = _REQUEST.size
        key = data[start : start + size].decode()
    except (struct.error, UnicodeDecodeError):
        raise ProtocolViolation("it sent an invalid directory request") from None
    return Request(operation, key, data[start + size :] if has_value else None, revision, lease, seconds)


def write_reply(outcome: int, revision: int = 0, changes: Collection[Event] = (), text: str = "") -> bytes:
    """Return a reply as bytes, with changes or a text."""
    parts = [_REPLY.pack(outcome, revision, len(changes)), text.encode()]
    for changed, key, entry in changes:
        name = key.encode()
        if entry is None:
            parts += (_CHANGE.pack(len(name), _DELETED, changed, 0, 0), name)
        else:
            head = _CHANGE.pack(len(name), len(entry.value), changed, entry.created, entry.lease)
            parts += (head, name, entry.value)
    return b"".join(parts)


def read_reply(data: bytes) -> Reply:
    """Return the reply. Raises ProtocolViolation if the data is none."""
    changes: Events = []
    try:
        outcome, revision, count = _REPLY.unpack_from(data)
        start = _REPLY.size
        if not count:
            return Reply(outcome, revision, changes, data[start:].decode())
        for _ in range(count):
            size, length, changed, created, lease = _CHANGE.unpack_from(data, start)
            start += _CHANGE.size
            key = data[start : start + size].decode()
            start += size
            entry = None
            if length != _DELETED:
                entry = Entry(key, data[start : start + length], changed, created, lease)
                start += length
            changes.append(Event(changed, key, entry))
    except (struct.error, UnicodeDecodeError):
        raise ProtocolViolation("it sent an invalid directory reply") from None
    if start != len(data):
        raise ProtocolViolation("it sent a directory reply that is cut off, or too long")
    return Reply(outcome, revision, changes)


def name_of(path: str) -> str:
    """Return the common prefix of the names of all directories that are stored at `path` over time."""
    return f"directory-{hashlib.sha256(path.encode()).hexdigest()[:16]}-"


class Channel:
    """Both directions. One thread may call `encrypt` while another calls `decrypt`."""

    def __init__(self, ciphers: Ciphers, longest: int, leftover: bytes = b"") -> None:
        """`longest` is the longest message that is accepted; `leftover` was received after the handshake."""
        self._writer = RecordWriter(ciphers.sending)
        self._decrypt = ciphers.receiving.decrypt
        self._longest = longest
        self._records = bytearray(leftover)
        self._content = bytearray()

    def encrypt(self, message: bytes) -> bytes:
        """Return the records of a message."""
        content = _LENGTH.pack(len(message)) + message
        if len(content) <= RECORD:
            return self._writer.encrypt(content)
        pieces = memoryview(content)
        return b"".join(self._writer.encrypt(pieces[at : at + RECORD]) for at in range(0, len(content), RECORD))

    def decrypt(self, data: bytes) -> list[bytes]:
        """Add received bytes; return the complete messages. Raise ProtocolViolation if a record or a message is too
        long, and DecryptionFailed if the bytes are not the next record of the other end."""
        self._records += data
        for record in _split(self._records, "record", TAG + 1, LONGEST + TAG):
            self._content += self._decrypt(record)
        return list(_split(self._content, "message", 0, self._longest))


def _split(data: bytearray, what: str, least: int, most: int) -> Iterator[bytes]:
    """Yield the complete pieces at the begin of `data`, each of which follows its length; then remove them."""
    start = 0
    while len(data) - start >= _HEAD:
        (size,) = _LENGTH.unpack_from(data, start)
        if not least <= size <= most:
            raise ProtocolViolation(f"a {what} of {size} bytes was announced; {least} to {most} are allowed")
        end = start + _HEAD + size
        if end > len(data):
            break
        yield bytes(data[start + _HEAD : end])
        start = end
    del data[:start]
