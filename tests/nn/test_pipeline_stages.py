"""Pipelines train stages of any kind as one process would."""

import gc
import random
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

import telegrad.autograd as autograd
from benchmarks.schedule_simulation import simulate
from telegrad._core.calls.call_names import user_name
from telegrad.autograd.gradients import Gradients
from telegrad.errors import UsageError
from telegrad.nn import Pipeline, RemoteModule
from telegrad.optim import DistributedOptimizer
from telegrad.pipeline import microbatches
from telegrad.pipeline.pipeline_schedule import SCHEDULES, plan
from telegrad.pipeline.stage import Backward, StageInput
from telegrad.pipeline.stage_runner import set_weight, weight_of
from telegrad.rpc import RRef, rpc_sync
from tests.nn.training import backward, filled, train_both

pytestmark = pytest.mark.usefixtures("here")

WIDTH = 6


class Calling(nn.Module):
    def __init__(self, worker: str, seed: int) -> None:
        super().__init__()
        self.inner = RemoteModule(worker, filled_linear, (seed,))
        self.layer = filled_linear(seed + 1)

    def forward(self, value: Tensor) -> Tensor:
        return self.layer(self.inner(value))


class Kind(nn.Module):
    def __init__(self, function: Callable[[Any, Any], Any], layers: int = 1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.function = function

    def forward(self, value: Any) -> Any:
        return self.function(self, value)


def several(m: Kind, value: Tensor) -> Any:
    return m.layers[0](value), {"other": m.layers[1](value).tanh(), "mask": value > 0, "scale": 0.5}


def test_an_output_without_a_dimension_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"output\['loss'\] of the model .* return value\[None\]"):
        microbatches.joined([{"loss": torch.tensor(1.0)}] * 2)


def joined(m: Kind, value: Any) -> Tensor:
    one, rest = value  # a part of the value is unused
    return m.layers[0](one * rest["mask"] + rest["scale"] if m.training else one)


def recomputed(reentrant: bool) -> nn.Module:
    return Kind(lambda m, it: checkpoint(lambda x: m.layers[1](m.layers[0](x).tanh()), it, use_reentrant=reentrant), 2)


def observed(m: Kind, value: Tensor) -> Tensor:
    middle = m.layers[0](value)
    if middle.requires_grad:
        middle.register_hook(lambda gradient: gradient * 2)
    return m.layers[1](middle)


def hooked() -> nn.Module:
    made = Kind(observed, 2)
    made.get_parameter("layers.1.weight").register_hook(lambda gradient: gradient * 3)
    return made


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(value, weight)
        return value * weight * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        value, weight = ctx.saved_tensors
        return gradient * weight * weight, (gradient * value * 2 * weight).sum(0)


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def filled_linear(seed: int) -> nn.Module:
    return filled(nn.Linear(WIDTH, WIDTH), seed)


STAGES: dict[str, list[Callable[[], nn.Module]]] = {
    "plain": [plain],
    "several tensors": [lambda: Kind(several, 2), lambda: Kind(joined)],
    "changes in place": [lambda: Kind(lambda m, value: m.layers[0](torch.relu_(value)))],
    "recomputed": [lambda: recomputed(False)],
    "recomputed, reentrant": [lambda: recomputed(True)],
    "hooks": [hooked],
    "a hook on the way": [lambda: Kind(observed, 2)],
    "a weight used twice": [lambda: Kind(lambda m, value: m.layers[0](torch.sin(m.layers[0](value))))],
    "nothing": [nn.Identity],
    "frozen": [lambda: Kind(lambda m, value: m.layers[0](value)).requires_grad_(False)],
    "a function in Python": [lambda: Kind(lambda m, value: Squared.apply(value, m.layers[0].bias))],
}
PLAIN = [("plain", 0, 1), ("plain", 0, 2), ("plain", 0, 3)]  # a model


def made(kind: str, part: int, seed: int) -> nn.Module:
    return filled(STAGES[kind][part](), seed)


def forms(seed: int, count: int) -> list[tuple[str, int, int]]:
    """Draw a random model: the kind of each stage, its part, and its seed."""
    chance = random.Random(seed)
    found: list[tuple[str, int, int]] = []
    while len(found) < count:
        kind = chance.choice(list(STAGES))
        if len(found) + len(STAGES[kind]) <= count:
            found += [(kind, part, 100 * seed + len(found) + part) for part in range(len(STAGES[kind]))]
    return found


