"""Fixtures of tests that differentiate through agents of this process, and of tests of sharded modules."""

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch.distributed

from telegrad._core.worker.current import Worker
from tests.autograd import sharding
from tests.cluster import PATIENCE, Process, free_port, group, wait_until


@pytest.fixture
def contexts_end(five: list[Worker], here: None) -> Iterator[None]:
    """Use `w0` on this thread, and wait until no worker keeps a context of the test."""
    yield
    wait_until(lambda: not any(len(worker.conductor.contexts) for worker in five))


@contextlib.contextmanager
def in_a_process_group(join: Callable[[int, int], None]) -> Iterator[list[Process]]:
    """Start two trainers in a process group of their own, and a third worker."""
    with group(3) as made:
        port = free_port()
        for rank in range(2):
            made[rank].begin(join, rank, port)
        for rank in range(2):
            made[rank].end(2 * PATIENCE)
        yield made[:2]


def join(rank: int, port: int) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)


@pytest.fixture(scope="module")
def trainers() -> Iterator[list[Process]]:
    with in_a_process_group(join) as made:
        yield made


@pytest.fixture(scope="module")
def fsdp_trainers() -> Iterator[list[Process]]:
    with in_a_process_group(sharding.join) as made:
        yield made
