"""An attacker on the network can do anything with the bytes of handshakes, and no end accepts a wrong peer."""

import json
import struct
from unittest.mock import patch

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from telegrad._core.security.handshake import LONGEST, PROTOCOL, Acceptor, Initiator
from telegrad.errors import AuthenticationFailed, ProtocolViolation, VersionMismatch
from tests.strangers.adversary import ACCEPT, DELIVER, FLIP, INITIATE, KEYS, MEMBERS, NAMED, Move, Network, honest

A, B, _ = MEMBERS
numbers = st.integers(0, 12)
begins = st.builds(Move, st.sampled_from([INITIATE, ACCEPT]), numbers, numbers, st.just(0), st.sampled_from([0, 0, 1]))
faithful = st.builds(Move, st.just(DELIVER), numbers, numbers)
changes = st.builds(Move, st.integers(0, 7), numbers, numbers, st.integers(0, 300), st.integers(0, 2**64 - 1))
games = st.lists(st.one_of(begins, faithful, faithful, changes), max_size=40)


ASTRAY, LOCKED_OUT = honest(wanted=2), honest(key=1)
openings = [*(honest()[:moves] for moves in range(9)), honest() + honest(2, 1), ASTRAY, LOCKED_OUT]


@settings(deadline=None, max_examples=200)
@given(st.sampled_from(openings), games)
@example(honest()[:6], [Move(FLIP, 1, 5, 37, 1)])  # another claim with the same proof
@example(ASTRAY, [])
@example(LOCKED_OUT, [])
def test_no_moves_of_an_attacker_connect_ends_that_do_not_agree(opening: list[Move], moves: list[Move]) -> None:
    Network().play([*opening, *moves])


def test_an_attacker_that_changes_nothing_does_not_prevent_a_handshake() -> None:
    network = Network()
    network.play(honest())
    assert network.done == 2


def test_the_check_finds_a_disagreement() -> None:
    """The ends share a key, and one of them lies about its identity."""
    network = Network()
    network.play(honest()[:2])
    network.parties[0].claim = MEMBERS[2]
    with pytest.raises(AssertionError, match="did not say this"):
        network.play(honest()[2:])


@settings(deadline=None, max_examples=200)
@given(st.permutations(range(1, 7)), st.lists(st.integers(1, 6), max_size=4))
def test_replayed_messages_in_any_order_complete_no_other_handshake(order: list[int], again: list[int]) -> None:
    network = Network()
    network.play(honest())
    network.play([Move(INITIATE, 0, 1), Move(ACCEPT, 1)])
    for end in (2, 3):
        network.play(Move(DELIVER, end, message) for message in [*order, *again])
    assert network.done == 2


@settings(deadline=None)
@given(st.integers(0, PROTOCOL.oldest - 1), st.booleans())
def test_an_unsupported_version_is_refused_at_both_ends(version: int, to_initiator: bool) -> None:
    a, b = Initiator(KEYS[0], A, B.incarnation), Acceptor(KEYS[0], B)
    hello = a.start()
    said, hearer, other = (b.receive(hello), a, b) if to_initiator else (hello, b, a)
    changed = bytearray(said)
    struct.pack_into("<H", changed, 7, version)
    with pytest.raises(VersionMismatch, match=f"version {version} "):
        hearer.receive(bytes(changed))
    with pytest.raises(VersionMismatch):
        other.receive(hearer.last_bytes)
    assert (a.done, b.done) == (False, False)


@settings(deadline=None)
@given(st.integers(PROTOCOL.newest + 1, 2**16 - 1), st.booleans())
def test_a_forged_version_is_refused(version: int, to_initiator: bool) -> None:
    a, b = Initiator(KEYS[0], A, B.incarnation), Acceptor(KEYS[0], B)
    said = [bytearray(a.start())]
    said.append(bytearray(b.receive(bytes(said[0]))))
    struct.pack_into("<H", said[to_initiator], 7, version)
    if to_initiator:
        with pytest.raises(AuthenticationFailed):
            b.receive(a.receive(bytes(said[1])))
    else:
        late = Acceptor(KEYS[0], B)
        with pytest.raises(AuthenticationFailed):
            late.receive(a.receive(late.receive(bytes(said[0]))))


@settings(deadline=None, max_examples=100)
@given(st.lists(st.binary(max_size=400), min_size=1, max_size=20), st.booleans(), st.integers(0, 2))
def test_bytes_after_a_good_start_are_refused_and_not_kept(pieces: list[bytes], to_initiator: bool, steps: int) -> None:
    a, b = Initiator(KEYS[0], A, B.incarnation), Acceptor(KEYS[0], B)
    end = a if to_initiator else b
    said = a.start()
    for step in range(2 * steps + to_initiator):  # each end has accepted this many messages
        said = (a if step % 2 else b).receive(said)
    try:
        for piece in pieces:
            end.receive(piece)
            assert len(end.leftover) <= 2 + LONGEST + len(piece)
    except NAMED:
        pass
    assert (end.done, end.peer) == (False, None)


values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20)),
    lambda inner: st.one_of(st.lists(inner, max_size=6), st.dictionaries(st.text(max_size=5), inner, max_size=6)),
    max_leaves=12,
)


def prove(claim: str) -> Acceptor:
    """Return the acceptor after the proof of a key holder with this claim."""
    a, b = Initiator(KEYS[0], A, B.incarnation), Acceptor(KEYS[0], B)
    second = b.receive(a.receive(b.receive(a.start())))
    with patch.object(json, "dumps", lambda _: claim):
        proof = a.receive(second)
    try:
        b.receive(proof)
    except NAMED:
        assert not b.done
    return b


finite = values.map(json.dumps).filter(lambda text: "Infinity" not in text and len(text) < LONGEST - 99)


@settings(deadline=None)
@given(st.one_of(finite, st.text(max_size=300)))
@example('["a", 1e999, "x", ""]')  # an infinite rank
def test_any_claim_of_a_key_holder_is_accepted_or_refused(claim: str) -> None:
    prove(claim)


@settings(deadline=None)
@given(st.binary(max_size=LONGEST - 1))
def test_any_refusal_is_a_documented_error(reason: bytes) -> None:
    for end in (Initiator(KEYS[0], A, B.incarnation), Acceptor(KEYS[0], B)):
        with pytest.raises(NAMED):
            end.receive((1 + len(reason)).to_bytes(2, "little") + b"R" + reason)


@settings(deadline=None)
@given(st.integers(0, 2**16 - 1).filter(lambda size: not 1 <= size <= LONGEST), st.binary(max_size=9))
def test_a_length_out_of_range_is_refused_at_once(size: int, behind: bytes) -> None:
    for end in (Initiator(KEYS[0], A, B.incarnation), Acceptor(KEYS[0], B)):
        with pytest.raises(ProtocolViolation):
            end.receive(size.to_bytes(2, "little") + behind)
