"""Shared memory of a peer is mapped only if it cannot shrink, and unused descriptors are closed."""

import array
import errno
import fcntl
import gc
import logging
import os
import pathlib
import resource
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from telegrad._core.memory.blobs import DESCRIPTORS_AT_ONCE, MOST_UNNAMED, Outgoing, Prepared
from telegrad._core.memory.warm_memory import SHARING, SharedBlockPool
from telegrad._core.transport import link as links
from telegrad._core.wire.messages import (
    CALL,
    COMMON,
    ENTRY,
    OPENED,
    RELEASE,
    RETIRE,
    Message,
    Unreceived,
    encode,
    pack_numbers,
)
from telegrad._core.wire.tensors import HOST
from tests.links import LinkEnd
from tests.strangers.door import descriptors

SIZE = 1 << 20
pytestmark = pytest.mark.skipif(not SHARING, reason="this platform has no memory files")


class Receiver(LinkEnd):
    def __init__(self) -> None:
        super().__init__(SharedBlockPool(SIZE))
        self.theirs.settimeout(10)
        self.link.reading.watch()

    @property
    def blobs(self) -> list[torch.Tensor]:
        return [blob for frame in self.frames for blob in frame.blobs]

    def pass_on(self, data: bytes, fds: list[int]) -> None:
        """Send a frame with descriptors, and have the link read it."""
        self.theirs.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))])
        while self.link.on_readable():
            pass


@pytest.fixture(scope="module", autouse=True)
def _others_are_collected() -> None:
    gc.collect()  # a collection of all objects takes a second if many tests ran before


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    gc.collect(1)  # closes the descriptors that the last test has left
    before = descriptors()
    made = Receiver()
    yield made
    made.frames.clear()
    made.close()
    assert descriptors() == before


def memory_file(size: int, seals: int, flags: int = 0) -> int:
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING | flags)
    os.ftruncate(fd, size)
    if seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def plain_file(folder: pathlib.Path) -> int:
    fd = os.open(folder / "file", os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, SIZE)
    return fd


def one_end(pipe: tuple[int, int]) -> int:
    os.close(pipe[1])
    return pipe[0]


SHRINK = fcntl.F_SEAL_SHRINK if SHARING else 0
UNFIT: dict[str, Callable[[pathlib.Path], int]] = {
    "not sealed": lambda _: memory_file(SIZE, 0),
    "may shrink": lambda _: memory_file(SIZE, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL),
    "too small": lambda _: memory_file(SIZE - 1, SHRINK),
    "empty": lambda _: memory_file(0, SHRINK),
    "no sealing": lambda _: os.memfd_create("test", 0),
    "file": plain_file,
    "folder": lambda folder: os.open(folder, os.O_RDONLY),
    "path": lambda folder: os.open(folder, os.O_PATH),
    "pipe": lambda _: one_end(os.pipe()),
    "device": lambda _: os.open("/dev/zero", os.O_RDWR),
    "socket": lambda _: socket.socket().detach(),
}


@pytest.mark.parametrize("common", [0, COMMON], ids=["lent", "common"])
@pytest.mark.parametrize("what", UNFIT)
def test_memory_that_can_shrink_is_refused(receiver: Receiver, tmp_path: pathlib.Path, what: str, common: int) -> None:
    fd = UNFIT[what](tmp_path)
    receiver.pass_on(encode(Message(CALL, 1), ENTRY.pack(common | 1, SIZE, HOST)), [fd])
    os.close(fd)
    assert not receiver.blobs
    assert "shared block" in str(receiver.link.closed)
    assert "is refused" in str(receiver.link.closed)


def test_huge_pages_are_not_mapped(receiver: Receiver) -> None:
    try:
        fd = memory_file(0, 0, os.MFD_HUGETLB)
        os.ftruncate(fd, 2 * SIZE)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SHRINK)
    except OSError as error:
        pytest.skip(f"this machine has no huge pages: {error}")
    receiver.pass_on(encode(Message(CALL, 1), ENTRY.pack(1, SIZE, HOST)), [fd])
    os.close(fd)
    assert "huge pages" in str(receiver.link.closed)


@pytest.mark.parametrize("common", [0, COMMON], ids=["lent", "common"])
def test_mapped_memory_cannot_be_truncated(receiver: Receiver, common: int) -> None:
    fd = memory_file(SIZE, SHRINK)
    os.pwrite(fd, b"\1" * SIZE, 0)
    receiver.pass_on(encode(Message(CALL, 1), ENTRY.pack(common | 1, SIZE, HOST)), [fd])
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 0)
    os.close(fd)
    assert receiver.link.closed is None
    assert int(receiver.blobs[0].sum()) == SIZE


