"""Each module, optimizer and scheduler of torch gives on another worker what it gives in one process."""

import pytest

from tests.limits.both import in_both
from tests.limits.classes import IN_TORCH, MODULES, OPTIMIZERS, SCHEDULED, SCHEDULERS, options_of
from tests.twin.sight import differences

pytestmark = pytest.mark.filterwarnings("ignore")


def _compare(function: str, *arguments: str) -> None:
    program = f"from tests.limits.classes import {function}\nfound = {function}({', '.join(arguments)})"
    assert not differences(*in_both(program))


WAYS = {"made_there": ("made", "backward", "gradients", "Opt"), "sent": ("call", "backward", "gradients")}
OFTEN = ["Linear", "BatchNorm2d"]  # in the second way


@pytest.mark.parametrize(
    ("way", "name"),
    [
        pytest.param(way, name, marks=[] if way == "made_there" or name in OFTEN else pytest.mark.nightly)
        for way in WAYS
        for name in sorted(IN_TORCH)
    ],
)
def test_module(way: str, name: str) -> None:
    assert name in MODULES, f"torch.nn.{name} needs an entry in tests/limits/classes.py"
    _compare(way, repr(name), *WAYS[way])


@pytest.mark.parametrize(
    ("name", "option"),
    [
        pytest.param(name, option, marks=pytest.mark.nightly if number else [])
        for name in sorted(OPTIMIZERS)
        for number, option in enumerate(options_of(name))
    ],
)
def test_optimizer(name: str, option: str) -> None:
    _compare("trained", repr(name), repr(option), "made", "backward", "Opt")


@pytest.mark.parametrize("name", sorted(SCHEDULED))
def test_scheduler(name: str) -> None:
    assert name in SCHEDULERS, f"{name} needs an entry in tests/limits/classes.py"
    _compare("scheduled", repr(name), "made", "backward", "Opt")
