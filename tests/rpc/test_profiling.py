"""Remote calls and backward passes as events of torch's profilers."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import pytest
import torch
from torch import nn
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

import telegrad.autograd as autograd
from telegrad._core.calls.profiling import event_name
from telegrad.nn import RemoteModule
from telegrad.rpc import Future, functions, remote, rpc_async, rpc_sync
from tests.cluster import PATIENCE

pytestmark = pytest.mark.usefixtures("here")


class Made(NamedTuple):
    """What a remote call makes."""

    number: int = 1


def fail() -> NoReturn:
    raise KeyError("as the test wants it")


def events(program: Callable[..., Any]) -> dict[str, FunctionEvent]:
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        program()
    return {event.name: event for event in seen.events()}


def test_each_way_of_calling_is_an_event() -> None:
    def program() -> None:
        x = torch.ones(2)
        assert torch.equal(rpc_sync("w1", torch.add, (x, 1)), x + 1)
        future = rpc_async("w2", torch.mul, (x, 2))
        assert isinstance(future, Future)
        assert torch.equal(future.then(lambda done: done.wait() + 1).wait(), x * 2 + 1)
        made = remote(1, Made)
        assert made.to_here(PATIENCE) == Made()
        made.future().then(lambda _: None).wait()  # callbacks run in order, that of the profiler first

    seen = events(program)
    assert {"rpc_sync#aten::add(w0 -> w1)", "rpc_async#aten::mul(w0 -> w2)"} <= seen.keys()
    assert seen["rpc_async#aten::mul(w0 -> w2)"].is_async
    assert "rpc_remote#Made(w0 -> w1)" in seen


class Counter:
    def add(self, number: int) -> int:
        return number + 1

    def __call__(self, number: int) -> int:
        return number


def use_all() -> None:
    """Every kind of call that is no function of the API, to w1."""
    counter = remote("w1", Counter)
    one: Any = remote("w1", torch.ones, (2,))
    counter.to_here()
    counter.rpc_sync().add(1)
    counter.rpc_sync()(1)
    counter.rpc_async().add(1).wait()
    counter.remote().add(1).to_here()
    (one + 1).to_here()
    one.sum().to_here()
    module = RemoteModule("w1", nn.Linear, (2, 2))
    module(torch.ones(2))
    module.forward_async(torch.ones(2)).wait()
    module.train()


CALLS = {
    "to_here#(w0)->(w1)",
    "rpc_sync#add(w0 -> w1)",
    "rpc_sync#__call__(w0 -> w1)",
    "rpc_async#add(w0 -> w1)",
    "rpc_remote#add(w0 -> w1)",
    "rpc_remote#sum(w0 -> w1)",
    "rpc_sync#RemoteModule(Linear).forward(w0 -> w1)",
    "rpc_async#RemoteModule(Linear).forward(w0 -> w1)",
}


def test_each_way_of_using_a_reference_or_a_remote_module_is_an_event(tmp_path: pathlib.Path) -> None:
    """Also in a trace that is exported."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        use_all()
    assert {event.name for event in seen.events()} >= CALLS
    seen.export_chrome_trace(str(tmp_path / "trace.json"))
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert {event.get("name") for event in trace["traceEvents"]} >= CALLS
    assert {average.key for average in seen.key_averages()} >= CALLS


def test_what_a_profiled_call_raises() -> None:
    def program() -> None:
        with pytest.raises(KeyError, match="as the test wants it"):
            rpc_sync("w1", fail)
        with pytest.raises(KeyError, match="as the test wants it"):
            rpc_async("w1", fail).wait()

    assert {"rpc_sync#fail(w0 -> w1)", "rpc_async#fail(w0 -> w1)"} <= events(program).keys()


def test_a_backward_pass_and_what_comes_back() -> None:
    x = torch.ones(3, requires_grad=True)

    def program() -> None:
        for _ in range(3):
            with autograd.context() as context:
                loss = rpc_sync("w1", torch.sin, (rpc_sync("w2", torch.exp, (x * 2,)),)).sum()
                autograd.backward(context, loss)
                assert x in autograd.get_gradients(context)

    names = events(program).keys()
    assert "torch::distributed::autograd::backward" in names
    assert "torch::distributed::autograd::SendRpcBackward" in names


@functions.async_execution
@torch.jit.script
def scripted(x: torch.Tensor) -> torch.jit.Future[torch.Tensor]:
    return torch.jit.fork(torch.sin, x)


@pytest.mark.parametrize(
    ("function", "name"),
    [(torch.add, "aten::add"), (fail, "fail"), (scripted, "scripted"), (print, "print"), ("name", "name")],
)
def test_names(function: Callable[..., Any] | str, name: str) -> None:
    assert event_name("sync", function, "a", "b") == f"rpc_sync#{name}(a -> b)"
