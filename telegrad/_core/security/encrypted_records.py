"""Encrypted and authenticated records, which carry all data of a TCP connection after its handshake.

    length    4 bytes, little-endian: the size of the rest
    content   the ciphertext of at most LONGEST bytes, and its tag

Records are independent of frames: a record may hold several frames, a part of one, or both. The nonce of a record is
its number, which is not sent. So a record that was altered, replayed, dropped or reordered cannot be decrypted, and
ends the connection.

`RecordWriter` encrypts data once, when it is written: queued data is plaintext, and records sent in part are kept as
ciphertext. `RecordReader` decrypts a record directly into its final memory if it fits. Neither does any I/O.
"""

from __future__ import annotations

import struct

from telegrad._core.security.noise import TAG, CipherState, DecryptionFailed
from telegrad._core.wire.messages import SCRATCH  # bytes per read, unless a longer record has begun
from telegrad.errors import ProtocolViolation

RECORD = 1 << 19  # bytes of content: still in the CPU cache when the socket copies it; measured (docs/decisions)
JOINED = 1 << 15  # bytes of small pieces that share a record
LONGEST = 1 << 20  # most bytes of content accepted
_LONGEST = LONGEST + TAG
OVERHEAD = 4 + TAG

_LENGTH = struct.Struct("<I")
_HEAD = _LENGTH.size
_pack_length, _unpack_length = _LENGTH.pack, _LENGTH.unpack_from
_NOTHING = memoryview(b"")


class RecordWriter:
    """Encrypt sent data; used by one thread at a time."""

    def __init__(self, cipher: CipherState) -> None:
        self.unsent: memoryview = _NOTHING  # records that the socket has not accepted yet
        self._encrypt, self._encrypt_into = cipher.encrypt, cipher.encrypt_into
        self._buffer: memoryview | None = None
        self._end = 0

    def encrypt(self, data: bytes | memoryview) -> bytes:
        """Return a record with at most RECORD bytes of content. Call this only if nothing is unsent."""
        return _pack_length(len(data) + TAG) + self._encrypt(data)

    def keep(self, unsent: bytes | memoryview) -> None:
        """Store the unsent rest of records that were made by `encrypt`."""
        self.unsent = memoryview(unsent)

    def room(self) -> int:
        """Return how many bytes of content the next record may have, to be sent together with the unsent records."""
        return min(RECORD, RECORD + JOINED + OVERHEAD - self._end) if self.unsent else RECORD

    def add(self, data: bytes | memoryview) -> None:
        """Append a record of at most `room()` bytes to the unsent records, of which nothing may have been sent yet."""
        if self._buffer is None:
            # A tensor follows the small record of its frame's header. The buffer holds both, so one write sends them.
            # It is made at the first `add`: a connection with short records alone needs none.
            self._buffer = memoryview(bytearray(RECORD + JOINED + 2 * OVERHEAD))
        # `unsent` becomes all of the buffer up to the end of this record. So records that were sent in part, or stored
        # by `keep`, would be sent again or lost.
        start = self._end if self.unsent else 0
        self._end = end = start + OVERHEAD + len(data)
        _LENGTH.pack_into(self._buffer, start, len(data) + TAG)
        self._encrypt_into(data, self._buffer[start + _HEAD : end])
        self.unsent = self._buffer[:end]

    def clear(self) -> None:
        """Drop the unsent records; no record may follow on this connection."""
        # Their nonces are used up. The other end would decrypt a later record with a nonce that was dropped.
        self.unsent = _NOTHING

    def sent(self, count: int) -> None:
        """Remove the first `count` bytes of `unsent`, which the socket has accepted."""
        self.unsent = self.unsent[count:]


