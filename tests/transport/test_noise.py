"""The Noise handshake agrees with published test vectors and with another implementation."""

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given, settings
from hypothesis import strategies as st
from noise.connection import NoiseConnection

from telegrad._core.security import noise
from telegrad._core.security.noise import KEY, MAX_NONCE, TAG, Ciphers, CipherState, DecryptionFailed, NoiseHandshake

# These are from vectors/cacophony.txt of the Haskell library cacophony, which are among the tests of Rust's snow.
PROLOGUE = bytes.fromhex("4a6f686e2047616c74")
PSK = bytes.fromhex("54686973206973206d7920417573747269616e20706572737065637469766521")
EPHEMERAL_A = bytes.fromhex("893e28b9dc6ca8d611ab664754b8ceb7bac5117349a4439a6b0569da977c464a")
EPHEMERAL_B = bytes.fromhex("bbdb4cdbd309f1a1f2e1456967fe288cadd6f712d65dc7b7793d5e63da6b375b")
MESSAGES = [
    (
        "4c756477696720766f6e204d69736573",
        "ca35def5ae56cec33dc2036731ab14896bc4c75dbb07a61f879f8e3afa4c79447c37a89fc17813788d30df2d59501d6066f5f8aecc3406bb"
        "d9829f2d24a531b1",
    ),
    (
        "4d757272617920526f746862617264",
        "95ebc60d2b1fa672c1f46a8aa265ef51bfe38e7ccb39ec5be34069f1448088432f29d79368ef9de4e1ae7a362fb05bf0ad668e026bf57145"
        "54497b3a720461",
    ),
    ("462e20412e20486179656b", "7c01e898a6201f36aecee532e29cd0b7f8ffa29d3366ad0dce39a6"),
    ("4361726c204d656e676572", "a9ff535aace3db6a1da1a7fb00fe2de2622bb373abad9fb42c00e0"),
    ("4a65616e2d426170746973746520536179", "6cfc49a3e65472edc2d0152abe5ce950170a8a47c959f30bd48b5f0aacf29adbfd"),
    (
        "457567656e2042f6686d20766f6e2042617765726b",
        "9bc86e6d974ed21ba04604a94aa68de21677eb409ead070c0cd569b069ee19ba142aa4c1a9",
    ),
]


def fixed(ephemeral: bytes) -> Callable[[int], bytes]:
    return lambda size: ephemeral[:size]


def joined(psk: bytes = PSK, prologue: bytes = PROLOGUE) -> tuple[Ciphers, Ciphers]:
    a, b = NoiseHandshake(psk, prologue), NoiseHandshake(psk, prologue)
    b.read_first(a.write_first())
    message, there = b.write_second()
    return a.read_second(message)[1], there


def test_the_published_vector() -> None:
    (first, second, *transport) = [(bytes.fromhex(payload), bytes.fromhex(text)) for payload, text in MESSAGES]
    a = NoiseHandshake(PSK, PROLOGUE, fixed(EPHEMERAL_A))
    b = NoiseHandshake(PSK, PROLOGUE, fixed(EPHEMERAL_B))
    assert (a.write_first(first[0]), b.read_first(first[1])) == (first[1], first[0])
    said, there = b.write_second(second[0])
    assert said == second[1]
    payload, here = a.read_second(said)
    assert (payload, a.hash) == (second[0], b.hash)
    for (payload, text), (sender, receiver) in zip(transport, itertools.cycle([(here, there), (there, here)])):
        assert sender.sending.encrypt(payload) == text
        assert receiver.receiving.decrypt(text) == payload


class OfNoiseprotocol:
    """An end of a handshake, made with the package noiseprotocol."""

    def __init__(self, initiates: bool, psk: bytes, prologue: bytes) -> None:
        self._of = NoiseConnection.from_name(noise.NAME)
        self._of.set_psks(psk)
        self._of.set_prologue(prologue)
        (self._of.set_as_initiator if initiates else self._of.set_as_responder)()
        self._of.start_handshake()

    def write(self, payload: bytes) -> bytes:
        return bytes(self._of.write_message(payload))

    def read(self, message: bytes) -> bytes:
        return bytes(self._of.read_message(message))

    def encrypt(self, payload: bytes) -> bytes:
        return bytes(self._of.encrypt(payload))

    def decrypt(self, message: bytes) -> bytes:
        return bytes(self._of.decrypt(message))


@settings(deadline=None, max_examples=15)
@given(st.binary(min_size=KEY, max_size=KEY), st.binary(max_size=99), st.lists(st.binary(max_size=300), max_size=9))
def test_another_implementation_answers_and_initiates(psk: bytes, prologue: bytes, payloads: list[bytes]) -> None:
    here, there = NoiseHandshake(psk, prologue), OfNoiseprotocol(False, psk, prologue)
    assert there.read(here.write_first(b"one")) == b"one"
    payload, ciphers = here.read_second(there.write(b"two"))
    assert payload == b"two"
    talk(ciphers, there, payloads)
    here, there = NoiseHandshake(psk, prologue), OfNoiseprotocol(True, psk, prologue)
    assert here.read_first(there.write(b"one")) == b"one"
    message, ciphers = here.write_second(b"two")
    assert there.read(message) == b"two"
    talk(ciphers, there, payloads)


