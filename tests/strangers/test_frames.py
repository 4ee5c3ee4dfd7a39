"""Any bytes yield frames or a documented error, the same for all pieces, and within bounded memory."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from telegrad._core.wire.messages import CALL, ENTRY, PREFIX, SCRATCH, FrameReader
from telegrad._core.wire.tensors import HOST
from telegrad.errors import ProtocolViolation
from tests.strangers.door import HAS_PROC, resident
from tests.strangers.streams import PLENTY, SMALL, agree, attach, cut, limited, read, samples, scratch_of

cuts = st.lists(st.integers(1, 200), min_size=1, max_size=5)
sizes = st.one_of(st.integers(0, 80), st.sampled_from([PLENTY, PLENTY + 1, 2**31, 2**32 - 1]))
vast = st.one_of(sizes, st.sampled_from([2**40, 2**63 - 1, 2**63, 2**64 - 1]))
prefixes = st.builds(
    PREFIX.pack, st.integers(0, 255), st.integers(0, 255), st.integers(0, 80), sizes, sizes, vast, st.just(0)
)
entries = st.builds(ENTRY.pack, st.integers(0, 6), vast, st.integers(-2, 2))
streams = st.lists(st.one_of(prefixes, entries, st.binary(max_size=120), st.sampled_from(samples())), max_size=8).map(
    b"".join
)


@settings(deadline=None, max_examples=200)
@given(streams, cuts, st.sampled_from([SMALL, SCRATCH]))
@example(PREFIX.pack(CALL, 0, 0, 0, 1, 0, 0) + ENTRY.pack(0, 2**64 - 1, HOST), [1], SMALL)
@example(PREFIX.pack(CALL, 0, 0, 0, 2**32 - 1, 0, 0), [28], SCRATCH)
def test_any_bytes_in_any_pieces(stream: bytes, cuts: list[int], scratch: int) -> None:
    with scratch_of(scratch):
        agree(stream, cuts, scratch)


@settings(deadline=None, max_examples=80)
@given(st.lists(st.sampled_from(samples()[:4]), min_size=1, max_size=4).map(b"".join), st.data())
def test_a_stream_that_ends_early_gives_the_frames_before_its_end(stream: bytes, data: st.DataObject) -> None:
    end = data.draw(st.integers(0, len(stream)))
    with scratch_of(SMALL):
        whole, _ = read(stream, [50])
        found, refused = read(stream[:end], [7])
        agree(stream[:end], [7], SMALL)
    assert not refused
    assert found == whole[: len(found)]


@settings(deadline=None, max_examples=100)
@given(st.sampled_from(samples()), st.lists(st.tuples(st.integers(0, 2000), st.integers(1, 255)), max_size=6), cuts)
def test_flipped_bits(stream: bytes, flips: list[tuple[int, int]], cuts: list[int]) -> None:
    wrong = bytearray(stream)
    for at, bits in flips:
        wrong[at % len(wrong)] ^= bits
    with scratch_of(SMALL):
        agree(bytes(wrong), cuts, SMALL)


def test_the_samples_are_read() -> None:
    with scratch_of(SMALL):
        found = [read(stream, [13]) for stream in samples()]
    assert [len(frames) for frames, _ in found] == [1, 3, 2, 2, 0, 0]
    assert [refused for _, refused in found] == [False] * 4 + [True] * 2


def announce(size: int) -> FrameReader:
    """Return a reader that has received the prefix of a frame with a body of `size` bytes."""
    reader = FrameReader(lambda size, device, _: (None, cut(limited(size), device)), attach, lambda *_: None)
    prefix = PREFIX.pack(CALL, 0, 0, 0, 0, size, 1)
    reader.buffer()[: len(prefix)] = prefix
    assert list(reader.advance(len(prefix))) == []
    return reader


@pytest.mark.parametrize("size", [2**63 - 100, 2**63, 2**64 - 1])
def test_a_length_above_all_memory_is_refused(size: int) -> None:
    with pytest.raises(ProtocolViolation):
        announce(size)


@pytest.mark.skipif(not HAS_PROC, reason="the platform does not tell the memory used")
def test_an_announced_body_takes_no_memory_until_it_arrives() -> None:
    before = resident()
    reader = announce(1 << 29)
    grown = resident() - before
    assert len(reader.buffer()) > 0
    assert grown < 1 << 24
