"""Benchmarks of the start and the shutdown of a group.

Four workers start at once. The start includes the import of the library from bytecode, but not `import torch`. One row
is about a whole program: from its start to the first answers of its workers.
"""

from __future__ import annotations

import gc
import importlib
import pathlib
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from multiprocessing.connection import Connection
from time import perf_counter
from typing import Any

from benchmarks.groups import START_PATIENCE, join
from benchmarks.measuring import TELEGRAD, Row
from benchmarks.processes import Child, Failed, answer_all, children_killed, free_port
from benchmarks.targets import OfPeer

JOIN, LEAVE = "join", "leave"


def stand_by(pipe: Connection, rank: int, size: int, library: str, way: str, port: int) -> None:
    """Run a worker that has imported torch, and joins and leaves on request.

    After `import torch`, a garbage collection of all its objects is due, which takes longer than the measured times.
    """
    gc.collect()

    def obey(order: str) -> Any:
        if order == JOIN:
            join(library, rank, size, way, port)
        else:
            importlib.import_module(library).shutdown()

    pipe.send((True, None))
    answer_all(pipe, obey)


def all_do(children: list[Child], order: str) -> float:
    """Return the seconds until the last worker has finished."""
    start = perf_counter()
    for child in children:
        child.tell(order)
    for child in children:
        child.wait_answer(START_PATIENCE, children)
    return perf_counter() - start


def come_and_go(library: str, way: str, order: str, size: int = 4, repeats: int = 3) -> float:
    """Return the ms until all workers have joined or left, from processes that have imported only torch."""
    taken = []
    for _ in range(repeats):
        port = free_port()
        with children_killed() as children:
            children += (Child(stand_by, rank, size, library, way, port) for rank in range(size))
            for child in children:
                child.wait_answer(START_PATIENCE, children)
            found = {each: all_do(children, each) for each in (JOIN, LEAVE)}
            taken.append(found[order])
    return statistics.median(taken) * 1e3


def _row(name: str, order: str) -> Row:
    return Row(name, "ms", False, partial(come_and_go, order=order), targets=(OfPeer(0.5),), alone=True)


PROGRAM = """
import torch
import telegrad
import telegrad.rpc as rpc

if __name__ == "__main__":
    with telegrad.local(4) as group:
        for name in group:
            rpc.rpc_sync(name, torch.add, (torch.ones(1), 1))
        print(flush=True)
"""
PEERS_PROGRAM = """
import torch
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp

def join(rank):
    options = rpc.TensorPipeRpcBackendOptions(init_method="tcp://localhost:{port}")
    rpc.init_rpc(str(rank), rank=rank, world_size=5, rpc_backend_options=options)

def serve(number):
    join(number + 1)
    rpc.shutdown()

if __name__ == "__main__":
    workers = mp.start_processes(serve, nprocs=4, start_method="spawn", join=False)
    join(0)
    for number in range(1, 5):
        rpc.rpc_sync(str(number), torch.add, (torch.ones(1), 1))
    print(flush=True)
    rpc.shutdown()
    workers.join()
"""


def program_start(library: str, way: str) -> float:
    """Return the ms from the start of a program to the answers of four workers that it starts."""
    text = PROGRAM if library == TELEGRAD else PEERS_PROGRAM.replace("{port}", str(free_port()))
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "program.py")
        path.write_text(text)
        start = perf_counter()
        with subprocess.Popen([sys.executable, path], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as program:
            assert program.stdout is not None
            if program.stdout.readline() != b"\n":
                raise Failed("the program has failed")
            return (perf_counter() - start) * 1e3


_PROGRAM_START = Row(
    "start of a program with 4 workers", "ms", False, program_start, targets=(OfPeer(0.7),), alone=True, rounds=3
)
LIFECYCLE = [
    _PROGRAM_START,
    _row("start of 4 workers", JOIN),
    _row("graceful shutdown of 4 workers", LEAVE),
]
