"""The Noise pattern NNpsk0: two ends that share a secret of 32 bytes agree on keys for one connection.

    -> psk, e
    <- e, ee

This module implements only `Noise_NNpsk0_25519_AESGCM_SHA256` of the Noise Protocol Framework, revision 34; names are
those of the specification. Both ends mix the shared secret and the fresh ephemeral keys into all later keys. So nobody
can take part without the secret, and ended connections stay confidential if the secret becomes known later. An attacker
can replay the first message. The responder must trust nothing before it has decrypted the first transport message,
which proves that the initiator holds the ephemeral key of this handshake.

Two things go beyond the specification. Transport messages may be longer than 65,535 bytes, which AES-GCM allows. And
each end replaces a key by `rekey` after every REKEY_AFTER messages; both count from the first message, and so switch at
the same one. The data encrypted with one key stays far below the limits of AES-GCM (2**36 bytes for messages of 1 MB,
an advantage of an attacker below 2**-60).

No nonce is used twice with one key: a nonce is consumed before the encryption, even if that fails.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from collections.abc import Callable
from typing import NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

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
