"""Three hosts with slow links between them: network namespaces of the test's own, shaped by `tc`."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
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

HOSTS = 3
RATE = "160mbit"  # 20 MB/s, of each link in each direction
SIZE = 40_000_000  # bytes of a version: two seconds of a link
READERS = 8
ADDRESS = "10.233.79.{}"
NEW_NETWORK = 0x40000000  # CLONE_NEWNET

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        not (shutil.which("ip") and shutil.which("tc")) or os.geteuid() != 0,
        reason="needs root, `ip` and `tc` (apt-get install iproute2) to make network namespaces",
    ),
]


def run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True, timeout=30)


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Namespaces at a bridge; what a host sends goes at the rate of its link, and what it gets, too."""
    bridge, names = f"telegrad{os.getpid()}b", [f"telegrad{os.getpid()}w{host}" for host in range(HOSTS)]
    try:
        for name in (bridge, *names):
            run("ip", "netns", "add", name)
        run("ip", "-n", bridge, "link", "add", "bridge", "type", "bridge")
        run("ip", "-n", bridge, "link", "set", "bridge", "up")
        for host, name in enumerate(names):
            cable = f"cable{host}"
            run("ip", "link", "add", cable, "netns", bridge, "type", "veth", "peer", "name", "wire", "netns", name)
            run("ip", "-n", bridge, "link", "set", cable, "master", "bridge")
            run("ip", "-n", name, "address", "add", f"{ADDRESS.format(host + 1)}/24", "dev", "wire")
            for place, link in ((bridge, cable), (name, "wire"), (name, "lo")):
                run("ip", "-n", place, "link", "set", link, "up")
            for place, link in ((bridge, cable), (name, "wire")):
                shape = ("rate", RATE, "burst", "256kb", "latency", "100ms")
                run("tc", "-n", place, "qdisc", "add", "dev", link, "root", "tbf", *shape)
        yield names
    except subprocess.CalledProcessError as error:
        pytest.skip(f"there can be no such hosts here: {error.stderr}")
    finally:
        for name in (*names, bridge):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def join(rank: int, count: int, host: str, port: int) -> None:
    torch.set_num_threads(1)
    with open(f"/var/run/netns/{host}") as file:
        assert ctypes.CDLL(None, use_errno=True).setns(file.fileno(), NEW_NETWORK) == 0, os.strerror(ctypes.get_errno())
    init(rank, count, port, init_method=f"tcp://{ADDRESS.format(1)}:{port}", rpc_timeout=120)


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
def joined(hosts: list[str], readers: int, deltas: Deltas) -> Iterator[list[Process]]:
    port, count = free_port(), readers + 1
    with processes(count) as group:
        places = [hosts[0], *(hosts[1 + number % (HOSTS - 1)] for number in range(readers))]
        for rank, (process, host) in enumerate(zip(group, places, strict=True)):
            process.begin(join, rank, count, host, port)
        for process in group:
            process.end(60)
        group[0].run(publish_from, SIZE, deltas)
        yield group


def test_many_readers_on_slow_links_take_little_longer_than_one(hosts: list[str]) -> None:
    """Each link carries each version once."""
    with joined(hosts, READERS, "off") as group:
        one = seconds(group[0], group[1:2])
        all_ = seconds(group[0], group[1:])
        print(f"one reader {one:.2f} s, {READERS} readers {all_:.2f} s")
        assert all_ <= 1.5 * one


def test_what_has_changed_takes_a_fraction_of_the_time(hosts: list[str]) -> None:
    """The deltas go along the chain, too."""
    taken = {}
    for deltas in ("off", "fast"):
        with joined(hosts, 2, deltas) as group:
            taken[deltas] = seconds(group[0], group[1:])
    print(f"whole {taken['off']:.2f} s, changes {taken['fast']:.2f} s")
    assert taken["fast"] * 2 <= taken["off"]
