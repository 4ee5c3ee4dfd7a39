"""Tests of the messages on the connection of an embedded directory."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telegrad._core.security.noise import RECORD, TAG, Ciphers, CipherState, DecryptionFailed
from telegrad._core.stores.directory import KEY_BYTES, VALUE_BYTES, Entry, Event
from telegrad._core.stores.directory_requests import (
    LONGEST_REQUEST,
    Channel,
    Reply,
    Request,
    read_reply,
    read_request,
    write_reply,
    write_request,
)
from telegrad.errors import ProtocolViolation

REVISIONS = st.integers(0, 2**63)
NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
REQUESTS = st.builds(
    Request, st.integers(0, 255), NAMES, st.none() | st.binary(max_size=50), REVISIONS, REVISIONS, st.floats(0, 1e9)
)


@st.composite
def events(draw: st.DrawFn) -> Event:
    revision, key = draw(REVISIONS), draw(NAMES)
    if draw(st.booleans()):
        return Event(revision, key, None)
    return Event(revision, key, Entry(key, draw(st.binary(max_size=50)), revision, draw(REVISIONS), draw(REVISIONS)))


@given(REQUESTS)
def test_requests_survive_encoding(request: Request) -> None:
    assert read_request(write_request(request)) == request


@given(REVISIONS, st.lists(events(), min_size=1, max_size=5))
def test_replies_survive_encoding_and_damaged_ones_are_refused(revision: int, changes: list[Event]) -> None:
    data = write_reply(1, revision, changes)
    assert read_reply(data) == Reply(1, revision, changes)
    for wrong in (data[:-1], data + b"x"):
        with pytest.raises(ProtocolViolation):
            read_reply(wrong)


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_texts_in_replies_survive_encoding(text: str) -> None:
    assert read_reply(write_reply(3, text=text)) == Reply(3, 0, [], text)


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_refused_or_read(data: bytes) -> None:
    for read in (read_request, read_reply):
        try:
            read(data)
        except ProtocolViolation:
            pass


def test_the_longest_request_has_the_length_of_the_limit() -> None:
    assert len(write_request(Request(4, "x" * KEY_BYTES, bytes(VALUE_BYTES)))) == LONGEST_REQUEST


def ends(longest: int = 1 << 22) -> tuple[Channel, Channel]:
    """Return the two ends of a connection."""
    keys = bytes(32), bytes([1] * 32)
    here = Ciphers(CipherState(keys[0]), CipherState(keys[1]))
    there = Ciphers(CipherState(keys[1]), CipherState(keys[0]))
    return Channel(here, longest), Channel(there, longest)


@given(st.lists(st.binary(max_size=300), max_size=8), st.integers(1, 100))
def test_messages_arrive_in_pieces_of_any_size(sent: list[bytes], size: int) -> None:
    here, there = ends()
    stream = b"".join(map(here.encrypt, sent))
    assert [message for at in range(0, len(stream), size) for message in there.decrypt(stream[at : at + size])] == sent


@pytest.mark.parametrize("size", [0, RECORD - 5, RECORD - 4, RECORD - 3, 3 * RECORD])
def test_long_messages_are_split_into_records(size: int) -> None:
    here, there = ends()
    message = bytes(range(256)) * (size // 256) + bytes(size % 256)
    assert there.decrypt(here.encrypt(message) + here.encrypt(b"next")) == [message, b"next"]


def test_bytes_that_came_with_the_handshake_are_decrypted() -> None:
    here, _ = ends()
    keys = bytes(32), bytes([1] * 32)
    there = Channel(Ciphers(CipherState(keys[1]), CipherState(keys[0])), 100, here.encrypt(b"first"))
    assert there.decrypt(b"") == [b"first"]


def test_a_message_that_is_too_long_is_refused() -> None:
    here, there = ends(longest=1000)
    assert there.decrypt(here.encrypt(bytes(1000))) == [bytes(1000)]
    with pytest.raises(ProtocolViolation, match="1001"):
        there.decrypt(here.encrypt(bytes(1001)))


@pytest.mark.parametrize("length", [0, TAG, (1 << 20) + TAG + 1, 2**32 - 1])
def test_an_invalid_length_of_a_record_is_refused(length: int) -> None:
    with pytest.raises(ProtocolViolation):
        ends()[1].decrypt(length.to_bytes(4, "little"))


def test_altered_and_repeated_records_are_refused() -> None:
    here, there = ends()
    record = here.encrypt(b"message")
    with pytest.raises(DecryptionFailed):
        there.decrypt(record[:-1] + bytes([record[-1] ^ 1]))
    here, there = ends()
    record = here.encrypt(b"message")
    assert there.decrypt(record) == [b"message"]
    with pytest.raises(DecryptionFailed):
        there.decrypt(record)