def trains_as_one_process(
    model: list[tuple[str, int, int]], workers: list[str], schedule: str, chunks: int, optimizer: Any, steps: int
) -> None:
    whole = nn.Sequential(*(made(*form) for form in model))
    remote = [RemoteModule(worker, made, form) for worker, form in zip(workers, model, strict=True)]
    if any(parameter.requires_grad for parameter in whole.parameters()):
        trains_alike(Pipeline(remote, chunks=chunks, schedule=schedule), whole, optimizer, steps)


def trains_alike(pipeline: Pipeline, whole: nn.Module, optimizer: Any, steps: int) -> None:
    torch.manual_seed(0)
    batches = [(torch.randn(16, WIDTH).double(), torch.randn(16, WIDTH).double()) for _ in range(steps)]
    ours = train_both(pipeline, whole, optimizer, batches, lr=0.05)
    assert sum(len(group["param_names"]) for group in ours.param_groups) == len(list(whole.parameters()))
    found, expected = pipeline.state_dict(), whole.state_dict()
    if found.keys() == {f"stages.{name}" for name in expected}:  # tied weights have another order
        found = {name: found[f"stages.{name}"] for name in expected}
    for (name, one), other in zip(found.items(), expected.values(), strict=True):
        assert torch.allclose(one, other, rtol=1e-7, atol=1e-9), (name, pipeline)


def workers_of(count: int, schedule: str) -> list[str]:
    used = next(each for each in (3, 2, 5, 1) if count % each == 0) if schedule == "interleaved" else 3
    return (["w1", "w2", "w0", "w3", "w4"][:used] * count)[:count]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kind", STAGES)
def test_each_kind_of_stage_gives_the_numbers_of_one_process(kind: str, schedule: str) -> None:
    model = [("plain", 0, 7), *[(kind, part, part) for part in range(len(STAGES[kind]))], ("plain", 0, 8)]
    trains_as_one_process(model, workers_of(len(model), schedule), schedule, 4, torch.optim.SGD, 3)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_stage_that_calls_other_workers(schedule: str) -> None:
    stages = [RemoteModule("w1", made, ("plain", 0, 1)), RemoteModule("w2", Calling, ("w3", 5)), made("plain", 0, 2)]
    whole = nn.Sequential(made("plain", 0, 1), filled_linear(5), filled_linear(6), made("plain", 0, 2))
    trains_alike(Pipeline(stages, chunks=4, schedule=schedule), whole, torch.optim.SGD, 2)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("workers", [["w1", "w2", "w0"], ["w1", "w1", "w1"], ["w1", "w2", "w1"]])
def test_tied_weights_train_as_one_weight(schedule: str, workers: list[str]) -> None:
    if schedule == "interleaved" and workers == ["w1", "w2", "w1"]:
        pytest.skip("the stages do not go around")
    whole = nn.Sequential(*(made(*form) for form in PLAIN))
    whole.get_submodule("2.0").weight = whole.get_parameter("0.0.weight")
    remote = [RemoteModule(worker, made, form) for worker, form in zip(workers, PLAIN, strict=True)]
    pipeline = Pipeline(remote, chunks=4, schedule=schedule, tied=[("0.0.weight", "2.0.weight")])
    trains_alike(pipeline, whole, torch.optim.Adam, 4)
    inputs = torch.randn(16, WIDTH).double()
    with torch.no_grad():
        assert torch.allclose(pipeline(inputs), whole(inputs), rtol=1e-8)
    state = pipeline.state_dict()
    assert state.keys() == {f"stages.{name}" for name in whole.state_dict()}
    assert torch.equal(state["stages.0.0.weight"], state["stages.2.0.weight"])


def test_calls_for_tied_weights_have_a_public_name() -> None:
    assert [user_name(function) for function in (weight_of, set_weight)] == ["Pipeline.state_dict"] * 2


