"""Backward passes run the nodes of one process, in its order and with its gradients, also if gradients arrive late."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed
from torch import nn

import telegrad.autograd as autograd
from telegrad._core.worker import current
from telegrad._core.worker.current import Worker
from telegrad.autograd import node_calls, pass_parts
from telegrad.rpc import rpc_sync
from tests.autograd.functions import Join, Passing, recomputed
from tests.cluster import PATIENCE, Process

End = Callable[[torch.Tensor], torch.Tensor | int]  # adds a last part to a loss

ran: list[str] = []
took: list[tuple[torch.Tensor | None, ...]] = []


@pytest.fixture(autouse=True)
def here(request: pytest.FixtureRequest) -> None:
    if "pair" in request.fixturenames:
        current.enter(request.getfixturevalue("pair")[0])
    ran.clear()
    took.clear()


class Named(torch.autograd.Function):
    """Records its runs."""

    @staticmethod
    def forward(ctx: Any, name: str, *xs: torch.Tensor) -> torch.Tensor | int:
        ctx.name, ctx.count = name, len(xs)
        return sum(xs)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ran.append(ctx.name)
        return None, *[gradient] * ctx.count


class Two(torch.autograd.Function):
    """A function with two outputs."""

    boxed_grads_call = False

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, materialize: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(materialize)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, first: torch.Tensor | None, second: torch.Tensor | None) -> tuple[torch.Tensor | int, None]:
        took.append((first, second))
        return (0 if first is None else first * 2) + (0 if second is None else second * 3), None


NEEDS_BOXED = pytest.mark.skipif(
    not hasattr(torch.autograd.function.BackwardCFunction, "apply_boxed"),
    reason="this torch gives gradients as arguments only",
)


class Boxed(Two):
    """A function that takes its gradients in a list."""

    boxed_grads_call = True

    @staticmethod
    def backward(ctx: Any, gradients: list[Any]) -> Any:  # type: ignore[override]
        return Two.backward(ctx, *gradients)


class Aside(Passing):
    """A function whose backward gives no gradient."""

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> None:
        ran.append("aside")
        took.append((gradient,))
        return None  # noqa: RET501 - as users write it


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def call(x: torch.Tensor, hops: int = 1) -> torch.Tensor:
    for _ in range(hops):
        x = rpc_sync("w1", double, (x,))
    return x


def late(x: torch.Tensor) -> torch.Tensor:
    """Make the graph before `x` wait for a gradient that comes back from another worker."""
    return call(x, 3).sum()


LATE = pytest.mark.parametrize("end", [lambda x: 0, late], ids=["at once", "late"])


@LATE
def test_the_newest_ready_node_runs_first(pair: list[Worker], end: End) -> None:
    with autograd.context() as context:
        base = torch.ones(2, requires_grad=True) * 1
        old, new = Named.apply("old", base), Named.apply("new", base)
        autograd.backward(context, call(Named.apply("join", new, old)).sum() + end(base))
    assert ran == ["join", "new", "old"]


def test_gradients_of_one_message_run_in_one_order(pair: list[Worker]) -> None:
    """Two separate chains get their gradients in one message: the newest node of both runs first."""
    with autograd.context() as context:
        a, b = (torch.ones(2, requires_grad=True) * 1 for _ in range(2))
        a, b = Named.apply("1", a), Named.apply("2", b)
        a, b = Named.apply("3", a), Named.apply("4", b)
        a, b = rpc_sync("w1", both, (a, b))
        autograd.backward(context, (a + b).sum())
    assert ran == ["4", "3", "2", "1"]


def both(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return a * 2, b * 2


def test_gradients_that_return_together_run_in_one_order(pair: list[Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds on the called worker, too, where the tensors of two calls are two regions of the graph."""
    monkeypatch.setattr(pass_parts, "GATHER", PATIENCE)  # else a pause of the machine divides them
    with autograd.context() as context:
        a, b = (torch.ones(2, requires_grad=True) * 1 for _ in range(2))
        keys = [rpc_sync("w1", begin, (each, name)) for each, name in ((a, "1"), (b, "2"))]
        ends = [rpc_sync("w1", go_on, (key, name)) for key, name in zip(keys, "34", strict=True)]
        autograd.backward(context, sum(ends).sum())
    assert ran == ["4", "3", "2", "1"]


BEGUN: list[torch.Tensor] = []
AGES = iter(range(1 << 40, 1 << 41))  # torch numbers nodes per thread, and calls run on several threads


def aged(tensor: torch.Tensor) -> torch.Tensor:
    tensor.grad_fn._set_sequence_nr(next(AGES))
    return tensor


def begin(x: torch.Tensor, name: str) -> int:
    BEGUN.append(aged(Named.apply(name, x)))
    return len(BEGUN) - 1


def go_on(key: int, name: str) -> torch.Tensor:
    return aged(Named.apply(name, BEGUN[key]))


@LATE
@pytest.mark.parametrize("function", [Two, pytest.param(Boxed, marks=NEEDS_BOXED)])
def test_an_output_without_gradient_gets_zeros(pair: list[Worker], end: End, function: type[Two]) -> None:
    with autograd.context() as context:
        leaf = torch.ones(2, requires_grad=True)
        base = leaf * 1
        first, second = function.apply(base)
        second.register_hook(lambda gradient: ran.append(str(gradient)))
        autograd.backward(context, call(first).sum() + end(base))
        assert autograd.get_gradients(context)[leaf].tolist() == [12 if end is late else 4] * 2
    assert ([[each.tolist() for each in given] for given in took], ran) == ([[[2, 2], [0, 0]]], ["None"])


