"""Tests of very large tensors between hosts, which are sent over several TCP streams."""

import contextlib
import logging
import pathlib
import random
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from time import monotonic
from typing import Any, cast

import pytest
import torch

from telegrad._core.agent.connections import Connections
from telegrad._core.memory import extra_streams
from telegrad._core.memory.extra_streams import LANES
from telegrad._core.sockets import tune_tcp
from telegrad._core.transport import connect, listener
from telegrad._core.transport.connect import Target
from telegrad._core.transport.link import Link
from telegrad._core.worker.current import Worker
from telegrad.errors import PeerLost
from tests.cluster import agents, group, in_threads, run_all, wait_until
from tests.transport.test_tls import Authority

LARGE = 100_000  # bytes, for these tests
SLOW = 20_000_000  # bytes per second
SO_MAX_PACING_RATE = 47  # Linux's number; Python has no name for it
Carry = Callable[[memoryview, Any], memoryview]

order: list[int] = []


def echo(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def make(size: int) -> torch.Tensor:
    return torch.arange(size, dtype=torch.uint8)


def total(*tensors: torch.Tensor) -> int:
    return sum(int(tensor.sum()) for tensor in tensors)


def note(number: int, *_: object) -> None:
    order.append(number)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extra_streams, "STRIPE_FROM", LARGE)
    order.clear()


