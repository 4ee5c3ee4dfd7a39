"""What cannot be a call is refused before it travels, with a text that shows how to write it."""

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
from telegrad.rpc import RRef, TensorPipeRpcBackendOptions, remote, rpc_async, rpc_sync
from tests.naming import alike

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
@pytest.mark.parametrize("args", [3, torch.ones(3), torch.ones(()), "ab", {1: 2}, {1}, (i for i in "ab")], ids=alike)
def test_arguments_that_are_no_tuple(call: Callable[..., Any], function: Callable[..., Any], args: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"args must be a tuple .* write args=\(x,\)") as raised:
        call("w1", function, args)
    assert type(args).__name__ in str(raised.value)


@pytest.mark.parametrize("call", [rpc_sync, rpc_async, remote])
@pytest.mark.parametrize("kwargs", [3, (1, 2), [("a", 1)], torch.ones(2)], ids=repr)
def test_keywords_that_are_no_dictionary(
    call: Callable[..., Any], kwargs: int | list[tuple[str, int]] | torch.Tensor | tuple[int, int]
) -> None:
    with pytest.raises(InvalidArgument, match=r"kwargs must be a dictionary .* kwargs=\{'name': x\}"):
        call("w1", take, (), kwargs)


@pytest.mark.parametrize("call", [rpc_sync, rpc_async, remote])
def test_functions_that_cannot_be_called(call: Callable[..., Any]) -> None:
    with pytest.raises(InvalidArgument, match=r"'take' \(str\) is not; give the function itself, without quotes"):
        call("w1", "take")
    with pytest.raises(InvalidArgument, match="should be callable, but 3"):
        call("w1", 3)
    with pytest.raises(InvalidArgument, match=r"such as thing\.method"):
        call("w1", nn.Linear(2, 2).weight)


@pytest.mark.parametrize("call", [rpc_sync, rpc_async, remote])
@pytest.mark.parametrize("timeout", [-5, -0.5, "5", None, float("nan")], ids=repr)
def test_timeouts_that_are_none(call: Callable[..., Any], timeout: float | str | None) -> None:
    with pytest.raises(InvalidArgument, match="timeout must be a number of seconds, 0 for no limit"):
        call("w1", take, (), None, timeout)


def test_timeouts_of_references() -> None:
    reference = RRef(3)
    with pytest.raises(InvalidArgument, match="timeout must be"):
        reference.to_here(-3)


def test_timeouts_of_options() -> None:
    with pytest.raises(UsageError, match="rpc_timeout must be a number of seconds, 0 for no limit"):
        TensorPipeRpcBackendOptions(rpc_timeout=-1)


def test_it_is_caught_as_the_builtin_type() -> None:
    for kind in (TypeError, ValueError, RuntimeError, UsageError):
        with pytest.raises(kind):
            rpc_sync("w1", take, 3)  # type: ignore[call-overload]


@pytest.mark.parametrize("args", [(1, 2), [1, 2], Pair(1, 2), torch.Size([1, 2])], ids=repr)
def test_any_tuple_or_list_is_allowed(args: Any) -> None:
    assert rpc_sync("w1", take, args, collections.OrderedDict(a=3)) == ((1, 2), {"a": 3})


def test_arguments_that_cannot_be_sent_are_counted_as_the_program_wrote_them() -> None:
    lock = threading.Lock()
    for refused in (
        lambda: rpc_sync("w1", take, (1, [lock])),  # type: ignore[arg-type]
        lambda: RRef([]).rpc_sync().append(1, [lock]),  # type: ignore[call-arg, arg-type]
        lambda: rpc_sync("w1", annotated, (RRef(torch.ones(1)), [lock])),
    ):
        with pytest.raises(CannotEncode, match=r"argument 1\[0\] \(_thread\.lock\) cannot be sent: cannot pickle"):
            refused()