@LATE
def test_an_output_without_gradient_gets_none_if_not_materialized(pair: list[Worker], end: End) -> None:
    with autograd.context() as context:
        base = torch.ones(2, requires_grad=True) * 1
        autograd.backward(context, call(Two.apply(base, False)[0]).sum() + end(base))
    assert [each is None for each in took[0]] == [False, True]


@LATE
def test_a_reached_node_without_gradient_runs(pair: list[Worker], end: End) -> None:
    with autograd.context() as context:
        base = torch.ones(2, requires_grad=True) * 1
        autograd.backward(context, call(Join.apply(base, Aside.apply(base))).sum() + end(base))
    assert (ran, took[0][0].tolist()) == (["aside"], [0, 0])


@LATE
def test_a_node_without_gradient_that_another_worker_reaches_runs(pair: list[Worker], end: End) -> None:
    with autograd.context() as context:
        leaf, unused = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
        base, apart = leaf * 1, Named.apply("apart", unused)
        autograd.backward(context, rpc_sync("w1", joined, (base, Aside.apply(base), apart)).sum() + end(base))
        assert unused not in autograd.get_gradients(context)
    assert ran == ["aside"], "and what the function did not use does not run"


def joined(x: torch.Tensor, aside: torch.Tensor, apart: torch.Tensor) -> torch.Tensor:
    return Join.apply(x, aside) * 1


@LATE
def test_an_unused_argument_has_no_gradient(pair: list[Worker], end: End) -> None:
    with autograd.context() as context:
        used, unused = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
        autograd.backward(context, rpc_sync("w1", joined, (used, used, unused)).sum() + end(used))
        assert set(autograd.get_gradients(context)) == {used}


def test_hooks_of_a_node_that_runs_by_hand_get_the_usual_arguments(pair: list[Worker]) -> None:
    seen = []
    for remote in (lambda x, hops=1: x.clone(), call):
        with autograd.context() as context:
            leaf = torch.ones(2, requires_grad=True)
            base = leaf * 1
            first, _ = Two.apply(base)
            first.grad_fn.register_prehook(lambda given: seen.append(("before", *map(str, given))))
            first.grad_fn.register_hook(lambda given, taken: seen.append(("after", *map(str, given), *map(str, taken))))
            loss = (remote(first) / (2 if remote is call else 1)).sum() + (remote(base, 3)).sum()
            loss.backward() if remote is not call else autograd.backward(context, loss)
    assert seen[:2] == seen[2:]


def test_anomaly_mode_does_not_warn_without_an_error(pair: list[Worker], recwarn: pytest.WarningsRecorder) -> None:
    with torch.autograd.detect_anomaly(), autograd.context() as context:
        recwarn.clear()
        base = torch.ones(2, requires_grad=True) * 1
        autograd.backward(context, call(Two.apply(base)[0]).sum() + late(base))
    assert len(took) == 1
    assert not [each for each in recwarn if "Error detected" in str(each.message)]


def test_the_engine_runs_the_nodes_whose_gradients_are_complete(
    pair: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only nodes that lead to a waiting node, and Python nodes behind it, run by hand."""
    by_hand, original = [], node_calls.run

    def run(node: Any, *rest: Any) -> Any:
        by_hand.append(type(node).__name__)
        return original(node, *rest)

    monkeypatch.setattr(node_calls, "run", run)
    with autograd.context() as context:
        base = torch.ones(2, requires_grad=True) * 1
        side = base.sin().cos().exp().tanh()
        for _ in range(20):
            base = base.relu()
        autograd.backward(context, call(side).sum() + late(base) + late(base.sin()))
    assert by_hand == ["SinBackward0"] * by_hand.count("SinBackward0")


# Programs that rely on the order


class Part(nn.Module):
    """A layer whose random numbers must be the same in a recomputation."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(x).sin() * x


@LATE
def test_recomputed_values_exist_before_they_are_needed(pair: list[Worker], end: End) -> None:
    """The recomputation has two nodes, as in pipelines, and uses random numbers."""
    leaf, part = torch.randn(4, 4, dtype=torch.float64, requires_grad=True), Part()
    found = []
    for function in (lambda part, x: part(x), lambda part, x: recomputed(part, x)):
        torch.manual_seed(5)
        with autograd.context() as context:
            base = leaf * 1
            one, other = function(part, base), function(part, base.cos())
            autograd.backward(context, call(one * other).sum() + end(base))
            found.append(autograd.get_gradients(context)[leaf])
    assert torch.allclose(found[0], found[1])


class Shared(torch.autograd.Function):
    """Sums its gradient over the replicas, as a synchronised normalisation does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = gradient * ctx.factor
        torch.distributed.all_reduce(total)
        took.append((total,))
        return total, None


def step(rank: int, far: int) -> list[list[float]]:
    """Run two independent collectives in a backward pass; a part of the gradient comes back after `far` hops."""
    took.clear()
    with autograd.context() as context:
        base = torch.ones(2, requires_grad=True) * 1
        old, new = Shared.apply(base, 1.0), Shared.apply(base, 10.0)
        loss = rpc_sync("worker2", double, (new + old * 3,)).sum()
        for _ in range(far):
            base = rpc_sync("worker2", double, (base,))
        autograd.backward(context, loss + base.sum())
    return [total.tolist() for (total,) in took]


@pytest.mark.parametrize("far", [(0, 0), (3, 3), (0, 3)], ids=["at once", "late", "late on one"])
def test_collectives_in_backward_run_in_one_order_on_replicas(trainers: list[Process], far: tuple[int, int]) -> None:
    for rank, replica in enumerate(trainers):
        replica.begin(step, rank, far[rank])
    for replica in trainers:
        assert replica.end() == [[2 * 2 * 10.0] * 2, [2 * 2 * 3.0] * 2]
