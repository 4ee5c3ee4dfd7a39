"""Some workers of one library: started once, taking turns, stopped while another group is measured.

Stopped, not only idle: the reference's shared memory transport polls with a whole core per process while it waits.
"""

from __future__ import annotations

import contextlib
import importlib
import signal
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from time import monotonic
from typing import Any

from benchmarks.processes import Child, Failed, answer_all, free_port

TELEGRAD, TORCH = "telegrad.rpc", "torch.distributed.rpc"
START_PATIENCE = 60.0
_CLOSE_PATIENCE = 10.0
_TRANSPORTS = {"host": None, "tcp": ["uv"], "cuda": None}  # the reference's names; Telegrad takes them as hints


class Group:
    """Processes of which the first runs what it is told."""

    def __init__(self, library: str, way: str, size: int) -> None:
        port = free_port()
        self._children: list[Child] = []
        try:
            for rank in range(size):
                self._children.append(Child(_work, rank, size, library, way, port))
            for child in self._children:
                child.wait_answer(START_PATIENCE, self._children)
        except BaseException as error:
            self.kill()
            if isinstance(error, Failed):
                raise Failed(f"did not start: {error}") from None
            raise
        self._signal(signal.SIGSTOP)

    def measure(self, function: Callable[[Any], float], patience: float) -> float:
        """What `function` finds on worker 0.

        Raises:
            Failed: it raised, hung, or a worker died; the group must then be killed.
        """
        self._signal(signal.SIGCONT)
        first = self._children[0]
        first.tell(function)
        figure = float(first.wait_answer(patience, self._children))
        self._signal(signal.SIGSTOP)
        return figure

    def _signal(self, number: int) -> None:
        for child in self._children:
            child.signal(number)

    def close(self) -> None:
        """Let the workers leave, and kill those that do not."""
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


def join(library: str, rank: int, size: int, way: str, port: int) -> Any:
    """Join a group of this host; the library's `rpc` module."""
    rpc = importlib.import_module(library)
    maps = {f"worker{other}": {0: 0} for other in range(size)} if way == "cuda" else None
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"tcp://127.0.0.1:{port}", _transports=_TRANSPORTS[way], rpc_timeout=300, device_maps=maps
    )
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size, rpc_backend_options=options)
    return rpc


def _work(pipe: Connection, rank: int, size: int, library: str, way: str, port: int) -> None:
    try:
        importlib.import_module(library.replace("rpc", "nn"))  # the reference needs it on all workers
        rpc = join(library, rank, size, way, port)
    except Exception:
        pipe.send((False, traceback.format_exc()))
        return
    pipe.send((True, None))
    answer_all(pipe, lambda function: function(rpc))
    with contextlib.suppress(Exception):  # the others may have been killed
        rpc.shutdown()
