"""Workers on three hosts: network namespaces joined by a bridge, which are parted, healed, and lost."""

from __future__ import annotations

import os
import queue
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection, Listener
from typing import Any

import cloudpickle
import pytest
import torch

import telegrad.rpc as rpc
from telegrad import errors

pytestmark = pytest.mark.nightly

HOSTS = 3
SILENCE = 2.0  # seconds, the option
NOTICED = 3 * SILENCE  # within which a silent host is taken for lost
TOLD = SILENCE + 2.0  # within which on_lost tells of it
PATIENCE = 30.0
PORT = 29555
ADDRESS = "10.232.78.{}"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=PATIENCE)


def why_not() -> str:
    """Why there can be no namespaces here, if so."""
    if not shutil.which("ip"):
        return "needs iproute2, for `ip netns`"
    probe = f"telegrad{os.getpid()}probe"
    try:
        ip("netns", "add", probe)
        ip("netns", "delete", probe)
    except (subprocess.SubprocessError, OSError) as error:
        return f"needs the right to make network namespaces: {getattr(error, 'stderr', '') or error}".strip()
    return ""


class Host:
    """A network namespace with one worker's process in it."""

    def __init__(self, number: int, bridge: str) -> None:
        self.number = number
        self.name = f"worker{number}"
        self.namespace = f"telegrad{os.getpid()}h{number}"
        self.address = ADDRESS.format(number + 1)
        self._bridge = bridge
        self._cable = f"cable{number}"  # the end at the bridge; the host's end is called `wire`
        ip("netns", "add", self.namespace)
        ip("link", "add", self._cable, "netns", bridge, "type", "veth", "peer", "name", "wire", "netns", self.namespace)
        ip("-n", bridge, "link", "set", self._cable, "master", "bridge")
        ip("-n", bridge, "link", "set", self._cable, "up")
        ip("-n", self.namespace, "address", "add", f"{self.address}/24", "dev", "wire")
        ip("-n", self.namespace, "link", "set", "wire", "up")
        ip("-n", self.namespace, "link", "set", "lo", "up")
        self._listener = Listener(family="AF_UNIX")  # a socket in a file, which all namespaces see
        self._process = subprocess.Popen(
            ["ip", "netns", "exec", self.namespace, sys.executable, "-m", __name__, str(self._listener.address)],
            start_new_session=True,
        )
        self._pipe: Connection

    def meet(self) -> None:
        """Once its process runs; until then it imports torch, as those of the others do."""
        self._pipe = self._listener.accept()

    def begin(self, function: Any, *args: Any) -> None:
        self._pipe.send_bytes(cloudpickle.dumps((function, args)))

    def end(self) -> Any:
        if not self._pipe.poll(PATIENCE):
            raise TimeoutError(f"{self.name} did not answer within {PATIENCE} s")
        value, failed = cloudpickle.loads(self._pipe.recv_bytes())
        assert not failed, f"on {self.name}: {failed}"
        return value

    def run(self, function: Any, *args: Any) -> Any:
        self.begin(function, *args)
        return self.end()

    def cable(self, state: str) -> None:
        """Pull the cable ("down"), or plug it in ("up")."""
        ip("-n", self._bridge, "link", "set", self._cable, state)

    def remove(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(PATIENCE)
        if hasattr(self, "_pipe"):
            self._pipe.close()
        self._listener.close()


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[Host]]:
    """Three hosts with a worker each, in one group; a test leaves it whole, but for the last one."""
    if why := why_not():
        pytest.skip(why)
    bridge = f"telegrad{os.getpid()}bridge"
    made: list[Host] = []
    ip("netns", "add", bridge)
    try:
        ip("-n", bridge, "link", "add", "bridge", "type", "bridge")
        ip("-n", bridge, "link", "set", "bridge", "up")
        made += (Host(number, bridge) for number in range(HOSTS))
        for host in made:
            host.meet()
            host.begin(join, host.number)
        for host in made:
            host.end()
        for host in made:  # so that all are connected
            assert host.run(call_all, range(HOSTS)) == [number + 1 for number in range(HOSTS)]
        yield made
    finally:
        for host in made:
            host.remove()
        for number in range(HOSTS):
            subprocess.run(["ip", "netns", "delete", f"telegrad{os.getpid()}h{number}"], capture_output=True)
        ip("netns", "delete", bridge)


# On the hosts

_losses: queue.SimpleQueue[tuple[str, float]] = queue.SimpleQueue()


def join(number: int) -> None:
    rpc.init_rpc(
        f"worker{number}",
        rank=number,
        world_size=HOSTS,
        rpc_backend_options=rpc.TelegradOptions(
            init_method=f"tcp://{ADDRESS.format(1)}:{PORT}", silence=SILENCE, rpc_timeout=PATIENCE
        ),
    )


def hear_losses() -> None:
    rpc.on_lost(lambda worker, _: _losses.put((worker.name, time.monotonic())))


def loss_of(name: str) -> float:
    """Return when it was told."""
    told = ("", 0.0)
    while told[0] != name:
        told = _losses.get(timeout=PATIENCE)
    return told[1]


def call_all(numbers: Any) -> list[int]:
    return [int(rpc.rpc_sync(f"worker{number}", torch.add, (torch.tensor(number), 1))) for number in numbers]


def lose(to: str) -> tuple[str, float]:
    """How a call ends whose callee is busy, and after how long."""
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


def test_a_partition_that_heals(hosts: list[Host]) -> None:
    """One host is cut off from the others, which go on; then all reach one another again."""
    hosts[0].begin(lose, "worker1")
    hosts[1].begin(lose, "worker0")
    hosts[1].cable("down")
    for host, lost in zip(hosts[:2], ("worker1", "worker0"), strict=True):
        told, seconds = host.end()
        assert told.startswith("PeerLost")
        assert repr(lost) in told
        assert seconds < NOTICED
    assert hosts[0].run(call_all, [0, 2]) == [1, 3]
    hosts[1].cable("up")
    for host in hosts:
        for other in hosts:
            assert host.run(call_until_it_works, other.name)


def test_a_host_that_vanishes(hosts: list[Host]) -> None:
    """Without a word, as when its power fails: those who wait for it are told, the others go on."""
    for host in hosts[:2]:
        host.run(hear_losses)
        host.begin(lose, "worker2")
    hosts[2].cable("down")
    gone = time.monotonic()
    for host in hosts[:2]:
        told, seconds = host.end()
        assert told.startswith("PeerLost")
        assert "'worker2'" in told
        assert seconds < NOTICED
        assert host.run(loss_of, "worker2") - gone < TOLD + SILENCE / 4  # the kernel's time has whole seconds
    assert hosts[0].run(call_all, [0, 1]) == [1, 2]
    assert hosts[1].run(call_all, [0, 1]) == [1, 2]


def serve(address: str) -> None:
    """Do what the test says, until it is gone."""
    from multiprocessing.connection import Client

    with Client(address) as pipe:
        while True:
            try:
                function, args = cloudpickle.loads(pipe.recv_bytes())
            except EOFError:
                return
            value, failed = None, ""
            try:
                value = function(*args)
            except BaseException as error:
                failed = repr(error)
            pipe.send_bytes(cloudpickle.dumps((value, failed)))


if __name__ == "__main__":
    serve(sys.argv[1])
