"""Benchmarks of a worker's memory: its peak while a large tensor is echoed, and its idle memory.

Resident memory includes the shared memory that the process has touched. A page that two processes share counts for
both, although the host has it once.
"""

from __future__ import annotations

import gc
import importlib
import pathlib
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks.calls import echo
from benchmarks.groups import START_PATIENCE, Group, join
from benchmarks.measuring import MB, OTHER, Row
from benchmarks.processes import Child, answer_all, children_killed, free_port
from benchmarks.targets import Absolute

LARGE = 256 * MB
NOW, PEAK = "VmRSS", "VmHWM"  # fields of /proc/PID/status


def resident(field: str) -> int:
    """Return the resident bytes of this process, current or peak."""
    gc.collect()
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def peak_of_echoes(rpc: Any, of_caller: bool, echoes: int = 3) -> float:
    """Return the growth to the peak, in tensors. The caller's own tensor and the result are included."""

    def measured(field: str) -> int:
        return resident(field) if of_caller else int(rpc.rpc_sync(OTHER, resident, (field,)))

    for _ in range(10):
        rpc.rpc_sync(OTHER, echo, (torch.ones(256),))
    before = measured(NOW)
    tensor = torch.ones(LARGE // 4)
    for _ in range(echoes):
        rpc.rpc_sync(OTHER, echo, (tensor,))
    return (measured(PEAK) - before) / LARGE


def echo_memory(library: str, way: str, of_caller: bool) -> float:
    """Measure in a new group, because the peak of a process never decreases."""
    group = Group(library, way, 2)
    try:
        return group.measure(partial(peak_of_echoes, of_caller=of_caller), START_PATIENCE)
    finally:
        group.kill()


def idle_worker(pipe: Connection, rank: int, library: str, way: str, port: int) -> None:
    """Join, call and be called once, and wait. Importing this module has imported torch."""
    before = resident(NOW)
    rpc = join(library, rank, 2, way, port)
    rpc.rpc_sync(f"worker{1 - rank}", echo, (torch.ones(2),))
    pipe.send((True, resident(NOW) - before))
    answer_all(pipe, lambda _: None)  # stay, because the other worker may not have called yet
    importlib.import_module(library).shutdown()


def idle_memory(library: str, way: str) -> float:
    """Return the growth of a worker since `import torch` in MB, the larger value of two workers."""
    port = free_port()
    with children_killed() as children:
        children += (Child(idle_worker, rank, library, way, port, fresh=True) for rank in range(2))
        return max(int(child.wait_answer(START_PATIENCE, children)) for child in children) / MB


MEMORY = [
    *(
        Row(
            f"256 MB echoed, peak of the {name}",
            "tensors",
            False,
            partial(echo_memory, of_caller=of_caller),
            ("host", "tcp"),
            targets=(Absolute(2.5),),
            rounds=2,
            alone=True,
        )
        for name, of_caller in (("caller", True), ("callee", False))
    ),
    Row("idle worker above import torch", "MB", False, idle_memory, targets=(Absolute(20),), rounds=2, alone=True),
]