def test_weights_that_cannot_be_tied() -> None:
    stages = [RemoteModule("w1", made, ("plain", 0, 1)), RemoteModule("w2", nn.Linear, (3, 3))]
    refused: dict[tuple[str, ...], str] = {
        ("0.0.weight",): "named in one tuple",
        **{
            ("0.0.weight", name): f"'{name}' is not the name of a parameter in one of 2 stages"
            for name in ("2.weight", "weight", "0", "x.weight")
        },
    }
    for names, said in refused.items():
        with pytest.raises(UsageError, match=said):
            Pipeline(stages, tied=[names])


@pytest.mark.parametrize("one_graph", [False, True])
def test_inputs_and_targets_with_gradients(one_graph: bool) -> None:
    embedding, whole = nn.Embedding(10, WIDTH).double(), nn.Sequential(*(made("plain", 0, seed) for seed in (1, 2)))
    pipeline = Pipeline([RemoteModule(f"w{seed}", made, ("plain", 0, seed)) for seed in (1, 2)], chunks=3)
    words, scale = torch.randint(10, (9,)), torch.randn(9, WIDTH).double().requires_grad_()

    def given() -> tuple[Tensor, Tensor]:
        inputs = embedding(words).tanh()
        return inputs, inputs * scale.exp() if one_graph else scale.exp()

    inputs, targets = given()
    wanted = mse_loss(whole(inputs), targets)
    wanted.backward()
    with autograd.context() as context:
        loss = pipeline.forward_backward(context, *given(), mse_loss)
        found = autograd.get_gradients(context)
    assert torch.allclose(loss, wanted.detach())
    for leaf in (embedding.weight, scale):
        assert leaf.grad is not None
        assert torch.allclose(found[leaf], leaf.grad)


def test_gradients_accumulate_over_batches_and_can_be_clipped() -> None:
    last = made("plain", 0, 2)
    pipeline, whole = Pipeline([RemoteModule("w1", made, ("plain", 0, 1)), last]), made("plain", 0, 2)
    first = made("plain", 0, 1)
    with autograd.context() as context:
        for seed in range(3):
            inputs = torch.full((4, WIDTH), 0.1 * seed).double()
            pipeline.forward_backward(context, inputs, inputs, mse_loss)
            mse_loss(whole(first(inputs)), inputs).backward()
        found = autograd.get_gradients(context)
        for one, other in zip(last.parameters(), whole.parameters(), strict=True):
            assert other.grad is not None
            assert torch.allclose(found[one], other.grad)


class Noting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.living: weakref.WeakSet[Any] = weakref.WeakSet()
        self.most = 0

    def forward(self, value: Tensor) -> Tensor:
        kept = Kept()
        with torch.autograd.graph.saved_tensors_hooks(lambda saved: (saved, kept), lambda packed: packed[0]):
            found = self.layer(value)
        self.living.add(kept)
        self.most = max(self.most, len(self.living))
        assert isinstance(found, Tensor)
        return found


class Kept:
    """An object that lives as long as the activations of one micro-batch."""


def most_living(module: RRef[Noting]) -> int:
    return module.local_value().most


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero-bubble"])
def test_a_stage_keeps_no_more_activations_than_its_schedule_allows(schedule: str) -> None:
    stages = [RemoteModule(worker, Noting) for worker in ("w1", "w2", "w0")]
    pipeline = Pipeline(stages, chunks=9, schedule=schedule)
    for _ in range(2):
        gc.collect()
        with autograd.context() as context:
            inputs = torch.randn(18, WIDTH)
            pipeline.forward_backward(context, inputs, inputs, mse_loss)
    most = [rpc_sync(stage.module_rref.owner(), most_living, (stage.module_rref,)) for stage in stages]
    assert most == simulate(plan(schedule, (0, 1, 2), 9), (0, 1, 2), 9).kept


def test_autocast_holds_in_all_stages() -> None:
    pipeline = Pipeline([RemoteModule("w1", nn.Linear, (WIDTH, WIDTH)), RemoteModule("w2", Types)], chunks=2)
    inputs = torch.ones(4, WIDTH)
    with autograd.context() as context, torch.autocast("cpu", torch.bfloat16):
        pipeline.forward_backward(context, inputs, inputs, mse_loss)
    assert rpc_sync("w2", types_seen, [pipeline.stages[1].module_rref]) == {torch.bfloat16}
    with torch.no_grad():
        pipeline(inputs)
    assert rpc_sync("w2", types_seen, [pipeline.stages[1].module_rref]) == {torch.bfloat16, torch.float32}


