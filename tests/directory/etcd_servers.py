"""Real servers of etcd for tests, from Debian's package etcd-server: killed, restarted, stopped, disconnected."""

import contextlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import urllib.request
from collections.abc import Sequence
from typing import Any

import pytest

from telegrad.directories import etcd
from telegrad.directories.etcd import EtcdDirectory
from tests.cluster import free_port, wait_until

ETCD = shutil.which("etcd") or ""
needs_etcd = pytest.mark.skipif(not ETCD, reason="there is no etcd: apt-get install etcd-server")


class Node:
    """A server of a cluster, whose data outlives its process."""

    def __init__(self, name: str, folder: pathlib.Path, options: Sequence[str] = (), scheme: str = "http") -> None:
        self.name, self.folder, self.options, self.scheme = name, folder, options, scheme
        self.port, self.peer = free_port(), f"http://127.0.0.1:{free_port()}"
        self.place = "127.0.0.1", self.port
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}"

    @property
    def where(self) -> str:
        """Return the URL for a group that has its directory here."""
        return f"etcd://127.0.0.1:{self.port}/tests"

    def start(self, cluster: str = "") -> None:
        """Start the process; `Cluster.wait` waits until it answers."""
        command = [ETCD, "--name", self.name, "--data-dir", str(self.folder / self.name)]
        command += ["--listen-client-urls", self.url, "--advertise-client-urls", self.url]
        command += ["--listen-peer-urls", self.peer, "--initial-advertise-peer-urls", self.peer]
        command += ["--initial-cluster", cluster or f"{self.name}={self.peer}", *self.options]
        with open(self.folder / f"{self.name}.log", "ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)

    def kill(self) -> None:
        if self.process:
            self.process.kill()
            self.process.wait()
            self.process = None

    def pause(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)  # all of its threads

    def resume(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def post(self, path: str, body: dict[str, Any], token: str = "") -> dict[str, Any]:
        """Send a request to the gateway without the engine's client."""
        headers = {"Authorization": token} if token else {}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=5) as response:
            return dict(json.load(response))

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any] | None:
        with contextlib.suppress(OSError):
            return self.post(path, body)
        return None

    def watchers(self) -> int:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=5) as response:
            lines = response.read().decode().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("etcd_debugging_mvcc_watcher_total "))


class Cluster:
    """Servers of a cluster: an engine of the contract."""

    ttl, slack = 2.0, 2.0

    def __init__(self, folder: pathlib.Path, size: int = 1, options: Sequence[str] = (), scheme: str = "http") -> None:
        self.nodes = [Node(f"n{n}", folder, options, scheme) for n in range(size)]
        self.members = ",".join(f"{each.name}={each.peer}" for each in self.nodes)
        self.start()

    def address(self, nodes: Sequence[Node] | None = None) -> str:
        return "etcd://" + ",".join(f"127.0.0.1:{each.port}" for each in nodes or self.nodes)

    def client(self, patience: float = 10.0) -> EtcdDirectory:
        return etcd.connect(f"{self.address()}/tests/group", patience)

    def start(self) -> None:
        for each in self.nodes:
            if each.process is None:
                each.start(self.members)

    def kill(self) -> None:
        for each in self.nodes:
            each.kill()

    def pause(self) -> None:
        for each in self.nodes:
            each.pause()

    def resume(self) -> None:
        for each in self.nodes:
            each.resume()

    def forget(self) -> None:
        """Compact all that was written until now."""
        revision = self.nodes[0].post("/v3/kv/range", {"key": "AA=="})["header"]["revision"]
        self.nodes[0].post("/v3/kv/compaction", {"revision": revision, "physical": True})

    def settle(self) -> None:
        """Wait until all nodes follow a leader."""
        for each in self.nodes:
            wait_until(lambda each=each: each.answer("/v3/kv/range", {"key": "AA=="}))  # type: ignore[misc]

    def leader(self, among: Sequence[Node] | None = None) -> Node:
        """Wait until one of the nodes that answer is the leader, and return it."""
        found: list[Node] = []

        def find() -> list[Node]:
            for each in among or self.nodes:
                status = each.answer("/v3/maintenance/status", {})
                if status and status.get("leader", "0") == status["header"]["member_id"]:
                    found.append(each)
            return found

        wait_until(find)
        return found[0]

    def close(self) -> None:
        self.kill()
