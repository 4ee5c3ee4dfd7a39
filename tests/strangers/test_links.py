"""After the handshake, too, invalid frames close their own connection and affect nothing else.

Members are trusted not to send them on purpose; an attacker on the network cannot have a frame accepted (test_attacks).
"""

import contextlib
import operator
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from telegrad._core.wire.messages import (
    CALL,
    ENTRY,
    HAS_REFERENCES,
    IN_STREAM,
    NOTICE,
    PREFIX,
    RELEASE,
    RETIRE,
    STRIPED,
    Message,
    encode,
)
from telegrad._core.wire.tensors import HOST
from telegrad._core.worker.current import Worker
from telegrad.errors import PeerLost
from tests.cluster import agents
from tests.links import LinkEnd
from tests.strangers.door import Visitor, knock, new_member, wait_closed
from tests.strangers.streams import SMALL, samples, scratch_of

KEY = "the key of the group"
NO_FRAME = PREFIX.pack(CALL, 0, 0, 0, 0, 2**63, 1)


def hear(stream: bytes, at_once: bool = False) -> tuple[Any, ...]:
    """Return the error of a link that receives this stream, and its frames."""
    with scratch_of(SMALL), contextlib.closing(LinkEnd()) as end:
        if at_once:
            end.link.feed(stream)
        else:
            end.theirs.sendall(stream)
            end.link.reading.watch()
            while end.link.on_readable():
                pass
        return end.link.closed, end.frames


sound = st.sampled_from(samples()[:2])
broken = st.one_of(st.binary(max_size=100), st.just(NO_FRAME))


@settings(deadline=None, max_examples=100)
@given(st.lists(sound, max_size=3).map(b"".join), broken)
@example(b"", encode(Message(CALL, 1), ENTRY.pack(7, 9, HOST)))
@example(b"", encode(Message(CALL, 1), ENTRY.pack(IN_STREAM, 2**64 - 1, HOST)))
@example(b"", encode(Message(CALL, 1), ENTRY.pack(STRIPED, 9, HOST)))
@example(b"", encode(Message(CALL, 1), ENTRY.pack(STRIPED, 9, 0)))
def test_an_invalid_frame_closes_the_link_or_waits_for_more(before: bytes, stream: bytes) -> None:
    closed, frames = hear(before + stream)
    assert closed is None or isinstance(closed, PeerLost) or "shut down" in str(closed)
    assert all(frame.kind not in (RELEASE, RETIRE) for frame in frames)


BEYOND = 1 << 47  # bytes, more than the address space of a process


def test_a_call_without_memory_for_its_tensors_keeps_the_link() -> None:
    closed, frames = hear(encode(Message(CALL, 1), ENTRY.pack(IN_STREAM, BEYOND, HOST)) + bytes(100))
    assert closed is None
    assert frames == []  # until the frame is complete


@pytest.mark.parametrize(
    "stream",
    [encode(Message(NOTICE), ENTRY.pack(IN_STREAM, BEYOND, HOST)), PREFIX.pack(CALL, 0, 0, 0, 0, BEYOND, 1)],
    ids=["control message", "body"],
)
def test_missing_memory_closes_the_link_if_no_call_can_fail_instead(stream: bytes) -> None:
    closed, _ = hear(stream)
    assert str(closed).startswith("this process has no memory left for the data of worker 'w1'")


def test_an_invalid_frame_sent_with_the_handshake_closes_the_link() -> None:
    closed, _ = hear(NO_FRAME, at_once=True)
    assert isinstance(closed, PeerLost)


@pytest.fixture(scope="module")
def worker() -> Iterator[list[Worker]]:
    with agents(2, transport="tcp", key=KEY) as workers:
        yield workers


@pytest.mark.parametrize("behind", [True, False], ids=["with the proof", "later"])
@pytest.mark.parametrize(
    "said",
    [NO_FRAME, encode(Message(RELEASE, body=b"123")), encode(Message(CALL, flags=HAS_REFERENCES, body=b"1"))],
    ids=["length", "list", "cargo"],
)
def test_a_worker_survives_connections_with_invalid_frames(worker: list[Worker], said: bytes, behind: bool) -> None:
    a, b = worker
    with knock(b) as sock:
        visitor = Visitor(sock, new_member(b), said if behind else b"")
        if not behind:
            visitor.say(said)
        wait_closed(sock, patience=1.0)
    assert a.agent.call("w1", operator.add, (1, 2), None) == 3
