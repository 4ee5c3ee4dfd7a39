"""`torch.compile` over code that makes remote calls: the graph breaks there, and the rest is compiled."""

import importlib
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

import telegrad.autograd as autograd
from telegrad.nn import Pipeline, RemoteModule
from telegrad.optim import DistributedOptimizer
from telegrad.rpc import RRef, remote, rpc_async, rpc_sync
from tests.cluster import processes

pytestmark = pytest.mark.usefixtures("here")


class Counter:
    def __init__(self) -> None:
        self.value = torch.zeros(4)

    def add(self, x: torch.Tensor) -> torch.Tensor:
        return self.value + x


def by_proxy(x: torch.Tensor) -> torch.Tensor:
    return remote("w1", Counter).rpc_sync().add(x * 2).sin()


def by_proxies(x: torch.Tensor) -> torch.Tensor:
    counter = remote("w1", Counter)
    return counter.rpc_async().add(x * 2).wait().sin() + counter.remote().add(x * 2).to_here()


def with_operators(x: torch.Tensor) -> torch.Tensor:
    negative: Any = remote("w1", torch.neg, (x * 2,))
    return (negative + 1).to_here().sin()


def gradients(x: torch.Tensor) -> torch.Tensor:
    with autograd.context() as context:
        weight = torch.ones(4, requires_grad=True)
        autograd.backward(context, rpc_sync("w1", torch.mul, (weight * 2, x)).sum())
        return autograd.get_gradients(context)[weight] * 2


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_code_with_remote_calls_compiles_and_gives_the_same(every: bool) -> None:
    module = RemoteModule("w1", nn.Linear, (4, 4))
    model = nn.Sequential(nn.Linear(4, 4), module, nn.Tanh())
    pipeline = Pipeline([RemoteModule("w1", nn.Linear, (4, 4)), RemoteModule("w2", nn.Linear, (4, 4))], chunks=2)
    programs: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda x: rpc_sync("w1", torch.add, (x * 2, 1)).sin(),
        lambda x: rpc_async("w1", torch.add, (x * 2, 1)).wait().sin(),
        lambda x: rpc_async("w1", torch.add, (x * 2, 1)).then(lambda done: done.wait() + 1).wait().sin(),
        lambda x: remote("w1", torch.add, (x * 2, 1)).to_here().sin(),
        lambda x: RRef(x * 2).local_value().sin(),
        lambda x: module(x).sin(),
        lambda x: module.forward_async(x * 2).wait().sin(),
        *(by_proxy, by_proxies, with_operators, gradients, model),
        lambda x: pipeline(torch.stack([x, x]) * 2).sin(),
    ]
    graphs = []

    def backend(graph: GraphModule, _: list[torch.Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    x = torch.randn(4)
    for program in programs if every else (by_proxy, gradients, programs[-1]):
        torch._dynamo.reset()
        graphs.clear()
        compiled = torch.compile(program, backend=backend)
        for _ in range(2):
            torch.testing.assert_close(compiled(x), program(x))
        # The compiler skips functions inside of our context managers, and the loop of Sequential.
        assert graphs or program in (gradients, model)
        assert not any("telegrad" in str(graph.code) for graph in graphs)


def test_a_compiled_training_step_gives_the_same_gradients() -> None:
    first = nn.Linear(4, 4)
    model = nn.Sequential(first, RemoteModule("w1", nn.Linear, (4, 4)))
    optimizer = DistributedOptimizer.for_module(torch.optim.SGD, model, lr=0.1)
    x = torch.randn(3, 4)

    def step(forward: Callable[[torch.Tensor], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        with autograd.context() as context:
            loss = forward(x).square().mean()
            autograd.backward(context, loss)
            gradient = autograd.get_gradients(context)[first.weight]
            optimizer.step(context)
            return loss.detach(), gradient.clone()

    state = {name: value.clone() for name, value in model.state_dict().items()}
    expected = step(model)
    model.load_state_dict(state)
    for got, wanted in zip(step(torch.compile(model, backend="eager")), expected, strict=True):
        torch.testing.assert_close(got, wanted)


class Part(nn.Module):
    """A module that has compiled code in one of the ways to have it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.inner: Any = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 4))
        self.before = torch.compile(without_weights, backend="aot_eager") if how == "function" else without_weights
        if how == "part":
            self.inner = torch.compile(self.inner, backend="aot_eager")
        if how == "in place":
            self.compile(backend="aot_eager")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.before(x))


def without_weights(x: torch.Tensor) -> torch.Tensor:
    return (x @ x.T).sin() @ x


@pytest.mark.parametrize("how", ["part", "function", "in place", "whole"])
def test_compiled_stages_train_where_backward_has_two_steps(how: str) -> None:
    parts: list[Any] = [torch.compile(Part(how), backend="aot_eager") if how == "whole" else Part(how) for _ in "ab"]
    stages = [parts[0], RemoteModule("w1", nn.Linear, (4, 4)), parts[1]]
    inputs, targets = torch.randn(2, 4, 4)
    found = []
    # The compiled backward donates its buffers from a first pass on that keeps no graph.
    for schedule in ("1f1b", "zero-bubble"):
        with autograd.context() as context:
            pipeline = Pipeline(stages, chunks=2, schedule=schedule)
            pipeline.forward_backward(context, inputs, targets, nn.functional.mse_loss)
            gradients = autograd.get_gradients(context)
            found.append([gradients[each] for part in parts for each in part.parameters()])
    torch.testing.assert_close(*found)


def test_a_compiled_function_runs_in_a_pass_that_other_workers_complete() -> None:
    """Its gradient is a part of the one that a hook waits for, so it runs alone, outside of a longer run."""
    torch._dynamo.reset()
    compiled = torch.compile(without_weights, backend="aot_eager")
    compiled(torch.ones(4, 4, requires_grad=True)).sum().backward()  # from here on it donates its buffers
    weight = torch.randn(4, 4, requires_grad=True)

    def found(forward: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        with autograd.context() as context:
            hooked = weight * 2
            hooked.register_hook(lambda gradient: gradient.clamp(-1, 1))
            loss = (forward(hooked) + rpc_sync("w1", torch.mul, (hooked, weight))).sum()
            autograd.backward(context, loss)
            with pytest.raises(RuntimeError, match="second time"):
                autograd.backward(context, loss)
            return autograd.get_gradients(context)[weight]

    torch.testing.assert_close(found(compiled), found(without_weights))


def test_remote_calls_do_not_import_the_compiler() -> None:
    with processes(1) as (fresh,):
        assert not fresh.run(imports_the_compiler)


def imports_the_compiler() -> bool:
    for name in ("telegrad.rpc", "telegrad.nn", "telegrad.optim", "telegrad.autograd"):
        importlib.import_module(name)
    return "torch._dynamo" in sys.modules