class RecordReader:
    """Decrypt received data; used by one thread at a time."""

    def __init__(self, cipher: CipherState) -> None:
        self._cipher = cipher
        self._buffer = memoryview(bytearray(SCRATCH))
        self._scratch = self._buffer[:SCRATCH]
        self._start = self._end = 0  # bounds of the received and not yet decrypted part of the buffer
        self._content: memoryview | None = None  # content of a record that is not consumed yet
        self.has_more = False  # True if more data follows the last decrypted record: a record or a part of one

    def buffer(self, most: int = SCRATCH) -> memoryview:
        """Return the memory for the next bytes from the socket: never empty, and not beyond a long record.

        It has at most `most` bytes, unless a longer record has begun.
        """
        unread = self._end - self._start
        if not unread:
            self._start = self._end = 0
            return self._scratch[:most]
        needed = _HEAD
        if unread >= _HEAD:  # `decrypt_into` has checked this length
            needed += _unpack_length(self._buffer, self._start)[0] + _HEAD  # and the next length, to move less data
        if needed > len(self._buffer):
            # Add room for data before the record in the same read: then later records of this length are not moved.
            grown = memoryview(bytearray(needed + SCRATCH))
            grown[:unread] = self._buffer[self._start : self._end]
            self._buffer, self._scratch = grown, grown[:SCRATCH]
            self._start, self._end = 0, unread
        elif self._start + max(needed, SCRATCH) > len(self._buffer):
            self._buffer[:unread] = bytes(self._buffer[self._start : self._end])
            self._start, self._end = 0, unread
        return self._buffer[self._end : max(self._start + needed, self._end + most)]

    def decrypt(self, came: int = 0) -> bytes:
        """Return the content of the next record; b"" if it is incomplete, longer than SCRATCH, or partly consumed.

        `came` bytes were written to `buffer()`.

        Raises:
            ProtocolViolation: the data is not a record.
            DecryptionFailed: it is not the next record of the other end.
        """
        here = self._end = self._end + came
        start = self._start + _HEAD
        # This is the short way for a record between two frames: it is returned as bytes and cut into frames without a
        # copy. Everything else is left to `decrypt_into`, which the caller calls next.
        if start > here or self._content is not None:
            return b""
        (length,) = _unpack_length(self._buffer, self._start)
        if not TAG < length <= SCRATCH:
            if length <= TAG or length > _LONGEST:
                raise ProtocolViolation(f"a record of {length} bytes was announced")
            return b""
        end = start + length
        if end > here:
            return b""
        self._start = end
        self.has_more = end != here
        return self._cipher.decrypt(self._buffer[start:end])

    def decrypt_into(self, target: memoryview, came: int = 0) -> int:
        """Write the next content to `target`, which is not empty; return the number of bytes, 0 without a whole record.

        `came` bytes were written to `buffer()`.

        Raises:
            ProtocolViolation: the data is not a record.
            DecryptionFailed: it is not the next record of the other end; the content of `target` must not be used.
        """
        here = self._end = self._end + came
        if self._content is not None:
            return self._copy(self._content, target)
        start = self._start + _HEAD
        if start > here:
            return 0
        (length,) = _unpack_length(self._buffer, self._start)
        if not TAG < length <= _LONGEST:
            raise ProtocolViolation(f"a record of {length} bytes was announced")
        end = start + length
        if end > here:
            return 0
        self._start = end
        self.has_more = end != here
        size = length - TAG
        # The record has more than fits, such as the end of one frame and the beginning of the next. The content is
        # decrypted as a whole, because it can be trusted only after its tag was checked.
        if size > len(target):
            return self._copy(memoryview(self._cipher.decrypt(self._buffer[start:end])), target)
        self._cipher.decrypt_into(self._buffer[start:end], target[:size])
        return size  # type: ignore[no-any-return]

    def _copy(self, content: memoryview, target: memoryview) -> int:
        """Write the first part of a record to `target`, and keep the rest."""
        count = min(len(target), len(content))
        target[:count] = content[:count]
        self._content = content[count:] if count < len(content) else None
        self.has_more = self._content is not None or self._start != self._end
        return count


def not_authentic(error: Exception) -> str:
    if isinstance(error, DecryptionFailed):
        return "the received data is not what that worker sent: it was altered on the way"
    return f"it sent an invalid record ({error})"
