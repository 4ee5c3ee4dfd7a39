"""What the programs share: a group of processes, and the time of their steps."""

from __future__ import annotations

import socket
import statistics
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch.multiprocessing as mp
from library import rpc


def run(main: Callable[[], None], *names: str, start: str = "spawn") -> None:
    """Run `main` on the first of a group of workers; each is a process, this one is the first."""
    port = free_port()
    others = mp.start_processes(serve, (names, port), nprocs=len(names) - 1, join=False, start_method=start)
    join(0, names, port)
    main()
    rpc.shutdown()
    others.join()


def serve(index: int, names: tuple[str, ...], port: int) -> None:
    join(index + 1, names, port)
    rpc.shutdown()


def join(rank: int, names: tuple[str, ...], port: int) -> None:
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}", num_worker_threads=16)
    rpc.init_rpc(names[rank], rank=rank, world_size=len(names), rpc_backend_options=options)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Steps:
    """The steps of a program: `for number in Steps(100):`, with the time of each."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._seconds: list[float] = []

    def __iter__(self) -> Any:
        for number in range(self._count):
            start = perf_counter()
            yield number
            self._seconds.append(perf_counter() - start)

    @property
    def median(self) -> float:
        """Seconds."""
        return statistics.median(self._seconds)


def report(seconds: float) -> None:
    """Tell the benchmark how long a step took; the last line of a program."""
    print(f"step {seconds * 1e3:.4f} ms", flush=True)
