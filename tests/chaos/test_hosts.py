"""Tests with workers on three hosts: network namespaces joined by a bridge, which are separated, joined, and lost."""

import queue
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import telegrad.rpc as rpc
from telegrad import errors
from tests.cluster import PATIENCE, Process, init, processes, run_all
from tests.hosts import Network, enter, network

pytestmark = pytest.mark.nightly

HOSTS = 3
SILENCE = 2.0  # seconds, the option
NOTICED = 3 * SILENCE  # within which a silent host is declared lost
TOLD = SILENCE + 2.0  # within which on_lost reports it
PORT = 29555


@pytest.fixture(scope="module")
def net() -> Iterator[Network]:
    with network(HOSTS) as made:
        yield made


@pytest.fixture(scope="module")
def hosts(net: Network) -> Iterator[list[Process]]:
    """Three hosts with a worker each, in one group; a test leaves it whole, except for the last one."""
    with processes(HOSTS) as made:
        for process, namespace in zip(made, net.namespaces, strict=True):
            process.run(enter, namespace)
        run_all(made, join, f"tcp://{net.addresses[0]}:{PORT}")
        for process in made:  # so that all are connected
            assert process.run(call_all, range(HOSTS)) == [number + 1 for number in range(HOSTS)]
        yield made


# On the hosts

_losses: queue.SimpleQueue[tuple[str, float]] = queue.SimpleQueue()


def join(rank: int, url: str) -> None:
    init(rank, HOSTS, PORT, init_method=url, silence=SILENCE)


def hear_losses() -> None:
    rpc.on_lost(lambda worker, _: _losses.put((worker.name, time.monotonic())))


def loss_of(name: str) -> float:
    """Return the time at which the loss was reported."""
    told = ("", 0.0)
    while told[0] != name:
        told = _losses.get(timeout=PATIENCE)
    return told[1]


def call_all(numbers: Any) -> list[int]:
    return [int(rpc.rpc_sync(f"worker{number}", torch.add, (torch.tensor(number), 1))) for number in numbers]


def lose(to: str) -> tuple[str, float]:
    """Return how a call ends whose callee is busy, and after how long."""
    began = time.monotonic()
    try:
        rpc.rpc_sync(to, time.sleep, (PATIENCE,), timeout=0)
    except errors.PeerError as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - began
    return "it succeeded", time.monotonic() - began


def call_until_it_works(to: str) -> bool:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        try:
            return call_all([int(to.removeprefix("worker"))]) == [int(to.removeprefix("worker")) + 1]
        except errors.PeerError:
            continue
    return False


# The tests


def test_a_group_survives_a_partition_that_heals(net: Network, hosts: list[Process]) -> None:
    """One host is separated from the others, which go on; then all reach one another again."""
    hosts[0].begin(lose, "worker1")
    hosts[1].begin(lose, "worker0")
    net.cable(1, "down")
    for host, lost in zip(hosts[:2], ("worker1", "worker0"), strict=True):
        told, seconds = host.end()
        assert told.startswith("PeerLost")
        assert repr(lost) in told
        assert seconds < NOTICED
    assert hosts[0].run(call_all, [0, 2]) == [1, 3]
    net.cable(1, "up")
    for host in hosts:
        for other in hosts:
            assert host.run(call_until_it_works, other.name)


def test_a_host_that_vanishes_is_reported(net: Network, hosts: list[Process]) -> None:
    """Its power fails, so to speak: callers that wait for it get errors, the others go on."""
    for host in hosts[:2]:
        host.run(hear_losses)
        host.begin(lose, "worker2")
    net.cable(2, "down")
    gone = time.monotonic()
    for host in hosts[:2]:
        told, seconds = host.end()
        assert told.startswith("PeerLost")
        assert "'worker2'" in told
        assert seconds < NOTICED
        assert host.run(loss_of, "worker2") - gone < TOLD + SILENCE / 4  # the kernel's timeout has whole seconds
    assert hosts[0].run(call_all, [0, 1]) == [1, 2]
    assert hosts[1].run(call_all, [0, 1]) == [1, 2]
