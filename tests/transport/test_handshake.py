"""The handshake accepts only holders of the key, in whatever pieces its bytes arrive."""

import struct
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telegrad._core.security.handshake import (
    ITSELF,
    LONGEST,
    ONE_SIDED,
    TCP,
    TLS,
    UNIX,
    Acceptor,
    Hello,
    Initiator,
    StreamId,
    VersionRange,
    is_hello,
)
from telegrad._core.security.keyring import Keyring, open_ring
from telegrad._core.security.tls import HANDSHAKE
from telegrad.errors import AuthenticationFailed, HandshakeError, PeerUnreachable

KEY, NEXT, LAST = (Keyring([name]) for name in (b"the key of the group", b"the next key", b"the last key"))
A = Hello("a", 0, "incarnation of a", "program", (("cuda:0", "cuda:1"),))
B = Hello("b", 1, "incarnation of b", "")


def ends(key_a: Keyring = KEY, key_b: Keyring = KEY, wanted: str = B.incarnation) -> tuple[Initiator, Acceptor]:
    return (
        Initiator(key_a, A, wanted, random=lambda size: b"1" * size),
        Acceptor(key_b, B, random=lambda size: b"2" * size),
    )


def converse(
    a: Initiator, b: Acceptor, cut: Callable[[bytes], list[bytes]] = lambda data: [data]
) -> tuple[bytes, bytes]:
    """Pass bytes between both ends until both are done; return the bytes of each."""
    said_a, said_b = [a.start()], []
    to_b, to_a = said_a[0], b""
    while to_a or to_b:
        to_a, to_b = b"".join(b.receive(piece) for piece in cut(to_b)), b""
        said_b.append(to_a)
        to_b, to_a = b"".join(a.receive(piece) for piece in cut(to_a)), b""
        said_a.append(to_b)
    return b"".join(said_a), b"".join(said_b)


@given(st.integers(1, 500), st.sampled_from([ITSELF, StreamId("c", 1), StreamId("c", -1)]))
def test_each_end_learns_the_peer_in_any_pieces(size: int, stream_id: StreamId) -> None:
    a, b = Initiator(KEY, A, B.incarnation, stream_id=stream_id), Acceptor(KEY, B)
    converse(a, b, lambda data: [data[at : at + size] for at in range(0, len(data), size)])
    assert (a.done, b.done) == (True, True)
    assert (a.peer, b.peer, b.stream_id) == (B, A, stream_id)
    assert (a.leftover, b.leftover) == (b"", b"")


def exchange(a: Initiator, b: Acceptor) -> list[bytes]:
    """Return the messages of both ends, in turn."""
    said = [a.start()]
    for end in (b, a, b, a, b):
        said.append(end.receive(said[-1]))
    assert a.receive(said[-1]) == b""
    return said


def test_frames_behind_the_handshake_are_kept() -> None:
    a, b = ends()
    said = [a.start()]
    for end in (b, a, b, a):
        said.append(end.receive(said[-1]))
    answer = b.receive(said[-1] + b"first frame")
    assert b.leftover == b"first frame"
    a.receive(answer + b"second")
    assert a.leftover == b"second"


def test_no_two_connections_have_the_same_keys() -> None:
    said: set[bytes] = set()
    for _ in range(5):
        a, b = Initiator(KEY, A, B.incarnation), Acceptor(KEY, B)
        exchange(a, b)
        assert a.ciphers is not None
        said.update(cipher.encrypt(bytes(16)) for cipher in a.ciphers)
    assert len(said) == 10


def test_the_claims_of_both_ends_are_encrypted() -> None:
    said = b"".join(exchange(*ends()))
    for text in (A.name, A.incarnation, A.program, B.incarnation):
        assert len(text) == 1 or text.encode() not in said


def test_both_ends_get_an_error_for_a_wrong_key() -> None:
    a, b = ends(key_a=NEXT)
    with pytest.raises(AuthenticationFailed, match=r"altered on the way.*TELEGRAD_KEY"):
        converse(a, b)
    with pytest.raises(AuthenticationFailed, match=r"refused.*TELEGRAD_KEY"):
        a.receive(b.last_bytes)


@pytest.mark.parametrize(
    "ring", [Keyring([b"the key of the group", b"the next key"]), KEY], ids=["two keys", "one key"]
)
def test_a_group_with_a_key_does_not_connect_to_an_open_one(ring: Keyring) -> None:
    for rings in ((ring, open_ring()), (open_ring(), ring)):
        with pytest.raises(AuthenticationFailed):
            converse(*ends(*rings))
    converse(*ends(open_ring(), open_ring()))


NAMES = [b"the key of the group", b"the next key", b"the last key"]


@pytest.mark.parametrize("mine", [["k"], ["k", "n"], ["n", "k"], ["n"], ["l", "n"], ["l", "k", "n"]], ids="".join)
@pytest.mark.parametrize("theirs", [["k"], ["k", "n"], ["n", "k"], ["n"], ["l"]], ids="".join)
def test_rings_that_share_a_key_connect_in_every_order(mine: list[str], theirs: list[str]) -> None:
    ring_a, ring_b = (Keyring([NAMES["knl".index(name)] for name in names]) for names in (mine, theirs))
    for attempt in range(len(mine)):
        a, b = Initiator(ring_a, A, B.incarnation, attempt=attempt), Acceptor(ring_b, B)
        try:
            converse(a, b)
        except AuthenticationFailed:
            with pytest.raises(AuthenticationFailed):
                a.receive(b.last_bytes)
            if not a.has_other_key:
                break
        else:
            assert mine[attempt] in theirs
            return
    assert not set(mine) & set(theirs)


