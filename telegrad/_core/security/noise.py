"""Encryption of a connection: two ends that share a secret of 32 bytes agree on keys, and exchange encrypted records.

The keys are agreed on by the Noise pattern NNpsk0:

    -> psk, e
    <- e, ee

This is `Noise_NNpsk0_25519_AESGCM_SHA256` of the Noise Protocol Framework, revision 34; names are those of the
specification. Both ends mix the shared secret and the fresh ephemeral keys into all later keys. So nobody
can take part without the secret, and ended connections stay confidential if the secret becomes known later. An attacker
can replay the first message. The responder must trust nothing before it has decrypted the first transport message,
which proves that the initiator holds the ephemeral key of this handshake.

Two things go beyond the specification. Transport messages may be longer than 65,535 bytes, which AES-GCM allows. And
each end replaces a key by `rekey` after every REKEY_AFTER messages; both count from the first message, and so switch at
the same one. The data encrypted with one key stays far below the limits of AES-GCM (2**36 bytes for messages of 1 MB,
an advantage of an attacker below 2**-60).

No nonce is used twice with one key: a nonce is consumed before the encryption, even if that fails.

Records carry all data of a TCP connection after its handshake.

    length    4 bytes, little-endian: the size of the rest
    content   the ciphertext of at most LONGEST bytes, and its tag

Records are independent of frames: a record may hold several frames, a part of one, or both. The nonce of a record is
its number, which is not sent. So a record that was altered, replayed, dropped or reordered cannot be decrypted, and
ends the connection.

`RecordWriter` encrypts data once, when it is written: queued data is plaintext, and records sent in part are kept as
ciphertext. `RecordReader` decrypts a record directly into its final memory if it fits. Neither does any I/O.
"""

import hashlib
import hmac
import secrets
import struct
from collections.abc import Callable
from typing import NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from telegrad._core.wire.messages import SCRATCH  # bytes per read, unless a longer record has begun
from telegrad.errors import ProtocolViolation

NAME = b"Noise_NNpsk0_25519_AESGCM_SHA256"  # as long as a hash: used directly as the first hash
KEY = 32
TAG = 16
REKEY_AFTER = 1 << 16  # messages
MAX_NONCE = 2**64 - 1  # reserved for `rekey`

Random = Callable[[int], bytes]

_NONCE = struct.Struct(">4xQ")
_pack_nonce = _NONCE.pack


class DecryptionFailed(Exception):
    """Raised for a message that was altered, replayed, reordered, or encrypted with another key."""


class CipherState:
    """The state of one direction of a connection: a key and its remaining nonces. One thread at a time."""

    __slots__ = ("_decrypt", "_decrypt_into", "_encrypt", "_encrypt_into", "_end", "_key", "_nonces")

    def __init__(self, key: bytes) -> None:
        self._use(key)
        self._allot(0)

    def _use(self, key: bytes) -> None:
        aead = AESGCM(key)
        self._key = key
        self._encrypt, self._encrypt_into = aead.encrypt, aead.encrypt_into
        self._decrypt, self._decrypt_into = aead.decrypt, aead.decrypt_into

    def _allot(self, first: int) -> None:
        """Create the nonces for the messages under the current key, beginning with number `first`."""
        self._end = first + REKEY_AFTER
        # Made of C iterators: consuming a nonce is one fast step that no signal handler can interrupt.
        self._nonces = map(_pack_nonce, range(first, self._end))

    # Each of these four methods consumes a nonce before its use. The code is repeated for the latency of small
    # messages. A nonce has 12 bytes and is never false, so the right side of `or` runs only when the iterator is at its
    # end.

    def encrypt(self, plaintext: bytes | memoryview, associated: bytes | None = None) -> bytes:
        """Return the ciphertext and tag of the next message."""
        nonce = next(self._nonces, None) or self._next_key()
        return self._encrypt(nonce, plaintext, associated)

    def encrypt_into(self, plaintext: bytes | memoryview, target: memoryview) -> None:
        """Write the ciphertext and tag of the next message to `target`, which has their size."""
        nonce = next(self._nonces, None) or self._next_key()
        self._encrypt_into(nonce, plaintext, None, target)

    def decrypt(self, ciphertext: bytes | memoryview, associated: bytes | None = None) -> bytes:
        """Return the plaintext of the next message; raise DecryptionFailed if it is not the next message of the other
        end. No further message can be decrypted."""
        nonce = next(self._nonces, None) or self._next_key()
        try:
            return self._decrypt(nonce, ciphertext, associated)
        except (InvalidTag, ValueError):
            raise DecryptionFailed from None

    def decrypt_into(self, ciphertext: memoryview, target: memoryview) -> None:
        """Write the plaintext of the next message to `target`, which has its size. Raise DecryptionFailed if it is not
        the next message of the other end; the content of `target` must not be used then."""
        nonce = next(self._nonces, None) or self._next_key()
        try:
            self._decrypt_into(nonce, ciphertext, None, target)
        except (InvalidTag, ValueError):
            raise DecryptionFailed from None

    def _next_key(self) -> bytes:
        """Replace the key, whose nonces are used up; return the first nonce of the new key."""
        if self._end >= MAX_NONCE - REKEY_AFTER:
            raise OverflowError("a connection has sent 2**64 messages")
        self.rekey()
        self._allot(self._end)
        return next(self._nonces)

    def rekey(self) -> None:
        """Derive the next key from the current one; the message number continues."""
        # REKEY of the specification: 32 zeros, encrypted with the largest nonce, without the tag. Both ends do this at
        # the same message, so nothing is sent for it.
        self._use(self._encrypt(_pack_nonce(MAX_NONCE), bytes(KEY), b"")[:KEY])


