"""Benchmarks of the start and the shutdown of a group.

Four workers start at once. The start includes the import of the library from bytecode, but not `import torch`.
"""

from __future__ import annotations

import gc
import importlib
import statistics
from functools import partial
from multiprocessing.connection import Connection
from time import perf_counter
from typing import Any

from benchmarks.groups import START_PATIENCE, join
from benchmarks.measuring import Row
from benchmarks.processes import Child, answer_all, children_killed, free_port
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


LIFECYCLE = [_row("start of 4 workers", JOIN), _row("graceful shutdown of 4 workers", LEAVE)]
