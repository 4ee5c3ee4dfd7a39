"""Tests of remote calls and backward passes as events of torch's profilers."""

import json
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import pytest
import torch
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

import telegrad.autograd as autograd
from telegrad._core.calls.profiling import event_name
from telegrad.rpc import Future, functions, remote, rpc_async, rpc_sync
from tests.cluster import PATIENCE

pytestmark = pytest.mark.usefixtures("here")


class Made(NamedTuple):
    """A callable value that a remote call makes."""

    number: int = 1

    def __call__(self) -> int:
        return self.number


def fail() -> NoReturn:
    raise KeyError("as the test wants it")


def events(program: Callable[..., Any], trace: pathlib.Path | None = None) -> dict[str, FunctionEvent]:
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        program()
    if trace is not None:
        seen.export_chrome_trace(str(trace))
    return {event.name: event for event in seen.events()}


def test_each_way_of_calling_is_an_event_and_in_an_exported_trace(tmp_path: pathlib.Path) -> None:
    """Tests of events of references and remote modules are in tests/compat/test_profiling.py."""

    def program() -> None:
        x = torch.ones(2)
        assert torch.equal(rpc_sync("w1", torch.add, (x, 1)), x + 1)
        future = rpc_async("w2", torch.mul, (x, 2))
        assert isinstance(future, Future)
        assert torch.equal(future.then(lambda done: done.wait() + 1).wait(), x * 2 + 1)
        made = remote(1, Made)
        assert made.to_here(PATIENCE) == Made()
        made.future().then(lambda _: None).wait()  # callbacks run in order, that of the profiler first
        assert made.rpc_sync()() == 1

    seen = events(program, tmp_path / "trace.json")
    names = {"rpc_sync#aten::add(w0 -> w1)", "rpc_async#aten::mul(w0 -> w2)", "rpc_remote#Made(w0 -> w1)"}
    names.add("rpc_sync#__call__(w0 -> w1)")
    assert names <= seen.keys()
    assert names <= {event.get("name") for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]}


def test_events_of_async_calls_may_end_on_another_thread() -> None:
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        for _ in range(20):  # an answer may already be there when the event begins
            rpc_async("w2", torch.mul, (torch.ones(2), 2)).then(lambda _: None).wait()
    found = [event.is_async for event in seen.events() if event.name == "rpc_async#aten::mul(w0 -> w2)"]
    assert len(found) == 20
    assert any(found)


def test_a_profiled_call_that_fails_raises_and_is_an_event() -> None:
    def program() -> None:
        with pytest.raises(KeyError, match="as the test wants it"):
            rpc_sync("w1", fail)
        with pytest.raises(KeyError, match="as the test wants it"):
            rpc_async("w1", fail).wait()

    assert {"rpc_sync#fail(w0 -> w1)", "rpc_async#fail(w0 -> w1)"} <= events(program).keys()


class Unprintable:
    def __call__(self) -> int:
        return 5

    def __repr__(self) -> NoReturn:
        raise ArithmeticError


def test_a_profiled_callable_object_whose_text_cannot_be_formatted_is_called() -> None:
    def program() -> None:
        assert rpc_sync("w1", Unprintable()) == 5

    assert any(name.startswith("rpc_sync#<Unprintable instance at") for name in events(program))


def test_a_backward_pass_and_its_send_functions_are_events() -> None:
    x = torch.ones(3, requires_grad=True)

    def program() -> None:
        for _ in range(3):
            with autograd.context() as context:
                autograd.backward(context, rpc_sync("w1", torch.sin, (rpc_sync("w2", torch.exp, (x * 2,)),)).sum())
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
def test_the_name_of_an_event_has_kind_function_and_workers(function: Callable[..., Any] | str, name: str) -> None:
    assert event_name("sync", function, "a", "b") == f"rpc_sync#{name}(a -> b)"
