"""Tensors of special kinds, and plain ones whose gradients other workers cannot know, are right or refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Self

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from telegrad import autograd
from telegrad.errors import CannotEncode, TelegradError, UsageError
from telegrad.optim import DistributedOptimizer, clip_grad_norm_
from telegrad.rpc import remote, rpc_stream, rpc_sync
from tests.cluster import Process, run_all

pytestmark = pytest.mark.usefixtures("contexts_end")


def leaf(size: int = 3) -> Tensor:
    return torch.arange(1.0, size + 1, requires_grad=True)


# Tensors that are made of other tensors


class Pair(Tensor):
    """A tensor that wraps two tensors."""

    @staticmethod
    def __new__(cls, one: Tensor, other: Tensor) -> Self:
        return Tensor._make_wrapper_subclass(cls, one.shape, dtype=one.dtype)

    def __init__(self, one: Tensor, other: Tensor) -> None:
        self.one, self.other = one, other

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        def run(name: str) -> Any:
            of_one = pytree.tree_map(lambda each: getattr(each, name) if isinstance(each, Pair) else each, args)
            return func(*of_one, **(kwargs or {}))

        one, other = run("one"), run("other")
        return cls(one, other) if isinstance(one, Tensor) else one


class Flat(Pair):
    """A pair with `__tensor_flatten__`."""

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["one", "other"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], _: Any, *__: Any) -> Flat:
        return Flat(inner["one"], inner["other"])


class OwnRule(Tensor):
    """A tensor with a `__reduce_ex__` of its own."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Tensor.as_subclass, (self.as_subclass(Tensor).detach(), OwnRule)


def jagged() -> Tensor:
    return torch.nested.as_nested_tensor([leaf(2), leaf(3)], layout=torch.jagged)


MADE_OF_OTHERS: dict[str, Callable[[], Tensor]] = {
    "pair": lambda: Pair(torch.ones(2), torch.zeros(2)).requires_grad_(),
    "flat": lambda: Flat(torch.ones(2), torch.zeros(2)).requires_grad_() * 2,
    "own rule": lambda: leaf().as_subclass(OwnRule),
    "parameter": lambda: nn.Parameter(Flat(torch.ones(2), torch.zeros(2))),
    "jagged": jagged,
    "nested": lambda: torch.nested.as_nested_tensor([leaf(2), leaf(3)]),
}


def same(value: Any) -> Any:
    return value


def made_there(name: str) -> Any:
    return [MADE_OF_OTHERS[name]()]


def yielded_there(name: str) -> Iterator[Any]:
    yield MADE_OF_OTHERS[name]()


@pytest.mark.parametrize("name", MADE_OF_OTHERS)
def test_wrapper_tensors_are_not_sent_without_their_history(name: str) -> None:
    with autograd.context():
        ways: list[Callable[[], Any]] = [
            lambda: rpc_sync("w1", same, ([MADE_OF_OTHERS[name]()],)),
            lambda: rpc_sync("w1", made_there, (name,)),
            lambda: remote("w1", made_there, (name,)).to_here(),
            lambda: list(rpc_stream("w1", yielded_there, (name,))),
        ]
        for way in ways:
            with pytest.raises(TelegradError, match=r"cannot be sent in an autograd context|has no graph|detach\(\)"):
                way()
        rpc_sync("w1", same, ([MADE_OF_OTHERS[name]().detach()],))
        with torch.no_grad():
            rpc_sync("w1", same, (Flat(torch.ones(2), torch.zeros(2)).requires_grad_(),))


@pytest.mark.parametrize("kind", [Pair, Flat])
def test_wrapper_tensors_as_leaves_are_trained(kind: type[Pair]) -> None:
    def loss(weight: Tensor) -> Tensor:
        return (weight * 3 + weight.sin()).sum()

    weights = [kind(torch.ones(3), torch.full((3,), 2.0)).requires_grad_() for _ in range(2)]
    loss(weights[0]).backward()
    loss(weights[0]).backward()
    with autograd.context() as context:
        for _ in range(2):
            autograd.backward(context, loss(weights[1]))
        found, wanted = autograd.get_gradients(context)[weights[1]], weights[0].grad
        assert isinstance(found, kind)
        assert isinstance(wanted, kind)
        assert torch.equal(found.one, wanted.one)
        assert torch.equal(found.other, wanted.other)


# Transforms and forward mode


def call(x: Tensor) -> Tensor:
    return rpc_sync("w1", torch.sin, (x,))