@pytest.fixture(params=["plain", pytest.param("tls", marks=pytest.mark.nightly)])
def pair(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Iterator[list[Worker]]:
    tls = Authority(tmp_path, "ours").files("worker") if request.param == "tls" else None
    with agents(2, transport="tcp", tls=tls, num_worker_threads=1) as workers:
        yield workers


def links(worker: Worker) -> list[Link]:
    """Return the connection that a worker has made, and the one that it has accepted."""
    connections = worker.agent._connections
    return [*(cast(Link, peer.link) for peer in connections._peers.values()), *connections._accepted]


def widen(a: Worker, b: Worker) -> None:
    """Wait until the connection from one to the other carries stripes both ways."""
    tensor = torch.ones(LARGE, dtype=torch.uint8)
    assert torch.equal(a.agent.call("w1", echo, (tensor,), None), tensor)
    wait_until(lambda: links(a)[0].lanes_out.ready and links(b)[0].lanes_out.ready)


def carried(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which the size of each memory that this worker's connections stripe is added."""
    sizes: list[int] = []

    def note_and_carry(carry: Carry, memory: memoryview, keeper: Any) -> memoryview:
        sizes.append(len(memory))
        return carry(memory, keeper)

    for each in {lane for link in links(worker) for lane in (link.lanes_in, link.lanes_out)}:
        monkeypatch.setattr(each, "carry", partial(note_and_carry, each.carry))
    return sizes


def test_large_tensors_are_striped_both_ways(pair: list[Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = pair
    widen(a, b)
    sizes = carried(a, monkeypatch)
    for size in (LARGE - 1, LARGE, LARGE + 1, 4_000_003):
        tensor = torch.randint(0, 255, (size,), dtype=torch.uint8)
        assert torch.equal(a.agent.call("w1", echo, (tensor,), None), tensor)
    assert sizes == [size for size in (LARGE, LARGE + 1, 4_000_003) for _ in ("there", "back")]


def test_calls_keep_their_order(pair: list[Worker]) -> None:
    a, b = pair
    widen(a, b)
    tensor = torch.ones(40 * LARGE, dtype=torch.uint8)
    for future in [a.agent.call_async("w1", note, (i, tensor) if i % 3 == 0 else (i,), None) for i in range(60)]:
        future.wait()
    assert order == list(range(60))


def test_large_and_small_tensors_of_many_threads(pair: list[Worker]) -> None:
    a, b = pair
    widen(a, b)

    def work(seed: int) -> None:
        choice = random.Random(seed)
        for _ in range(40):
            size = choice.choice([3, 1000, LARGE, 5 * LARGE, 1_500_000])
            if choice.random() < 0.5:
                assert torch.equal(a.agent.call("w1", make, (size,), None), make(size))
            else:
                futures = [a.agent.call_async("w1", total, (make(size), make(7)), None) for _ in range(4)]
                assert {future.wait() for future in futures} == {total(make(size), make(7))}

    in_threads(*[lambda seed=seed: work(seed) for seed in range(4)])


@pytest.mark.parametrize("end", ["sender's", "receiver's"])
def test_a_broken_stream_fails_its_call_and_the_next_call_reconnects(pair: list[Worker], end: str) -> None:
    a, b = pair
    widen(a, b)
    broken = links(a)[0].lanes_out if end == "sender's" else links(b)[0].lanes_in
    large = torch.ones(64 << 20, dtype=torch.uint8)
    carry = broken.carry

    def carry_and_break(memory: memoryview, keeper: Any) -> memoryview:
        with contextlib.suppress(OSError):
            broken._socks[1].shutdown(2)
        return carry(memory, keeper)

    broken.carry = carry_and_break
    start = monotonic()
    with pytest.raises(PeerLost, match="'w1' was lost"):
        a.agent.call("w1", total, (large,), None)
    assert monotonic() - start < 10
    assert a.agent.call("w1", total, (large,), None) == 64 << 20


def test_calls_work_without_streams_that_cannot_be_made(pair: list[Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    a = pair[0]
    begun = []
    begin = Connections._begin_widen

    def note_and_begin(connections: Connections, target: Target, link: Link, sends: bool) -> None:
        begun.append(sends)
        begin(connections, target, link, sends)

    monkeypatch.setattr(Connections, "_begin_widen", note_and_begin)
    monkeypatch.setattr(Connections, "_join", lambda self, sock, *_: sock.close())
    tensor = torch.ones(LARGE, dtype=torch.uint8)
    for _ in range(20):
        assert torch.equal(a.agent.call("w1", echo, (tensor,), None), tensor)
    assert begun == [True, False]  # once for each direction
    assert not links(a)[0].lanes_out.ready


def test_the_reason_for_a_single_stream_is_logged(
    pair: list[Worker], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    a, _ = pair
    a.agent.call("w1", total, (torch.ones(1),), None)
    monkeypatch.setattr(Connections, "_reach", lambda *_: (_ for _ in ()).throw(OSError("no way")))
    with caplog.at_level(logging.INFO, "telegrad"):
        tensor = torch.ones(LARGE, dtype=torch.uint8)
        assert torch.equal(a.agent.call("w1", echo, (tensor,), None), tensor)
        wait_until(lambda: len(caplog.messages) == 2)
    assert set(caplog.messages) == {"telegrad: worker 'w1' and this one use one stream for large tensors: no way"}


def lane_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "telegrad-lane"]


def test_the_threads_of_streams_end_with_the_group(tmp_path: pathlib.Path) -> None:
    before = len(lane_threads())
    with agents(2, transport="tcp") as (a, b):
        widen(a, b)
        assert len(lane_threads()) == before + 4 * LANES
    wait_until(lambda: len(lane_threads()) == before)


@pytest.mark.skipif(sys.platform != "linux", reason="needs sockets that can be told to be slow")
def test_several_slow_streams_are_faster_than_a_single_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def tune_and_slow_down(sock: socket.socket, silence: float) -> None:
        tune_tcp(sock, silence)
        sock.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, SLOW)

    for module in (connect, listener):
        monkeypatch.setattr(module, "tune_tcp", tune_and_slow_down)
    with agents(2, transport="tcp") as (a, b):
        tensor, took = torch.ones(SLOW // 2, dtype=torch.uint8), []
        for least in (SLOW, LARGE):
            monkeypatch.setattr(extra_streams, "STRIPE_FROM", least)
            if least == LARGE:
                widen(a, b)
            times = []
            for _ in range(1 if least == SLOW else 5):  # the shortest, since other programs may delay some
                start = monotonic()
                assert a.agent.call("w1", total, (tensor,), None) == SLOW // 2
                times.append(monotonic() - start)
            took.append(min(times))
        assert took[1] < took[0] / 2  # of four streams


def talk(rank: int, size: int) -> int:
    from telegrad import rpc

    extra_streams.STRIPE_FROM = LARGE
    to = f"worker{1 - rank}"
    for _ in range(30):
        assert rpc.rpc_sync(to, total, (make(size),)) == total(make(size))
        assert torch.equal(rpc.rpc_sync(to, make, (size,)), make(size))
    return len(lane_threads()) // 2  # half are of the connection to this worker


@pytest.mark.nightly
def test_two_processes_both_ways_at_once() -> None:
    with group(2, transport="tcp") as workers:
        assert run_all(workers, talk, 3_000_000) == [2 * LANES] * 2
