"""The group for the files here: the programs run on its first worker."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from telegrad._core.worker import current
from tests.cluster import agents


@pytest.fixture(scope="module", autouse=True)
def _three() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with agents(3) as workers:
        current.enter(workers[0])
        yield
        current.enter(None)
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _no_process_group() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
