"""What cannot be a call is refused before it travels.

That each parameter is checked is tested in tests/test_checks.py, and what the errors say in tests/limits.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from telegrad._core.worker.worker import Worker
from telegrad.errors import CannotEncode, InvalidArgument, UsageError
from telegrad.rpc import RRef, remote, rpc_async, rpc_sync

pytestmark = pytest.mark.usefixtures("here", "nothing_travels")


class Pair(NamedTuple):
    first: int
    second: int


def take(*args: int, **kwargs: int) -> tuple[tuple[int, ...], dict[str, int]]:
    return args, kwargs


def annotated(value: torch.Tensor) -> torch.Tensor:
    return value


@pytest.fixture
def nothing_travels(five: list[Worker], request: pytest.FixtureRequest) -> Iterator[None]:
    """A call that is refused was never begun."""
    before = five[0].agent.started
    yield
    assert five[0].agent.started - before == ("allowed" in request.node.name)


@pytest.mark.parametrize("call", [rpc_sync, rpc_async, remote])
@pytest.mark.parametrize("function", [take, annotated, torch.neg])
def test_it_is_caught_as_the_builtin_type(call: Callable[..., Any], function: Callable[..., Any]) -> None:
    for kind in (TypeError, ValueError, RuntimeError, UsageError):
        with pytest.raises(kind, match=r"args must be a tuple .* write args=\(x,\)"):
            call("w1", function, torch.ones(()))
    with pytest.raises(InvalidArgument, match=r"such as thing\.method"):
        call("w1", nn.Linear(2, 2).weight)


@pytest.mark.parametrize("args", [(1, 2), [1, 2], Pair(1, 2), torch.Size([1, 2])], ids=repr)
def test_any_tuple_or_list_is_allowed(args: Pair | list[int] | torch.Size | tuple[int, int]) -> None:
    assert rpc_sync("w1", take, args, collections.OrderedDict(a=3)) == ((1, 2), {"a": 3})


def test_arguments_that_cannot_be_sent_are_counted_as_the_program_wrote_them() -> None:
    lock = threading.Lock()
    for refused in (
        lambda: rpc_sync("w1", take, (1, [lock])),
        lambda: RRef([]).rpc_sync().append(1, [lock]),
        lambda: rpc_sync("w1", annotated, (RRef(torch.ones(1)), [lock])),
    ):
        with pytest.raises(CannotEncode, match=r"argument 1\[0\] \(_thread\.lock\) cannot be sent: cannot pickle"):
            refused()
