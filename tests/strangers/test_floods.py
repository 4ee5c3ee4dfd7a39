"""Members work on during floods of strangers, whose resources are freed afterwards."""

import contextlib
import gc
import itertools
import operator
import random
import resource
import select
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from functools import partial

import pytest

from telegrad._core.security.handshake import MOST_LINES, Hello, Initiator
from telegrad._core.security.keyring import Keyring
from telegrad._core.transport import listener
from telegrad._core.worker.current import Worker
from tests.cluster import agents, in_threads, wait_until
from tests.strangers.door import (
    HAS_PROC,
    LATE,
    Visitor,
    begin_to_knock,
    descriptors,
    knock,
    new_member,
    resident,
    say,
    wait_closed,
)

KEY = "the key of the group"
OTHER = Keyring([b"another key"])
CROWD = 1000
NORMAL = 0.05  # seconds of a call on a busy machine; waiting for strangers takes longer
MEGABYTE = 1 << 20

pytestmark = pytest.mark.skipif(not HAS_PROC, reason="the platform does not tell what a process uses")


@pytest.fixture
def worker() -> Iterator[tuple[Worker, Worker]]:
    with agents(2, transport="tcp", key=KEY) as (a, b):
        latency(a)
        yield a, b


def latency(worker: Worker, calls: int = 50, to: str = "w1") -> float:
    """Return the median duration of a call."""
    took = []
    for number in range(calls):
        start = time.perf_counter()
        assert worker.agent.call(to, operator.add, (number, 1), None, timeout=20) == number + 1
        took.append(time.perf_counter() - start)
    return statistics.median(took)


@contextlib.contextmanager
def given_back() -> Iterator[None]:
    """Assert that descriptors, threads, and most of the memory are freed at the end."""
    gc.collect()
    memory, files, threads = resident(), descriptors(), threading.active_count()
    yield
    wait_until(lambda: descriptors() <= files)
    wait_until(lambda: threading.active_count() <= threads + 1)
    assert resident() - memory < 32 * MEGABYTE


@contextlib.contextmanager
def crowd(worker: Worker, count: int = CROWD) -> Iterator[list[socket.socket]]:
    """Open connections that send nothing."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(4 * count, hard) if hard != resource.RLIM_INFINITY else 4 * count
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    strangers = []
    try:
        strangers += [begin_to_knock(worker) for _ in range(count)]
        yield strangers
    finally:
        for sock in strangers:
            sock.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def greet(worker: Worker) -> None:
    """Run the handshake of a new member."""
    with knock(worker) as sock:
        sock.settimeout(2.0)
        Visitor(sock, new_member(worker))


def test_a_silent_crowd_does_not_slow_members(worker: tuple[Worker, Worker]) -> None:
    a, b = worker
    with given_back():
        before = resident()
        with crowd(b):
            assert latency(a, 200) < NORMAL
            assert resident() - before < 32 * MEGABYTE


def test_a_new_member_connects_despite_a_crowd(worker: tuple[Worker, Worker]) -> None:
    _, b = worker
    with crowd(b, listener.MOST_STRANGERS + 50):
        greet(b)


def test_garbage_from_many_connections(worker: tuple[Worker, Worker], caplog: pytest.LogCaptureFixture) -> None:
    a, b = worker
    heard = []

    def babble(seed: int) -> None:
        chance = random.Random(seed)
        hello = Initiator(OTHER, Hello("w0", 0, "x", ""), "x").start()
        for _ in range(60):
            with knock(b) as sock:
                say(sock, chance.choice([b"", hello[: chance.randrange(40)], hello]))
                say(sock, chance.randbytes(chance.choice([3, 100, 3000, 100_000])))
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_WR)
                heard.append(wait_closed(sock))

    with given_back():
        *_, during = in_threads(*[partial(babble, seed) for seed in range(4)], partial(latency, a, 100))
    assert len(heard) == 240
    assert during < NORMAL
    assert len([r for r in caplog.records if "was refused" in r.getMessage()]) == MOST_LINES
    with b.agent._connections.listener._lock:
        assert b.agent._connections.listener._refusals.left_out(float("inf")) == [("127.0.0.1", 240 - MOST_LINES)]
    greet(b)


def test_a_slow_stranger_is_closed_although_it_is_never_silent(worker: tuple[Worker, Worker]) -> None:
    a, b = worker
    b.agent._connections.listener.patience = 0.4
    hello = Initiator(OTHER, Hello("w0", 0, "x", ""), "x").start()
    with given_back(), contextlib.ExitStack() as stack:
        slow = [stack.enter_context(knock(b)) for _ in range(20)]
        start = time.monotonic()
        for byte in itertools.takewhile(lambda _: time.monotonic() - start < 0.4 + LATE, hello):
            for sock in slow:
                say(sock, bytes([byte]))
            assert latency(a, 3) < NORMAL
            if select.select(slow, [], [], 0.05)[0]:  # too often for an idle connection
                break
        for sock in slow:
            assert wait_closed(sock) == b""
        assert time.monotonic() - start < 0.4 + LATE + 1.0


def test_a_member_may_be_slow(worker: tuple[Worker, Worker]) -> None:
    """The handshake of the member arrives byte by byte."""
    _, b = worker
    end = new_member(b)
    with knock(b) as sock:
        said = end.start()
        while not end.done:
            for at in range(len(said)):
                sock.sendall(said[at : at + 1])
                time.sleep(0.002)
            said = end.receive(sock.recv(4096))