def test_the_next_key_is_tried_only_if_the_peer_does_not_have_this_one() -> None:
    ring = Keyring(NAMES)
    for reason in (b"altered", b"stranger", b"other", b"version", b"user"):
        a = Initiator(ring, A, B.incarnation)
        with pytest.raises((HandshakeError, PeerUnreachable)):
            a.receive((1 + len(reason)).to_bytes(2, "little") + b"R" + reason)
        assert not a.has_other_key


@pytest.mark.parametrize(
    ("carrier_a", "carrier_b"),
    [
        (TCP, UNIX),
        (UNIX, TCP),
        (TCP, TLS + bytes(64)),
        (TLS + bytes(64), TCP),
        (TLS + b"a" * 32 + b"m" * 32, TLS + b"m" * 32 + b"b" * 32),
    ],
    ids=["tcp to unix", "unix to tcp", "tcp to tls", "tls to tcp", "between two tls connections"],
)
def test_a_handshake_fails_over_another_connection(carrier_a: bytes, carrier_b: bytes) -> None:
    a, b = Initiator(KEY, A, B.incarnation, carrier_a), Acceptor(KEY, B, carrier_b)
    with pytest.raises(AuthenticationFailed):
        converse(a, b)
    assert (a.peer, b.peer) == (None, None)


def test_a_name_that_is_too_long_is_an_error_at_its_own_end() -> None:
    a, b = Initiator(KEY, A._replace(name="a" * LONGEST), B.incarnation), Acceptor(KEY, B)
    assert len(a._say(b"", bytes(LONGEST))) == LONGEST + 2
    with pytest.raises(HandshakeError, match="too long"):
        exchange(a, b)


@pytest.mark.parametrize(
    ("spoken_a", "spoken_b", "agreed"),
    [
        (VersionRange(7, 7), VersionRange(7, 7), 7),
        (VersionRange(7, 7), VersionRange(7, 8), 7),
        (VersionRange(7, 8), VersionRange(8, 9), 8),
        (VersionRange(7, 8), VersionRange(7, 8), 8),
        (VersionRange(7, 9), VersionRange(7, 8), 8),
    ],
)
def test_neighbouring_versions_use_the_older_one(spoken_a: VersionRange, spoken_b: VersionRange, agreed: int) -> None:
    for first, second in [(spoken_a, spoken_b), (spoken_b, spoken_a)]:
        a = Initiator(KEY, A, B.incarnation, spoken=first)
        b = Acceptor(KEY, B, spoken=second)
        converse(a, b)
        assert (a.peer, b.peer) == (B, A)
        assert a.version == b.version == agreed


def test_another_incarnation_of_the_wanted_worker_is_refused() -> None:
    a, b = ends(wanted="the one before")
    with pytest.raises(PeerUnreachable, match=r"another worker listens there now.* restarted"):
        converse(a, b)
    with pytest.raises(PeerUnreachable, match=r"refused: .* restarted"):
        b.receive(a.last_bytes)


def test_a_replayed_first_message_does_not_authenticate() -> None:
    """The acceptor draws the same random bytes as before, and must not trust the first message all the same."""
    said = exchange(*ends())
    _, b = ends()
    b.receive(said[0])
    answer = b.receive(said[2])  # a real acceptor answers with fresh keys
    assert answer
    assert not b.done
    assert b.peer is None


def test_an_acceptor_with_fresh_keys_refuses_a_recorded_claim() -> None:
    said = exchange(*ends())
    random = iter([b"2" * 32, b"another secret key of 32 bytes.."])  # the same random bytes, another ephemeral key
    b = Acceptor(KEY, B, random=lambda _: next(random))
    b.receive(said[0])
    assert b.receive(said[2]) != said[3]
    with pytest.raises(AuthenticationFailed, match="altered"):
        b.receive(said[4])
    assert not b.done


def test_an_acceptor_refuses_an_initiator_that_wants_another_worker() -> None:
    a, b = ends()
    a._wanted = B.incarnation
    said = [a.start()]
    for end in (b, a, b):
        said.append(end.receive(said[-1]))
    assert a._noise is not None
    a._wanted = "another"
    a._read_claim = lambda text: (B._replace(incarnation="another"), [])
    with pytest.raises(PeerUnreachable):
        b.receive(a.receive(said[-1]))
    assert b.peer is None


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("hearer", ["initiator", "acceptor"])
def test_no_flipped_bit_passes(hearer: str, step: int) -> None:
    said_a, said_b = converse(*ends())
    said = said_b if hearer == "initiator" else said_a
    for bit in range(0, 8 * len(said), step):
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
    "garbage", [b"GET / HTTP/1.1\r\n", bytes.fromhex("160301"), struct.pack("<I", 2**31), b"\0\0\0", b"SSH-2.0-x"]
)
def test_garbage_is_refused_within_three_bytes(garbage: bytes) -> None:
    for end in ends():
        with pytest.raises(HandshakeError):
            list(map(end.receive, struct.unpack("3c", garbage[:3])))


def test_both_ends_get_an_error_for_tls_on_one_side_only() -> None:
    a, b = ends()
    assert is_hello(a.start())
    assert not is_hello(b"GET / HTTP/1.1")
    error = b.refuse_without_tls()
    with pytest.raises(AuthenticationFailed, match=ONE_SIDED):
        a.receive(b.last_bytes)
    assert ONE_SIDED in str(error)
    with pytest.raises(AuthenticationFailed, match=ONE_SIDED):
        Acceptor(KEY, B).receive(HANDSHAKE + b"\x01\x02")
