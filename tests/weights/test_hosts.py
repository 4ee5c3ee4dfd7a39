"""Weights on three hosts with slow links: network namespaces of the test, shaped by `tc`."""

import contextlib
import statistics
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from telegrad.weights import Publisher, Subscriber
from telegrad.weights.deltas import Deltas
from tests.cluster import Process, free_port, init, processes
from tests.hosts import Network, enter, network

HOSTS = 3
RATE = "160mbit"  # 20 MB/s, of each link in each direction
SIZE = 40_000_000  # bytes of a version: two seconds of a link
READERS = 8

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(300)]


@pytest.fixture
def hosts() -> Iterator[Network]:
    """Make hosts whose links are limited in both directions."""
    with network(HOSTS, "tc") as made:
        for host, name in enumerate(made.namespaces):
            for place, link in ((made.bridge, f"cable{host}"), (name, "wire")):
                shape = ("rate", RATE, "burst", "256kb", "latency", "100ms")
                command = ["tc", "-n", place, "qdisc", "add", "dev", link, "root", "tbf", *shape]
                subprocess.run(command, check=True, timeout=30)
        yield made


def join(rank: int, count: int, host: str, url: str) -> None:
    torch.set_num_threads(1)
    enter(host)
    init(rank, count, 0, init_method=url, rpc_timeout=120)


_held: list[Any] = []


def publish_from(size: int, deltas: Deltas) -> None:
    state = {"weight": torch.randn(size // 4)}
    _held.append((Publisher("policy", state, deltas=deltas), state["weight"]))


def publish() -> int:
    publisher, weight = _held[0]
    weight[torch.randint(0, len(weight), (len(weight) // 50,))] += 1
    return int(publisher.publish())


def subscribe() -> None:
    _held.append(Subscriber("worker0", "policy"))


def read(number: int) -> float:
    assert _held[-1].at_least(number).number == number
    return time.monotonic()


def leave() -> None:
    _held.pop().close()


def seconds(learner: Process, readers: list[Process]) -> float:
    for reader in readers:
        reader.run(subscribe)
    taken = []
    for _ in range(3):
        begun = time.monotonic()
        number = learner.run(publish)
        for reader in readers:
            reader.begin(read, number)
        taken.append(max(reader.end(60) for reader in readers) - begun)
    for reader in readers:
        reader.run(leave)
    return statistics.median(taken)


@contextlib.contextmanager
def joined(hosts: Network, readers: int, deltas: Deltas) -> Iterator[list[Process]]:
    url, count = f"tcp://{hosts.addresses[0]}:{free_port()}", readers + 1
    with processes(count) as group:
        places = [0, *(1 + number % (HOSTS - 1) for number in range(readers))]
        for rank, (process, host) in enumerate(zip(group, places, strict=True)):
            process.begin(join, rank, count, hosts.namespaces[host], url)
        for process in group:
            process.end(60)
        group[0].run(publish_from, SIZE, deltas)
        yield group


def test_many_readers_on_slow_links_take_little_longer_than_a_single_one(hosts: Network) -> None:
    """Each link carries each version once."""
    with joined(hosts, READERS, "off") as group:
        one = seconds(group[0], group[1:2])
        all_ = seconds(group[0], group[1:])
        print(f"one reader {one:.2f} s, {READERS} readers {all_:.2f} s")
        assert all_ <= 1.5 * one


def test_deltas_take_a_fraction_of_the_time(hosts: Network) -> None:
    """Deltas are passed along the chain of hosts, too."""
    taken = {}
    for deltas in ("off", "fast"):
        with joined(hosts, 2, deltas) as group:
            taken[deltas] = seconds(group[0], group[1:])
    print(f"whole {taken['off']:.2f} s, changes {taken['fast']:.2f} s")
    assert taken["fast"] * 2 <= taken["off"]
