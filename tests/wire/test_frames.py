"""Frames are read from a stream in any pieces, and keep the parts around the memory of tensors."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telegrad._core.wire.messages import (
    CALL,
    ENTRY,
    IN_STREAM,
    LEND,
    PREFIX,
    SCRATCH,
    Message,
    Unreceived,
    append,
    encode,
    pack_numbers,
    split,
    unknown,
    unpack_numbers,
)
from telegrad.errors import ProtocolViolation
from tests.strangers.streams import SHARED_BLOCKS, plain, read


def written(frame: Message) -> bytes:
    """Return the bytes of a frame; a blob is bytes in the stream, or (number, size, device) for shared memory."""
    table = b"".join(
        ENTRY.pack(*blob) if isinstance(blob, tuple) else ENTRY.pack(IN_STREAM, len(blob), len(blob) % 2 - 1)
        for blob in frame.blobs
    )
    return encode(frame, table) + b"".join(blob for blob in frame.blobs if not isinstance(blob, tuple))


small = st.binary(max_size=40)
sizes = st.sampled_from([0, 1, 27, 28, 29, 5000, SCRATCH - 30, SCRATCH, SCRATCH + 1, 3 * SCRATCH])
large = sizes.map(lambda size: (b"0123456789abcdef" * (size // 16 + 1))[:size])
blobs = st.one_of(large, st.tuples(st.integers(1, SHARED_BLOCKS), st.integers(0, 99), st.integers(-1, 2)))
frames = st.builds(
    Message,
    st.integers(1, 255).filter(lambda kind: kind != LEND),  # which the connection processes itself
    st.integers(0, 2**64 - 1),
    st.integers(0, 255),
    small,
    small,
    st.one_of(small, large),
    st.lists(blobs, max_size=3),
)


@settings(deadline=None, max_examples=150)
@given(st.lists(frames, max_size=6), st.lists(st.integers(1, 2 * SCRATCH), min_size=1, max_size=5), st.booleans())
def test_any_cuts(sent: list[Message], cuts: list[int], apart: bool) -> None:
    assert read(b"".join(map(written, sent)), cuts, apart) == (plain(sent), False)


def test_many_in_one_read() -> None:
    sent = [Message(CALL, number, 0, b"h", b"", b"body") for number in range(1000)]
    assert read(b"".join(map(written, sent)), [SCRATCH]) == (plain(sent), False)


@given(st.lists(st.integers(0, 2**64 - 1)))
def test_numbers(numbers: list[int]) -> None:
    assert list(unpack_numbers(pack_numbers(numbers))) == numbers


@given(st.binary(), st.binary())
def test_attachments_behind_a_body_are_split_off(body: bytes, attachments: bytes) -> None:
    loaded = append(body, attachments)
    for received in (loaded, memoryview(loaded)):
        found, behind = split(received)
        assert (bytes(found), bytes(behind)) == (body, attachments)


def test_a_body_can_have_two_attachments() -> None:
    inner, outer = split(append(append(b"body", b"first"), b"second"))
    assert (bytes(outer), [bytes(part) for part in split(inner)]) == (b"second", [b"body", b"first"])


def test_a_frame_begins_with_the_lengths_of_its_parts() -> None:
    table = ENTRY.pack(1, 2, 3) * 2
    frame = encode(Message(CALL, 7, 5, b"head", b"me", b"the body"), table)
    assert PREFIX.unpack_from(frame) == (CALL, 5, 4, 2, 2, 8, 7)
    assert frame[PREFIX.size :] == b"headme" + table + b"the body"


def test_bodies_that_are_too_short_are_refused() -> None:
    for body in (b"", b"abc", b"\1\0\0\0"):
        with pytest.raises(ProtocolViolation):
            split(body)
    assert split(append(b"", b"")) == (b"", b"")
    for size in (1, 7, 9):
        with pytest.raises(ProtocolViolation):
            unpack_numbers(bytes(size))


def test_frames_in_messages_for_people() -> None:
    assert unknown(CALL).endswith(" CALL")
    assert "kind 255" in unknown(255)
    assert repr(Message(CALL, 7, head=b"f", body=b"abc")) == "<CALL 7 'f': 3 bytes>"
    assert repr(Message(255, 7)) == "<255 7 '': 0 bytes>"
    error = str(Unreceived(1024, "full").error("here", "there"))
    assert "'here' has no memory for 1,024 bytes that worker 'there' sent (full)" in error