TRANSFORMS: list[Callable[[Callable[[Tensor], Tensor]], Any]] = [
    lambda function: torch.func.vmap(function)(torch.ones(2, 3)),
    lambda function: torch.func.grad(lambda x: function(x).sum())(torch.ones(3)),
    lambda function: torch.func.jvp(function, (torch.ones(3),), (torch.ones(3),)),
    lambda function: torch.func.jacrev(function)(torch.ones(3)),
    lambda function: torch.func.jacfwd(function)(torch.ones(3)),
    lambda function: torch.func.hessian(lambda x: function(x).sum())(torch.ones(3)),
    lambda function: torch.func.vjp(function, torch.ones(3)),
    lambda function: torch.func.functionalize(function)(torch.ones(3)),
    lambda function: torch.func.vmap(torch.func.grad(lambda x: function(x).sum()))(torch.ones(2, 3)),
]


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("function", [call, lambda x: call(x[:0]), lambda x: call(torch.complex(x, x)).real])
def test_calls_inside_of_transforms_are_refused(transform: Any, function: Any) -> None:
    with pytest.raises(CannotEncode, match=r"from inside a transform of torch\.func|with a tangent"):
        transform(function)


def test_tensors_that_a_transform_does_not_wrap_may_be_sent() -> None:
    x = torch.ones(3)
    assert torch.equal(torch.func.vmap(lambda y: y * call(x))(torch.ones(2, 3)), torch.ones(2, 3) * x.sin())


def test_tangents_are_not_lost() -> None:
    x = torch.ones(3)
    with forward_ad.dual_level():
        assert torch.equal(call(x), x.sin())
        for dual in (forward_ad.make_dual(x, x), Flat(forward_ad.make_dual(x, x), x)):
            with pytest.raises(CannotEncode, match="with a tangent"):
                rpc_sync("w1", same, (dual,))


# Tensors of one message that share memory


def with_part(x: Tensor) -> tuple[Tensor, Tensor]:
    whole = x * 1
    return whole, whole[1:3]


def with_detached(x: Tensor) -> tuple[Tensor, Tensor]:
    whole = x * 1
    return whole, whole.detach()


