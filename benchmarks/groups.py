"""Groups of workers of one library that take turns. A group is stopped while another one is measured.

Workers are stopped by SIGSTOP, because the shared memory transport of torch's RPC uses a whole core per idle process.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from time import monotonic
from typing import Any

from torch import distributed

from benchmarks.measuring import PIPELINING
from benchmarks.processes import Child, Failed, answer_all, free_port
from tests.hosts import Network, enter

START_PATIENCE = 60.0
_CLOSE_PATIENCE = 10.0
HOSTS = "hosts"  # the way on which each worker is on a host of its own, a network namespace
_TRANSPORTS = {"tcp": ["uv"], HOSTS: ["uv"]}  # names of torch's transports; hints for Telegrad
_CHANNELS = {HOSTS: ["mpt_uv", "basic"]}  # torch's others read the memory of other processes, as no other host can


class Group:
    """Worker processes. The first one runs the measurements, or all of them for torch.distributed.pipelining."""

    def __init__(
        self,
        library: str,
        way: str,
        size: int,
        threads: int | None = None,
        run: Callable[..., None] | None = None,
    ) -> None:
        """Start the processes, which run `run`, or `work` by default."""
        port = free_port()
        self._children: list[Child] = []
        self._network = Network(size) if way == HOSTS else None
        try:
            if self._network is not None:
                self._network.make()
            for rank in range(size):
                place = rank, size, library, way, port, self._network
                self._children.append(Child(run or work, *place, threads=threads))
            for child in self._children:
                child.wait_answer(START_PATIENCE, self._children)
        except BaseException as error:
            self.kill()
            if isinstance(error, Failed):
                raise Failed(f"did not start: {error}") from None
            raise
        self._told = self._children if library == PIPELINING else self._children[:1]
        self._signal(signal.SIGSTOP)

    def measure(self, function: Callable[[Any], float], patience: float) -> float:
        """Return the result of `function` on worker 0, or on the last rank.

        Raises:
            Failed: `function` raised or hung, or a worker died. The group must then be killed.
        """
        self._signal(signal.SIGCONT)
        for child in self._told:
            child.tell(function)
        figures = [child.wait_answer(patience, self._children) for child in self._told]
        self._signal(signal.SIGSTOP)
        return float(figures[-1])

    def processor_time(self) -> float:
        """Return the processor time of all processes, in seconds."""
        return sum(child.processor_time() for child in self._children)

    def _signal(self, number: int) -> None:
        for child in self._children:
            child.signal(number)

    def close(self) -> None:
        """Let the workers leave, and kill the remaining ones after a time limit."""
        try:
            self._signal(signal.SIGCONT)
            for child in self._children:
                child.tell(None)
            deadline = monotonic() + _CLOSE_PATIENCE
            for child in self._children:
                child.join(max(0, deadline - monotonic()))
        finally:
            self.kill()

    def kill(self) -> None:
        for child in self._children:
            child.kill()
        if self._network is not None:
            self._network.remove()


def join(library: str, rank: int, size: int, way: str, port: int, address: str = "127.0.0.1") -> Any:
    """Join a group. Return the library's `rpc` module. `address` is that of worker 0."""
    rpc = importlib.import_module(library)
    maps = {f"worker{other}": {0: 0} for other in range(size)} if way == "cuda" else None
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"tcp://{address}:{port}",
        _transports=_TRANSPORTS.get(way),
        _channels=_CHANNELS.get(way),
        rpc_timeout=300,
        device_maps=maps,
    )
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size, rpc_backend_options=options)
    return rpc


def _join_ranks(rank: int, size: int, port: int) -> Any:
    distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    return importlib.import_module(PIPELINING)


def work(
    pipe: Connection, rank: int, size: int, library: str, way: str, port: int, network: Network | None = None
) -> None:
    """Run a worker that executes the functions of the pipe, on its host of the network if there is one."""
    try:
        if network is not None:
            enter(network.namespaces[rank])
            os.environ.update(TP_SOCKET_IFNAME="wire", GLOO_SOCKET_IFNAME="wire")  # torch would choose loopback
        if library == PIPELINING:
            joined, leave = _join_ranks(rank, size, port), distributed.destroy_process_group
        else:
            importlib.import_module(library.replace("rpc", "nn"))  # torch's RPC needs it on all workers
            address = network.addresses[0] if network is not None else "127.0.0.1"
            joined = join(library, rank, size, way, port, address)
            leave = joined.shutdown
    except Exception:
        pipe.send((False, traceback.format_exc()))
        return
    pipe.send((True, None))
    answer_all(pipe, lambda function: function(joined))
    with contextlib.suppress(Exception):  # other workers may have been killed
        leave()
