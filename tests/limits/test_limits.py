"""Each program of the table is refused as it says, and docs/limits.md is what the table makes."""

from __future__ import annotations

import pathlib
import re
import sys
import types
from collections.abc import Iterator

import pytest

from telegrad.rpc import current
from tests.cluster import agents
from tests.limits import pipelines, training, values
from tests.limits.page import PAGE, Limit, page, pattern_of

LIMITS = [*training.LIMITS, *pipelines.LIMITS, *values.LIMITS]
MODULE = "program_of_a_limit"  # where functions and classes of the programs are found

GIVEN = """
import torch
from torch import nn
import telegrad.rpc as rpc
from telegrad import autograd, checkpoint
from telegrad.nn import Pipeline, RemoteModule
from telegrad.optim import DistributedOptimizer, clip_grad_norm_
from telegrad.weights import Publisher, Shard, ShardedPublisher, ShardedSubscriber, Subscriber

x = torch.ones(3, 3, requires_grad=True)
remote = RemoteModule("w1", nn.Linear, (3, 3))
optimizer = DistributedOptimizer.for_module(torch.optim.SGD, remote, lr=0.1)
model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
pipeline = Pipeline([remote, nn.Linear(3, 3)], chunks=2)


def there(worker, function, *args):
    return rpc.rpc_sync(worker, function, args)
"""


@pytest.fixture(scope="module")
def three() -> Iterator[None]:
    with agents(3) as workers:
        current.enter(workers[0])
        yield
        current.enter(None)


@pytest.fixture
def program(three: None, tmp_path: pathlib.Path) -> Iterator[dict[str, object]]:
    """The names that a program has, in a module that calls find."""
    module = sys.modules[MODULE] = types.ModuleType(MODULE)
    exec(GIVEN, module.__dict__)
    module.__dict__["folder"] = tmp_path / "checkpoint"
    yield module.__dict__
    del sys.modules[MODULE]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("limit", LIMITS, ids=[f"{limit.area}-{limit.what}" for limit in LIMITS])
def test_limit(limit: Limit, program: dict[str, object]) -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - its type is compared below
        exec(limit.program, program)
    assert type(caught.value).__name__ == limit.error
    assert re.match(pattern_of(limit.says), str(caught.value), re.DOTALL), str(caught.value)


def test_the_page_is_made_from_the_table() -> None:
    assert PAGE.read_text() == page(LIMITS), "python -m tests.limits writes it anew"


def test_each_limit_stands_once() -> None:
    assert len({(limit.area, limit.what) for limit in LIMITS}) == len(LIMITS)
