"""A model that is cut gives what the whole model gives, or is refused with the reason."""

import logging
import pickle
import random
import threading
from collections.abc import Callable, Iterator
from functools import partial
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import batch_norm, dropout
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from telegrad.errors import UsageError
from telegrad.pipeline import comparison
from telegrad.pipeline.split import SplitModel, split_model
from tests.cluster import PATIENCE

WIDTH = 4


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Use one thread: on a busy machine, threads of small operations wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


GLOBAL: list[int] = []


class Two(nn.Module):
    counts = 0
    state: Tensor
    a: nn.Linear
    b: nn.Linear

    def __init__(self, forward: Callable[[Any, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.register_buffer("state", torch.zeros(WIDTH))
        self.calls, self.function = 0, forward
        self.counter = SimpleNamespace(count=0)

    def forward(self, value: Tensor) -> Tensor:
        assert self.function is not None
        return self.function(self, value)


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient


def mean(value: Tensor) -> Tensor:
    return value.detach().mean(0)


# Equal models


def reassigned(m: Two, value: Tensor) -> Tensor:
    found = m.a(value)
    m.state = m.state + mean(found)
    return m.b(found) + m.state


def written_and_read_in_one_stage(m: Two, value: Tensor) -> Tensor:
    found = m.a(value)
    m.state[:2].add_(mean(found)[:2])
    return m.b(found + m.state)


def passed_by_value(m: Two, value: Tensor) -> Tensor:
    found = m.a(value)
    m.state.copy_(mean(found))
    kept = m.state.view(WIDTH) * 1
    return m.b(found) + kept


def training_flag(m: Two, value: Tensor) -> Tensor:
    found = m.a(value)
    return m.b(dropout(found * 2 if m.training else found, 0.5, m.training))


def size(m: Two, value: Tensor) -> Tensor:
    found = m.a(value)
    return m.b(found) * int(found.shape[0]) + torch.arange(value.shape[0], dtype=value.dtype)[:, None]


def data_type(m: Two, value: Tensor) -> Tensor:
    found = m.a(value)
    return m.b(found) if found.dtype == torch.float64 else found


def asserted(m: Two, value: Tensor) -> Tensor:
    assert value.shape[1] == WIDTH
    torch._assert(value.shape[0] < 50, "too many")
    return m.b(m.a(value))


def no_grad(m: Two, value: Tensor) -> Tensor:
    found = m.a(value)
    with torch.no_grad():
        scale = found.mean()
    return m.b(found) * scale


def value_changed_behind(m: Two, value: Tensor) -> Tensor:
    found = m.a(value)
    given = m.b(found * 1)
    found.add_(1)
    return given + found


def normalized(m: Two, value: Tensor) -> Tensor:
    return m.b(m.norm(m.a(value)))


def changed_hook() -> nn.Module:
    made = Two(normalized)
    made.a.register_forward_hook(lambda _, __, output: output * 2)
    made.b.register_forward_pre_hook(lambda _, given: (given[0] + 1,))
    return made


def parametrized(parametrize: Callable[[nn.Module], nn.Module]) -> nn.Module:
    made = Two(normalized)
    parametrize(made.a)
    parametrize(made.b)
    return made


def averaged_without_gradients(m: Two, value: Tensor) -> Tensor:
    found = m.a(value)
    with torch.no_grad():
        m.state.mul_(0.9).add_(found.mean(0), alpha=0.1)
        kept = m.state.clone()
    return m.b(found) + kept + found


def half_frozen() -> nn.Module:
    class Frozen(Two):
        def train(self, mode: bool = True) -> Any:
            super().train(mode)
            self.norm.eval()
            return self

    made = Frozen(normalized)
    made.a.requires_grad_(False)
    return made


def of(function: Callable[[Two, Tensor], Tensor]) -> Callable[[], nn.Module]:
    return lambda: Two(function)


EQUAL: dict[str, Callable[[], nn.Module]] = {
    function.__name__: of(function)
    for function in (
        *(reassigned, written_and_read_in_one_stage, passed_by_value, training_flag, size, data_type, asserted),
        *(no_grad, value_changed_behind, normalized, averaged_without_gradients),
    )
} | {
    "random numbers": of(
        lambda m, value: m.b(m.a(value) + torch.rand(WIDTH, dtype=value.dtype)) * torch.rand(1, dtype=value.dtype)
    ),
    "length": of(lambda m, value: m.b(m.a(value)) / len(value)),
    "attribute": of(lambda m, value: m.b(m.a(value) * m.calls + torch.tensor([1.0, 2, 3, 4], dtype=value.dtype))),
    "weight used twice": of(lambda m, value: m.b(m.a(value)) @ m.a.weight),
    "hooks that return": changed_hook,
    "parametrized": partial(parametrized, weight_norm),
    "half frozen": half_frozen,
    "spectral norm": partial(parametrized, spectral_norm),  # its second part writes to two buffers in one operation
}


def copied(value: Any) -> Any:
    made: dict[Tensor, Tensor] = {}
    return tree_map_only(Tensor, lambda tensor: made.setdefault(tensor, tensor.clone()), value)


def through(made: SplitModel, stages: list[nn.Module], inputs: Tensor) -> Tensor:
    assert made.inputs is not None
    value: Any = made.inputs(inputs)
    made.inputs.check(value, True)
    for stage in stages:
        value = stage(copied(value))
    return value


def check_equal(model: nn.Module, made: SplitModel, rounds: int = 3) -> None:
    """Train for some rounds in both modes, with the stages as workers receive them."""
    stages = [pickle.loads(pickle.dumps(stage)) for stage in made.stages]
    names = [(number, name) for number, stage in enumerate(stages) for name, _ in stage.named_parameters()]
    for round_ in range(rounds):
        mode = round_ % 3 != 1
        inputs = torch.randn(3 + round_, WIDTH, dtype=torch.float64)
        outputs = []
        for modules, run in (([model], model), (stages, lambda value: through(made, stages, value))):
            for module in modules:
                module.train(mode)
                module.zero_grad()
            torch.manual_seed(round_)
            outputs.append(run(inputs))
            outputs[-1].square().sum().backward()
        assert torch.equal(*outputs)
        gradients: dict[str, Tensor] = {}
        for number, name in names:
            gradient = stages[number].get_parameter(name).grad
            if gradient is not None:
                gradients[name] = gradients[name] + gradient if name in gradients else gradient
        assert gradients.keys() == {name for name, each in model.named_parameters() if each.grad is not None}
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name in gradients:
                    torch.testing.assert_close(gradients[name], parameter.grad)
                    for each in (model, *(stages[number] for number, other in names if other == name)):
                        each.get_parameter(name).sub_(0.001 * gradients[name])
        for stage in stages:
            for name, buffer in stage.named_buffers():
                if not name.startswith("_constants"):
                    assert torch.equal(buffer, model.get_buffer(name)), name


@pytest.mark.parametrize("name", EQUAL)
def test_stages_compute_what_the_whole_model_computes(name: str) -> None:
    model = EQUAL[name]().double()
    check_equal(model, split_model(model, 2, at=["b"], example=torch.randn(8, WIDTH, dtype=torch.float64)))


# Refused models


def view_written(m: Two, value: Tensor) -> Tensor:
    found = m.a(value)
    m.state[:2].add_(mean(found)[:2])
    return m.b(found) + m.state


def out_written(m: Two, value: Tensor) -> Tensor:
    found = m.a(value)
    torch.add(m.state, mean(found), out=m.state.view(WIDTH))
    return m.b(found) + m.state


def clamped_weight(m: Two, value: Tensor) -> Tensor:
    with torch.no_grad():
        m.a.weight.clamp_(-5, 5)  # changes nothing until training leads to such values
    return m.b(m.a(value)) + m.a.weight.sum()


def clamped_data(m: Two, value: Tensor) -> Tensor:
    m.a.weight.data.clamp_(-0.1, 0.1)
    return m.b(m.a(value)) + m.a.weight.sum()


def view_across(m: Two, value: Tensor) -> Tensor:
    found = m.a(value)
    part = found[:, :2]
    given = m.b(found * 1)
    part += 1
    return given + found


def python_state(m: Two, value: Tensor) -> Tensor:
    m.calls += 1
    return m.b(m.a(value))


def state_of_an_object(m: Two, value: Tensor) -> Tensor:
    m.counter.count += 1
    return m.b(m.a(value)) * (1 if m.counter.count < 100 else 0)


def state_of_a_class(m: Two, value: Tensor) -> Tensor:
    Two.counts += 1
    return m.b(m.a(value)) * (1 if Two.counts < 100 else 0)


def global_state(m: Two, value: Tensor) -> Tensor:
    GLOBAL.append(1)
    return m.b(m.a(value)) * len(GLOBAL)


def global_state_of_a_function(m: Two, value: Tensor) -> Tensor:
    return global_state(m, value)


def state_of_an_inner_function(m: Two, value: Tensor) -> Tensor:
    def inner() -> int:
        GLOBAL.append(1)
        return len(GLOBAL)

    return m.b(m.a(value)) * inner()


GENERATOR = torch.Generator()
norm = torch.Generator()  # also the name of a part of the model


def seed_of_a_generator(m: Two, value: Tensor) -> Tensor:
    return m.b(m.norm(m.a(value))) * (1 if GENERATOR.initial_seed() else 2)


def _counting() -> Callable[[Two, Tensor], Tensor]:
    count = 0

    def state_of_a_closure(m: Two, value: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return m.b(m.a(value)) * (1 if count < 100 else 0)

    return state_of_a_closure


def hook_of_a_tensor(m: Two, value: Tensor) -> Tensor:
    found = m.a(value)
    if found.requires_grad:
        found.register_hook(lambda gradient: gradient * 2)
    return m.b(found)


def with_a_hook(register: str, hook: Callable[..., Any]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        made = Two(normalized)
        attrgetter(register)(made.a)(hook)
        return made

    return make


REFUSED: list[tuple[Callable[[], nn.Module], str]] = [
    (of(view_written), r"'state' is changed in place .* used by the stages \[0, 1\]"),
    (of(out_written), r"'state' is changed in place .* used by the stages \[0, 1\]"),
    (
        of(lambda m, value: m.b(m.a(m.norm(value))) * m.norm.running_var + m.norm.running_mean),
        r"'norm.running_mean' is changed in place .* used by the stages \[0, 1\]",
    ),
    (of(clamped_weight), r"'a.weight' is changed in place .* used by the stages \[0, 1\]"),
    (of(clamped_data), "as .data does"),
    (of(view_across), "a view of it is sent to another stage"),
    (of(python_state), "changes .calls., which is Python state"),
    (of(state_of_an_object), "changes 'counter', which is Python state"),
    (of(state_of_a_class), r"changes 'Two.counts', which is Python state"),
    (of(global_state), r"changes '.*test_proving.GLOBAL', which is Python state"),
    (of(global_state_of_a_function), r"changes '.*test_proving.GLOBAL', which is Python state"),
    (of(_counting()), r"changes '.*test_proving.count', which is Python state"),
    (of(state_of_an_inner_function), r"changes '.*test_proving.GLOBAL', which is Python state"),
    (
        of(lambda m, value: m.b(m.a(value)) + torch.rand(WIDTH, generator=GENERATOR)),
        r"changes '.*test_proving.GENERATOR', which is Python state",
    ),
    (
        of(lambda m, value: m.b(m.a(value)) * (random.random() + 1)),
        "differ from the model in training, with 8 samples: output 0",
    ),
    (of(hook_of_a_tensor), "differ from the model in training, with 8 samples: the gradient of 'a.bias'"),
    (of(lambda m, value: m.b(checkpoint(m.a, value, use_reentrant=False))), "uses activation checkpointing"),
    (of(lambda m, value: m.b(Reversed.apply(m.a(value)))), r"torch.autograd.Function \(Reversed\)"),
    (
        of(lambda m, value: m.b(m.a(value)) if value.sum() > 0 else value),
        r"torch.export cannot record its forward in training",
    ),
    (with_a_hook("register_forward_hook", lambda *_: None), r"of 'a' returns nothing"),
    (with_a_hook("register_full_backward_hook", lambda *_: None), r"'a' \(Linear\) has hooks"),
    (with_a_hook("weight.register_hook", lambda gradient: gradient * 2), "the parameter 'a.weight' has hooks"),
]


@pytest.mark.parametrize(("make", "said"), REFUSED)
def test_models_that_stages_would_not_reproduce_are_refused(make: Callable[[], nn.Module], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        split_model(make().double(), 2, at=["b"], example=torch.randn(8, WIDTH, dtype=torch.float64))


def test_an_unchanged_generator_is_no_state() -> None:
    """A global with the name of a part of the model is no state, either."""
    made = split_model(Two(seed_of_a_generator).double(), 2, at=["b"], example=torch.randn(8, WIDTH).double())
    assert len(made.stages) == 2


def test_without_the_check_only_the_recording_runs() -> None:
    assert len(split_model(Two(global_state), 2, at=["b"], example=torch.randn(8, WIDTH), check=False).stages) == 2


def test_a_sequence_is_compared_if_there_is_an_example() -> None:
    class Counting(nn.Linear):
        def forward(self, value: Tensor) -> Tensor:
            GLOBAL.append(1)
            return super().forward(value) * len(GLOBAL)

    model = nn.Sequential(Counting(WIDTH, WIDTH), Counting(WIDTH, WIDTH))
    assert len(split_model(model, 2, at=["1"]).stages) == 2
    with pytest.raises(UsageError, match="differ from the model in training, with 8 samples: output 0"):
        split_model(model, 2, at=["1"], example=torch.randn(8, WIDTH))


def centered(model: Two, value: Tensor) -> Tensor:
    value = model.a(value).tanh()
    return model.b(value - value.mean(0))


def with_aux_in_training(model: Two, value: Tensor) -> tuple[Tensor, Tensor]:
    value = dropout(model.a(value), 0.5, model.training)
    balance = value.softmax(1).mean(0).square().sum()
    return model.b(value), balance if model.training else torch.zeros_like(balance)


@pytest.mark.parametrize(("function", "output", "samples"), [(centered, 0, 10), (with_aux_in_training, 1, 2)])
def test_a_model_that_mixes_samples_is_refused(function: Any, output: int, samples: int) -> None:
    torch.manual_seed(0)  # with some weights, dropout leaves nothing to compare
    example = torch.randn(samples, WIDTH)
    with pytest.raises(UsageError, match=rf"micro-batches: output {output}\. It mixes or counts samples"):
        split_model(Two(function), 2, at=["b"], example=example, chunks=4)
    split_model(Two(function), 2, at=["b"], example=example, chunks=1)
    with pytest.raises(UsageError, match="mixes or counts samples"):
        split_model(nn.Sequential(Two(function), nn.Identity()), 2, at=["1"], example=example, chunks=4)


@pytest.mark.parametrize(
    "function",
    [
        normalized,
        lambda model, value: model.b(batch_norm(model.a(value), None, None, training=True)),
        lambda model, value: model.b(dropout(model.a(value)) + torch.randn_like(value)),
        lambda model, value: model.b(torch.native_dropout(model.a(value), 0.5, True)[0]),
        lambda model, value: (model.b(model.a(value)), model.a.weight.sum(), value.square().mean()),
        lambda model, value: model.b(model.a(value)).T,
    ],
)
def test_batch_norm_and_random_numbers_do_not_count_as_mixing(function: Any) -> None:
    model, example = Two(function), torch.randn(10, WIDTH)
    before = torch.get_rng_state()
    split_model(model, 2, at=["b"], example=example, chunks=4)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    "function",
    [lambda _, value: value * random.random(), lambda _, value: list(value), lambda _, value: value.view(8, WIDTH)],
)
def test_what_cannot_be_compared_is_not_called_mixing(function: Any) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Two(function))
    split_model(model, 2, at=["1"], example=torch.ones(8, WIDTH), chunks=4)


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_is_compared_with_the_precision_of_its_type(dtype: torch.dtype) -> None:
    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = (nn.MultiheadAttention(64, 4, batch_first=True) for _ in range(2))

        def forward(self, value: Tensor) -> Tensor:
            for layer in (self.a, self.b):
                value = value + layer(value, value, value, need_weights=False)[0]
            return value

    torch.manual_seed(0)
    assert len(split_model(Attending().to(dtype), 2, at=["b"], example=torch.randn(11, 16, 64).to(dtype)).stages) == 2


def test_a_buffer_that_stages_of_a_sequence_share_is_refused() -> None:
    norm = nn.BatchNorm1d(WIDTH)
    with pytest.raises(UsageError, match=r"'0.running_mean' is used by the stages \[0, 1\]"):
        split_model(nn.Sequential(norm, nn.Linear(WIDTH, WIDTH), norm), 2, at=["1"])


def test_cutting_does_not_change_model_generators_or_gradients() -> None:
    model = Two(written_and_read_in_one_stage).double().eval()
    model.norm.train()
    model(torch.ones(8, WIDTH, dtype=torch.float64)).sum().backward()
    names = [(name, each, each._version) for name, each in (*model.named_parameters(), *model.named_buffers())]
    gradients = {name: (own.grad, own.grad.clone()) for name, own in model.named_parameters() if own.grad is not None}
    values = {name: each.clone() for name, each, _ in names}
    modes = [each.training for each in model.modules()]
    before = torch.get_rng_state(), random.getstate(), torch.is_grad_enabled()
    with torch.no_grad():
        split_model(model, 2, at=["b"], example=torch.randn(8, WIDTH, dtype=torch.float64, generator=torch.Generator()))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), torch.is_grad_enabled()) == before[1:]
    assert [each.training for each in model.modules()] == modes
    for name, each, version in names:
        assert dict([*model.named_parameters(), *model.named_buffers()])[name] is each
        assert each._version == version
        assert torch.equal(each, values[name])
    for name, (gradient, value) in gradients.items():
        assert model.get_parameter(name).grad is gradient
        assert torch.equal(gradient, value)


# Micro-batches that differ from the example


def check_inputs(made: SplitModel, inputs: Any, mode: bool = True) -> None:
    assert made.inputs is not None
    made.inputs.check(made.inputs(inputs), mode)


class Positions(nn.Module):
    """Takes up to 16 positions, and handles a single one differently."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(16, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor, scale: float = 1.0) -> Tensor:
        assert value.shape[1] <= 16
        found = self.table(torch.arange(value.shape[1])) + value[:, :, None]
        return self.last(found * scale if value.shape[1] > 1 else -found)


def test_a_micro_batch_that_differs_from_the_example_is_refused() -> None:
    made = split_model(Positions(), 2, at=["last"], example=torch.ones(4, 8))
    for size_ in (1, 2, 7):
        check_inputs(made, torch.ones(size_, 5))
    others: list[tuple[Any, str]] = [
        (torch.ones(3, 17), r"size\(\)\[1\] <= 16"),
        (torch.ones(3, 1), r"it has \(3, 1\)"),
        (torch.ones(3, 8).double(), "torch.float64 with 2 dimensions where the example had a tensor of torch.float32"),
        (torch.ones(3, 8, 1), "with 3 dimensions"),
        (
            {"value": torch.ones(3, 8), "scale": 2.0},
            r"of another structure: the example was a tensor, and this input is a dictionary with 'value', "
            r"'scale' \(a value of the type float\)",
        ),
        ((torch.ones(3, 8), [torch.ones(3)]), "and this input is a tuple of a tensor, a list of a tensor"),
    ]
    for inputs, said in others:
        with pytest.raises(UsageError, match=said):
            check_inputs(made, inputs)


def test_a_size_of_one_causes_no_log_message_of_torch(caplog: pytest.LogCaptureFixture) -> None:
    torch_logger = logging.getLogger("torch._export.non_strict_utils")
    torch_logger.addHandler(caplog.handler)
    try:
        made = split_model(Positions(), 2, at=["last"], example=torch.ones(4, 1))
    finally:
        torch_logger.removeHandler(caplog.handler)
    assert len(made.stages) == 2
    assert [each for each in caplog.records if each.levelno >= logging.WARNING] == []


def test_a_constant_of_the_example_must_not_change() -> None:
    made = split_model(Positions(), 2, at=["last"], example={"value": torch.ones(4, 8), "scale": 2.0})
    check_inputs(made, {"value": torch.ones(4, 8), "scale": 2.0})
    with pytest.raises(UsageError, match=r"it has 3.0 where the example had 2.0"):
        check_inputs(made, {"value": torch.ones(4, 8), "scale": 3.0})


def test_a_single_sample_is_refused_if_the_model_handles_it_differently() -> None:
    model = Two(lambda m, value: m.b(m.a(value)) if value.shape[0] > 1 else value)
    made = split_model(model, 2, at=["b"], example=torch.ones(4, WIDTH))
    check_inputs(made, torch.ones(2, WIDTH))
    with pytest.raises(UsageError, match="sizes of 0 and 1"):
        check_inputs(made, torch.ones(1, WIDTH))


def test_a_single_sample_is_refused_if_the_model_refuses_it() -> None:
    """Batch normalization raises an error in training, which a recording does not contain."""
    made = split_model(Two(normalized), 2, at=["b"], example=torch.ones(4, WIDTH))
    check_inputs(made, torch.ones(1, WIDTH), False)
    with pytest.raises(UsageError, match="sizes of 0 and 1"):
        check_inputs(made, torch.ones(1, WIDTH))


def test_stages_that_make_tensors_can_be_moved() -> None:
    made = split_model(Two(size), 2, at=["b"], example=torch.ones(4, WIDTH))
    assert made.inputs is not None
    value: Any = made.inputs(torch.ones(3, WIDTH, device="meta"))
    for stage in made.stages:
        value = stage.to("meta")(value)
    assert value.is_meta
    with pytest.raises(UsageError, match="data types of a model are recorded"):
        made.stages[0].double()


# Random programs


class Chance(nn.Module):
    """A random sequence of statements, some of which change tensors in place that others use."""

    state: Tensor

    def __init__(self, seed: int) -> None:
        super().__init__()
        chance = random.Random(seed)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("state", torch.zeros(WIDTH))
        self.plan = tuple((chance.choice(STATEMENTS), chance.random()) for _ in range(9))

    def forward(self, value: Tensor) -> Tensor:
        values = [value * 1]
        for number, (statement, place) in enumerate(self.plan):
            if number % 2 == 0 and number < 8:
                values.append(self.layers[number // 2](values[-1] * 1))
            values.append(statement(self, values[int(place * len(values))], values[-1]))
        return values[-1] + values[1]


def assign(m: Chance, old: Tensor, value: Tensor) -> Tensor:
    m.state = m.state * 0.5 + mean(value)
    return value + old


def write(m: Chance, old: Tensor, value: Tensor) -> Tensor:
    m.state[1:3].mul_(0.5).add_(mean(value)[1:3])
    return value * 1


def change(m: Chance, old: Tensor, value: Tensor) -> Tensor:
    old[:, 1:].detach().mul_(0.5)
    return value * 1


STATEMENTS: list[Callable[[Chance, Tensor, Tensor], Tensor]] = [
    *(assign, write, change),
    lambda m, old, value: value + m.state,
    lambda m, old, value: value + old,
    lambda m, old, value: old[:, :2].repeat(1, 2) + value,
    lambda m, old, value: dropout(value, 0.3, m.training),
    lambda m, old, value: m.norm(value),
    lambda m, old, value: value * 2 if m.training else value / value.shape[0],
    lambda m, old, value: value.view(-1, 2, 2).transpose(1, 2).reshape(-1, WIDTH),
    lambda m, old, value: value @ m.layers[0].weight,  # type: ignore[operator]
]


SEEDS = range(60)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", SEEDS)
def test_random_programs_are_equal_or_refused(seed: int) -> None:
    torch.manual_seed(seed)
    model = Chance(seed).double()
    example = torch.randn(4, WIDTH, dtype=torch.float64)
    try:
        model(example).sum().backward()
    except RuntimeError:  # autograd needs a value that was overwritten
        return
    at = sorted(random.Random(seed).sample(["layers.1", "layers.2", "layers.3"], 2))
    try:
        made = split_model(model, 3, at=at, example=example)
    except UsageError as error:
        assert "changed in place" in str(error) or "differ" in str(error), error  # noqa: PT017
    else:
        check_equal(model, made)


def test_threads_that_refuse_saved_tensors_hooks_leave_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    lock, at_lock, original = threading.RLock(), threading.Event(), saved_tensors_hooks.__enter__

    class Watched:
        def __enter__(self) -> None:
            at_lock.set()
            lock.acquire()

        def __exit__(self, *_: object) -> None:
            lock.release()

    def enter_and_leave() -> None:
        with comparison._no_saving():
            pass

    other = threading.Thread(target=enter_and_leave)
    with lock:
        with comparison._no_saving():
            monkeypatch.setattr(comparison, "_one_by_one", Watched())
            other.start()
            assert at_lock.wait(PATIENCE)
        assert saved_tensors_hooks.__enter__ is original
    other.join(PATIENCE)
    assert saved_tensors_hooks.__enter__ is original
