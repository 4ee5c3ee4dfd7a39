"""Each program of the tables does as it says, and docs/limits.md is what the tables make."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Iterator

import pytest
import torch

from telegrad.rpc import current
from tests.cluster import agents
from tests.limits.both import GIVEN, in_both, module
from tests.limits.page import PAGE, Left, Limit, pattern_of
from tests.limits.rows import LEFT, LIMITS, RIGHT, text
from tests.twin.sight import differences

REFUSED = """
x = torch.ones(3, 3, requires_grad=True)
remote = RemoteModule("w1", nn.Linear, (3, 3))
optimizer = DistributedOptimizer.for_module(torch.optim.SGD, remote, lr=0.1)
model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
pipeline = Pipeline([remote, nn.Linear(3, 3)], chunks=2)


def there(worker, function, *args):
    return rpc.rpc_sync(worker, function, args)
"""

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module", autouse=True)
def _three() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with agents(3) as workers:
        current.enter(workers[0])
        yield
        current.enter(None)
    torch.set_num_threads(threads)


def _marks(limit: Limit) -> list[pytest.MarkDecorator]:
    """To record a model takes seconds."""
    return [pytest.mark.nightly] if "example=" in limit.program else []


@pytest.mark.parametrize(
    "limit", [pytest.param(each, id=f"{each.area}-{each.what}", marks=_marks(each)) for each in LIMITS]
)
def test_limit(limit: Limit, tmp_path: pathlib.Path) -> None:
    with (
        module(GIVEN + REFUSED, {"folder": tmp_path / "checkpoint"}) as program,
        pytest.raises(Exception) as caught,  # noqa: PT011 - its type is compared below
    ):
        exec(limit.program, program)
    assert type(caught.value).__name__ == limit.error
    assert re.match(pattern_of(limit.says), str(caught.value), re.DOTALL), str(caught.value)


@pytest.mark.parametrize(("area", "what"), [(area, what) for area, programs in RIGHT.items() for what in programs])
def test_right(area: str, what: str) -> None:
    assert not differences(*in_both(RIGHT[area][what]))


@pytest.mark.parametrize("left", LEFT, ids=[left.what for left in LEFT])
def test_left_to_each_worker(left: Left) -> None:
    assert differences(*in_both(left.program))


def test_the_page_is_made_from_the_tables() -> None:
    assert PAGE.read_text() == text(), "python -m tests.limits writes it anew"


def test_each_limit_stands_once() -> None:
    assert len({(limit.area, limit.what) for limit in LIMITS}) == len(LIMITS)
