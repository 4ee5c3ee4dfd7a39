"""`telegrad.autograd.grad` in contexts and `torch.autograd.grad` in one process, which alone misses remote parts."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from telegrad import autograd
from telegrad._core.worker import current
from telegrad.errors import ContextEnded, UsageError
from telegrad.rpc import rpc_sync
from tests.autograd.functions import Passing, leaf, mix, two

Grad = Callable[..., Sequence[Any]]
Call = Callable[..., Any]


pytestmark = pytest.mark.usefixtures("contexts_end")


def call_here(_: str, function: Any, *args: Any) -> Any:
    return function(*args)


def call_there(to: str, function: Any, *args: Any) -> Any:
    return rpc_sync(to, function, args)


def both(program: Callable[[Call, Grad], Sequence[Tensor | None]]) -> None:
    """Run a program with remote calls and our gradients, and in one process with torch's; compare the results."""
    wanted = program(call_here, torch.autograd.grad)
    with autograd.context() as context:
        found = program(call_there, lambda *args, **options: autograd.grad(context, *args, **options))
        assert not autograd.get_gradients(context)
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert torch.allclose(one.detach(), other.detach(), rtol=1e-9)


# Random programs


def through(a: Tensor, b: Tensor) -> Tensor:
    return rpc_sync("w2", mix, (a, b)) + a


def through_here(a: Tensor, b: Tensor) -> Tensor:
    return mix(a, b) + a


class Twice(torch.autograd.Function):
    """A node in Python."""

    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        return a * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


def random_program(seed: int, call: Call, grad: Grad) -> Sequence[Tensor | None]:
    """Run calls, operators and hooks in random order; return gradients of the first or second order."""
    choose = random.Random(seed)
    tensors = [leaf(seed=seed), leaf(seed=seed + 1), leaf(seed=seed + 2)]
    remote = call is call_there
    for _ in range(choose.randrange(4, 12)):
        a, b = choose.choice(tensors), choose.choice(tensors)
        kind = choose.randrange(6)
        if kind == 0:
            made = [call(choose.choice(["w1", "w2"]), mix, a, b)]
        elif kind == 1:
            made = [call("w1", through if remote else through_here, a, b)]
        elif kind == 2:
            made = list(call("w1", two, a, b))
        elif kind == 3:
            made = [Twice.apply(a) * b]
        else:
            made = [a * b + b.cos()]
        # Received tensors get no hook, see `test_a_hook_of_a_received_input`.
        if kind > 2 and choose.random() < 0.3:
            made[0].register_hook(lambda gradient: None if gradient is None else gradient * 3)
        tensors += made
    outputs = choose.sample(tensors[3:], min(len(tensors) - 3, 2))
    inputs = choose.sample(tensors, choose.randrange(1, 4))
    create = choose.random() < 0.5
    options = {"grad_outputs": [torch.ones_like(each) for each in outputs], "allow_unused": True}
    found = list(grad(outputs, inputs, create_graph=create, retain_graph=True, **options))
    graded = [each for each in found if each is not None and each.requires_grad]
    if graded:
        found += grad(sum((each**2).sum() for each in graded), choose.sample(tensors, 2), allow_unused=True)
    return found


@pytest.mark.parametrize("first", range(0, 60, 10))
def test_random_programs(first: int) -> None:
    for seed in range(first, first + 10):
        try:
            both(lambda call, grad, seed=seed: random_program(seed, call, grad))  # type: ignore[misc]
        except Exception as error:
            raise AssertionError(f"SEED={seed}: {error}") from error


# Uses of such gradients


