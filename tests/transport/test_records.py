"""Records arrive as they were sent, in any pieces, and altered ones are refused."""

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telegrad._core.security.noise import (
    JOINED,
    KEY,
    LONGEST,
    OVERHEAD,
    RECORD,
    TAG,
    CipherState,
    RecordReader,
    RecordWriter,
)
from telegrad._core.wire.messages import SCRATCH
from telegrad.errors import ProtocolViolation

SECRET = bytes(KEY)


def written(pieces: Sequence[bytes]) -> bytes:
    """Return the records of these pieces, some of them joined in one record."""
    writer, said = RecordWriter(CipherState(SECRET)), b""
    for number, piece in enumerate(pieces):
        if number % 3 == 2:
            said += bytes(writer.unsent)
            writer.clear()
            said += writer.encrypt(piece)
            continue
        if len(piece) > writer.room():
            said += bytes(writer.unsent)
            writer.clear()
        writer.add(piece)
    return said + bytes(writer.unsent)


def read(stream: bytes, cuts: Sequence[int], targets: Sequence[int], small: int = 0) -> bytes:
    """Return the decrypted content of a stream that arrives in pieces of `cuts` bytes, read in parts of `targets`.

    One of each `small` small records is decrypted into new bytes instead.
    """
    reader, found = RecordReader(CipherState(SECRET)), b""
    cut, sizes = itertools.cycle(cuts), itertools.cycle(targets)
    at = turn = 0
    while at < len(stream):
        buffer = reader.buffer()
        assert len(buffer) > 0
        came = min(next(cut), len(buffer), len(stream) - at)
        buffer[:came] = stream[at : at + came]
        at += came
        while True:
            turn += 1
            if small and not turn % small:
                content, came = reader.decrypt(came), 0
                assert len(content) <= SCRATCH
                found += content
                if content and not reader.has_more:
                    break
            target = memoryview(bytearray(next(sizes)))
            count = reader.decrypt_into(target, came)
            came = 0
            found += target[:count]
            if not count:
                break
            if not reader.has_more:
                assert not reader.decrypt_into(target)
                break
    return found


sizes = st.sampled_from([1, 2, 100, SCRATCH - OVERHEAD, SCRATCH, JOINED, RECORD - 1, RECORD])
contents = st.lists(st.builds(lambda size, byte: bytes([byte]) * size, sizes, st.integers(0, 255)), max_size=5)
cuts = st.lists(st.sampled_from([1, 3, 19, 20, 21, 24, 4096, SCRATCH, 1 << 30]), min_size=1, max_size=4)


@settings(deadline=None, max_examples=30)
@given(
    contents,
    cuts.filter(lambda cuts: sum(cuts) > 200),
    st.lists(st.integers(1, 1 << 19), min_size=1, max_size=4),
    st.integers(0, 2),
)
def test_records_arrive_in_any_pieces(pieces: list[bytes], cuts: list[int], targets: list[int], small: int) -> None:
    assert read(written(pieces), cuts, [*targets, 1 << 16], small) == b"".join(pieces)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=5), cuts, st.integers(0, 2))
def test_small_records_arrive_in_any_pieces(pieces: list[bytes], cuts: list[int], small: int) -> None:
    assert read(written(pieces), cuts, [7, 64], small) == b"".join(pieces)


@pytest.mark.parametrize("length", [0, 1, TAG, LONGEST + TAG + 1, 2**32 - 1])
def test_a_record_of_an_impossible_length_is_refused(length: int) -> None:
    reader = RecordReader(CipherState(SECRET))
    reader.buffer()[:4] = length.to_bytes(4, "little")
    with pytest.raises(ProtocolViolation, match=str(length)):
        reader.decrypt(4)
    with pytest.raises(ProtocolViolation, match=str(length)):
        reader.decrypt_into(memoryview(bytearray(9)))


def test_no_memory_is_allocated_for_a_long_record_before_it_arrives() -> None:
    reader = RecordReader(CipherState(SECRET))
    assert len(reader.buffer()) == SCRATCH
    reader.buffer()[:3] = b"\0\0\x10"
    assert (reader.decrypt_into(memoryview(bytearray(9)), 3), len(reader.buffer())) == (0, SCRATCH - 3)


def test_a_long_record_behind_a_short_one_is_not_moved() -> None:
    writer, reader = RecordWriter(CipherState(SECRET)), RecordReader(CipherState(SECRET))
    target = memoryview(bytearray(SCRATCH))
    for turn in range(3):
        stream = memoryview(writer.encrypt(b"head") + writer.encrypt(bytes(SCRATCH)))
        first = reader.buffer()
        first[:] = stream[:SCRATCH]
        assert reader.decrypt(SCRATCH) == b"head"
        assert not reader.decrypt_into(target)
        rest = reader.buffer()
        if turn:  # the first turn made the buffer grow
            assert bytes(first[:SCRATCH]) == stream[:SCRATCH]
        came = len(stream) - SCRATCH
        rest[:came] = stream[SCRATCH:]
        assert reader.decrypt_into(target, came) == SCRATCH
        assert not reader.has_more


def test_bytes_that_the_socket_did_not_take_are_kept() -> None:
    writer, plain = RecordWriter(CipherState(SECRET)), RecordWriter(CipherState(SECRET))
    whole = plain.encrypt(b"a message")
    writer.keep(memoryview(writer.encrypt(b"a message"))[5:])
    writer.sent(3)
    assert bytes(writer.unsent) == whole[8:]
    writer.sent(len(whole) - 8)
    writer.add(b"another")
    assert bytes(writer.unsent) == plain.encrypt(b"another")


def test_a_large_content_is_decrypted_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    places: list[int] = []
    true = CipherState.decrypt_into

    def noted(cipher: CipherState, ciphertext: memoryview, target: memoryview) -> None:
        places.append(len(target))
        true(cipher, ciphertext, target)

    monkeypatch.setattr(CipherState, "decrypt_into", noted)
    content = bytes(range(256)) * (3 * RECORD // 256)
    pieces = [content[at : at + RECORD] for at in range(0, len(content), RECORD)]
    assert (read(written(pieces), [1 << 30], [len(content)]), places) == (content, [RECORD] * 3)
