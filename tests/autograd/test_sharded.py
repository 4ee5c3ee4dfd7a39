"""FSDP modules (`fully_shard`) have the same gradients in a context as outside of one, and as in one process."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from telegrad import autograd
from telegrad.nn import Pipeline, RemoteModule
from telegrad.optim import DistributedOptimizer
from telegrad.rpc import RRef
from tests.autograd.sharding import (
    Call,
    Net,
    batch,
    far,
    local,
    lookup,
    mean_square,
    near,
    net_before,
    net_behind,
    same,
    sent_and_not_used,
    shard,
    two_calls,
    two_losses,
    used_twice,
)
from tests.cluster import Process, run_all


class Checkpointed(Net):
    def forward(self, x: Tensor) -> Tensor:
        lower: Tensor = checkpoint(self.lower, x, use_reentrant=False)
        hidden: Tensor = checkpoint(self.upper, lower, use_reentrant=False)
        return self.head(hidden.tanh())


class Stashing(Net):
    """A module that keeps an inner tensor, which is no output of the module, so that FSDP has no hook on it."""

    kept: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.kept = super().forward(x)
        return self.kept.tanh()


class Halves(nn.ModuleList):
    """Two modules with a remote call between them."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        super().__init__([nn.Linear(4, 4), nn.Linear(4, 4)])


def around_a_call(net: Any, call: Call, x: Tensor) -> Tensor:
    return mean_square(net[1](call(lookup, net[0](x))))


class Frozen(Net):
    def __init__(self) -> None:
        super().__init__()
        self.upper.requires_grad_(False)


def inside_is_sent(net: Any, call: Call, x: Tensor) -> Tensor:
    """Send the kept tensor and ignore the result: the output gets its gradient before the rest is known to get none."""
    y = net(call(lookup, x))
    call(lookup, net.kept)
    return call(mean_square, y)