def test_read_only_memory_is_refused(receiver: Receiver) -> None:
    fd = memory_file(SIZE, SHRINK | fcntl.F_SEAL_WRITE)
    receiver.pass_on(encode(Message(CALL, 1), ENTRY.pack(1, SIZE, HOST)), [fd])
    os.close(fd)
    assert "is refused" in str(receiver.link.closed)


@pytest.mark.parametrize("common", [0, COMMON], ids=["lent", "common"])
def test_a_block_that_could_not_be_mapped_is_mapped_at_its_next_loan(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch, common: int
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    fd = memory_file(SIZE, SHRINK)
    frame = encode(Message(CALL, 1), ENTRY.pack(common | 1, SIZE, HOST))
    with monkeypatch.context() as patch:
        patch.setattr("telegrad._core.memory.blobs.mmap.mmap", fails)
        receiver.pass_on(frame, [fd])
        again = [fd] if common else []  # common blocks are passed each time
        receiver.pass_on(frame, again)
    receiver.pass_on(frame, again)
    os.close(fd)
    assert receiver.link.closed is None
    assert [type(blob) for blob in receiver.blobs] == [Unreceived, Unreceived, torch.Tensor]
    assert [*receiver.link._maps.released] == [common | 1] * 2  # the peer may lend it to other calls


@pytest.mark.parametrize("end", ["retired", "closed"])
def test_a_block_that_was_never_mapped_is_closed(receiver: Receiver, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    monkeypatch.setattr("telegrad._core.memory.blobs._map", Mock(side_effect=MemoryError))
    fd = memory_file(SIZE, SHRINK)
    receiver.pass_on(encode(Message(CALL, 1), ENTRY.pack(1, SIZE, HOST)), [fd])
    os.close(fd)
    assert len(receiver.link._maps._unmapped) == 1
    if end == "retired":
        receiver.pass_on(encode(Message(RETIRE, body=pack_numbers([1]))), [])
        assert not receiver.link._maps._unmapped  # the fixture counts descriptors


@contextmanager
def null(count: int) -> Iterator[list[int]]:
    fd = os.open("/dev/null", os.O_RDONLY)
    yield [fd] * count
    os.close(fd)


def test_unnamed_descriptors_close_the_link_and_are_closed(receiver: Receiver) -> None:
    before = descriptors()
    most = 0
    for _ in range(MOST_UNNAMED // DESCRIPTORS_AT_ONCE + 1):
        assert receiver.link.closed is None
        with null(DESCRIPTORS_AT_ONCE) as fds:
            receiver.pass_on(encode(Message(RELEASE)), fds)
        most = max(most, descriptors() - before)
    assert most <= MOST_UNNAMED
    assert "without a frame that names them" in str(receiver.link.closed)
    assert descriptors() < before  # the link's own descriptor is closed, too


def test_descriptors_that_were_lost_in_transit_close_the_link(receiver: Receiver) -> None:
    with null(DESCRIPTORS_AT_ONCE + 1) as fds:
        receiver.pass_on(encode(Message(RELEASE)), fds)
    assert "were lost in transit" in str(receiver.link.closed)


def test_a_process_without_descriptors_closes_the_link_with_advice(receiver: Receiver) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with null(8) as fds:
        data = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
        receiver.theirs.sendmsg([encode(Message(RELEASE))], data)
        last = os.dup(0)
        os.close(last)
        resource.setrlimit(resource.RLIMIT_NOFILE, (last + 1, hard))
        try:
            receiver.link.on_readable()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert "ulimit -n" in str(receiver.link.closed)


def test_received_descriptors_are_not_inheritable(receiver: Receiver) -> None:
    with null(1) as fds:
        receiver.pass_on(encode(Message(RELEASE)), fds)
    assert [os.get_inheritable(fd) for fd in receiver.link._maps.arrived] == [False]


@pytest.mark.parametrize("way", ["from device to device", "through the host"])
def test_the_way_of_device_memory_is_logged_without_the_lock_of_the_link(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """A handler of the program may send the line to the same worker."""
    link, commit, lines = receiver.link, Outgoing.commit, []

    def offers(outgoing: Outgoing, prepared: list[Prepared]) -> Any:
        outgoing.opened("it has no handle")
        return commit(outgoing, prepared)

    def note(record: logging.LogRecord) -> bool:
        lines.append((link._lock.locked(), record.getMessage()))
        return False

    monkeypatch.setattr(links, "log", logged := logging.Logger("telegrad", logging.INFO))
    logged.addFilter(note)
    if way == "through the host":
        monkeypatch.setattr(Outgoing, "commit", offers)
        link.send(Message(CALL, 1, blobs=[torch.ones(8)]))
    else:
        receiver.pass_on(encode(Message(OPENED, 1)), [])
    ((is_locked, line),) = lines
    assert way in line
    assert not is_locked
