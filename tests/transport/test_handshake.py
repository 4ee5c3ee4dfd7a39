"""The handshake lets in who holds the key, whatever the bytes come in, and nobody else."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telegrad.errors import AuthenticationFailed, HandshakeError, PeerUnreachable, ProtocolViolation, VersionMismatch
from telegrad.transport.handshake import LONGEST, NONCE, PROTOCOL, Acceptor, Claim, Initiator, Spoken

KEY = b"the key of the group"
A = Claim("a", 0, "incarnation of a", "program")
B = Claim("b", 1, "incarnation of b", "")


def ends(key_a: bytes = KEY, key_b: bytes = KEY, wanted: str = B.incarnation) -> tuple[Initiator, Acceptor]:
    return Initiator(key_a, A, wanted, b"1" * NONCE), Acceptor(key_b, B, b"2" * NONCE)


def converse(
    a: Initiator, b: Acceptor, cut: Callable[[bytes], list[bytes]] = lambda data: [data]
) -> tuple[bytes, bytes]:
    """Carry bytes to and fro until both are done; what each said."""
    said_a, said_b = [a.start()], []
    to_b, to_a = said_a[0], b""
    while to_a or to_b:
        to_a, to_b = b"".join(b.receive(piece) for piece in cut(to_b)), b""
        said_b.append(to_a)
        to_b, to_a = b"".join(a.receive(piece) for piece in cut(to_a)), b""
        said_a.append(to_b)
    return b"".join(said_a), b"".join(said_b)


def test_both_learn_who_the_other_is() -> None:
    a, b = ends()
    converse(a, b)
    assert a.done
    assert b.done
    assert (a.peer, b.peer) == (B, A)
    assert (a.leftover, b.leftover) == (b"", b"")


@given(st.integers(1, 50))
def test_in_any_pieces(size: int) -> None:
    a, b = ends()
    converse(a, b, lambda data: [data[at : at + size] for at in range(0, len(data), size)])
    assert (a.peer, b.peer) == (B, A)


def test_frames_behind_the_handshake_are_kept() -> None:
    a, b = ends()
    proof = a.receive(b.receive(a.start()))
    answer = b.receive(proof + b"first frame")
    assert b.leftover == b"first frame"
    a.receive(answer + b"second")
    assert a.leftover == b"second"


def test_a_wrong_key_is_told_to_both() -> None:
    a, b = ends(key_a=b"another")
    with pytest.raises(AuthenticationFailed, match="TELEGRAD_KEY"):
        converse(a, b)
    with pytest.raises(AuthenticationFailed, match="refused"):
        a.receive(b.parting)


@pytest.mark.parametrize(
    ("spoken_a", "spoken_b", "agreed"),
    [
        (Spoken(7, 7), Spoken(7, 7), 7),
        (Spoken(7, 7), Spoken(7, 8), 7),
        (Spoken(7, 8), Spoken(8, 9), 8),
        (Spoken(7, 8), Spoken(7, 8), 8),
        (Spoken(7, 9), Spoken(7, 8), 8),
    ],
)
def test_neighbouring_versions_speak_the_older_one(spoken_a: Spoken, spoken_b: Spoken, agreed: int) -> None:
    for first, second in [(spoken_a, spoken_b), (spoken_b, spoken_a)]:
        a = Initiator(KEY, A, B.incarnation, spoken=first)
        b = Acceptor(KEY, B, spoken=second)
        converse(a, b)
        assert (a.peer, b.peer) == (B, A)
        assert a.version == b.version == agreed


@pytest.mark.parametrize("newer_asks", [True, False])
def test_versions_that_are_too_far_apart_are_told_to_both(newer_asks: bool) -> None:
    older, newer = Spoken(7, 7), Spoken(8, 9)
    a = Initiator(KEY, A, B.incarnation, spoken=newer if newer_asks else older)
    b = Acceptor(KEY, B, spoken=older if newer_asks else newer)
    with pytest.raises(VersionMismatch, match=r"version 7 .* none before 8"):
        converse(a, b)
    with pytest.raises(VersionMismatch, match="same telegrad"):
        (b if newer_asks else a).receive((a if newer_asks else b).parting)


def test_today_s_worker_speaks_to_the_one_before_and_the_next() -> None:
    for other in (PROTOCOL.oldest, PROTOCOL.newest, PROTOCOL.newest + 1):
        a, b = Initiator(KEY, A, B.incarnation), Acceptor(KEY, B, spoken=Spoken(PROTOCOL.oldest, other))
        converse(a, b)
        assert a.version == b.version == min(other, PROTOCOL.newest)


def test_the_worker_that_was_wanted_has_gone() -> None:
    a, b = ends(wanted="the one before")
    with pytest.raises(PeerUnreachable):
        converse(a, b)
    with pytest.raises(PeerUnreachable, match="restarted"):
        a.receive(b.parting)


def test_a_recording_is_worthless() -> None:
    said_a, said_b = converse(*ends())
    b = Acceptor(KEY, B)  # another nonce this time
    with pytest.raises(AuthenticationFailed):
        b.receive(said_a)
    assert b.peer is None
    a = Initiator(KEY, A, B.incarnation)
    a.start()
    with pytest.raises(AuthenticationFailed):
        a.receive(said_b)
    assert a.peer is None


def test_a_reflection_is_worthless() -> None:
    a = Initiator(KEY, A, B.incarnation)
    with pytest.raises(ProtocolViolation):
        a.receive(a.start())
    a, b = ends()
    proof = a.receive(b.receive(a.start()))
    with pytest.raises(AuthenticationFailed):
        a.receive(proof)  # its own, sent back


def test_a_mirror_that_calls_itself_the_acceptor_proves_nothing() -> None:
    """Its challenge holds the initiator's own nonce, its proof is the initiator's own."""
    a = Initiator(KEY, A, B.incarnation)
    proof = a.receive(a.start().replace(b"H", b"C", 1))
    with pytest.raises(AuthenticationFailed):
        a.receive(proof)


@pytest.mark.parametrize("hearer", ["initiator", "acceptor"])
def test_no_flipped_bit_passes(hearer: str) -> None:
    said_a, said_b = converse(*ends())
    said = said_b if hearer == "initiator" else said_a
    for bit in range(8 * len(said)):
        wrong = bytearray(said)
        wrong[bit // 8] ^= 1 << bit % 8
        a, b = ends()
        a.start()
        end = a if hearer == "initiator" else b
        try:
            end.receive(bytes(wrong))
        except (HandshakeError, PeerUnreachable):
            pass
        assert not end.done, f"bit {bit}"
        assert end.peer is None, f"bit {bit}"


@pytest.mark.parametrize(
    "said",
    ["", "{}", "5", "[]", '["a", 1]', '["a", "one", "b", "c"]', "\ufffd", "[" * 1500],
    ids=lambda said: said[:9] or "empty",
)
def test_a_key_holder_that_claims_nonsense_is_refused(said: str) -> None:
    a, b = ends()
    challenge = b.receive(a.start())
    with patch.object(json, "dumps", lambda fields: said):
        proof = a.receive(challenge)
    with pytest.raises(ProtocolViolation, match="no claim"):
        b.receive(proof)
    assert not b.done


@pytest.mark.parametrize(
    "garbage", [b"GET / HTTP/1.1\r\n", bytes.fromhex("160301"), struct.pack("<I", 2**31), b"\0\0\0", b"SSH-2.0-x"]
)
def test_strangers_are_known_by_their_first_bytes(garbage: bytes) -> None:
    for end in ends():
        with pytest.raises(ProtocolViolation):
            list(map(end.receive, struct.unpack("3c", garbage[:3])))


def test_what_no_message_can_be_is_refused_by_its_length() -> None:
    for size in (0, LONGEST + 1, 2**16 - 1):
        with pytest.raises(ProtocolViolation):
            Acceptor(KEY, B).receive(size.to_bytes(2, "little"))


@pytest.mark.parametrize("reason", [b"key", b"nothing known", b"\xff", b""], ids=repr)
def test_any_refusal_ends_it(reason: bytes) -> None:
    for end in ends():
        with pytest.raises(HandshakeError, match="refused"):
            end.receive((1 + len(reason)).to_bytes(2, "little") + b"R" + reason)
        assert not end.done


@settings(max_examples=300)
@given(st.lists(st.binary(min_size=1, max_size=200), max_size=40))
def test_noise_is_refused_and_never_kept(pieces: list[bytes]) -> None:
    for end in ends():
        try:
            for piece in pieces:
                end.receive(piece)
                assert len(end._buffer) <= LONGEST + 2 + len(piece)
        except HandshakeError:
            pass
        assert not end.done