def weighted(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight


class Elsewhere(nn.Module):
    """A module whose parameter is sent to another worker."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(16.0).reshape(4, 4))

    def forward(self, call: Call, x: Tensor) -> Tensor:
        return call(weighted, x, self.weight)


def sent_parameter(net: Elsewhere, call: Call, x: Tensor) -> Tensor:
    return mean_square(net(call, x))


def compared(rank: int, program: Any, options: dict[str, Any]) -> list[bool]:
    if "rounded" in options:
        from torch.distributed.fsdp import MixedPrecisionPolicy

        options = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}
    return same(program, rank, **options)


@pytest.mark.parametrize(
    ("program", "options"),
    [
        *(
            pytest.param(program, {}, id=program.__name__)
            for program in (net_behind, net_before, two_losses, sent_and_not_used, used_twice, two_calls)
        ),
        pytest.param(two_losses, {"reshard_after_forward": False}, id="parameters are kept"),
        pytest.param(around_a_call, {"kind": Halves}, id="modules before and behind a call"),
        pytest.param(net_behind, {"passes": 2}, id="two passes, added up"),
        pytest.param(net_behind, {"rounded": True}, id="mixed precision"),
        pytest.param(net_behind, {"kind": Checkpointed}, id="checkpointed"),
        pytest.param(net_behind, {"kind": Frozen}, id="frozen"),
        pytest.param(inside_is_sent, {"kind": Stashing}, id="a module runs in several pieces"),
        pytest.param(sent_parameter, {"kind": Elsewhere}, id="a parameter is sent"),
    ],
)
def test_gradients_equal_those_outside_of_a_context(fsdp_trainers: list[Process], program: Any, options: Any) -> None:
    for found in run_all(fsdp_trainers, compared, program, options):
        assert all(found)


def over_one_graph(rank: int) -> list[bool]:
    outside, inside = shard(Net()), shard(Net())
    loss = net_behind(outside, near, batch(rank))
    loss.backward(retain_graph=True)
    loss.backward()
    with autograd.context() as context:
        loss = net_behind(inside, far, batch(rank))
        autograd.backward(context, loss, retain_graph=True)
        autograd.backward(context, loss)
        found = autograd.get_gradients(context)
    pairs = zip(inside.parameters(), outside.parameters(), strict=True)
    return [torch.equal(local(found[one]), local(other.grad)) for one, other in pairs]


def test_a_graph_that_runs_twice(fsdp_trainers: list[Process]) -> None:
    for found in run_all(fsdp_trainers, over_one_graph):
        assert all(found)


# Training


class Table(nn.Module):
    """The remote part of a model."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4, generator=torch.Generator().manual_seed(5)))

    def forward(self, rows: Tensor) -> Tensor:
        return self.weight[rows]


def rows(rank: int, step: int) -> Tensor:
    return torch.tensor([rank, step + 1, 2 * rank + 1])


def trained(rank: int, rides: bool) -> tuple[list[Tensor], Tensor]:
    net, table = shard(Net()), RemoteModule("worker2", Table)
    parameters = [*map(RRef, net.parameters()), *table.remote_parameters()]
    optimizer = DistributedOptimizer(torch.optim.Adam, parameters, lr=0.1)
    for step in range(3):
        with autograd.context() as context:
            autograd.backward(context, mean_square(net(table(rows(rank, step)))), step=optimizer if rides else None)
            if not rides:
                optimizer.step(context)
    (weight,) = table.remote_parameters()
    return [parameter.full_tensor().detach() for parameter in net.parameters()], weight.to_here().detach()


def trained_in_one_process() -> tuple[list[Tensor], list[Tensor]]:
    net, tables = Net(), [Table(), Table()]
    optimizer = torch.optim.Adam([*net.parameters(), *tables[0].parameters(), *tables[1].parameters()], lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        for rank, table in enumerate(tables):
            mean_square(net(table(rows(rank, step)))).backward()
        for parameter in net.parameters():
            parameter.grad = None if parameter.grad is None else parameter.grad / 2
        optimizer.step()
    return [parameter.detach() for parameter in net.parameters()], [table.weight.detach() for table in tables]


@pytest.mark.parametrize("rides", [False, True])
def test_a_table_and_a_sharded_net_train_as_one_process(fsdp_trainers: list[Process], rides: bool) -> None:
    wanted, tables = trained_in_one_process()
    for (found, table), other in zip(run_all(fsdp_trainers, trained, rides), tables, strict=True):
        assert all(torch.allclose(one, two, atol=1e-6) for one, two in zip(found, wanted, strict=True))
        assert torch.allclose(table, other, atol=1e-6)


def with_hooks(rank: int) -> tuple[list[float], bool]:
    net, seen = shard(Net()), []
    parameter = net.head.weight

    def after(parameter: Any) -> None:
        seen.append(float(parameter.grad.full_tensor().sum()))
        if len(seen) == 3:
            parameter.grad = None

    parameter.register_post_accumulate_grad_hook(after)
    with autograd.context() as context:
        for _ in range(3):
            autograd.backward(context, net_behind(net, far, batch(rank)))
        return seen, parameter in autograd.get_gradients(context)


def test_hooks_after_accumulation_see_the_sum_of_the_context(fsdp_trainers: list[Process]) -> None:
    for (one, two, three), there in run_all(fsdp_trainers, with_hooks):
        assert (two, three) == pytest.approx((2 * one, 3 * one))
        assert not there


def with_decay(rank: int) -> bool:
    """Use the sharded parameters themselves in the loss."""
    outside, inside = shard(Net()), shard(Net())

    def loss(net: Any, call: Call) -> Tensor:
        decay: Any = (net.head.weight**2).sum()
        return net_behind(net, call, batch(rank)) + decay.full_tensor()

    loss(outside, near).backward()
    with autograd.context() as context:
        autograd.backward(context, loss(inside, far))
        found: Any = autograd.get_gradients(context)[inside.head.weight]
    wanted: Any = outside.head.weight.grad
    return torch.allclose(found.full_tensor(), wanted.full_tensor())


def test_sharded_parameters_in_the_loss(fsdp_trainers: list[Process]) -> None:
    assert run_all(fsdp_trainers, with_decay) == [True, True]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_sharded_stage_of_a_pipeline(fsdp_trainers: list[Process], schedule: str) -> None:
    for found in run_all(fsdp_trainers, as_stage, schedule):
        assert found == [True] * 6


def as_stage(rank: int, schedule: str) -> list[bool]:
    outside, inside = shard(Net()), shard(Net())
    mean_square(outside(batch(rank)).sin()).backward()
    pipeline = Pipeline([inside, RemoteModule("worker2", Sine)], chunks=2, schedule=schedule)
    with autograd.context() as context:
        pipeline.forward_backward(context, batch(rank).detach(), batch(rank).detach(), lambda y, _: mean_square(y))
        found = autograd.get_gradients(context)
    pairs: Any = zip(inside.parameters(), outside.parameters(), strict=True)
    return [torch.allclose(local(found[one]), local(other.grad)) for one, other in pairs]


class Sine(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sin()