class Ciphers(NamedTuple):
    sending: CipherState
    receiving: CipherState


class NoiseHandshake:
    """One end: the initiator calls `write_first`, then `read_second`; the responder `read_first`, then `write_second`.

    It keeps the hash of the transcript, and the key of the next payload.
    """

    def __init__(self, psk: bytes, prologue: bytes, random: Random = secrets.token_bytes) -> None:
        if len(psk) != KEY:
            raise ValueError(f"the shared secret has {len(psk)} bytes, not {KEY}")
        self._random = random
        self._private: X25519PrivateKey | None = None
        self._theirs = b""
        self.hash = NAME
        self._mix_hash(prologue)
        # The token psk of the first message, processed here because it needs nothing of the message: MixKeyAndHash.
        self._chaining_key, mixed, key = _hkdf(NAME, psk, 3)
        self._mix_hash(mixed)
        self._cipher = CipherState(key)

    def write_first(self, payload: bytes = b"") -> bytes:
        """Return the first message; its payload may be replayed."""
        return self._make_ephemeral() + self._encrypt_and_hash(payload)

    def read_first(self, message: bytes) -> bytes:
        """Return the payload of the first message; raise DecryptionFailed if the initiator has another secret, or
        another prologue, or the message was altered."""
        self._read_ephemeral(message)
        return self._decrypt_and_hash(message[KEY:])

    def write_second(self, payload: bytes = b"") -> tuple[bytes, Ciphers]:
        """Return the second message, and the ciphers for all later messages; raise DecryptionFailed if the public key
        of the initiator is invalid."""
        public = self._make_ephemeral()
        self._mix_exchange()
        message = public + self._encrypt_and_hash(payload)
        # The first key encrypts the messages of the initiator, the second those of the responder.
        there, here = _hkdf(self._chaining_key, b"", 2)
        return message, Ciphers(CipherState(here), CipherState(there))

    def read_second(self, message: bytes) -> tuple[bytes, Ciphers]:
        """Return the payload of the second message, and the ciphers for all later messages; raise DecryptionFailed if
        it does not answer the first message."""
        self._read_ephemeral(message)
        self._mix_exchange()
        payload = self._decrypt_and_hash(message[KEY:])
        here, there = _hkdf(self._chaining_key, b"", 2)
        return payload, Ciphers(CipherState(here), CipherState(there))

    def _make_ephemeral(self) -> bytes:
        self._private = X25519PrivateKey.from_private_bytes(self._random(KEY))
        return self._mix_ephemeral(self._private.public_key().public_bytes_raw())

    def _read_ephemeral(self, message: bytes) -> None:
        self._theirs = self._mix_ephemeral(message[:KEY])

    def _mix_ephemeral(self, public: bytes) -> bytes:
        self._mix_hash(public)
        self._mix_key(public)  # required by patterns with psk only
        return public

    def _mix_exchange(self) -> None:
        assert self._private is not None
        try:
            self._mix_key(self._private.exchange(X25519PublicKey.from_public_bytes(self._theirs)))
        except ValueError:  # a public key of low order: the exchange would be 0 for any private key
            raise DecryptionFailed from None

    def _mix_key(self, material: bytes) -> None:
        self._chaining_key, key = _hkdf(self._chaining_key, material, 2)
        self._cipher = CipherState(key)

    def _mix_hash(self, data: bytes) -> None:
        self.hash = hashlib.sha256(self.hash + data).digest()

    def _encrypt_and_hash(self, plaintext: bytes) -> bytes:
        ciphertext = self._cipher.encrypt(plaintext, self.hash)
        self._mix_hash(ciphertext)
        return ciphertext

    def _decrypt_and_hash(self, ciphertext: bytes) -> bytes:
        plaintext = self._cipher.decrypt(ciphertext, self.hash)
        self._mix_hash(ciphertext)
        return plaintext


def _hkdf(chaining_key: bytes, material: bytes, outputs: int) -> list[bytes]:
    secret = hmac.digest(chaining_key, material, "sha256")
    found = [b""]
    for number in range(1, outputs + 1):
        found.append(hmac.digest(secret, found[-1] + bytes([number]), "sha256"))
    return found[1:]


# Records

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
