"""What stands on the wire around the memory of a frame."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telegrad._core.wire.messages import (
    CALL,
    ENTRY,
    PREFIX,
    Message,
    append,
    encode,
    pack_numbers,
    split,
    unpack_numbers,
)


@given(st.binary(), st.binary())
def test_what_stands_behind_a_body_is_found_again(body: bytes, attachments: bytes) -> None:
    loaded = append(body, attachments)
    for received in (loaded, memoryview(loaded)):
        found, behind = split(received)
        assert (bytes(found), bytes(behind)) == (body, attachments)


def test_bodies_can_be_loaded_twice() -> None:
    inner, outer = split(append(append(b"body", b"first"), b"second"))
    assert bytes(outer) == b"second"
    assert [bytes(part) for part in split(inner)] == [b"body", b"first"]


def test_a_frame_begins_with_the_lengths_of_its_parts() -> None:
    table = ENTRY.pack(1, 2, 3) * 2
    frame = encode(Message(CALL, 7, 5, b"head", b"me", b"the body"), table)
    assert PREFIX.unpack_from(frame) == (CALL, 5, 4, 2, 2, 8, 7)
    assert frame[PREFIX.size :] == b"headme" + table + b"the body"


@pytest.mark.parametrize("numbers", [[], [0], [2**64 - 1, 3]])
def test_numbers_travel(numbers: list[int]) -> None:
    assert list(unpack_numbers(memoryview(pack_numbers(numbers)))) == numbers
