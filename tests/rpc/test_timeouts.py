"""Tests of the text of timeouts, and of errors for workers that ended without shutdown."""

import threading
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import telegrad.autograd as autograd
from telegrad._core.agent.agent import Agent
from telegrad._core.worker import current
from telegrad._core.worker.current import Worker
from telegrad.errors import CallTimeout, PeerUnreachable, ShutDown
from telegrad.nn import Pipeline, RemoteModule
from telegrad.optim import DistributedOptimizer
from telegrad.rpc import RRef, remote, rpc_async, rpc_sync
from tests.cluster import PATIENCE, agents

SHORT = 0.05

held = threading.Event()


@pytest.fixture
def impatient(here: None, five: list[Worker]) -> Iterator[Agent]:
    """Give this worker's calls a short timeout, and release held calls after the test."""
    held.clear()
    agent = five[0].agent
    before, agent.timeout = agent.timeout, SHORT
    yield agent
    agent.timeout = before
    held.set()


def hold(*_: object) -> torch.Tensor:
    held.wait(PATIENCE)
    return torch.ones(1)


def annotated(value: torch.Tensor) -> torch.Tensor:
    return hold()


class Holding(nn.Module):
    def __init__(self, made: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        if not made:
            hold()

    def forward(self, x: int | torch.Tensor) -> torch.Tensor:
        return hold()

    def method(self) -> torch.Tensor:
        return hold()


class HoldingSGD(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        hold()


def optimize() -> None:
    agent = current.agent()
    agent.timeout = PATIENCE  # the first optimizer of a process imports a lot
    module = RemoteModule("w1", nn.Linear, (1, 1))
    optimizer = DistributedOptimizer.for_module(HoldingSGD, module, lr=0.1)
    with autograd.context() as context:
        autograd.backward(context, module(torch.ones(1)).sum())
        agent.timeout = SHORT
        optimizer.step(context)


def pipe() -> None:
    pipeline = Pipeline([RemoteModule("w1", Holding), RemoteModule("w2", nn.Identity)], chunks=1)
    with autograd.context() as context:
        pipeline.forward_backward(context, torch.ones(1, 1), torch.ones(1, 1), nn.MSELoss())


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: rpc_sync("w1", hold), f"{__name__}.hold"),
        (lambda: rpc_async("w1", hold).wait(), f"{__name__}.hold"),
        (lambda: rpc_sync("w1", lambda: hold()), r"<lambda>.<locals>.<lambda>"),
        (lambda: rpc_sync("w1", annotated, (remote("w2", torch.ones, (1,)),)), f"{__name__}.annotated"),
        (lambda: rpc_async("w1", annotated, (remote("w2", torch.ones, (1,)),)).wait(), f"{__name__}.annotated"),
        (lambda: remote("w1", hold).to_here(), r"to_here\(\) of <RRef w0/\d+ on 'w1'.*>"),
        (lambda: remote("w1", hold).future().wait(), f"{__name__}.hold"),
        (lambda: remote("w1", Holding).rpc_sync().method(), r"method\(\) of the value of a reference"),
        (lambda: remote("w1", Holding).rpc_async().method().wait(), r"method\(\) of the value of a reference"),
        (lambda: RemoteModule("w1", Holding, (False,)), r"RemoteModule\(\)"),
        (lambda: RemoteModule("w1", Holding)(1), r"RemoteModule\(Holding\)\.forward"),
        (lambda: RemoteModule("w1", Holding).forward_async(1).wait(), r"RemoteModule\(Holding\)\.forward"),
        (optimize, r"DistributedOptimizer\.step"),
    ],
)
def test_a_timeout_names_the_function_and_the_worker(call: Callable[..., Any], name: str, impatient: Agent) -> None:
    with pytest.raises(CallTimeout, match=rf"\({SHORT} s\): {name} on worker 'w1'\. It may still be running"):
        call()


def test_a_pipeline_batch_has_a_timeout_per_micro_batch_and_direction(impatient: Agent) -> None:
    said = rf"\({2 * SHORT} s\): Pipeline\.forward_backward on worker 'w[12]'\. It may still be running"
    with pytest.raises(CallTimeout, match=said):
        pipe()


def test_a_timeout_for_a_local_value_names_its_reference(impatient: Agent) -> None:
    reference = remote("w0", hold)
    with pytest.raises(CallTimeout, match=r"<RRef w0/\d+ here.*>: the value was not created within 0.05 s"):
        reference.to_here()
    assert isinstance(reference, RRef)


def test_an_error_tells_that_its_worker_ended_without_shutdown() -> None:
    arrived, end = threading.Event(), threading.Event()

    def wait() -> None:
        arrived.set()
        end.wait(PATIENCE)

    with agents(2) as pair:
        future = pair[0].agent.call_async("w1", Call(wait), (), None)
        assert arrived.wait(PATIENCE)
        pair[1].end_with_the_program()  # as the interpreter does at its exit
        end.set()
        with pytest.raises(ShutDown, match=r"'w1' left without the others: its program ended without rpc.shutdown\(\)"):
            future.wait()
        with pytest.raises(PeerUnreachable, match=r"'w1' left .* its program ended without.*; the call has not run"):
            pair[0].agent.call("w1", hold, (), None)


class Call:
    """A function of this process that is pickled as a number."""

    functions: ClassVar[list[Callable[..., Any]]] = []

    def __init__(self, function: Callable[..., Any]) -> None:
        self.number = len(self.functions)
        self.functions.append(function)

    def __call__(self) -> None:
        return self.functions[self.number]()
