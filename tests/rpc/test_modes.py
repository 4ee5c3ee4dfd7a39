"""The grad mode and the autocast that a function enters hold for that function alone, also while it waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

import telegrad.autograd as autograd
from telegrad.rpc import rpc_async, rpc_stream, rpc_sync

pytestmark = pytest.mark.usefixtures("here")

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
    await asyncio.sleep(0)
    torch.set_grad_enabled(False)


async def modes_later() -> tuple[Modes, Modes]:
    before = modes()
    await asyncio.sleep(0)
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


def test_a_result_of_a_function_that_sets_the_grad_mode_has_its_history() -> None:
    x = torch.ones(3, requires_grad=True)

    def doubled(value: torch.Tensor) -> torch.Tensor:
        made = value * 2
        torch.set_grad_enabled(False)
        return made

    with autograd.context() as context:
        autograd.backward(context, rpc_sync("w1", doubled, (x,)).sum())
        assert autograd.get_gradients(context)[x].tolist() == [2, 2, 2]


async def wait_in(mode: Callable[[], AbstractContextManager[Any]], name: str) -> tuple[Modes, Modes]:
    """Wait in a mode for `let_go`."""
    with mode():
        await _event(name).wait()
        inside = modes()
    await asyncio.sleep(0)
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
def test_a_coroutine_that_waits_in_a_mode_leaves_that_to_itself(outer: Callable[[], Any]) -> None:
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


def test_a_stream_that_yields_in_a_mode_leaves_that_to_itself() -> None:
    def counting() -> Any:
        with torch.no_grad():
            for _ in range(3):
                yield modes()

    async def counting_later() -> Any:
        with torch.no_grad():
            for _ in range(3):
                await asyncio.sleep(0)
                yield modes()

    for function in (counting, counting_later):
        for seen in rpc_stream("w1", function):
            assert seen == (False, False, False)
            assert rpc_sync("w1", modes) == NONE
            assert rpc_sync("w1", modes_later) == (NONE, NONE)
