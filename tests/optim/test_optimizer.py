"""Optimizers over several workers give the parameters that one process would give."""

import threading
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import pytest
import torch
from torch import nn

import telegrad.autograd as autograd
from telegrad._core.worker import current
from telegrad._core.worker.current import Worker
from telegrad.errors import ContextEnded, PeerError, TelegradWarning, UsageError, WorkersFailed
from telegrad.nn import Pipeline, RemoteModule
from telegrad.optim import DistributedOptimizer, clip_grad_norm_
from telegrad.rpc import RRef, remote, rpc_sync
from tests.cluster import agents_here, in_threads

pytestmark = pytest.mark.usefixtures("here")


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, dtype=torch.float64)


class Model(nn.Module):
    """Four layers on `owners` workers, the first of which is this one."""

    def __init__(self, owners: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(
            [linear(4, 4) if i % owners == 0 else RemoteModule(f"w{i % owners}", linear, (4, 4)) for i in range(4)]
        )

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            value = layer(value).tanh()
        return value


def together(owners: int) -> tuple[Model, Model]:
    """Return a distributed model, and the same in one place."""
    spread, whole = Model(owners), Model(1)
    whole.load_state_dict(spread.state_dict())
    return spread, whole


def same(spread: Model, whole: Model, tolerance: float = 1e-12) -> bool:
    return all(
        torch.allclose(one, other, rtol=0, atol=tolerance)
        for one, other in zip(spread.state_dict().values(), whole.state_dict().values(), strict=True)
    )


def data(seed: int) -> torch.Tensor:
    return torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def loss_of(model: Model, seed: int) -> torch.Tensor:
    inputs = data(seed)
    return (model(inputs) - inputs.flip(1)).square().mean()


WAYS = pytest.mark.parametrize("fused", [False, True], ids=["after the pass", "with the pass"])


def run_step(context: int, loss: torch.Tensor, optimizer: DistributedOptimizer, fused: bool) -> None:
    autograd.backward(context, loss, step=optimizer if fused else None)
    if not fused:
        optimizer.step(context)


def train(optimizer: DistributedOptimizer, loss: Callable[[], torch.Tensor], fused: bool = False) -> None:
    """Compute a loss, and step."""
    with autograd.context() as context:
        run_step(context, loss(), optimizer, fused)


def step_both(
    spread: Model,
    optimizer: DistributedOptimizer,
    whole: Model,
    reference: torch.optim.Optimizer,
    seed: int,
    fused: bool = False,
) -> None:
    train(optimizer, lambda: loss_of(spread, seed), fused)
    step_whole(whole, reference, seed)


def step_whole(whole: Model, reference: torch.optim.Optimizer, *seeds: int) -> None:
    reference.zero_grad()
    for seed in seeds:
        loss_of(whole, seed).backward()
    reference.step()


def make_leaf() -> torch.Tensor:
    return torch.ones(3, 3, requires_grad=True)


def set_grad(leaf: RRef[torch.Tensor]) -> None:
    leaf.local_value().grad = torch.full((3, 3), 7.0)


def grad_of(leaf: RRef[torch.Tensor]) -> torch.Tensor | None:
    return leaf.local_value().grad


def test_grad_is_left_alone() -> None:
    leaf = remote("w1", make_leaf)
    rpc_sync("w1", set_grad, (leaf,))
    train(DistributedOptimizer(torch.optim.SGD, [leaf], lr=1), lambda: leaf.to_here().sum())
    assert leaf.to_here().sum() == 0
    assert rpc_sync("w1", grad_of, (leaf,)).unique() == 7


def test_groups_have_hyperparameters_of_their_own() -> None:
    slow, fast, late = (remote(f"w{number}", make_leaf) for number in (1, 2, 1))
    optimizer = DistributedOptimizer(
        torch.optim.SGD, [{"params": [slow], "lr": 0.1}, {"params": fast, "momentum": 0.5}], lr=0.2
    )
    optimizer.add_param_group({"params": [late], "lr": 0.4})
    assert [(group["lr"], group["momentum"]) for group in optimizer.param_groups] == [(0.1, 0), (0.2, 0.5), (0.4, 0)]
    optimizer.param_groups[2]["lr"] = 0.5
    train(optimizer, lambda: torch.stack([each.to_here().sum() for each in (slow, fast, late)]).sum())
    assert [round(each.to_here()[0, 0].item(), 6) for each in (slow, fast, late)] == [0.9, 0.8, 0.5]
    assert "Parameter Group 2" in repr(optimizer)


def test_sparse_gradients() -> None:
    table = RemoteModule("w1", nn.Embedding, (10, 3), {"sparse": True})
    before = table.state_dict()["weight"].clone()
    optimizer = DistributedOptimizer(torch.optim.SparseAdam, table.remote_parameters(), lr=0.1)
    with autograd.context() as context:
        autograd.backward(context, table(torch.tensor([1, 1, 4])).sum())
        optimizer.accumulate(context)
    train(optimizer, lambda: table(torch.tensor([7])).sum())
    changed = (table.state_dict()["weight"] - before).abs().sum(1) > 0
    assert changed.nonzero().flatten().tolist() == [1, 4, 7]


class Gauge(torch.optim.SGD):
    """Records the largest number of steps at the same time."""

    inside = 0
    most = 0
    barrier: threading.Barrier | None = None

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        Gauge.inside += 1
        Gauge.most = max(Gauge.most, Gauge.inside)
        if Gauge.barrier is not None:
            Gauge.barrier.wait()
        rpc_sync("w0", torch.add, (torch.ones(1), 1))
        super().step(closure)
        Gauge.inside -= 1


def train_alone(worker: Worker, leaf: RRef[Any], optimizer: DistributedOptimizer, steps: int, fused: bool) -> None:
    """Train with parameters that other trainers use, too; runs on a thread of its own."""
    current.enter(worker)
    for _ in range(steps):
        train(optimizer, lambda: leaf.to_here().sum(), fused)


@WAYS
def test_steps_over_the_same_parameters_take_turns(five: list[Worker], fused: bool) -> None:
    Gauge.inside = Gauge.most = 0
    leaf = remote("w1", make_leaf)
    optimizers = [DistributedOptimizer(Gauge, [leaf], lr=0.125) for _ in range(4)]
    in_threads(*(lambda own=own: train_alone(five[0], leaf, own, 5, fused) for own in optimizers))
    assert Gauge.most == 1
    assert leaf.to_here()[0, 0] == 1 - 20 * 0.125


def test_steps_over_different_parameters_do_not_wait_for_each_other(five: list[Worker]) -> None:
    Gauge.barrier = threading.Barrier(2, timeout=30)
    try:
        leaves = [remote("w1", make_leaf) for _ in range(2)]
        optimizers = [DistributedOptimizer(Gauge, [leaf], lr=0.1) for leaf in leaves]
        in_threads(
            *(partial(train_alone, five[0], leaf, own, 1, False) for leaf, own in zip(leaves, optimizers, strict=True))
        )
    finally:
        Gauge.barrier = None


class Squared(nn.Module):
    """Needs its parameter again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), 3.0))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value * self.weight.square()


@WAYS
def test_a_step_between_forward_and_backward_of_another_trainer(fused: bool) -> None:
    module = RemoteModule("w1", Squared)
    value = torch.ones(2, requires_grad=True)

    def run(optimizer: DistributedOptimizer) -> None:
        with autograd.context() as slow:
            result = module(value).sum()

            def step_of_another() -> None:
                current.enter(worker)
                train(optimizer, lambda: module(value).sum(), fused)

            in_threads(step_of_another)
            run_step(slow, result, optimizer, fused)

    worker = current.here()
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation[\s\S]*hogwild=True"):
        run(DistributedOptimizer(torch.optim.SGD, [module.module_rref], lr=0.1))
    run(DistributedOptimizer(torch.optim.SGD, [module.module_rref], lr=0.1, hogwild=True))
    start = 3 - 0.1 * 2 * 3
    first = start - 0.1 * 2 * start
    second = first - 0.1 * 2 * first
    assert module.state_dict()["weight"].tolist() == pytest.approx([second] * 2)


def test_hogwild_follows_replaced_parameters() -> None:
    module = RemoteModule("w1", Squared)
    optimizer = DistributedOptimizer.for_module(torch.optim.SGD, module, lr=0.1, hogwild=True)
    module.load_state_dict({"weight": torch.ones(2)}, assign=False)
    module.double()
    train(optimizer, lambda: module(torch.ones(2, dtype=torch.float64)).sum())
    assert module.state_dict()["weight"].tolist() == pytest.approx([0.8] * 2)


def test_state_is_loaded_on_more_workers() -> None:
    spread, whole = together(2)
    optimizer = DistributedOptimizer.for_module(torch.optim.Adam, spread, lr=0.05)
    reference = torch.optim.Adam(whole.parameters(), lr=0.05)
    for seed in range(3):
        step_both(spread, optimizer, whole, reference, seed)
    optimizer.param_groups[0]["lr"] = reference.param_groups[0]["lr"] = 0.01
    state = optimizer.state_dict()
    assert set(state["state"]) == set(whole.state_dict())
    other = Model(4)
    other.load_state_dict(spread.state_dict())
    restored = DistributedOptimizer.for_module(torch.optim.Adam, other, lr=1)
    restored.load_state_dict(state)
    for seed in range(3):
        step_both(other, restored, whole, reference, seed)
    assert same(other, whole)
    with pytest.raises(UsageError, match=r"other parameters.*layers\.0\.bias"):
        DistributedOptimizer.for_module(torch.optim.Adam, nn.Linear(2, 2)).load_state_dict(state)


class Outer(nn.Module):
    """A module whose parts on other workers are before, between and inside of its own parts."""

    def __init__(self, spread: bool) -> None:
        super().__init__()
        self.first = RemoteModule("w1", Inner, (spread,)) if spread else Inner(spread)
        self.second = nn.Linear(2, 3)
        self.third = RemoteModule("w1", nn.Linear, (3, 2)) if spread else nn.Linear(3, 2)
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> Any:
        return self.third(self.second(self.first(x))) * self.scale


class Inner(nn.Module):
    def __init__(self, spread: bool) -> None:
        super().__init__()
        self.far = RemoteModule("w2", nn.Linear, (4, 4)) if spread else nn.Linear(4, 4)
        self.near = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> Any:
        return self.near(self.far(x))


def test_the_state_lists_parameters_in_the_order_of_the_model() -> None:
    spread, whole = Outer(True), Outer(False)
    optimizer = DistributedOptimizer.for_module(torch.optim.Adam, spread)
    train(optimizer, lambda: spread(torch.ones(4)).sum())
    state = optimizer.state_dict()
    assert state["param_groups"][0]["params"] == [name for name, _ in whole.named_parameters()]
    alone = torch.optim.Adam(whole.parameters())
    alone.load_state_dict(state)
    for name, parameter in whole.named_parameters():
        assert torch.equal(alone.state[parameter]["exp_avg"], state["state"][name]["exp_avg"])
    with pytest.raises(UsageError, match=r"state has 0, 1, .*; only the optimizer has .* has positions: write names"):
        optimizer.load_state_dict(alone.state_dict())
    with pytest.raises(UsageError, match="has positions"):
        optimizer.load_state_dict({**alone.state_dict(), "param_groups": state["param_groups"]})


def test_the_state_lists_references_in_the_given_order() -> None:
    parts = [remote(worker, nn.Linear, (1, 1)) for worker in ("w2", "w1", "w2")]
    names = DistributedOptimizer(torch.optim.SGD, parts, lr=0.1).state_dict()["param_groups"][0]["params"]
    assert names == [f"{number}.{name}" for number in range(3) for name in ("weight", "bias")]


class Fails(torch.optim.SGD):
    """Fails when it is made, or in its step."""

    def __init__(self, params: list[dict[str, list[torch.Tensor]]], lr: int, when: str) -> None:
        if when == "made":
            raise ValueError("cannot be made")
        super().__init__(params, lr)

    def step(self, closure: Any = None) -> NoReturn:
        raise ArithmeticError("cannot step")


def test_errors_name_their_workers() -> None:
    leaves = [remote(f"w{number}", make_leaf) for number in (1, 2, 3)]
    model = nn.Sequential(RemoteModule("w1", linear, (1, 1)), nn.Tanh())  # of which this worker has no parameter
    with pytest.raises(ValueError, match=r"cannot be made[\s\S]*On worker 'w1'"):
        DistributedOptimizer.for_module(Fails, model, lr=1, when="made")
    with pytest.raises(WorkersFailed, match=r"3 of 3 workers failed") as made:
        DistributedOptimizer(Fails, leaves, lr=1, when="made")
    assert set(made.value.errors) == {"w1", "w2", "w3"}
    optimizer = DistributedOptimizer(Fails, leaves, lr=1, when="later")
    for fused in (False, True):
        with autograd.context() as context, pytest.raises(WorkersFailed, match=r"w2: ArithmeticError: cannot step"):
            run_step(context, torch.stack([leaf.to_here().sum() for leaf in leaves]).sum(), optimizer, fused)


def test_a_worker_that_died() -> None:
    with agents_here(3) as workers:
        leaves = [remote(f"w{number}", make_leaf) for number in (1, 2)]
        optimizer = DistributedOptimizer(torch.optim.SGD, leaves, lr=1)
        with autograd.context() as context:
            autograd.backward(context, leaves[0].to_here().sum())
            workers[2].agent.close()
            with pytest.raises(PeerError, match="w2"):
                optimizer.step(context)
        assert leaves[0].to_here().sum() == 0


def use_optimizer(optimizer: RRef[Any], leaf: RRef[Any]) -> None:
    """Use an optimizer that another worker has made."""
    with autograd.context() as context:
        autograd.backward(context, leaf.to_here().sum())
        optimizer.rpc_sync().step(context)


def test_an_optimizer_can_be_used_by_another_worker() -> None:
    leaf = remote("w1", make_leaf)
    optimizer = DistributedOptimizer(torch.optim.SGD, [leaf], lr=1)
    rpc_sync("w2", use_optimizer, (RRef(optimizer), leaf))
    assert leaf.to_here().sum() == 0
    rpc_sync("w2", use_optimizer, [optimizer, leaf])  # sent as a reference, as the annotation demands
    assert leaf.to_here().sum() == -9


def test_wrong_uses_are_errors_with_advice() -> None:
    optimizer = DistributedOptimizer(torch.optim.SGD, [remote("w1", make_leaf)], lr=1)
    with pytest.raises(UsageError, match="a new context for each step"):
        optimizer.zero_grad()


def test_a_shared_parameter_of_a_model_is_used_once() -> None:
    layer = RemoteModule("w1", nn.Linear, (2, 2))
    model = nn.ModuleList([layer, RemoteModule.init_from_module_rref("w1", layer.get_module_rref())])
    optimizer = DistributedOptimizer.for_module(torch.optim.SGD, model, lr=1)
    assert optimizer.param_groups[0]["param_names"] == ["0.weight", "0.bias"]


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "a closure": (lambda: (torch.optim.LBFGS, [RRef(nn.Linear(2, 2))]), "LBFGS cannot be used over several workers"),
    "a closure, in secret": (lambda: (lambda p: torch.optim.LBFGS(p), [RRef(nn.Linear(2, 2))]), "LBFGS cannot be used"),
    "an optimizer": (
        lambda: (torch.optim.SGD(linear(1, 1).parameters()), []),
        r"takes a class of optimizers \(optimizer_class\), not SGD",
    ),
    "another class": (lambda: (nn.Linear, [RRef(nn.Linear(2, 2))]), "Linear is not an optimizer class"),
    "a module": (lambda: (torch.optim.SGD, nn.Linear(2, 2)), r"not Linear. Write DistributedOptimizer\.for_module"),
    "a remote module": (lambda: (torch.optim.SGD, RemoteModule("w1", nn.Linear, (2, 2))), r"\.for_module"),
    "a generator": (
        lambda: (torch.optim.SGD, nn.Linear(2, 2).parameters()),
        r"takes references to parameters \(params_rref\), not Parameter.*for_module",
    ),
    "a text": (lambda: (torch.optim.SGD, [remote("w1", str, ("x",))]), "neither a parameter nor a module, but to str"),
    "nothing": (lambda: (torch.optim.SGD, []), r"is empty\. Write DistributedOptimizer\.for_module"),
    "lists in a list": (lambda: (torch.optim.SGD, [[RRef(nn.Linear(2, 2))]]), r"use \[\*these, \*those\]"),
    "nothing to train": (lambda: (torch.optim.SGD, [remote("w1", nn.ReLU)]), "there is no parameter to optimize"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_parameters_are_refused_by_the_constructor(what: str) -> None:
    make, said = WRONG[what]
    with pytest.raises(UsageError, match=said):
        DistributedOptimizer(*make())


@pytest.mark.parametrize("where", ["w0", "w1"])
def test_parameters_that_are_given_twice_are_refused(where: str) -> None:
    layer = RemoteModule(where, linear, (2, 2))
    module, weight, bias, again = layer.get_module_rref(), *layer.remote_parameters(), layer.remote_parameters()[0]
    for groups, names in (
        ([[weight], [again, bias]], "'0' and '1'"),
        ([[weight, bias], [weight, bias]], "'0' and '2'"),
        ([[module], [bias]], "'0.bias' and '1'"),
        ([[bias], [module]], "'0' and '1.bias'"),
    ):
        given: list[dict[str, Any]] = [{"params": each, "lr": 0.1 * len(each)} for each in groups]
        with pytest.raises(UsageError, match=f"appear in more than one parameter group: {names} are the same"):
            DistributedOptimizer(torch.optim.SGD, given, lr=0.1)
    for twice in [weight, bias, again], [module, bias], [module, module]:
        with pytest.raises(ValueError, match="contains duplicate parameters: '0"):
            DistributedOptimizer(torch.optim.SGD, twice, lr=0.1)


def test_a_refused_group_changes_no_owner() -> None:
    first, second = (remote(f"w{number}", make_leaf) for number in (1, 2))
    optimizer = DistributedOptimizer(torch.optim.SGD, [second], lr=1)
    with pytest.raises(UsageError, match="appear in more than one parameter group"):
        optimizer.add_param_group({"params": [second, first]})
    optimizer.add_param_group({"params": [first], "lr": 3})
    train(optimizer, lambda: first.to_here().sum() + second.to_here().sum())
    assert [each.to_here()[0, 0].item() for each in (first, second)] == [-2, 0]


def test_a_reference_or_remote_modules_may_replace_a_list_of_references() -> None:
    layers: Any = [RemoteModule("w1", linear, (2, 2)), RemoteModule("w2", linear, (2, 2))]
    assert len(DistributedOptimizer(torch.optim.SGD, layers, lr=0.1).locals) == 2
    layer: Any = remote("w1", linear, (2, 2))
    assert list(DistributedOptimizer(torch.optim.SGD, layer, lr=0.1).locals) == ["w1"]


@pytest.mark.filterwarnings("error")
def test_a_step_without_a_backward_pass_warns_that_it_did_nothing() -> None:
    model = RemoteModule("w1", linear, (2, 2))
    optimizer = DistributedOptimizer.for_module(torch.optim.SGD, model, lr=0.1)
    with autograd.context() as context:
        loss = model(torch.ones(2, dtype=torch.float64)).sum()
        autograd.grad(context, loss * 2, loss, retain_graph=True)  # accumulates nothing
        with pytest.warns(TelegradWarning, match=r"so step\(\) did nothing: .* has run no backward pass"):
            optimizer.step(context)
        autograd.backward(context, loss)
        optimizer.step(context)


@WAYS
@pytest.mark.filterwarnings("error")
def test_a_pass_that_reaches_none_of_the_parameters_warns_unless_they_are_frozen(fused: bool) -> None:
    other = torch.ones(1, requires_grad=True)
    models = [RemoteModule(worker, linear, (2, 2)) for worker in ("w1", "w2")]
    optimizer = DistributedOptimizer.for_module(torch.optim.SGD, nn.ModuleList(models), lr=1)
    models[0].requires_grad_(False)
    with pytest.warns(TelegradWarning, match="did nothing: probably the loss does not depend on them"):
        train(optimizer, lambda: other.sum(), fused)
    models[1].requires_grad_(False)
    train(optimizer, lambda: models[0](data(1)[:, :2]).sum() * other.sum(), fused)


def test_a_step_after_a_batch_of_a_pipeline_is_not_told_to_run_a_pass() -> None:
    optimizer = DistributedOptimizer(torch.optim.SGD, [remote("w1", make_leaf)], lr=1)
    batch = torch.ones(2, 2), torch.zeros(2, 2), nn.functional.mse_loss
    with autograd.context() as context, pytest.warns(TelegradWarning, match="probably the loss does not depend"):
        Pipeline([nn.Linear(2, 2)], chunks=1).forward_backward(context, *batch, step=optimizer)


def test_a_step_in_an_ended_context_changes_no_parameter() -> None:
    leaf = remote("w1", make_leaf)
    optimizer = DistributedOptimizer(torch.optim.SGD, [leaf], lr=1)
    with autograd.context() as context:
        autograd.backward(context, leaf.to_here().sum())
    for act in (optimizer.step, optimizer.accumulate):
        with pytest.raises(ContextEnded, match=rf"id: {context} has ended.*call {act.__name__}\(\) inside"):
            act(context)
    with pytest.raises(
        UsageError,
        match=r"takes the id of a context \(context_id\) first, not <context.*: write `with autograd\.context\(\) as",
    ):
        optimizer.step(autograd.context())  # type: ignore[arg-type]
    for use in (optimizer.step, optimizer.accumulate, partial(clip_grad_norm_, params=optimizer, max_norm=1.0)):
        with pytest.raises(ValueError, match=r"takes the id of a context \(context_id\) first, not 1208925"):
            use(2**80)
    with pytest.raises(ValueError, match="groups must be the list of dictionaries under 'param_groups'"):
        optimizer.load_groups([{"params": 3}])
    assert leaf.to_here().sum() == 9


def test_a_worker_without_parameters_has_no_share() -> None:
    model = nn.Sequential(nn.Tanh(), RemoteModule("w1", linear, (2, 2)))
    optimizer = DistributedOptimizer.for_module(torch.optim.SGD, model, lr=0.1)
    assert list(optimizer.locals) == ["w1"]
    optimizer.add_param_group({"params": [RRef(nn.Tanh()), RRef(linear(2, 2))], "lr": 0.5})
    assert (list(optimizer.locals), [group["lr"] for group in optimizer.param_groups]) == (["w1", "w0"], [0.1, 0.5])


def test_a_step_does_not_make_uninvolved_owners_join_the_context(five: list[Worker]) -> None:
    used, unused = remote("w1", make_leaf), remote("w2", make_leaf)
    optimizer = DistributedOptimizer(torch.optim.SGD, [used, unused], lr=1)
    with autograd.context() as context:
        autograd.backward(context, used.to_here().sum())
        optimizer.step(context)
        assert [worker.conductor.contexts.get(context) is not None for worker in five[:3]] == [True, True, False]
    with autograd.context() as context:
        autograd.backward(context, unused.to_here().sum())
        optimizer.accumulate(context)
    with autograd.context() as context:
        autograd.backward(context, used.to_here().sum())
        optimizer.step(context)
        assert five[2].conductor.contexts.get(context) is not None, "what was kept went nowhere"
    assert used.to_here().sum() == -9
    assert unused.to_here().sum() == 0
