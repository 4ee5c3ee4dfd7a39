"""Some workers of one library: started once, taking turns, stopped while another group is measured.

Stopped, not only idle: the reference's shared memory transport polls with a whole core per process while it waits.
"""

from __future__ import annotations

import importlib
import multiprocessing as mp
import os
import signal
import socket
import traceback
import warnings
from typing import Any

from benchmarks.rows import ROWS

TELEGRAD, TORCH = "telegrad.rpc", "torch.distributed.rpc"
_TRANSPORTS = {"host": None, "tcp": ["uv"]}  # the reference's names; Telegrad takes them as hints


class Group:
    """Processes of which the first runs rows when told to."""

    def __init__(self, library: str, way: str, size: int) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        context = mp.get_context("spawn")
        self._pipes = []
        self._processes = []
        for rank in range(size):
            mine, theirs = context.Pipe()
            process = context.Process(target=_work, args=(rank, size, library, way, port, theirs), daemon=True)
            process.start()
            self._pipes.append(mine)
            self._processes.append(process)
        for pipe in self._pipes:
            _answer(pipe)

        self._signal(signal.SIGSTOP)

    def measure(self, row: int) -> float:
        self._signal(signal.SIGCONT)
        self._pipes[0].send(row)
        figure = float(_answer(self._pipes[0]))
        self._signal(signal.SIGSTOP)
        return figure

    def _signal(self, number: int) -> None:
        for process in self._processes:
            os.kill(process.pid, number)

    def close(self) -> None:
        self._signal(signal.SIGCONT)
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(20)
            if process.is_alive():
                process.kill()


def _answer(pipe: Any) -> Any:
    worked, value = pipe.recv()
    if not worked:
        raise RuntimeError(value)
    return value


def _work(rank: int, size: int, library: str, way: str, port: int, pipe: Any) -> None:
    warnings.simplefilter("ignore")
    rpc = importlib.import_module(library)
    importlib.import_module(library.replace("rpc", "nn"))  # the reference needs it on all workers
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"tcp://127.0.0.1:{port}", _transports=_TRANSPORTS[way], rpc_timeout=300
    )
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size, rpc_backend_options=options)
    pipe.send((True, None))
    while (row := pipe.recv()) is not None:
        try:
            pipe.send((True, ROWS[row].measure(rpc)))
        except Exception:
            pipe.send((False, traceback.format_exc()))
    rpc.shutdown()