class Layer(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.inner = nn.Linear(3, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).tanh()


layers = {"w1": Layer(1), "w2": Layer(2)}


def apply(where: str, x: Tensor) -> Tensor:
    return layers[where](x)


def gradients_of_layer(where: str, context: int) -> list[Tensor]:
    found = autograd.get_gradients(context)
    return [found[parameter] for parameter in layers[where].parameters()]


def maml(call: Call, grad: Grad) -> tuple[Tensor, Tensor]:
    """Return the loss after some steps of a weight, and the weight before them."""
    start, x = leaf(3, 3), leaf(4, 3, seed=7).detach()

    def loss(weight: Tensor, x: Tensor) -> Tensor:
        return (call("w2", apply, "w2", call("w1", apply, "w1", x) @ weight) ** 2).mean()

    weight = start
    for _ in range(3):
        (slope,) = grad(loss(weight, x), weight, create_graph=True)
        weight = weight - 0.1 * slope
    return loss(weight, x * 2), start


def test_maml_through_remote_layers() -> None:
    loss, start = maml(call_here, torch.autograd.grad)
    parameters = [parameter for layer in layers.values() for parameter in layer.parameters()]
    wanted = torch.autograd.grad(loss, [start, *parameters])
    with autograd.context() as context:
        loss, start = maml(call_there, lambda *args, **options: autograd.grad(context, *args, **options))
        autograd.backward(context, loss)
        found = [autograd.get_gradients(context)[start]]
        for where in layers:
            found += rpc_sync(where, gradients_of_layer, (where, context))
    for one, other in zip(found, wanted, strict=True):
        assert torch.allclose(one, other, rtol=1e-9)


# Edge cases


def test_a_hook_of_a_received_input() -> None:
    x = leaf()
    with autograd.context() as context:
        received = rpc_sync("w1", mix, (x, x))
        received.register_hook(lambda gradient: gradient * 3)
        loss = (received * 2).sum()
        (alone,) = autograd.grad(context, loss, [received], retain_graph=True)
        assert alone is not None
        assert torch.equal(alone, torch.full_like(received, 6))
        assert torch.equal(alone, torch.autograd.grad(loss, received, retain_graph=True)[0])
        with pytest.raises(UsageError, match="came from worker 'w1' and has a hook"):
            autograd.grad(context, loss, [received, x])


def test_the_graph_is_kept_or_freed_as_in_torch() -> None:
    x = leaf()
    with autograd.context() as context:
        loss = (rpc_sync("w1", mix, (x, x)) ** 2).sum()
        autograd.grad(context, loss, x, retain_graph=True)
        autograd.grad(context, loss, x)
        with pytest.raises(RuntimeError, match="second time"):
            autograd.grad(context, loss, x)


def test_an_input_that_is_not_used() -> None:
    x, y = leaf(), leaf()
    with autograd.context() as context:
        loss = rpc_sync("w1", mix, (x, x)).sum()
        with pytest.raises(RuntimeError, match=r"inputs\[1\] appears not to have been used"):
            autograd.grad(context, loss, [x, y], retain_graph=True)
        assert autograd.grad(context, loss, [y, x], allow_unused=True)[0] is None


def test_a_step_rides_with_the_pass_after_it() -> None:
    """A worker does not wait for gradients of a pass that accumulates none."""
    x = leaf()
    with autograd.context() as context:
        autograd.grad(context, rpc_sync("w1", apply, ("w1", x)).sum(), x, retain_graph=True)
        parts = current.conductor().contexts.find(context).parts
        assert all(each is not None and not each._runner.expects for each in parts.values())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (lambda x: (x * 2, x), "needs its gradient in grad_outputs"),
        (lambda x: (x.sum(), []), "inputs is empty"),
        (lambda x: (x.sum(), x.detach()), "one of the inputs does not require a gradient"),
        (lambda x: (x.sum(), 3), "inputs must be tensors of this worker"),
        (lambda x: (x.sum(), x, x), "for an output of shape"),
        (lambda x: (x * 2, x, x + 1j), "complex128, for an output of shape .* and type torch.float64"),
        (lambda x: (x * 1j, x, x), "float64, for an output of shape .* and type torch.complex128"),
        (lambda x: (x.sum(), x, [None, None]), "2 gradients for 1 outputs"),
    ],
)
def test_wrong_arguments(arguments: Callable[[Tensor], tuple[Any, ...]], message: str) -> None:
    with autograd.context() as context, pytest.raises(UsageError, match=message):
        autograd.grad(context, *arguments(leaf()))


def test_a_context_that_has_ended() -> None:
    with pytest.raises(ContextEnded):
        autograd.grad(3, leaf().sum(), leaf())


# Passes of torch, which miss remote parts


def ways(x: Tensor, loss: Callable[[], Tensor]) -> list[Callable[[], Any]]:
    return [
        lambda: torch.autograd.grad(loss(), x),
        lambda: torch.autograd.grad(loss(), [x, leaf()], allow_unused=True),
        lambda: torch.autograd.backward(loss(), inputs=[x]),
        lambda: loss().backward(inputs=[x]),
        lambda: torch.autograd.grad(loss(), torch.autograd.graph.get_gradient_edge(x)),
    ]


