"""Another host that falls silent, and two hosts that share a kernel: in network namespaces of the test's own."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import time
from collections.abc import Iterator

import pytest
import torch

import telegrad.rpc as rpc
from telegrad import errors
from tests.cluster import PATIENCE, free_port, init, processes

SILENCE = 2.0
NEW_NETWORK = 0x40000000  # CLONE_NEWNET
ADDRESSES = "10.231.77.1", "10.231.77.2"

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(
        not shutil.which("ip") or not hasattr(os, "geteuid") or os.geteuid() != 0,
        reason="needs root and `ip` (apt-get install iproute2) to make network namespaces",
    ),
]


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Two network namespaces with a wire between them."""
    names = [f"telegrad{os.getpid()}{end}" for end in "ab"]
    made = []
    try:
        for name in names:
            ip("netns", "add", name)
            made.append(name)
        ip("link", "add", "wire", "netns", names[0], "type", "veth", "peer", "name", "wire", "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", "wire")
            ip("-n", name, "link", "set", "wire", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in made:
            ip("netns", "delete", name)


def move_to(namespace: str) -> None:
    """This process belongs to that host from now on."""
    with open(f"/var/run/netns/{namespace}") as file:
        assert ctypes.CDLL(None, use_errno=True).setns(file.fileno(), NEW_NETWORK) == 0, os.strerror(ctypes.get_errno())


def join(namespace: str, rank: int, port: int) -> None:
    move_to(namespace)
    init(rank, 2, port, init_method=f"tcp://{ADDRESSES[0]}:{port}", silence=SILENCE)


def add() -> float:
    return float(rpc.rpc_sync("worker1", torch.add, (torch.ones(1 << 16), 1)).sum())


def wait_in_vain() -> tuple[str, float]:
    """How a call ends whose callee sleeps, and after how long."""
    start = time.monotonic()
    with pytest.raises(errors.PeerLost) as caught:
        rpc.rpc_sync("worker1", time.sleep, (PATIENCE,), timeout=0)
    return str(caught.value), time.monotonic() - start


def test_a_host_that_falls_silent(hosts: list[str]) -> None:
    port = free_port()
    with processes(2) as workers:
        for rank, worker in enumerate(workers):
            worker.begin(join, hosts[rank], rank, port)
        for worker in workers:
            worker.end()
        assert workers[0].run(add) == 2 * (1 << 16)
        workers[0].begin(wait_in_vain)
        ip("-n", hosts[1], "link", "set", "wire", "down")
        text, seconds = workers[0].end()
        assert "worker1" in text
        assert seconds < 3 * SILENCE
