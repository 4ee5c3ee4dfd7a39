"""Messages over a connection after its handshake: each direction is a stream of encrypted records.

A message is its length in four bytes, and its content. Records (`security.records`) split that stream anywhere: a
message longer than a record is in several. Both ends of a connection to the embedded directory use this module. Pure.
"""

from __future__ import annotations

import encodings.idna  # noqa: F401 see below
import hashlib
import struct

# Otherwise imported at the first connection, by many forked processes that connect at the same moment.
from cryptography.hazmat.backends.openssl import backend as _backend  # noqa: F401

from telegrad._core.security.encrypted_records import LONGEST, RECORD, RecordWriter
from telegrad._core.security.noise import TAG, Ciphers
from telegrad.errors import ProtocolViolation

INCARNATION = "directory"  # of directories in handshakes; workers have others

_LENGTH = struct.Struct("<I")
_HEAD = _LENGTH.size


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
        """Add received bytes; return the complete messages.

        Raises:
            ProtocolViolation: a record or a message is too long.
            DecryptionFailed: the bytes are not the next record of the other end.
        """
        records, content = self._records, self._content
        records += data
        start = 0
        while len(records) - start >= _HEAD:
            (size,) = _LENGTH.unpack_from(records, start)
            if not TAG < size <= LONGEST + TAG:
                raise ProtocolViolation(f"a record of {size} bytes was announced")
            end = start + _HEAD + size
            if end > len(records):
                break
            content += self._decrypt(bytes(records[start + _HEAD : end]))
            start = end
        del records[:start]
        return self._messages(content)

    def _messages(self, content: bytearray) -> list[bytes]:
        found = []
        start = 0
        while len(content) - start >= _HEAD:
            (size,) = _LENGTH.unpack_from(content, start)
            if size > self._longest:
                raise ProtocolViolation(f"a message of {size} bytes was announced; at most {self._longest} are allowed")
            end = start + _HEAD + size
            if end > len(content):
                break
            found.append(bytes(content[start + _HEAD : end]))
            start = end
        del content[:start]
        return found
