"""The handshake lets in who holds the key, whatever the bytes come in, and nobody else."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telegrad.errors import AuthenticationFailed, HandshakeError, PeerUnreachable, ProtocolViolation, VersionMismatch
from telegrad.transport.handshake import LONGEST, NONCE, PROTOCOL, Acceptor, Claim, Initiator

KEY = b"the key of the group"
A = Claim("a", 0, "incarnation of a", "program")
B = Claim("b", 1, "incarnation of b", "")


def ends(key_a=KEY, key_b=KEY, wanted=B.incarnation):
    return Initiator(key_a, A, wanted, b"1" * NONCE), Acceptor(key_b, B, b"2" * NONCE)


def converse(a, b, cut=lambda data: [data]):
    """Carry bytes to and fro until both are done; what each said."""
    said_a, said_b = [a.start()], []
    to_b, to_a = said_a[0], b""
    while to_a or to_b:
        to_a, to_b = b"".join(b.receive(piece) for piece in cut(to_b)), b""
        said_b.append(to_a)
        to_b, to_a = b"".join(a.receive(piece) for piece in cut(to_a)), b""
        said_a.append(to_b)
    return b"".join(said_a), b"".join(said_b)


def test_both_learn_who_the_other_is():
    a, b = ends()
    converse(a, b)
    assert a.done
    assert b.done
    assert (a.peer, b.peer) == (B, A)
    assert (a.leftover, b.leftover) == (b"", b"")


@given(st.integers(1, 50))
def test_in_any_pieces(size):
    a, b = ends()
    converse(a, b, lambda data: [data[at : at + size] for at in range(0, len(data), size)])
    assert (a.peer, b.peer) == (B, A)


def test_frames_behind_the_handshake_are_kept():
    a, b = ends()
    proof = a.receive(b.receive(a.start()))
    answer = b.receive(proof + b"first frame")
    assert b.leftover == b"first frame"
    a.receive(answer + b"second")
    assert a.leftover == b"second"


def test_a_wrong_key_is_told_to_both():
    a, b = ends(key_a=b"another")
    with pytest.raises(AuthenticationFailed, match="TELEGRAD_KEY"):
        converse(a, b)
    with pytest.raises(AuthenticationFailed, match="refused"):
        a.receive(b.parting)


def test_another_version_is_told_to_both():
    a, b = ends()
    hello = bytearray(a.start())
    struct.pack_into("<H", hello, 2 + 1 + 4, PROTOCOL + 1)
    with pytest.raises(VersionMismatch, match=f"version {PROTOCOL + 1}"):
        b.receive(bytes(hello))
    with pytest.raises(VersionMismatch, match="same telegrad"):
        a.receive(b.parting)


def test_the_worker_that_was_wanted_has_gone():
    a, b = ends(wanted="the one before")
    with pytest.raises(PeerUnreachable):
        converse(a, b)
    with pytest.raises(PeerUnreachable, match="restarted"):
        a.receive(b.parting)


def test_a_recording_is_worthless():
    said, _ = converse(*ends())
    with pytest.raises(AuthenticationFailed):
        Acceptor(KEY, B).receive(said)  # another nonce this time


def test_a_reflection_is_worthless():
    a = Initiator(KEY, A, B.incarnation)
    with pytest.raises(HandshakeError):
        a.receive(a.start())
    a, b = ends()
    challenge = b.receive(a.start())
    proof = a.receive(challenge)
    with pytest.raises(HandshakeError):
        a.receive(proof)  # its own proof, sent back


def test_no_flipped_bit_passes():
    said_a, said_b = converse(*ends())
    for direction, said in enumerate((said_a, said_b)):
        for bit in range(8 * len(said)):
            wrong = bytearray(said)
            wrong[bit // 8] ^= 1 << bit % 8
            a, b = ends()
            a.start()
            try:
                b.receive(said_a if direction else bytes(wrong))
                a.receive(bytes(wrong) if direction else said_b)
            except HandshakeError:
                continue
            except PeerUnreachable:
                continue
            assert not (a.done and b.done), f"bit {bit} of direction {direction}"


@pytest.mark.parametrize(
    "garbage", [b"GET / HTTP/1.1\r\n", bytes.fromhex("160301"), struct.pack("<I", 2**31), b"\0\0\0", b"SSH-2.0-x"]
)
def test_strangers_are_known_by_their_first_bytes(garbage):
    b = Acceptor(KEY, B)
    with pytest.raises(ProtocolViolation):
        b.receive(garbage)


@settings(max_examples=300)
@given(st.lists(st.binary(min_size=1, max_size=200), max_size=40))
def test_noise_is_refused_and_never_kept(pieces):
    for end in ends():
        try:
            for piece in pieces:
                end.receive(piece)
                assert len(end._buffer) <= LONGEST + 2 + len(piece)
        except HandshakeError:
            pass
        assert not end.done
