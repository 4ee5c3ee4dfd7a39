"""Optimizers whose steps fused with the backward pass take the same steps, without messages of their own."""

import threading
import time
from collections import Counter
from collections.abc import Callable
from math import inf
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook

import telegrad.autograd as autograd
from telegrad._core.worker import current
from telegrad._core.worker.current import Worker
from telegrad.autograd.contexts import Contexts
from telegrad.errors import ContextEnded, UsageError, WorkersFailed
from telegrad.nn import RemoteModule
from telegrad.optim import DistributedOptimizer, clip_grad_norm_
from telegrad.rpc import RRef, remote, rpc_sync
from tests.cluster import PATIENCE, in_threads
from tests.links import count_sent
from tests.optim.test_optimizer import Fails, Model, data, linear, loss_of, make_leaf, same, step_whole, together, train
from tests.rpc.test_errors import FailsBackward

pytestmark = pytest.mark.usefixtures("here")

OF_PASSES = ("Start", "PackedShipment", "PassReport", "Mark", "DeclareDead")


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the messages that are sent: those of passes, calls and their answers."""
    return count_sent(monkeypatch, lambda message: {type(message).__name__}.intersection(OF_PASSES))


# Messages


def backward(sent: Counter[str], context: int, loss: torch.Tensor, **options: Any) -> Counter[str]:
    """Return the messages of a backward pass."""
    sent.clear()
    autograd.backward(context, loss, **options)
    return sent.copy()


def test_a_step_on_a_parameter_server_needs_no_message_of_its_own(sent: Counter[str]) -> None:
    server = RemoteModule("w1", linear, (4, 4))
    optimizer = DistributedOptimizer.for_module(torch.optim.SGD, server, lr=0.1)
    for _ in range(3):
        with autograd.context() as context:
            loss = server(data(0)).sum()
            alone = backward(sent, context, loss)
        with autograd.context() as context:
            loss = server(data(0)).sum()
            assert backward(sent, context, loss, step=optimizer) == alone
        assert alone == {"PackedShipment": 1, "PassReport": 1}


def test_a_step_on_a_chain_of_workers_needs_no_call(sent: Counter[str]) -> None:
    spread, whole = together(4)
    optimizer = DistributedOptimizer.for_module(torch.optim.SGD, spread, lr=0.1)
    reference = torch.optim.SGD(whole.parameters(), lr=0.1)
    for seed in range(3):
        with autograd.context() as context:
            counts = backward(sent, context, loss_of(spread, seed), step=optimizer)
        assert counts["PackedShipment"] == 6
        assert counts["PassReport"] <= 6
        assert counts.keys() == {"PackedShipment", "PassReport"}
        step_whole(whole, reference, seed)
    assert same(spread, whole)


@pytest.mark.filterwarnings("error")  # such as a scheduler's that misses the step
def test_changes_of_hyperparameters_ride_along(sent: Counter[str]) -> None:
    spread, whole = together(3)
    optimizer = DistributedOptimizer.for_module(torch.optim.SGD, spread, lr=0.1, momentum=0.9)
    reference = torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9)
    schedulers = [lr_scheduler.StepLR(each, 2, 0.5) for each in (optimizer, reference)]
    for seed in range(6):
        with autograd.context() as context:
            counts = backward(sent, context, loss_of(spread, seed), step=optimizer)
        assert "call" not in counts
        step_whole(whole, reference, seed)
        for scheduler in schedulers:
            scheduler.step()
    assert same(spread, whole)


# Passes whose end owners cannot know


def test_an_unused_send_makes_the_owner_wait_for_a_call(sent: Counter[str]) -> None:
    used, other = (remote(f"w{number}", make_leaf) for number in (1, 2))
    optimizer = DistributedOptimizer(torch.optim.SGD, [used, other], lr=1)
    with autograd.context() as context:
        used.to_here()
        counts = backward(sent, context, (used.to_here() * other.to_here()).sum(), step=optimizer)
    assert counts["call"] == counts["result"] == 1
    assert used.to_here().sum() == other.to_here().sum() == 0


def test_gradients_that_wait_for_an_unused_send() -> None:
    """A node waits for two sends, one of which gets no gradient: the owner steps once it knows this."""
    leaf = remote("w1", make_leaf)
    optimizer = DistributedOptimizer(torch.optim.SGD, [leaf], lr=1)
    with autograd.context() as context:
        one, _ = rpc_sync("w1", halves, (leaf,))
        autograd.backward(context, one.sum(), step=optimizer)
    assert leaf.to_here().sum() == 9 - 9 * 2


def halves(weight: RRef[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    middle = weight.local_value() * 2
    rpc_sync("w2", torch.neg, (middle,))
    return middle + 0, middle + 1


def test_owners_without_gradients_in_the_pass(sent: Counter[str]) -> None:
    used, unused = remote("w1", make_leaf), remote("w2", make_leaf)
    optimizer = DistributedOptimizer(torch.optim.AdamW, [used, unused], lr=0.1, weight_decay=0.5)
    with autograd.context() as context:
        autograd.backward(context, unused.to_here().sum())
        optimizer.accumulate(context)
    train(optimizer, lambda: used.to_here().sum(), fused=True)
    assert used.to_here().sum() < 9
    assert unused.to_here().sum() < 9  # with the accumulated gradients
    before = unused.to_here()
    train(optimizer, lambda: used.to_here().sum(), fused=True)
    assert torch.equal(unused.to_here(), before)


def test_two_passes_in_a_context() -> None:
    spread, whole = together(3)
    optimizer = DistributedOptimizer.for_module(torch.optim.Adam, spread, lr=0.05)
    reference = torch.optim.Adam(whole.parameters(), lr=0.05)
    for seed in range(4):
        with autograd.context() as context:
            autograd.backward(context, loss_of(spread, seed), retain_graph=True)
            autograd.backward(context, loss_of(spread, seed + 1), step=optimizer)
        step_whole(whole, reference, seed, seed + 1)
    assert same(spread, whole, 1e-6)


@pytest.mark.parametrize("clips", [False, True])
def test_a_step_after_a_pass_that_has_stepped_is_refused(clips: bool) -> None:
    leaf = remote("w1", make_leaf)
    optimizer = DistributedOptimizer(torch.optim.SGD, [leaf], lr=1)
    for _ in range(2):
        with autograd.context() as context:
            autograd.backward(context, leaf.to_here().sum(), step=optimizer.clipped(9.0) if clips else optimizer)
            with pytest.raises(UsageError, match="has already stepped with the gradients of this context"):
                optimizer.step(context)
    assert leaf.to_here().unique().tolist() == [-1]
    with autograd.context() as context:
        autograd.backward(context, leaf.to_here().sum())
        optimizer.step(context)
        optimizer.step(context)
    assert leaf.to_here().unique().tolist() == [-3]


def test_passes_of_one_context_may_step_at_once() -> None:
    leaf, both = remote("w1", make_leaf), threading.Barrier(2)
    optimizer = DistributedOptimizer(torch.optim.SGD, [leaf], lr=1)

    def meet(*_: object) -> None:
        both.wait(PATIENCE)

    optimizer.register_step_pre_hook(meet)
    optimizer.register_step_post_hook(meet)
    with autograd.context() as context:
        value = leaf.to_here()
        for future in [autograd.backward_async(context, value.sum(), step=optimizer) for _ in range(2)]:
            future.wait()


def test_contexts_of_several_threads_have_stepped(five: list[Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    leaf, has_ended = remote("w1", make_leaf), Contexts.has_ended
    optimizer = DistributedOptimizer(torch.optim.SGD, [leaf], lr=1)
    meeting = threading.Barrier(2)

    def meet(contexts: Contexts, id_: int) -> bool:
        if id_ == first:  # both threads look which of the contexts that have stepped have ended
            meeting.wait(PATIENCE)
        return has_ended(contexts, id_)

    def step() -> None:
        current.enter(five[0])
        with autograd.context() as context:
            autograd.backward(context, leaf.to_here().sum(), step=optimizer)
            meeting.wait(PATIENCE)
            with pytest.raises(UsageError, match="has already stepped"):
                optimizer.step(context)

    with autograd.context() as first:
        autograd.backward(first, leaf.to_here().sum(), step=optimizer)
        monkeypatch.setattr(Contexts, "has_ended", meet)
        in_threads(step, step)


# Failures


class FailsOn(torch.optim.SGD):
    """Fails if its first parameter has the given value."""

    def __init__(self, params: Any, lr: float, value: float) -> None:
        super().__init__(params, lr)
        self.value = value

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if self.param_groups[0]["params"][0].flatten()[0] == self.value:
            raise ArithmeticError("cannot step")
        super().step(closure)


def make_twos() -> torch.Tensor:
    return torch.full((3, 3), 2.0, requires_grad=True)


def test_an_owner_that_fails() -> None:
    good, bad = remote("w1", make_leaf), remote("w2", make_twos)
    optimizer = DistributedOptimizer(FailsOn, [good, bad], lr=1, value=2.0)
    with (
        autograd.context() as context,
        pytest.raises(ArithmeticError, match=r"cannot step[\s\S]*On worker 'w2'.*DistributedOptimizer\.step \(FailsOn"),
    ):
        autograd.backward(context, (good.to_here() * bad.to_here()).sum(), step=optimizer)
    assert good.to_here().sum() == 9 - 9 * 2
    assert bad.to_here().sum() == 18


def test_owners_that_fail() -> None:
    leaves = [remote(f"w{number}", make_leaf) for number in (1, 2, 3)]
    optimizer = DistributedOptimizer(Fails, leaves, lr=1, when="later")
    with autograd.context() as context:
        future = autograd.backward_async(context, leaves[0].to_here().sum(), step=optimizer)
        with pytest.raises(WorkersFailed, match="3 of 3"):
            future.wait()


def broken(weight: RRef[torch.Tensor]) -> torch.Tensor:
    return FailsBackward.apply(weight.local_value())


@pytest.mark.parametrize("begin", [autograd.backward, lambda *to, **how: autograd.backward_async(*to, **how).wait()])
def test_a_pass_that_fails(begin: Callable[..., Any]) -> None:
    good, bad = remote("w1", make_leaf), remote("w2", make_leaf)
    optimizer = DistributedOptimizer(torch.optim.SGD, [good, bad], lr=1)
    with autograd.context() as context:
        loss = (good.to_here() + rpc_sync("w2", broken, (bad,))).sum()
        with pytest.raises(ValueError, match="boom"):
            begin(context, loss, step=optimizer)
    assert bad.to_here().sum() == 9
    assert good.to_here().sum() in (9, 0)  # this owner may have stepped
    train(optimizer, lambda: bad.to_here().sum(), fused=True)
    assert bad.to_here().sum() == 0


def test_wrong_steps_are_refused() -> None:
    leaf = torch.ones(1, requires_grad=True)
    with autograd.context() as context, pytest.raises(UsageError, match="step must be a DistributedOptimizer, not SGD"):
        autograd.backward(context, leaf.sum(), step=torch.optim.SGD([leaf]))  # type: ignore[arg-type]
    optimizer = DistributedOptimizer(torch.optim.SGD, [RRef(leaf)], lr=1)
    with pytest.raises(ContextEnded):
        autograd.backward(context, leaf.sum(), step=optimizer)
    assert leaf == 1


# Features of steps


@pytest.mark.parametrize("norm", [1.0, 2.0, inf])
@pytest.mark.parametrize("limit", [0.1, 1e6])
def test_clipping(norm: float, limit: float, sent: Counter[str]) -> None:
    one, other = Model(3), Model(3)
    other.load_state_dict(one.state_dict())
    optimizers = [DistributedOptimizer.for_module(torch.optim.SGD, each, lr=0.5) for each in (one, other)]
    clipped = optimizers[0].clipped(limit, norm)
    assert clipped.norm is None
    for seed in range(3):
        with autograd.context() as context:
            counts = backward(sent, context, loss_of(one, seed), step=clipped)
        assert counts["call"] == counts["result"] == 2  # one round; the local part needs no connection
        with autograd.context() as context:
            autograd.backward(context, loss_of(other, seed))
            wanted = clip_grad_norm_(context, optimizers[1], limit, norm)
            optimizers[1].step(context)
        assert clipped.norm is not None
        assert torch.allclose(clipped.norm, wanted.double())
    for mine, theirs in zip(one.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.allclose(mine, theirs)


class Waits(torch.optim.SGD):
    """Steps once a gradient has arrived at the next worker."""

    came = threading.Event()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert Waits.came.wait(PATIENCE)
        super().step(closure)


def times(x: torch.Tensor, weight: RRef[torch.Tensor]) -> torch.Tensor:
    return x * weight.local_value()


def test_gradients_do_not_wait_for_a_step_elsewhere() -> None:
    Waits.came.clear()
    weight, x = remote("w1", make_leaf), torch.ones(3, 3, requires_grad=True)
    x.register_hook(lambda _: Waits.came.set())
    train(DistributedOptimizer(Waits, [weight], lr=1), lambda: rpc_sync("w1", times, (x, weight)).sum(), fused=True)
    assert weight.to_here().sum() == 0


def test_a_root_on_another_worker_and_an_asynchronous_pass() -> None:
    leaf = remote("w1", make_leaf)
    optimizer = DistributedOptimizer(torch.optim.SGD, [leaf], lr=1)
    with autograd.context() as context:
        autograd.backward(context, leaf.sum(), step=optimizer)
        assert leaf.to_here().sum() == 0
    with autograd.context() as context:
        autograd.backward_async(context, leaf.to_here().sum(), step=optimizer).wait()
        assert leaf.to_here().sum() == -9


@pytest.mark.parametrize("of_all", [True, False])
def test_pre_hooks_run_before_a_riding_step(of_all: bool) -> None:
    leaf = remote("w1", make_leaf)
    optimizer = DistributedOptimizer(torch.optim.SGD, [leaf], lr=1)
    seen = []
    optimizer.register_step_post_hook(lambda *_: seen.append(leaf.to_here().sum().item()))
    train(optimizer, lambda: leaf.to_here().sum(), fused=True)

    def before(stepping: torch.optim.Optimizer, *_: Any) -> None:
        if stepping is optimizer:  # not the owner's optimizer, which is in this process, too
            seen.append(leaf.to_here().sum().item())

    handle = register_optimizer_step_pre_hook(before) if of_all else optimizer.register_step_pre_hook(before)
    train(optimizer, lambda: leaf.to_here().sum(), fused=True)
    handle.remove()
    assert seen == [0, 0, -9]


class Halving(DistributedOptimizer):
    """Halves the learning rate before each step."""

    def step(self, context_id: int) -> None:  # type: ignore[override]
        self.param_groups[0]["lr"] /= 2
        super().step(context_id)


def test_a_subclass_can_act_before_a_riding_step() -> None:
    leaf = remote("w1", make_leaf)
    train(Halving(torch.optim.SGD, [leaf], lr=1.0), lambda: leaf.to_here().sum(), fused=True)
    assert leaf.to_here()[0, 0] == 0.5


def test_a_tensor_as_hyperparameter() -> None:
    leaf = remote("w1", make_leaf)
    optimizer = DistributedOptimizer(torch.optim.SGD, [leaf], lr=1.0)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.25)
    train(optimizer, lambda: leaf.to_here().sum(), fused=True)
    assert leaf.to_here()[0, 0] == 0.75


def test_overlapping_steps_with_changed_hyperparameters() -> None:
    leaf = remote("w1", make_leaf)
    optimizer = DistributedOptimizer(torch.optim.SGD, [leaf], lr=1.0)
    optimizer.param_groups[0]["lr"] = 0.5
    first = optimizer._telegrad_fused(1)
    assert first.step_id
    optimizer.param_groups[0]["lr"] = 0.25
    assert not optimizer._telegrad_fused(2).step_id
    del first
    assert optimizer._telegrad_fused(2).step_id


def test_the_owner_forgets_a_deleted_optimizer(five: list[Worker]) -> None:
    step_ids = five[1].conductor.fused_steps
    optimizer = DistributedOptimizer(torch.optim.SGD, [remote("w1", make_leaf)], lr=1.0)
    number = optimizer._telegrad_fused(1).step_id
    assert number in step_ids
    del optimizer
    deadline = time.monotonic() + PATIENCE
    while number in step_ids:  # a message tells the owner
        assert time.monotonic() < deadline


@pytest.mark.parametrize("rides", [True, False])
def test_hyperparameters_are_sent_again_after_a_failed_step(rides: bool) -> None:
    good, bad = remote("w1", make_leaf), remote("w2", make_twos)
    optimizer = DistributedOptimizer(FailsOn, [good, bad], lr=1.0, value=2.0)

    def step() -> None:
        with autograd.context() as context:
            autograd.backward(context, (good.to_here() * bad.to_here()).sum(), step=optimizer if rides else None)
            if not rides:
                optimizer.step(context)

    optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(ArithmeticError):
        step()  # one owner has the new value
    optimizer.param_groups[0]["lr"] = 1.0
    before = good.to_here()
    with pytest.raises(ArithmeticError):
        step()
    assert torch.allclose(good.to_here(), before - 2.0)
