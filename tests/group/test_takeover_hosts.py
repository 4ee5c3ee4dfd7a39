"""The same between hosts: network namespaces joined by a bridge; one is lost, one is cut off and comes back."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator

import pytest

import telegrad.rpc as rpc
from telegrad.rpc import current
from tests.chaos.test_hosts import ADDRESS, PATIENCE, SILENCE, Host, call_until_it_works, ip, why_not

pytestmark = pytest.mark.nightly

PORT = 29556
COUNT = 4
PLACES = f"tcp://{ADDRESS.format(1)}:{PORT},{ADDRESS.format(2)}:{PORT}"


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    """Four hosts with a process each, in no group yet."""
    if why := why_not():
        pytest.skip(why)
    bridge = f"telegrad{os.getpid()}bridge"
    made: list[Host] = []
    ip("netns", "add", bridge)
    try:
        ip("-n", bridge, "link", "add", "bridge", "type", "bridge")
        ip("-n", bridge, "link", "set", "bridge", "up")
        made += (Host(number, bridge) for number in range(COUNT))
        for host in made:
            host.meet()
        yield made
    finally:
        for host in made:
            host.remove()
        for number in range(COUNT):
            subprocess.run(["ip", "netns", "delete", f"telegrad{os.getpid()}h{number}"], capture_output=True)
        ip("netns", "delete", bridge)


def join(number: int, places: str = PLACES) -> None:
    options = rpc.TelegradOptions(init_method=places, silence=SILENCE, rpc_timeout=PATIENCE)
    rpc.init_rpc(f"worker{number}", rank=number, rpc_backend_options=options)


def seat() -> tuple[int, str, int]:
    """Who serves, and where."""
    assert current.worker is not None
    _, rank, _, host, port = current.worker.directory.store
    return rank, host, port


def wait_for_server(rank: int) -> tuple[int, str, int]:
    until = time.monotonic() + PATIENCE
    while seat()[0] != rank and time.monotonic() < until:
        time.sleep(0.01)
    return seat()


def names() -> list[str]:
    return [worker.name for worker in rpc.workers()]


def test_the_store_goes_from_host_to_host(hosts: list[Host]) -> None:
    for host in hosts[:3]:
        host.run(join, host.number)
    for host in hosts[:3]:
        host.run(rpc.wait_for_workers, 3, PATIENCE)
    os.killpg(hosts[0]._process.pid, signal.SIGKILL)
    began = time.monotonic()
    hosts[3].run(join, 3)
    assert time.monotonic() - began < 2
    assert hosts[3].run(seat) == hosts[2].run(wait_for_server, 1) == (1, ADDRESS.format(2), PORT)
    for host in hosts[1:]:
        host.run(rpc.wait_for_workers, ["worker1", "worker2", "worker3"], PATIENCE)
        assert host.run(call_until_it_works, "worker2")
    hosts[1].cable("down")  # no word of it comes to the others
    assert hosts[2].run(wait_for_server, 2) == hosts[3].run(wait_for_server, 2) == (2, ADDRESS.format(3), PORT)
    assert hosts[2].run(call_until_it_works, "worker3")
    hosts[1].cable("up")
    assert hosts[1].run(wait_for_server, 2) == (2, ADDRESS.format(3), PORT)
    for host in hosts[1:]:
        assert host.run(names) == ["worker1", "worker2", "worker3"]
        for other in hosts[1:]:
            assert host.run(call_until_it_works, other.name)
