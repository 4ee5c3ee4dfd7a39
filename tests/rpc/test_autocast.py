"""Tests of modes: the caller's autocast and grad mode hold in its calls, a function's own modes for it alone."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

import telegrad.autograd as autograd
from telegrad._core.calls.futures import Future
from telegrad.nn import Pipeline, RemoteModule
from telegrad.rpc import RRef, functions, remote, rpc_async, rpc_stream, rpc_sync
from tests.cluster import next_turn

pytestmark = pytest.mark.usefixtures("here")


def state(*_: Any) -> tuple[bool, torch.dtype, bool]:
    return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()


async def state_later(*_: object) -> Any:
    before = state()
    await next_turn()
    return before, state()


@functions.async_execution
def state_of_the_next(to: str) -> Future[Any]:
    return rpc_async(to, state)


class Holder:
    def state(self) -> tuple[bool, torch.dtype, bool]:
        return state()


OFF = False, torch.bfloat16, True


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cached", [True, False])
def test_autocast_holds_in_every_kind_of_call(dtype: torch.dtype, cached: bool) -> None:
    holder = remote("w1", Holder)
    with torch.autocast("cpu", dtype, cache_enabled=cached):
        mine = state()
        assert rpc_sync("w1", state) == mine
        assert rpc_async("w1", state).wait() == mine
        assert remote("w1", state).to_here() == mine
        assert rpc_sync("w0", state) == mine
        assert rpc_sync("w1", state_later) == (mine, mine)
        assert rpc_sync("w1", state_of_the_next, ("w2",)) == mine
        assert holder.rpc_sync().state() == mine
        assert rpc_sync("w1", lambda: state()) == mine
        assert rpc_sync("w1", state, (RRef(1), torch.ones(1))) == mine
        with torch.autocast("cpu", enabled=False):
            assert not rpc_sync("w1", state)[0]
        with torch.no_grad():
            assert rpc_sync("w1", lambda: (state(), torch.is_grad_enabled())) == (mine, False)
        with autograd.context():
            assert rpc_sync("w1", state, (RRef(1), torch.ones(1, requires_grad=True))) == mine
    assert rpc_sync("w1", state) == rpc_sync("w1", state_later)[0] == OFF


class Block(nn.Module):
    """Layers that, with `again`, are recomputed in the backward pass."""

    def __init__(self, again: bool = False) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        chance = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.uniform_(-1, 1, generator=chance)
        self.again = again
        self.seen: list[torch.dtype] = []

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.run, value, use_reentrant=False) if self.again else self.run(value)

    def run(self, value: torch.Tensor) -> torch.Tensor:
        value = self.layers[0](value)
        self.seen.append(value.dtype)
        return self.layers[1:](value)


def of_block(module: RRef[Block], context: int) -> tuple[list[torch.Tensor], list[torch.dtype]]:
    block, gradients = module.local_value(), autograd.get_gradients(context)
    return [gradients[each] for each in block.parameters()], block.seen


@pytest.mark.parametrize("again", [False, True])
def test_a_remote_module_computes_in_autocast_as_a_local_one(again: bool) -> None:
    inputs = torch.randn(3, 4)
    here, there = Block(again), RemoteModule("w1", Block, (again,))
    with torch.autocast("cpu"):
        wanted = here(inputs)
    wanted.float().sum().backward()
    with autograd.context() as context:
        with torch.autocast("cpu"):
            found = there(inputs)
        autograd.backward(context, found.float().sum())
        gradients, seen = rpc_sync("w1", of_block, (there.module_rref, context))
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, wanted)
    assert seen == here.seen == [torch.bfloat16] * (2 if again else 1)
    for mine, theirs in zip(gradients, here.parameters(), strict=True):
        assert theirs.grad is not None
        assert torch.equal(mine, theirs.grad)


def test_autocast_holds_in_all_stages_of_a_pipeline_and_in_the_loss() -> None:
    inputs, targets = torch.randn(8, 4), torch.randn(8, 4)
    first, second = Block(), Block()
    stages = [RemoteModule("w1", Block), RemoteModule("w2", Block)]
    pipeline = Pipeline(stages, chunks=1)
    with torch.autocast("cpu"):
        wanted = mse_loss(second(first(inputs)), targets)
    wanted.backward()
    with autograd.context() as context, torch.autocast("cpu"):
        assert torch.equal(pipeline.forward_backward(context, inputs, targets, mse_loss), wanted.detach())
        for stage, block in zip(stages, (first, second), strict=True):
            gradients, seen = rpc_sync(stage.on, of_block, (stage.module_rref, context))
            assert seen == [torch.bfloat16]
            for mine, theirs in zip(gradients, block.parameters(), strict=True):
                assert theirs.grad is not None
                assert torch.equal(mine, theirs.grad)


# Modes that a function enters hold for that function alone, also while it waits


Modes = tuple[bool, bool, bool]
NONE = True, False, False


def modes() -> Modes:
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")


def switch_off() -> None:
    torch.set_grad_enabled(False)


def switch_off_and_fail() -> None:
    torch.set_grad_enabled(False)
    raise ValueError("it failed")


async def switch_off_later() -> None:
    await next_turn()
    torch.set_grad_enabled(False)


async def modes_later() -> tuple[Modes, Modes]:
    before = modes()
    await next_turn()
    return before, modes()


def test_a_function_that_sets_the_grad_mode_sets_it_for_itself() -> None:
    for _ in range(3):
        rpc_sync("w1", switch_off)
        assert rpc_sync("w1", modes) == NONE
        with pytest.raises(ValueError, match="it failed"):
            rpc_sync("w1", switch_off_and_fail)
        assert rpc_sync("w1", modes) == NONE
        rpc_sync("w1", switch_off_later)
        assert rpc_sync("w1", modes_later) == (NONE, NONE)


def test_the_result_of_a_function_that_disables_grad_keeps_its_graph() -> None:
    x = torch.ones(3, requires_grad=True)

    def doubled(value: torch.Tensor) -> torch.Tensor:
        made = value * 2
        torch.set_grad_enabled(False)
        return made

    with autograd.context() as context:
        autograd.backward(context, rpc_sync("w1", doubled, (x,)).sum())
        assert autograd.get_gradients(context)[x].tolist() == [2, 2, 2]


async def wait_in(mode: Callable[[], AbstractContextManager[Any]], name: str) -> tuple[Modes, Modes]:
    """Wait in a mode for `let_go`; return the modes within it and after it."""
    with mode():
        await _event(name).wait()
        inside = modes()
    await next_turn()
    return inside, modes()


async def let_go(*names: str) -> None:
    for name in names:
        _event(name).set()


def _event(name: str) -> asyncio.Event:
    return _events.setdefault(name, asyncio.Event())


_events: dict[str, asyncio.Event] = {}


def autocast() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16)


INSIDE: list[tuple[Any, Modes]] = [
    (torch.no_grad, (False, False, False)),
    (torch.inference_mode, (False, True, False)),
    (autocast, (True, False, True)),
    (torch.enable_grad, (True, False, False)),
]


@pytest.mark.parametrize("outer", [torch.enable_grad, torch.no_grad])
def test_the_mode_of_a_waiting_coroutine_holds_for_it_alone(outer: Callable[[], Any]) -> None:
    _events.clear()
    names = [str(number) for number in range(len(INSIDE))]
    with outer():
        mine = modes()
        waiting = [rpc_async("w1", wait_in, (mode, name)) for (mode, _), name in zip(INSIDE, names, strict=True)]
    assert rpc_sync("w1", modes_later) == (NONE, NONE)
    rpc_sync("w1", let_go, tuple(names))
    for future, (mode, inside) in zip(waiting, INSIDE, strict=True):
        grad = inside[0] if mode is not autocast else mine[0]
        assert future.wait() == ((grad, *inside[1:]), mine)
    assert rpc_sync("w1", modes_later) == (NONE, NONE)


def test_the_mode_of_a_stream_that_yields_holds_for_it_alone() -> None:
    def counting() -> Any:
        with torch.no_grad():
            for _ in range(3):
                yield modes()

    async def counting_later() -> Any:
        with torch.no_grad():
            for _ in range(3):
                await next_turn()
                yield modes()

    for function in (counting, counting_later):
        for seen in rpc_stream("w1", function):
            assert seen == (False, False, False)
            assert rpc_sync("w1", modes) == NONE
            assert rpc_sync("w1", modes_later) == (NONE, NONE)