@pytest.mark.parametrize("way", range(5))
@pytest.mark.parametrize("is_leaf", [True, False])
def test_torch_refuses_gradients_that_come_from_other_workers(way: int, is_leaf: bool) -> None:
    start = leaf()
    losses: list[Callable[[Tensor], Tensor]] = [
        lambda x: rpc_sync("w1", mix, (x, x)).sum(),
        lambda x: (x * x).sum() + rpc_sync("w1", mix, (x, x)).sum(),
        lambda x: (x * rpc_sync("w1", mix, (x * 2, x))).sum(),
        lambda x: (rpc_sync("w2", mix, (rpc_sync("w1", mix, (x, x)), leaf())) * x).sum(),
    ]
    with autograd.context():
        for loss in losses:
            x = start if is_leaf else start * 2
            with pytest.raises(UsageError, match=r"telegrad.autograd.grad\(context_id, outputs, inputs\)"):
                ways(x, lambda loss=loss, x=x: loss(x))[way]()  # type: ignore[misc]
    assert start.grad is None


def test_torch_may_compute_local_gradients() -> None:
    x, weight = leaf(), leaf(seed=2)
    with autograd.context() as context:
        received = rpc_sync("w1", mix, (x, x))
        loss = (received * weight).sum()
        for wanted, expected in ((weight, received), (received, weight)):
            assert torch.equal(torch.autograd.grad(loss, wanted, retain_graph=True)[0], expected)
        loss.backward(inputs=[weight], retain_graph=True)
        sent_later = rpc_sync("w2", mix, (received, weight))
        assert torch.equal(torch.autograd.grad((received * 2).sum(), received)[0], torch.full_like(received, 2))
        autograd.backward(context, sent_later.sum())


def test_a_worker_may_differentiate_by_a_received_tensor() -> None:
    x = leaf()
    with autograd.context() as context:
        autograd.backward(context, rpc_sync("w1", slope_there, (x,)).sum())
        assert torch.allclose(autograd.get_gradients(context)[x], 6 * x.detach())


def slope_there(x: Tensor) -> Tensor:
    (slope,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    return slope


def test_torch_refuses_graphs_of_an_ended_context() -> None:
    x = leaf()
    with autograd.context():
        loss = rpc_sync("w1", mix, (x, x)).sum() + x.sum()
    with pytest.raises(UsageError, match="which has ended"):
        torch.autograd.grad(loss, x)


def test_a_hook_that_runs_the_engine() -> None:
    x, y = leaf(), leaf()
    with autograd.context() as context:
        other = rpc_sync("w2", mix, (y, y)).sum()
        doubled = x * 2
        doubled.register_hook(lambda _: other.backward())
        with pytest.raises(UsageError, match=r"Run it with telegrad\.autograd\.backward"):
            autograd.backward(context, doubled.sum())


@pytest.mark.parametrize("inner", [autograd.backward, lambda context, loss: autograd.grad(context, loss, loss)])
def test_a_hook_that_waits_for_another_pass(inner: Callable[[int, Tensor], Any]) -> None:
    x = leaf()
    with autograd.context() as context:
        other = rpc_sync("w1", mix, (x, x)).sum()
        received = rpc_sync("w2", mix, (x, x))
        received.register_hook(lambda _: inner(context, other))
        with pytest.raises(UsageError, match="runs inside a backward pass"):
            autograd.backward(context, (received * 2).sum())


class Waiting(Passing):
    """Queues a callback for the end of torch's pass, as wrappers that shard parameters do."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        torch.autograd.Variable._execution_engine.queue_callback(lambda: None)
        return gradient


def waiting(x: Tensor) -> Tensor:
    return Waiting.apply(x)


@pytest.mark.parametrize("call", [call_here, call_there])
def test_callbacks_at_the_end_of_torchs_pass_are_refused(call: Call) -> None:
    x = leaf()
    call_here("w1", waiting, x).sum().backward()
    with autograd.context() as context, pytest.raises(UsageError, match=r"at the end of torch's backward pass"):
        autograd.backward(context, call("w1", waiting, x).sum())