def complex_parts(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    whole = torch.complex(x, x)
    return whole, whole.conj(), whole.imag


def overwrite(one: Tensor, part: Tensor) -> Tensor:
    part.mul_(3)
    return one.sum()


def test_writes_to_shared_memory_are_refused() -> None:
    x = leaf(4)
    with autograd.context() as context:
        whole, part = rpc_sync("w1", with_part, (x,))
        for write in (lambda: whole.mul_(2), lambda: part[0].fill_(1)):
            with pytest.raises(RuntimeError, match="is a view and"):
                write()
        whole, part = rpc_sync("w1", with_part, (x,))
        autograd.backward(context, (whole.sum() + (part * part).sum()))
        assert autograd.get_gradients(context)[x].tolist() == [1, 5, 7, 1]
        mine = x * 1
        with pytest.raises(RuntimeError, match="is a view and"):
            rpc_sync("w1", overwrite, (mine, mine[1:]))


def test_writes_to_shared_memory_without_history_are_noticed() -> None:
    x = leaf(4)
    with autograd.context() as context:
        whole, detached = rpc_sync("w1", with_detached, (x,))
        loss = (whole * whole).sum()
        detached.mul_(2)
        assert torch.equal(whole, detached)
        with pytest.raises(RuntimeError, match="modified inplace"):
            autograd.backward(context, loss)


def test_shared_memory_of_complex_numbers() -> None:
    x, y = leaf(4), leaf(4)
    with autograd.context() as context:
        loss: Any = sum(each.abs().sum() for each in rpc_sync("w1", complex_parts, (x,)))
        autograd.backward(context, loss)
        sum(each.abs().sum() for each in complex_parts(y)).backward()
        assert torch.allclose(autograd.get_gradients(context)[x], y.grad)  # type: ignore[arg-type]


# Results with a graph for a caller under no_grad


def sine_with_grad(x: Tensor) -> Tensor:
    with torch.enable_grad():
        return x.sin()


kept: dict[str, Tensor] = {}


def keep(x: Tensor) -> None:
    kept["before"] = x.sin()


def get_kept() -> Tensor:
    return kept["before"]


def test_gradients_of_calls_under_no_grad_are_not_lost() -> None:
    x = leaf()
    with autograd.context() as context:
        rpc_sync("w1", keep, (x,))
        for function, args in ((sine_with_grad, [x]), (get_kept, [])):
            with torch.no_grad():
                received: Tensor = rpc_sync("w1", function, args)
            assert received.requires_grad
            for run in (
                lambda loss: autograd.backward(context, loss),
                lambda loss: autograd.grad(context, loss, x),
                lambda loss: torch.autograd.grad(loss, x),
                lambda loss: loss.backward(),
            ):
                with pytest.raises(UsageError, match=r"a call under torch\.no_grad"):
                    run((received * x).sum())
        autograd.backward(context, (received.detach() * x).sum())
    kept.clear()


# DTensor and replicas, which need a process group


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def tensor_parallel() -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    net = parallelize_module(network(), init_device_mesh("cpu", (2,)), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    x = torch.ones(2, 4, requires_grad=True)
    optimizer = DistributedOptimizer.for_module(torch.optim.Adam, net, lr=0.1)
    with autograd.context() as context:
        clipped = ""
        for _ in range(2):
            autograd.backward(context, (net(rpc_sync("worker2", double, (x,))) ** 2).sum())
        try:
            clip_grad_norm_(context, optimizer, 1.0)
        except UsageError as error:
            clipped = str(error)
        optimizer.step(context)
    whole: Any = net
    return {"weights": [each.full_tensor().detach() for each in whole.parameters()], "clipped": clipped}


def double(x: Tensor) -> Tensor:
    return x * 2


@pytest.mark.nightly
def test_distributed_parameters_train_as_in_one_process(trainers: list[Process]) -> None:
    for trainer in trainers:
        trainer.begin(tensor_parallel)
    found = [trainer.end() for trainer in trainers]
    net = network()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    for _ in range(2):
        (net(torch.full((2, 4), 2.0)) ** 2).sum().backward()
    optimizer.step()
    for each in found:
        assert "would count several times" in each["clipped"]
        for weight, wanted in zip(each["weights"], net.parameters(), strict=True):
            assert torch.allclose(weight, wanted, atol=1e-6)


def of_static_graph(rank: int) -> tuple[str, list[bool]]:
    replica = nn.parallel.DistributedDataParallel(network(), static_graph=True)

    def gradients_in_context() -> list[Tensor]:
        x = torch.full((2, 4), 1.0 + rank, requires_grad=True)
        with autograd.context() as context:
            autograd.backward(context, (replica(rpc_sync("worker2", double, (x,))) ** 2).sum())
            found = autograd.get_gradients(context)
        return [found[each] for each in replica.parameters()]

    with pytest.raises(UsageError) as refused:
        gradients_in_context()
    for _ in range(2):
        replica.zero_grad()
        (replica(torch.full((2, 4), 2.0 + 2 * rank)) ** 2).sum().backward()
    wanted = [each.grad for each in replica.parameters()]
    return str(refused.value), list(map(torch.equal, gradients_in_context(), wanted))  # type: ignore[arg-type]


def test_replicas_with_a_static_graph_need_a_pass_outside_of_contexts(trainers: list[Process]) -> None:
    for refused, same in run_all(trainers, of_static_graph):
        assert "_delay_all_reduce uses the gradients that are in .grad at the end" in refused
        assert "static_graph=True can after one backward pass outside of contexts" in refused
        assert same == [True] * 4


# Reentrant activation checkpoints


def test_a_checkpoint_that_uses_a_received_tensor() -> None:
    x = leaf()
    with autograd.context() as context:
        received = call(x)
        for function in (lambda value: value * received, lambda value: call(value) * value):
            made = checkpoint(function, x * 2, use_reentrant=True)
            with pytest.raises(
                UsageError, match=r"came from worker 'w1': it makes a remote call.* not one of its arguments"
            ):
                autograd.backward(context, made.sum(), retain_graph=True)
        made = checkpoint(torch.mul, x * 2, received, use_reentrant=True)
        autograd.backward(context, made.sum())
        assert torch.allclose(autograd.get_gradients(context)[x], (2 * (x.sin() + x * x.cos())).detach())


@pytest.mark.parametrize("run", [autograd.backward, autograd.backward_async, autograd.grad])
def test_the_id_of_the_context_is_the_first_argument(run: Any) -> None:
    with autograd.context() as context, pytest.raises(UsageError, match="the id of the context comes first"):
        run([leaf().sum()], context, leaf())