class Types(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen: set[torch.dtype] = set()

    def forward(self, value: Tensor) -> Tensor:
        self.seen.add(value.dtype)
        return value


def types_seen(module: RRef[Types]) -> set[torch.dtype]:
    return module.local_value().seen


@pytest.mark.parametrize(
    ("seed", "schedule"),
    [
        (0, "zero-bubble"),
        *(pytest.param(seed, each, marks=pytest.mark.nightly) for seed in range(1, 26) for each in SCHEDULES),
    ],
)
def test_random_models_have_the_same_parameters_after_fifty_steps(seed: int, schedule: str) -> None:
    chance = random.Random(seed)
    model = forms(seed, chance.randint(1, 6))
    workers = workers_of(len(model), schedule)
    optimizer = chance.choice([torch.optim.SGD, torch.optim.Adam])
    trains_as_one_process(model, workers, schedule, chance.randint(1, 16), optimizer, 50)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("clips", [False, True])
def test_a_step_rides_with_a_batch(schedule: str, clips: bool) -> None:
    whole = nn.Sequential(*(made(*form) for form in PLAIN))
    remote = [RemoteModule(worker, made, form) for worker, form in zip(["w1", "w2", "w0"], PLAIN, strict=True)]
    pipeline = Pipeline(remote, chunks=4, schedule=schedule)
    ours = DistributedOptimizer.for_module(torch.optim.Adam, pipeline, lr=0.05)
    theirs = torch.optim.Adam(whole.parameters(), lr=0.05)
    scheduler, theirs_too = (torch.optim.lr_scheduler.StepLR(each, 1, 0.5) for each in (ours, theirs))
    inputs, targets = torch.randn(16, WIDTH).double(), torch.randn(16, WIDTH).double()
    for _ in range(3):
        backward(pipeline, inputs, targets, mse_loss, step=ours.clipped(0.01) if clips else ours)
        theirs.zero_grad()
        mse_loss(whole(inputs), targets).backward()
        if clips:
            nn.utils.clip_grad_norm_(whole.parameters(), 0.01)
        theirs.step()
        scheduler.step()
        theirs_too.step()
    for one, other in zip(pipeline.state_dict().values(), whole.state_dict().values(), strict=True):
        assert torch.allclose(one, other, rtol=1e-7)


def test_a_riding_step_waits_for_gradients_of_other_paths() -> None:
    embedding, shared = nn.Embedding(10, WIDTH).double(), RemoteModule("w1", filled_linear, (5,))
    first, last = RemoteModule("w1", made, ("plain", 0, 1)), made("plain", 0, 3)
    pipeline, alone = Pipeline([first, RemoteModule("w2", nn.Sequential, (shared,)), last], chunks=3), filled_linear(5)
    whole = nn.Sequential(made("plain", 0, 1), alone, made("plain", 0, 3))
    table = nn.Embedding(10, WIDTH).double()
    table.load_state_dict(embedding.state_dict())
    group: list[Any] = [RRef(embedding.weight), *first.remote_parameters(), *shared.remote_parameters()]
    group += [RRef(each) for each in last.parameters()]
    ours = DistributedOptimizer(torch.optim.SGD, group, lr=0.1)
    theirs = torch.optim.SGD([*table.parameters(), *whole.parameters()], lr=0.1)
    words, targets = torch.arange(9), torch.randn(9, WIDTH).double()
    for _ in range(2):
        backward(pipeline, embedding(words), targets, mse_loss, step=ours)
        theirs.zero_grad()
        mse_loss(whole(table(words)), targets).backward()
        theirs.step()
    assert torch.allclose(embedding.weight, table.weight)
    assert torch.allclose(shared.state_dict()["weight"], alone.get_parameter("weight"))
    assert torch.allclose(first.state_dict()["0.weight"], whole.get_parameter("0.0.weight"))


def test_a_riding_step_must_be_a_distributed_optimizer() -> None:
    pipeline = Pipeline([made("plain", 0, 1)])
    optimizer: Any = torch.optim.SGD(pipeline.parameters())
    inputs = torch.ones(2, WIDTH).double()
    with pytest.raises(UsageError, match="step must be a DistributedOptimizer, not SGD"):
        backward(pipeline, inputs, inputs, mse_loss, step=optimizer)


def test_inputs_of_a_stage_are_freed_with_their_micro_batch() -> None:
    gc.disable()
    try:
        inlet = StageInput([torch.ones(2, requires_grad=True)])
        gone = weakref.ref(inlet.tensors[0])
        sums = Gradients()
        for in_steps in (False, True):
            made = Backward(sums, [(inlet.tensors[0] * 2).sum()], inlet, NotImplemented)
            made.run([torch.ones(())], in_steps=in_steps)
            made.run_weights()
            del made
            inlet = StageInput([torch.ones(2, requires_grad=True)])
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("workers", [["w1", "w2"], ["w1", "w1"]])
def test_a_frozen_tied_weight_does_not_change(workers: list[str]) -> None:
    first, second = (RemoteModule(worker, frozen_first, (seed,)) for seed, worker in enumerate(workers))
    pipeline = Pipeline([first, second], tied=[("0.0.weight", "1.0.weight")])
    optimizer = DistributedOptimizer.for_module(torch.optim.SGD, pipeline, lr=0.1)
    before = first.state_dict()["0.weight"].clone()
    inputs = torch.randn(4, WIDTH).double()
    backward(pipeline, inputs, inputs, mse_loss, step=optimizer)
    assert torch.equal(first.state_dict()["0.weight"], before)


def frozen_weight(module: RRef[nn.Module]) -> None:
    dict(module.local_value().named_buffers())["0.weight"].requires_grad_(False)


@pytest.mark.parametrize("freezes", ["stage", "weight"])
@pytest.mark.parametrize("is_local", [False, True])
def test_freezing_a_tied_weight_through_another_stage_is_refused(freezes: str, is_local: bool) -> None:
    first = RemoteModule("w1", made, ("plain", 0, 1))
    second = made("plain", 0, 2) if is_local else RemoteModule("w2", made, ("plain", 0, 2))
    pipeline = Pipeline([first, second], tied=[("0.0.weight", "1.0.weight")])
    optimizer = DistributedOptimizer.for_module(torch.optim.SGD, pipeline, lr=0.1)
    inputs = torch.randn(4, WIDTH).double()
    train = partial(backward, pipeline, inputs, inputs, mse_loss, step=optimizer)
    train()
    before = pipeline.state_dict()
    if freezes == "stage":
        second.requires_grad_(False)
    else:
        place = pipeline._drive().runners[1].owner()
        rpc_sync(place, frozen_weight, (second.module_rref if isinstance(second, RemoteModule) else RRef(second),))
    with pytest.raises(
        UsageError, match=r"^stage 2 of 2 of a Pipeline .* was frozen after its weight '0.weight' was tie"
    ):
        train()
    assert all(torch.equal(value, before[name]) for name, value in pipeline.state_dict().items())
    with torch.no_grad():
        pipeline(inputs)
    second.requires_grad_()
    first.requires_grad_(False)
    train()
    assert torch.equal(first.state_dict()["0.weight"], before["stages.0.0.weight"])
    first.requires_grad_()
    train()
    assert not torch.equal(first.state_dict()["0.weight"], before["stages.0.0.weight"])


@pytest.mark.parametrize("is_local", [False, True])
def test_a_tied_weight_of_a_frozen_stage_gives_gradients(is_local: bool) -> None:
    whole = nn.Sequential(made("plain", 0, 1), made("plain", 0, 2).requires_grad_(False))
    whole.get_submodule("1.0").weight = whole.get_parameter("0.0.weight")
    second = (made("plain", 0, 2) if is_local else RemoteModule("w2", made, ("plain", 0, 2))).requires_grad_(False)
    pipeline = Pipeline([RemoteModule("w1", made, ("plain", 0, 1)), second], tied=[("0.0.weight", "1.0.weight")])
    trains_alike(pipeline, whole, torch.optim.SGD, 4)


def frozen_first(seed: int) -> nn.Module:
    module = made("plain", 0, seed)
    module.get_parameter("0.weight").requires_grad_(False)
    return module
