"""The group for the files here: the programs run on its first worker."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from tests.cluster import agents_here


@pytest.fixture(scope="module", autouse=True)
def _three() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with agents_here(3):
        yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _no_process_group() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
