"""Each program of the tables has its documented result, and docs/limits.md is made from the tables."""

import pathlib
import re

import pytest
import torch

from telegrad import rpc
from tests.cluster import group
from tests.limits.both import GIVEN, in_both, module
from tests.limits.page import PAGE, Left, Limit, pattern_of
from tests.limits.rows import LEFT, LEFT_TO_PROCESSES, LIMITS, RIGHT, text
from tests.twin.sight import differences

REFUSED = """
x = torch.ones(3, 3, requires_grad=True)
remote = RemoteModule("w1", nn.Linear, (3, 3))
optimizer = DistributedOptimizer.for_module(torch.optim.SGD, remote, lr=0.1)
model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
pipeline = Pipeline([remote, nn.Linear(3, 3)], chunks=2)


def there(worker, function, *args):
    return rpc.rpc_sync(worker, function, args)


class Two(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(3, 3), nn.Linear(3, 3), nn.BatchNorm1d(3)
        self.register_buffer("state", torch.zeros(3))
        self.calls, self.function = 0, function

    def forward(self, value):
        return self.function(self, value)


def split(function, example=torch.ones(3, 3), at="b"):
    return Pipeline.split(Two(function), ["w1", "w2"], at=[at], example=example)
"""

pytestmark = pytest.mark.filterwarnings("ignore")


def _marks(program: str) -> list[pytest.MarkDecorator]:
    slow = "compile", "example=", "split(lambda", "split(forward", "torch.export.export", "torch.cond", "num_workers"
    return [pytest.mark.nightly] if any(each in program for each in slow) else []


@pytest.mark.parametrize(
    "limit", [pytest.param(each, id=f"{each.area}-{each.what}", marks=_marks(each.program)) for each in LIMITS]
)
def test_a_refused_program_raises_its_error(limit: Limit, tmp_path: pathlib.Path) -> None:
    with (
        module(GIVEN + REFUSED, {"folder": tmp_path / "checkpoint"}) as program,
        pytest.raises(Exception) as caught,  # noqa: PT011 - its type is compared below
    ):
        exec(limit.program, program)
    assert type(caught.value).__name__ == limit.error
    assert re.match(pattern_of(limit.says), str(caught.value), re.DOTALL), str(caught.value)


@pytest.mark.parametrize(
    ("area", "what"),
    [
        pytest.param(area, what, marks=_marks(program))
        for area, programs in RIGHT.items()
        for what, program in programs.items()
    ],
)
def test_a_supported_program_gives_the_same_as_in_one_process(area: str, what: str) -> None:
    assert not differences(*in_both(RIGHT[area][what]))


@pytest.mark.parametrize("left", LEFT, ids=[left.what for left in LEFT])
def test_a_use_left_to_each_worker_differs_from_one_process(left: Left) -> None:
    assert differences(*in_both(left.program))


def _settings() -> tuple[object, ...]:
    flags = torch.are_deterministic_algorithms_enabled(), torch.is_anomaly_enabled()
    precision = torch.get_float32_matmul_precision()
    return torch.get_default_dtype(), *flags, precision, torch.backends.cuda.flash_sdp_enabled()


def _changed_and_asked(program: str) -> tuple[tuple[object, ...], ...]:
    before = _settings()
    exec(program, {"torch": torch})
    return before, _settings(), rpc.rpc_sync("worker1", _settings)


@pytest.mark.nightly
@pytest.mark.parametrize("left", LEFT_TO_PROCESSES, ids=[left.what for left in LEFT_TO_PROCESSES])
def test_a_change_of_a_process_does_not_reach_other_workers(left: Left) -> None:
    with group(2) as processes:
        before, changed, there = processes[0].run(_changed_and_asked, left.program)
    assert all(one != other for one, other in zip(before, changed, strict=True))
    assert there == before


def test_the_page_is_made_from_the_tables() -> None:
    assert PAGE.read_text() == text(), "python -m tests.limits writes it anew"


def test_no_limit_is_listed_twice() -> None:
    assert len({(limit.area, limit.what) for limit in LIMITS}) == len(LIMITS)
