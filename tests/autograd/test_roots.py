"""Passes from several roots: no worker begins before the values of all of them exist."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from telegrad import autograd
from telegrad._core.worker.current import Worker
from telegrad.errors import CallTimeout, ContextEnded, UsageError
from telegrad.nn import RemoteModule
from telegrad.optim import DistributedOptimizer
from telegrad.rpc import RRef, remote, rpc_sync
from tests.autograd.functions import Passing
from tests.autograd.test_backward import leaf
from tests.cluster import PATIENCE, wait_until
from tests.seeds import by_day_and_night, run_each

pytestmark = pytest.mark.usefixtures("contexts_end")

WEIGHTS = [leaf() for _ in range(5)]  # of each worker
ONES = torch.ones(3, 3, dtype=torch.float64)
GATES: list[threading.Event] = []


def layer(number: int, x: Tensor) -> Tensor:
    return (WEIGHTS[number] * x).sin()


def loss(scale: float, number: int, gate: int | None = None) -> Tensor:
    """Return a loss that leads to the weights of another worker, once the gate is open."""
    assert gate is None or GATES[gate].wait(PATIENCE)
    return rpc_sync(f"w{number}", layer, (number, torch.full((3, 3), scale, dtype=torch.float64))).sum()


def relayed(to: str, *args: Any) -> RRef[Tensor]:
    return remote(to, loss, args)


def fails(gate: int) -> None:
    assert GATES[gate].wait(PATIENCE)
    raise ValueError("no loss today")


@pytest.fixture(autouse=True)
def gates() -> None:
    GATES[:] = [threading.Event() for _ in range(3)]


def begun(five: list[Worker]) -> int:
    return sum(worker.conductor.passes for worker in five)


def waits_for(five: list[Worker], *names: str) -> None:
    """Check that a pass comes to wait for these workers alone, and that no worker has begun it."""
    wait_until(lambda: [owing for *_, owing in five[0].conductor.under_way()] == [sorted({*names})])
    assert not begun(five)


def run_seed(five: list[Worker], seed: int) -> None:
    """Run a pass from random roots, whose calls end in random order, and compare with one process."""
    draw = random.Random(seed)
    GATES[:] = [threading.Event() for _ in range(3)]
    roots: list[Any] = []
    pending: list[tuple[int, str]] = []
    expected = torch.zeros(())
    with autograd.context() as context:
        for gate in range(draw.choice([2, 3])):
            server, to, how = draw.choice([3, 3, 4]), f"w{draw.randrange(4)}", draw.randrange(5)
            if how == 0:
                roots.append(loss(gate + 1, server))
            elif how == 1:
                roots.append(remote(to, loss, (gate + 1, server)))
                roots[-1].future().wait()
            else:
                made = (to, gate + 1, server, gate)
                roots.append(relayed(*made) if how < 4 else rpc_sync("w4", relayed, made))
                pending.append((gate, to))
            expected = expected + layer(server, (gate + 1) * ONES).sum()
        future = autograd.backward_async(context, roots)
        is_spread = len({"w0" if isinstance(root, Tensor) else root.owner_name() for root in roots}) > 1
        draw.shuffle(pending)
        while pending:
            if is_spread:
                waits_for(five, *(to for _, to in pending))
            GATES[pending.pop()[0]].set()
        future.wait()
        for weight, gradient in zip(WEIGHTS, torch.autograd.grad(expected, WEIGHTS, allow_unused=True), strict=True):
            found = [each.conductor.gradients(context) for each in five if each.conductor.contexts.get(context)]
            there = [each[weight] for each in found if weight in each]
            assert len(there) == (gradient is not None)
            assert all(torch.allclose(each, gradient) for each in there)
    wait_until(lambda: not begun(five))


@by_day_and_night(range(40), range(40, 2_040))
def test_passes_from_random_roots_are_like_those_of_one_process(five: list[Worker], seeds: range) -> None:
    run_each(seeds, lambda seed: run_seed(five, seed))


FIRST: dict[str, Callable[[], Any]] = {
    "a tensor": lambda: loss(1, 3),
    "a reference": lambda: remote("w1", loss, (1, 3)),
    "an own value": lambda: RRef(loss(1, 3)),
}


@pytest.mark.parametrize("first", FIRST)
def test_a_failed_root_fails_the_pass_before_it_begins(five: list[Worker], first: str) -> None:
    server = RemoteModule("w3", torch.nn.Linear, (2, 1))
    optimizer = DistributedOptimizer.for_module(torch.optim.SGD, server, lr=0.1)
    before = server.state_dict()
    with autograd.context() as context:
        roots = [FIRST[first](), server(torch.ones(2)).sum(), remote("w2", fails, (0,))]
        future = autograd.backward_async(context, roots, step=optimizer)
        waits_for(five, "w2")
        GATES[0].set()
        with pytest.raises(ValueError, match=r"no loss today[\s\S]*On worker 'w2'"):
            future.wait()
        assert not begun(five)
        assert all(torch.equal(value, before[name]) for name, value in server.state_dict().items())
        with pytest.raises(ValueError, match="no loss today"):
            autograd.backward(context, roots, step=optimizer)


@pytest.mark.parametrize("foreign", [False, True])
def test_a_timeout_names_the_workers_of_missing_roots(five: list[Worker], foreign: bool) -> None:
    with autograd.context() as context:
        args = ("w2", 1, 3, 0)
        roots = [remote("w1", loss, (1, 3)), rpc_sync("w4", relayed, args) if foreign else relayed(*args)]
        roots[0].future().wait()
        with pytest.raises(CallTimeout, match=r"timed out; it was waiting for 'w2'\. Give it a longer timeout"):
            autograd.backward(context, roots, timeout=0.1)
        assert not begun(five)
        GATES[0].set()
        roots[1].future().wait()
        autograd.backward(context, roots)


def test_a_context_that_ends_while_a_root_is_missing(five: list[Worker]) -> None:
    with autograd.context() as context:
        roots: list[Any] = [loss(1, 3), remote("w2", loss, (1, 3, 0))]
        future = autograd.backward_async(context, roots)
        waits_for(five, "w2")
    with pytest.raises(ContextEnded, match="wait for the pass"):
        future.wait()
    GATES[0].set()
    roots[1].future().wait()
    assert not begun(five)


def test_two_passes_of_a_context_whose_roots_come_in_turn(five: list[Worker]) -> None:
    with autograd.context() as context:
        passes = [
            autograd.backward_async(context, [loss(gate + 1, 3), remote("w1", loss, (gate + 1, 3, gate))])
            for gate in (0, 1)
        ]
        GATES[1].set()
        passes[1].wait()
        GATES[0].set()
        passes[0].wait()
        (one,), (other,) = (torch.autograd.grad(layer(3, scale * ONES).sum(), WEIGHTS[3]) for scale in (1, 2))
        assert torch.allclose(five[3].conductor.gradients(context)[WEIGHTS[3]], 2 * (one + other))


class Waiting(Passing):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        assert GATES[0].wait(PATIENCE)
        return gradient


def waiting() -> Tensor:
    return Waiting.apply(WEIGHTS[1]).sum()


def extend(root: RRef[Tensor]) -> None:
    root.local_value().add_(loss(2, 3))


def test_a_root_that_changes_while_its_pass_runs_is_named(five: list[Worker]) -> None:
    with autograd.context() as context:
        first, changing, there = remote("w1", waiting), remote("w1", loss, (1, 3)), remote("w3", loss, (1, 4))
        for root in (first, changing, there):
            root.future().wait()
        passes = [autograd.backward_async(context, roots) for roots in (first, [there, changing])]
        wait_until(lambda: [owing for *_, owing in five[0].conductor.under_way()] == [["w1"], ["w1"]])
        rpc_sync("w1", extend, (changing,))
        GATES[0].set()
        passes[0].wait()
        with pytest.raises(UsageError, match=r"a call has changed a root in place meanwhile[\s\S]*On worker 'w3'"):
            passes[1].wait()
