"""The directories of a group whose workers are on hosts of a test: embedded, etcd, Redis."""

import pathlib
import shutil
import subprocess
from collections.abc import Callable

from tests.cluster import PATIENCE, wait_until
from tests.hosts import Network

WORKERS = 5
APART = WORKERS  # the host without a worker
PORT, PEERS = 29560, 29561
ETCD, REDIS = shutil.which("etcd") or "", shutil.which("redis-server") or ""


class Engine:
    """A directory; its servers are on `hosts`, and a majority of them decides."""

    hosts: tuple[int, ...] = (0,)
    missing = ""  # the reason why it cannot be run here
    slack = 0.0  # seconds by which leases outlive their ttl
    may_pause = True  # it counts on while the machine does not run it; the embedded one notices that

    def __init__(self, network: Network, folder: pathlib.Path) -> None:
        self._network, self._folder = network, folder
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    @property
    def url(self) -> str:
        return f"tcp://{self._network.addresses[0]}:{PORT}"

    def start(self) -> None:
        for host in self.hosts:
            self._start_on(host)
        wait_until(lambda: all(self._listens(host) for host in self.hosts))

    def stop(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait(PATIENCE)

    def begin_restart(self) -> Callable[[], None]:
        """Kill one server; return the function that restarts it."""
        host = self.hosts[0]
        self._processes[host].kill()
        self._processes[host].wait(PATIENCE)
        return lambda: self._start_on(host)

    def _start_on(self, host: int) -> None:
        with open(self._folder / f"server{host}.log", "ab") as log:
            self._processes[host] = self._network.run(host, *self._command(host), stdout=log, stderr=log)

    def _listens(self, host: int) -> bool:
        text = (self._folder / f"server{host}.log").read_text()
        return self._processes[host].poll() is None and self._ready in text

    def _command(self, host: int) -> list[str]:
        raise NotImplementedError

    _ready = ""


class Embedded(Engine):
    """A directory that worker 0 starts, and its keeper restarts once it was killed."""

    may_pause = False

    def start(self) -> None:
        """Do nothing: the worker starts it."""

    def stop(self) -> None:
        """Do nothing: it ends with the group."""


class Etcd(Engine):
    """A server on the host without a worker."""

    hosts: tuple[int, ...] = (APART,)
    missing = "" if ETCD else "needs etcd (apt-get install etcd-server)"
    slack = 2.0
    _ready = "ready to serve client requests"

    @property
    def url(self) -> str:
        places = ",".join(f"{self._network.addresses[host]}:{PORT}" for host in self.hosts)
        return f"etcd://{places}/tests/group"

    def _command(self, host: int) -> list[str]:
        client, peer = (f"http://{self._network.addresses[host]}:{port}" for port in (PORT, PEERS))
        cluster = ",".join(f"n{each}=http://{self._network.addresses[each]}:{PEERS}" for each in self.hosts)
        command = [ETCD, "--name", f"n{host}", "--data-dir", str(self._folder / f"n{host}")]
        command += ["--listen-client-urls", client, "--advertise-client-urls", client]
        command += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
        return [*command, "--initial-cluster", cluster]


class EtcdCluster(Etcd):
    """Three servers, each beside a worker."""

    hosts = (0, 1, 2)
    slack = 6.0  # a new leader begins to count the ttl anew, after an election


class Redis(Engine):
    """A server on the host without a worker."""

    hosts = (APART,)
    missing = "" if REDIS else "needs redis-server (apt-get install redis-server)"
    _ready = "Ready to accept connections"

    @property
    def url(self) -> str:
        return f"redis://{self._network.addresses[APART]}:{PORT}"

    def _command(self, host: int) -> list[str]:
        settings = f"--port {PORT} --bind {self._network.addresses[host]} --dir {self._folder} --protected-mode no"
        return [REDIS, *settings.split(), "--save", "", "--appendonly", "yes", "--appendfsync", "always"]


ENGINES = {"embedded": Embedded, "etcd": Etcd, "etcd3": EtcdCluster, "redis": Redis}
