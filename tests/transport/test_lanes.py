"""Stripes: the parts of a large content that are sent over several streams are joined again."""

import contextlib
import os
import socket
import threading
from collections.abc import Iterator

import pytest

from telegrad._core.memory import extra_streams
from telegrad._core.memory.extra_streams import LANES, READY, ExtraStreams
from telegrad.errors import ProtocolViolation
from tests.cluster import PATIENCE, wait_until

LARGE = 1 << 20


@pytest.fixture(autouse=True)
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extra_streams, "STRIPE_FROM", LARGE)


class Direction:
    """Both ends of one direction, joined by streams; the test copies the first stripe."""

    def __init__(self) -> None:
        self.failed = threading.Event()
        self.made: list[str] = []
        self.sending = ExtraStreams(True, self._fail, lambda: self.made.append("lanes"))
        self.receiving = ExtraStreams(False, self._fail, None)
        self.pairs: list[tuple[socket.socket, socket.socket]] = []

    def _fail(self, error: BaseException) -> None:
        self.error = error
        self.failed.set()

    def join(self) -> None:
        here, there = socket.socketpair()
        self.pairs.append((here, there))
        self.receiving.add(there, b"")
        self.sending.add(here, b"")

    def widen(self) -> None:
        for _ in range(LANES):
            self.join()
        wait_until(lambda: self.sending.ready)

    def pass_on(self, data: bytes) -> bytearray:
        """Send `data`; return the memory in which it arrives."""
        came = bytearray(len(data))
        theirs = self.receiving.carry(memoryview(came), None)
        ours = self.sending.carry(memoryview(data), None)
        assert len(ours) == len(theirs)
        theirs[:] = ours
        return came

    def close(self) -> None:
        self.sending.close()
        self.receiving.close()


def settle(lanes: ExtraStreams) -> None:
    done = threading.Event()
    if lanes.afterwards(done.set):
        assert done.wait(PATIENCE)


@pytest.fixture
def direction() -> Iterator[Direction]:
    with contextlib.closing(Direction()) as made:
        yield made


@pytest.mark.parametrize("size", [1, 4096, 4 * 4096, 4 * 4096 + 1, 123_457, (1 << 22) + 3])
def test_striped_data_is_joined_again(direction: Direction, size: int) -> None:
    direction.widen()
    data = os.urandom(size)
    came = direction.pass_on(data)
    settle(direction.receiving)
    assert came == data
    assert direction.receiving.is_idle()


def test_many_contents_arrive_in_order(direction: Direction) -> None:
    direction.widen()
    sent = [os.urandom(size) for size in range(1, 200_000, 7919)]
    came = [direction.pass_on(data) for data in sent]
    settle(direction.receiving)
    assert came == sent


@pytest.mark.parametrize("size", [1, 4 * 4096 + 1, (1 << 22) + 3])
def test_a_dropped_content_does_not_displace_the_next(direction: Direction, size: int) -> None:
    direction.widen()
    first = direction.sending.carry(memoryview(bytearray(size)), None)
    assert sum(map(len, direction.receiving.drop(size))) == len(first)
    data = os.urandom(size)
    came = direction.pass_on(data)
    settle(direction.receiving)
    assert came == data


def test_streams_are_made_once_and_for_large_contents_only(direction: Direction) -> None:
    assert not direction.sending.serve(LARGE - 1)
    assert not direction.sending.wanted
    assert not direction.sending.serve(LARGE)
    assert direction.sending.wanted
    direction.sending.make_wanted()
    assert not direction.sending.serve(LARGE)
    assert not direction.sending.wanted
    assert direction.made == ["lanes"]


def test_contents_are_striped_only_after_all_streams_are_ready(direction: Direction) -> None:
    for _ in range(LANES - 1):
        direction.join()
    here, there = socket.socketpair()
    direction.sending.add(here, b"")
    wait_until(lambda: direction.sending._greeted == LANES - 1)
    assert not direction.sending.serve(LARGE)
    there.sendall(READY)
    wait_until(lambda: direction.sending.serve(LARGE))
    there.close()


def test_a_stream_that_closes_before_its_answer_is_no_failure(direction: Direction) -> None:
    here, there = socket.socketpair()
    direction.sending.add(here, b"")
    there.close()
    wait_until(lambda: here.fileno() < 0)
    assert not direction.failed.is_set()
    assert not direction.sending.ready


def test_stripes_without_streams_are_refused(direction: Direction) -> None:
    direction.join()
    with pytest.raises(ProtocolViolation, match="no streams"):
        direction.receiving.carry(memoryview(bytearray(LARGE)), None)


@pytest.mark.parametrize("end", [0, 1], ids=["sender's", "receiver's"])
def test_a_stream_that_ends_inside_of_a_stripe_is_a_failure(direction: Direction, end: int) -> None:
    direction.widen()
    size = 64 << 20  # more than the socket buffers hold
    receiving = direction.receiving if end == 0 else direction.sending
    receiving.carry(memoryview(bytearray(size)), None)
    direction.pairs[1][end].shutdown(socket.SHUT_RDWR)
    assert direction.failed.wait(PATIENCE)
    assert isinstance(direction.error, OSError)


def test_a_callback_for_the_rest_is_called_when_the_streams_close(direction: Direction) -> None:
    direction.widen()
    direction.receiving.carry(memoryview(bytearray(100_000)), None)
    called = threading.Event()
    assert direction.receiving.afterwards(called.set)
    direction.receiving.close()
    assert called.is_set()
    assert not direction.receiving.afterwards(called.clear)


def test_late_and_surplus_streams_are_closed(direction: Direction) -> None:
    direction.widen()
    for closed in (False, True):
        if closed:
            direction.receiving.close()
        here, there = socket.socketpair()
        direction.receiving.add(there, b"")
        assert there.fileno() < 0
        here.close()