def talk(ciphers: Ciphers, other: Any, payloads: list[bytes]) -> None:
    for payload in payloads:
        assert other.decrypt(ciphers.sending.encrypt(payload)) == payload
        assert ciphers.receiving.decrypt(other.encrypt(payload)) == payload


def test_a_wrong_secret_or_prologue_is_refused_at_the_first_message() -> None:
    for psk, prologue in ((bytes(KEY), PROLOGUE), (PSK, b"another")):
        with pytest.raises(DecryptionFailed):
            NoiseHandshake(psk, prologue).read_first(NoiseHandshake(PSK, PROLOGUE).write_first())


@pytest.mark.parametrize("public", [bytes(KEY), (1).to_bytes(KEY, "little"), b"\xff" * KEY])
def test_a_public_key_of_low_order_is_refused(public: bytes) -> None:
    """Otherwise both ends would agree on a key that a holder of the shared secret can compute."""
    b, a = NoiseHandshake(PSK, PROLOGUE), NoiseHandshake(PSK, PROLOGUE)
    a._mix_ephemeral(public)
    first = public + a._encrypt_and_hash(b"")
    assert b.read_first(first) == b""
    if public == b"\xff" * KEY:  # an alternative encoding of a valid key
        b.write_second()
    else:
        with pytest.raises(DecryptionFailed):
            b.write_second()


@pytest.mark.parametrize("cut", [0, 5, KEY - 1, KEY, KEY + TAG - 1])
def test_messages_that_are_too_short_are_refused(cut: int) -> None:
    a, b = NoiseHandshake(PSK, PROLOGUE), NoiseHandshake(PSK, PROLOGUE)
    first = a.write_first()
    with pytest.raises(DecryptionFailed):
        NoiseHandshake(PSK, PROLOGUE).read_first(first[:cut])
    b.read_first(first)
    second, _ = b.write_second()
    with pytest.raises(DecryptionFailed):
        a.read_second(second[:cut])


def test_messages_out_of_order_are_refused() -> None:
    here, there = joined()
    said = [here.sending.encrypt(bytes([number])) for number in range(3)]
    with pytest.raises(DecryptionFailed):
        there.receiving.decrypt(said[1])
    here, there = joined()
    first = here.sending.encrypt(b"first")
    assert there.receiving.decrypt(first) == b"first"
    with pytest.raises(DecryptionFailed):
        there.receiving.decrypt(first)
    with pytest.raises(DecryptionFailed):  # nor accepted by its own sender
        here.receiving.decrypt(first)


def test_no_nonce_is_used_twice_even_after_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[tuple[bytes, bytes]] = []
    true = AESGCM

    class Watched:
        def __init__(self, key: bytes) -> None:
            self._key, self._of = key, true(key)

        def _note(self, nonce: bytes) -> None:
            used.append((self._key, nonce))
            if len(used) % 3 == 0:
                raise KeyboardInterrupt

        def encrypt(self, nonce: bytes, data: bytes, associated: bytes | None) -> bytes:
            self._note(nonce)
            return self._of.encrypt(nonce, data, associated)

        def encrypt_into(self, nonce: bytes, data: bytes, associated: bytes | None, target: memoryview) -> None:
            self._note(nonce)
            self._of.encrypt_into(nonce, data, associated, target)

        decrypt = decrypt_into = None

    monkeypatch.setattr(noise, "AESGCM", Watched)
    monkeypatch.setattr(noise, "REKEY_AFTER", 5)
    cipher = CipherState(bytes(KEY))
    for number in range(40):
        try:
            if number % 2:
                cipher.encrypt(b"x")
            else:
                cipher.encrypt_into(b"x", memoryview(bytearray(1 + TAG)))
        except KeyboardInterrupt:
            pass
    numbers = [each for each in used if each[1] != bytes(4) + b"\xff" * 8]  # those of rekeying encrypt no message
    assert len(set(numbers)) == len(numbers) >= 35


def test_both_ends_rekey_at_the_same_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "REKEY_AFTER", 3)
    here, there = joined()
    keys = set()
    for number in range(10):
        assert there.receiving.decrypt(here.sending.encrypt(bytes([number]))) == bytes([number])
        assert here.sending._key == there.receiving._key
        keys.add(here.sending._key)
    assert len(keys) == 4


def test_rekeying_agrees_with_another_implementation() -> None:
    a, b = NoiseHandshake(PSK, PROLOGUE), OfNoiseprotocol(False, PSK, PROLOGUE)
    b.read(a.write_first())
    _, ciphers = a.read_second(b.write(b""))
    for number in range(3):
        talk(ciphers, b, [bytes([number])])
        ciphers.sending.rekey()
        ciphers.receiving.rekey()
        b._of.rekey_inbound_cipher()
        b._of.rekey_outbound_cipher()
    talk(ciphers, b, [b"the last"])


def test_a_cipher_fails_before_its_nonces_run_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "REKEY_AFTER", 4)
    cipher = CipherState(PSK)
    cipher._allot(MAX_NONCE + 1 - 8)
    assert len({cipher.encrypt(b"") for _ in range(4)}) == 4
    for _ in range(3):
        with pytest.raises(OverflowError):
            cipher.encrypt(b"")


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
