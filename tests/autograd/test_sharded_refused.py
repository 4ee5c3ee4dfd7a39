"""Passes through FSDP modules (`fully_shard`) that are refused, and passes that fail."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from telegrad import autograd
from telegrad.errors import UsageError
from tests.autograd.functions import Passing
from tests.autograd.sharding import Net, batch, far, local, lookup, mean_square, near, net_before, net_behind, shard
from tests.cluster import Process, run_all

# Refused passes


class OneModule(Net):
    """A module that makes a remote call in the middle."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.upper(far(lookup, self.lower(x))))


def without_sync(net: Any, context: int, x: Tensor) -> None:
    net.set_requires_gradient_sync(False)
    try:
        autograd.backward(context, net_behind(net, far, x))
    finally:
        net.set_requires_gradient_sync(True)


def through_the_middle(net: Any, context: int, x: Tensor) -> None:
    autograd.backward(context, mean_square(shard(OneModule())(x)))


def in_two_messages(net: Any, context: int, x: Tensor) -> None:
    autograd.backward(context, net_before(net, far, x) + net_before(net, far, x * 2))


def with_a_graph(net: Any, context: int, x: Tensor) -> None:
    autograd.backward(context, net_behind(net, far, x), create_graph=True)


def of_inputs(net: Any, context: int, x: Tensor) -> None:
    autograd.grad(context, net_behind(net, far, x), x)


REFUSED = {
    without_sync: "from one autograd context into the next",
    through_the_middle: "apply fully_shard to the part before the call and to the part after it",
    in_two_messages: "begin an autograd context for each forward pass",
    with_a_graph: "create_graph=True",
    of_inputs: r"telegrad\.autograd\.grad",
}


def refused(rank: int, run: Any) -> tuple[str, list[bool]]:
    """Return the error, and the correctness of later gradients of the module, inside and outside of a context."""
    net, other = shard(Net()), shard(Net())
    with autograd.context() as context, pytest.raises(UsageError) as error:
        run(net, context, batch(rank))
    net_behind(other, near, batch(rank)).backward()
    net_behind(net, near, batch(rank)).backward()
    with autograd.context() as context:
        autograd.backward(context, net_behind(net, far, batch(rank)))
        found = autograd.get_gradients(context)
    return str(error.value), [
        torch.equal(local(each), local(wanted.grad))
        for one, wanted in zip(net.parameters(), other.parameters(), strict=True)
        for each in (one.grad, found[one])
    ]


def of_the_other_kind(rank: int) -> tuple[str, bool]:
    """Return the error, and True if a backward pass behind a detached tensor gives the gradient of the input."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    def made() -> FullyShardedDataParallel:
        return FullyShardedDataParallel(Net(), device_id=torch.device("cpu"))

    with autograd.context() as context, pytest.raises(UsageError) as error:
        autograd.backward(context, net_behind(made(), far, batch(rank)))
    x, y = batch(rank), batch(rank)
    with autograd.context() as context:
        sent = far(lookup, x)
        detached = sent.detach().requires_grad_()
        mean_square(made()(detached)).backward()
        autograd.backward(context, (sent * detached.grad).sum())
        found = autograd.get_gradients(context)[x]
    net_behind(Net(), near, y).backward()
    return str(error.value), y.grad is not None and torch.allclose(found, y.grad)


def test_the_older_fsdp_needs_a_backward_pass_of_its_own(fsdp_trainers: list[Process]) -> None:
    for error, right in run_all(fsdp_trainers, of_the_other_kind):
        assert "behind a detached tensor" in error
        assert right


@pytest.mark.parametrize("run", REFUSED)
def test_impossible_passes_are_refused_on_all_ranks(fsdp_trainers: list[Process], run: Any) -> None:
    for error, right in run_all(fsdp_trainers, refused, run):
        assert re.search(REFUSED[run], error)
        assert all(right)


# Passes that fail


class Fails(Passing):
    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Tensor:
        raise RuntimeError("no gradient here")


class Failing(Net):
    fails = True

    def forward(self, x: Tensor) -> Tensor:
        lower: Any = self.lower(x)
        hidden: Tensor = self.upper(Fails.apply(lower) if self.fails else lower)
        return self.head(hidden.tanh())


def fail_once(rank: int) -> list[bool]:
    net = shard(Failing())
    parameters = list(net.parameters())
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 7.0)
    with autograd.context() as context, pytest.raises(RuntimeError, match="no gradient here"):
        autograd.backward(context, net_behind(net, far, batch(rank)))
    kept = [bool((local(parameter.grad) == 7.0).all()) for parameter in parameters]
    net.reset_iter_state()
    net.fails = False
    other = shard(Net())
    net_behind(other, near, batch(rank)).backward()
    with autograd.context() as context:
        autograd.backward(context, net_behind(net, far, batch(rank)))
        found = autograd.get_gradients(context)
    pairs = zip(parameters, other.parameters(), strict=True)
    return [*kept, *(torch.equal(local(found[one]), local(two.grad)) for one, two in pairs)]


def test_a_failed_pass_does_not_change_grad(fsdp_trainers: list[Process]) -> None:
    from torch.distributed.fsdp import FSDPModule

    if not hasattr(FSDPModule, "reset_iter_state"):
        pytest.skip("this version of torch cannot make a module usable again")
    for found in run_all(fsdp_trainers, fail_once):
        assert all(found)
