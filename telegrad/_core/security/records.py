"""Records: what crosses a connection over TCP behind its handshake, each encrypted and authenticated.

    length    4 bytes, little-endian, of what follows
    content   the ciphertext of at most LONGEST bytes, and its tag

Records say nothing about frames: a record may hold several frames, a part of one, or both. The nonce of a record is its
number, which does not travel. So a record that was altered, replayed, left out or moved cannot be decrypted, and ends
the connection.

`RecordWriter` encrypts at the moment of writing, once: what waits to be sent is plain, and what the socket has taken in
part is kept as ciphertext. `RecordReader` decrypts a record at once into the memory that it belongs to, where it fits.
Neither does any I/O.
"""

from __future__ import annotations

import struct

from telegrad._core.security.noise import TAG, CipherState, DecryptionFailed
from telegrad._core.wire.frames import SCRATCH  # bytes that are read at once, where no longer record has begun
from telegrad.errors import ProtocolViolation

RECORD = 1 << 19  # bytes of content: in the processor's cache as the socket copies it; measured (docs/decisions)
JOINED = 1 << 15  # bytes of small pieces that share a record
LONGEST = 1 << 20  # bytes of content that are taken
_LONGEST = LONGEST + TAG
OVERHEAD = 4 + TAG

_LENGTH = struct.Struct("<I")
_HEAD = _LENGTH.size
_pack_length, _unpack_length = _LENGTH.pack, _LENGTH.unpack_from
_NOTHING = memoryview(b"")


class RecordWriter:
    """What is sent, for one thread at a time."""

    def __init__(self, cipher: CipherState) -> None:
        self.unsent: memoryview = _NOTHING  # records, as far as the socket has not taken them
        self._encrypt, self._encrypt_into = cipher.encrypt, cipher.encrypt_into
        self._buffer: memoryview | None = None
        self._end = 0

    def encrypt(self, data: bytes | memoryview) -> bytes:
        """Return a record with at most RECORD bytes of content; nothing is unsent."""
        return _pack_length(len(data) + TAG) + self._encrypt(data)

    def keep(self, unsent: bytes | memoryview) -> None:
        """Take in what the socket has not taken of records that are not kept here."""
        self.unsent = memoryview(unsent)

    def room(self) -> int:
        """Return how many bytes of content the next record may have, so that it is sent together with those unsent."""
        return min(RECORD, RECORD + JOINED + OVERHEAD - self._end) if self.unsent else RECORD

    def add(self, data: bytes | memoryview) -> None:
        """Encrypt a record of at most `room()` bytes behind those that are unsent, of which nothing was sent yet."""
        if self._buffer is None:
            self._buffer = memoryview(bytearray(RECORD + JOINED + 2 * OVERHEAD))
        start = self._end if self.unsent else 0
        self._end = end = start + OVERHEAD + len(data)
        _LENGTH.pack_into(self._buffer, start, len(data) + TAG)
        self._encrypt_into(data, self._buffer[start + _HEAD : end])
        self.unsent = self._buffer[:end]

    def clear(self) -> None:
        """Drop what is unsent; no record may follow on this connection."""
        self.unsent = _NOTHING

    def sent(self, count: int) -> None:
        """The socket has taken so many bytes of `unsent`."""
        self.unsent = self.unsent[count:]


class RecordReader:
    """What is received, for one thread at a time."""

    def __init__(self, cipher: CipherState) -> None:
        self._cipher = cipher
        self._buffer = memoryview(bytearray(SCRATCH))
        self._scratch = self._buffer[:SCRATCH]
        self._start = self._end = 0  # the part of the buffer that has come and was not decrypted
        self._content: memoryview | None = None  # of a record, as far as nobody has taken it
        self.has_more = False  # behind what was decrypted last, something is here: a record, or a part of one

    def buffer(self, most: int = SCRATCH) -> memoryview:
        """Return where the next bytes from the socket belong: never empty, and not beyond a long record.

        At most `most` bytes of them, unless a longer record has begun.
        """
        unread = self._end - self._start
        if not unread:
            self._start = self._end = 0
            return self._scratch[:most]
        needed = _HEAD
        if unread >= _HEAD:  # `decrypt_into` has looked at this length
            needed += _unpack_length(self._buffer, self._start)[0] + _HEAD  # and the next, so that little is moved
        if needed > len(self._buffer):
            # Room for what comes before it in the same read, so that later records of this length are not moved.
            grown = memoryview(bytearray(needed + SCRATCH))
            grown[:unread] = self._buffer[self._start : self._end]
            self._buffer, self._scratch = grown, grown[:SCRATCH]
            self._start, self._end = 0, unread
        elif self._start + max(needed, SCRATCH) > len(self._buffer):
            self._buffer[:unread] = bytes(self._buffer[self._start : self._end])
            self._start, self._end = 0, unread
        return self._buffer[self._end : max(self._start + needed, self._end + most)]

    def decrypt(self, came: int = 0) -> bytes:
        """Return the content of the next record; b"" where it is not whole, longer than SCRATCH, or taken in part.

        `came` bytes were written to `buffer()`.

        Raises:
            ProtocolViolation: what came is no record.
            DecryptionFailed: it is not the next record of the other end.
        """
        here = self._end = self._end + came
        start = self._start + _HEAD
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
        """Write what comes next to `target`, which is not empty; return how many bytes, 0 without a whole record.

        `came` bytes were written to `buffer()`.

        Raises:
            ProtocolViolation: what came is no record.
            DecryptionFailed: it is not the next record of the other end; `target` holds nothing to be used then.
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
    """Return what users are told of a record that was refused."""
    if isinstance(error, DecryptionFailed):
        return "what came over the connection was not sent so by that worker: it was altered on the way"
    return f"it sent what is no record ({error})"
