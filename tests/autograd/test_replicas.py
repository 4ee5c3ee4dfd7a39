"""DistributedDataParallel modules on trainers whose losses go through other workers."""

import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import telegrad
import telegrad.autograd as autograd
from telegrad import rpc
from telegrad.rpc import RRef, remote, rpc_async, rpc_sync
from tests.cluster import PATIENCE, Process, group, in_threads, run_all

TRAINERS = 2


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def batch(rank: int) -> torch.Tensor:
    return torch.arange(6.0).reshape(2, 3) * (rank + 1)


class Table(nn.Module):
    """The remote part of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


def averaged(loss: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> list[torch.Tensor | None]:
    """Return the gradients of a local network, averaged over the trainers' batches."""
    net = network()
    for rank in range(TRAINERS):
        (loss(net, batch(rank) @ torch.ones(3, 3)) / TRAINERS).backward()
    return [parameter.grad for parameter in net.parameters()]


def whole_program(rank: int, unused: bool, options: dict[str, Any]) -> bool:
    net = DistributedDataParallel(network(), **options)
    seen = []
    next(net.parameters()).register_hook(lambda gradient: seen.append(gradient))
    for parameter in net.parameters():
        parameter.grad = torch.full_like(parameter, 7.0)
    for forward in (net.forward, net):  # repeated uses of a reducer, with and without the module's `__call__`
        with autograd.context() as context:
            table = remote("worker2", Table)
            x = table.rpc_sync().forward(batch(rank))
            y = forward(x)
            if unused:
                rpc_sync("worker2", torch.exp, (y,))
            autograd.backward(context, rpc_sync("worker2", torch.sin, (y,)).sum())
            found = autograd.get_gradients(context)
            far = rpc_sync("worker2", gradient_of_table, (table, context))
    for parameter, wanted in zip(net.parameters(), averaged(lambda net, x: net(x).sin().sum()), strict=True):
        assert wanted is not None
        assert torch.allclose(found[parameter], wanted, atol=1e-6)
        assert parameter.grad.eq(7).all()
    assert len(seen) == 2
    assert far.abs().sum() > 0
    return True


def gradient_of_table(table: RRef[Table], context: int) -> torch.Tensor:
    return autograd.get_gradients(context)[table.local_value().weight]


@pytest.mark.parametrize(
    ("unused", "options"),
    [(False, {"gradient_as_bucket_view": True}), (False, {"bucket_cap_mb": 1e-5}), (True, {})],
    ids=str,
)
def test_gradients_are_averaged(trainers: list[Process], unused: bool, options: dict[str, Any]) -> None:
    assert all(run_all(trainers, whole_program, unused, options))


def program_over_a_group_of_workers(rank: int) -> bool:
    assert not torch.distributed.is_initialized()
    return whole_program(rank, False, {"process_group": telegrad.process_group(rpc.group(["worker0", "worker1"]))})


def test_gradients_are_averaged_over_a_process_group_without_a_default_one() -> None:
    with group(TRAINERS + 1) as made:
        assert all(run_all(made[:TRAINERS], program_over_a_group_of_workers))


def two_uses_without_synchronisation(rank: int) -> bool:
    """Use the module twice; the gradients come back from two workers at different times."""
    net = DistributedDataParallel(network())
    with autograd.context() as context, net.no_sync():
        loss = rpc_async("worker2", torch.sin, (net(batch(rank)),)).wait().sum()
        autograd.backward(context, loss + net(batch(rank)).sum())
        found = autograd.get_gradients(context)
    expected = network()
    (expected(batch(rank)).sin().sum() + expected(batch(rank)).sum()).backward()
    for parameter, wanted in zip(net.parameters(), expected.parameters(), strict=True):
        assert wanted.grad is not None
        assert torch.allclose(found[parameter], wanted.grad, atol=1e-6)
    return True


def a_group_that_ends_with_its_module(rank: int) -> bool:
    """Destroy the group of a module while the group's thread holds a Python tensor, without a thread switch."""
    group_of_its_own = torch.distributed.new_group()
    net = DistributedDataParallel(network(), process_group=group_of_its_own)
    with autograd.context() as context:
        autograd.backward(context, net(batch(rank)).sum())
    sys.setswitchinterval(PATIENCE)
    try:
        torch.distributed.all_reduce(torch.zeros(1 << 24), group=group_of_its_own, async_op=True)  # 64 MB
        torch.distributed.destroy_process_group(group_of_its_own)
        del group_of_its_own, net
    finally:
        sys.setswitchinterval(5e-3)
    return True


def groups_that_do_not_wait(rank: int) -> bool:
    """Begin the reduction of one module, and during it that of the other; the ranks do so in different orders."""
    groups = [torch.distributed.new_group([0, 1]) for _ in range(2)]
    modules = [DistributedDataParallel(network(), process_group=each) for each in groups]
    begun = threading.Event()

    def reduce(number: int, bucket: Any) -> Any:
        if number == rank:
            begun.set()
        return allreduce_hook(groups[number], bucket)

    def gradients(number: int) -> list[torch.Tensor]:
        modules[number].register_comm_hook(number, lambda number, bucket: reduce(number, bucket))  # not annotated
        assert number == rank or begun.wait(PATIENCE)
        with autograd.context() as context:
            autograd.backward(context, modules[number](batch(rank)).sin().sum())
            found = autograd.get_gradients(context)
        return [found[parameter] for parameter in modules[number].parameters()]

    one, other = in_threads(lambda: gradients(0), lambda: gradients(1))
    return all(map(torch.allclose, one, other))


@pytest.mark.parametrize(
    "program", [two_uses_without_synchronisation, a_group_that_ends_with_its_module, groups_that_do_not_wait]
)
def test_programs_of_all_trainers(trainers: list[Process], program: Callable[[int], bool]) -> None:
    assert run_all(trainers, program) == [True] * TRAINERS
