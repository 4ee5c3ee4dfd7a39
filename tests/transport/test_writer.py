"""The writer sends the bytes of the outbox, and keeps their memory alive until they are sent."""

import contextlib
import itertools
import random
import socket
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest

from telegrad._core.memory.blobs import Chunk
from telegrad._core.memory.device_streams import Streams
from telegrad._core.memory.staging import Staging
from telegrad._core.security.noise import JOINED, KEY, RECORD, CipherState, RecordReader, RecordWriter
from telegrad._core.transport import writer as writers
from telegrad._core.transport.link import Link
from telegrad._core.transport.writer import MOST_BUFFERS, Writer
from telegrad._core.wire.messages import CALL, Message
from telegrad.errors import PeerError
from tests.links import LinkEnd

SECRET = bytes(KEY)
FREED = 0xDD
SIZES = [1, 100, JOINED // 3, JOINED - 1, JOINED, RECORD - 1, RECORD, RECORD + 1, RECORD + JOINED // 2, 2 * RECORD + 7]


class Keeper:
    """Owns memory, which is overwritten when the owner is released."""


def chunk(content: bytes) -> Chunk:
    memory, keeper = bytearray(content), Keeper()
    weakref.finalize(keeper, lambda: memory.__setitem__(slice(None), bytes([FREED]) * len(memory)))
    return Chunk(memoryview(memory).toreadonly(), (), keeper)


def received(sock: socket.socket, size: int, encrypted: bool) -> bytes:
    reader, found = RecordReader(CipherState(SECRET)), b""
    while len(found) < size:
        if not encrypted:
            found += sock.recv(1 << 16)
            continue
        count = sock.recv_into(reader.buffer())
        target = memoryview(bytearray(2 * RECORD))
        while taken := reader.decrypt_into(target, count):
            found, count = found + bytes(target[:taken]), 0
            if not reader.has_more:
                break
    return found


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "records"])
@pytest.mark.parametrize("seed", range(10))
def test_memory_is_kept_alive_until_it_is_sent(seed: int, encrypted: bool) -> None:
    pick = random.Random(seed)
    contents = [pick.randbytes(pick.choice(SIZES)) for _ in range(12)]
    ours, theirs = socket.socketpair()
    records = RecordWriter(CipherState(SECRET)) if encrypted else None
    with contextlib.closing(ours), contextlib.closing(theirs):
        ours.setblocking(False)
        theirs.settimeout(30)
        writable = threading.Event()
        found: list[bytes] = []
        reading = threading.Thread(
            target=lambda: found.append(received(theirs, sum(map(len, contents)), encrypted)), daemon=True
        )
        writer = Writer(
            ours, contextlib.nullcontext(), Staging(Streams()), lambda _: writable.set(), writable.set, records
        )
        writer.outbox.extend(map(chunk, contents))
        reading.start()
        while writer.is_busy:
            writer.flush(is_writable=True)
        reading.join(30)
    assert found == [b"".join(contents)]


Steps = list[Callable[[], None]]


def merged(one: list[Any], other: list[Any]) -> Iterator[list[Any]]:
    """Yield all interleavings of the steps of two threads."""
    for places in itertools.combinations(range(len(one) + len(other)), len(one)):
        first, second = iter(one), iter(other)
        yield [next(first if place in places else second) for place in range(len(one) + len(other))]


def test_a_queue_that_two_answers_hold_up_is_released_in_any_order() -> None:
    """A writer keeps one callback: a connection has one caller, so each callback releases the same queue."""
    sock = socket.socket()
    writer = Writer(sock, contextlib.nullcontext(), Staging(Streams()), lambda _: None, lambda: None)
    sock.close()
    full = [Chunk(b"x")] * (MOST_BUFFERS + 1)
    held = False
    acts: dict[int, Callable[[], None]] = {}

    def hold_up(is_held_up: bool) -> None:
        nonlocal held
        held = is_held_up

    def telling(thread: int) -> Steps:
        return [lambda: acts.update({thread: writer.take_drained()}), lambda: acts[thread]()]

    def answering(thread: int) -> Steps:
        """Return the steps of a thread that finds the connection congested."""
        register = partial(setattr, writer, "drained", partial(hold_up, False))
        return [partial(hold_up, True), register, *telling(thread)]

    def drained() -> None:
        writer.outbox.clear()
        writer.waits = False

    writing = [drained, *telling(0)]
    for answers in merged(answering(1), answering(2)):
        for steps in merged(answers, writing):
            writer.outbox.extend(full)
            writer.waits, held = True, False
            for step in steps:
                step()
            assert not held
            assert writer.drained is None


def test_unread_data_is_noticed_at_any_descriptor() -> None:
    """`select` takes none above 1023."""
    with contextlib.closing(LinkEnd(descriptor=1500)) as end:
        assert not end.link.has_unread()
        end.theirs.send(b"x")
        assert end.link.has_unread()
        end.link.close(PeerError("the end"))
        assert not end.link.has_unread()


@pytest.mark.parametrize(
    ("place", "name", "step"),
    [
        (Writer, "_has_next", Link.on_writable),  # as of a device that fails
        (Writer, "_has_next", lambda link: link.send(Message(CALL, 1))),
        (writers, "_new", lambda link: link.send(Message(CALL, 1, body=bytes(1 << 24)))),  # a part was sent
    ],
)
def test_an_error_during_a_write_ends_only_the_connection(
    place: Any, name: str, step: Callable[[Link], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.closing(LinkEnd()) as end:
        if name == "_has_next":
            end.link._outbox.append(Chunk(b"x"))
        monkeypatch.setattr(place, name, Mock(side_effect=MemoryError("too little")))
        with contextlib.suppress(MemoryError):  # of the sender
            step(end.link)
        assert "a message could not be sent (MemoryError('too little'))" in str(end.link.closed)
        with pytest.raises(PeerError):  # it would be taken for the rest
            end.link.send(Message(CALL, 2))
