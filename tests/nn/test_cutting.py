"""Stages that are cut out of a model compute, one after the other, what the whole model computes."""

import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from telegrad.errors import UsageError
from telegrad.pipeline.split import SplitModel, split_model
from tests.cluster import in_threads

WIDTH = 6


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def sequence() -> nn.Module:
    return nn.Sequential(linear(), nn.Tanh(), linear(), nn.ReLU(), linear())


def named() -> nn.Module:
    again = nn.ReLU()  # a module in two places
    layers = nn.Sequential(linear(), again, nn.Sequential(linear(), nn.Tanh()), linear(), again)
    return nn.Sequential(OrderedDict(embed=linear(), layers=layers, head=linear()))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = linear(), nn.Dropout(0.5)

    def forward(self, value: Tensor) -> Tensor:
        return self.drop(self.layer(value).tanh())


class Choosing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = linear(), linear()

    def forward(self, value: Tensor) -> Tensor:
        return self.last(self.layer(value) if value.sum() > 0 else self.layer(-value))


class Layers(nn.Module):
    def __init__(self, count: int = 4, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.layers = nn.ModuleList(block() for _ in range(count))

    def forward(self, value: Tensor) -> Tensor:
        for layer in self.layers:
            value = layer(value)
        return value


class Skips(nn.Module):
    """Uses early values in late layers: the input, the output of the first layer, and a size."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(linear() for _ in range(4))

    def forward(self, value: Tensor) -> Tensor:
        rows = value.shape[0]
        first = self.layers[0](value)
        second = self.layers[1](first).tanh()
        third = self.layers[2](second + first)
        return self.layers[3](third).view(rows, -1) + first * value


class Several(nn.Module):
    """Takes several inputs, one of them with a default, and returns several values."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = linear(), linear(), linear()

    def forward(self, input: Tensor, mask: Tensor, scale: float = 2.0, *, other: Tensor) -> Any:  # noqa: A002
        found = self.first(input).masked_fill(mask, 0.0)
        found = self.second(found * scale) + other
        return self.third(found).masked_fill(mask, 1.0), {"mask": mask, "found": found}


class Own(nn.Module):
    """Has parameters, buffers and constants of its own, and uses them."""

    bias: Tensor
    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(WIDTH))
        self.register_buffer("bias", torch.rand(WIDTH))
        self.register_buffer("table", torch.rand(64, WIDTH), persistent=False)
        self.plain = torch.rand(WIDTH)
        self.norm, self.first, self.second = nn.BatchNorm1d(WIDTH), linear(), linear()

    def forward(self, value: Tensor) -> Tensor:
        value = self.norm(value + self.table[: value.size(0)]) * self.scale
        value = self.first(value) + self.bias
        return self.second(value) * self.plain + self.bias + torch.ones(WIDTH)


class Inside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = Layers(3), linear()

    def forward(self, value: Tensor) -> Tensor:
        return self.head(self.encoder(value)).relu()


class Case(NamedTuple):
    make: Callable[[], nn.Module]
    at: list[str]
    inputs: Callable[[], Any] = lambda: torch.randn(5, WIDTH)


def several() -> dict[str, Tensor]:
    return {
        "input": torch.randn(5, WIDTH),
        "mask": torch.rand(5, WIDTH) > 0.5,
        "other": torch.randn(5, WIDTH, requires_grad=True),
    }


CASES = {
    "a sequence": Case(sequence, ["2", "4"]),
    "a sequence in a sequence": Case(named, ["layers", "layers.2.1", "layers.4"]),
    "a sequence, of which a part is traced": Case(lambda: nn.Sequential(linear(), Inside()), ["1.encoder.layers.1"]),
    "a list": Case(Layers, ["layers.1", "layers.3"]),
    "deeper layers": Case(Inside, ["encoder.layers.1", "encoder.layers.2", "head"]),
    "a module with the first of its parts": Case(lambda: nn.Sequential(linear(), Inside()), ["1"]),
    "skips": Case(Skips, ["layers.1", "layers.2", "layers.3"]),
    "several inputs and outputs": Case(Several, ["second", "third"], several),
    "several inputs in order": Case(Several, ["third"], lambda: tuple(several().values())),
    "own parameters and buffers": Case(Own, ["first", "second"]),
    "one stage": Case(sequence, []),
    "one stage of several inputs": Case(Several, [], several),
}


def sent(made: SplitModel) -> list[nn.Module]:
    return [pickle.loads(pickle.dumps(stage)) for stage in made.stages]


def applied(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(inputs[0], inputs[1], other=inputs[2]) if isinstance(inputs, tuple) else model(inputs)


def through(made: SplitModel, stages: list[nn.Module], inputs: Any) -> Any:
    value = inputs if made.inputs is None else made.inputs(inputs)
    for stage in stages:
        value = stage(value)
    return value


def total(outputs: Any) -> Tensor:
    return torch.stack([each.square().sum() for each in tree_leaves(outputs)]).sum()


@pytest.mark.parametrize("name", CASES)
def test_stages_give_the_outputs_of_the_whole_model(name: str) -> None:
    torch.manual_seed(0)
    case = CASES[name]
    model, inputs = case.make(), case.inputs()
    before = dict(vars(model)), set(model.state_dict())
    made = split_model(model, len(case.at) + 1, at=case.at, example=inputs)
    assert (dict(vars(model)), set(model.state_dict())) == before
    stages = sent(made)
    torch.manual_seed(1)
    wanted = applied(model, inputs)
    torch.manual_seed(1)
    found = through(made, stages, inputs)
    for one, other in zip(tree_leaves(found), tree_leaves(wanted), strict=True):
        assert torch.equal(one, other)
    total(wanted).backward()
    total(found).backward()
    gradients = {name: own.grad for stage in stages for name, own in stage.named_parameters()}
    assert set(gradients) == {name for name, _ in model.named_parameters()}
    for parameter, own in model.named_parameters():
        torch.testing.assert_close(gradients[parameter], own.grad)
    state = {key: value for stage in stages for key, value in stage.state_dict().items()}
    assert set(state) == set(model.state_dict())
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


def test_stages_of_a_sequence_are_sequences() -> None:
    chain = split_model(named(), 2, at=["layers.2"]).stages
    assert [type(stage) for stage in chain] == [nn.Sequential, nn.Sequential]
    assert list(chain[0].state_dict()) == ["embed.weight", "embed.bias", "layers.0.weight", "layers.0.bias"]


def test_stages_follow_train_and_eval() -> None:
    model, inputs = Layers().eval(), torch.randn(5, WIDTH)
    made = split_model(model, 2, at=["layers.2"], example=inputs)
    stages = sent(made)
    for mode in (False, True, False):
        model.train(mode)
        outputs = []
        for run in (model, lambda value: through(made, stages, value)):
            torch.manual_seed(0)
            outputs.append(run(inputs))
        assert torch.equal(*outputs)
        for stage in stages:
            stage.train(not mode)
    with pytest.raises(UsageError, match=r"in different modes: call train\(\) or eval\(\) of the pipeline"):
        through(made, [stages[0].eval(), stages[1].train()], inputs)


@pytest.mark.parametrize(
    ("make", "count", "wanted"),
    [
        (lambda: nn.Sequential(*(linear() for _ in range(12))), 5, [2, 3, 2, 3, 2]),
        (lambda: nn.Sequential(linear(), nn.Linear(WIDTH, 100), nn.Linear(100, WIDTH), linear()), 3, [2, 1, 1]),
        (lambda: Layers(6), 3, [2, 2, 2]),
        (lambda: Layers(2), 2, [1, 1]),
        (lambda: nn.Sequential(linear(), Layers(4, linear), nn.ReLU()), 5, [1, 1, 1, 1, 1]),
        (lambda: nn.Sequential(linear(), Block(), Block()), 2, [1, 2]),
        (sequence, 1, [3]),
    ],
)
def test_a_model_is_cut_into_about_equal_stages(make: Callable[[], nn.Module], count: int, wanted: list[int]) -> None:
    stages = split_model(make(), count, example=torch.randn(4, WIDTH)).stages
    assert [sum(name.endswith("weight") for name, _ in stage.named_parameters()) for stage in stages] == wanted


def test_without_an_example_a_sequence_is_cut_between_its_children() -> None:
    assert split_model(nn.Sequential(linear(), Choosing(), linear()), 3).parts == [["0"], ["1"], ["2"]]


def test_a_count_of_children_for_each_stage() -> None:
    assert split_model(sequence(), 3, balance=[1, 3, 1]).parts == [["0"], ["1", "2", "3"], ["4"]]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.middle, self.head = linear(), linear(), nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, value: Tensor) -> Tensor:
        return self.head(self.middle(self.embed(value))) @ self.middle.weight


def test_parameters_of_several_stages_are_listed() -> None:
    assert sorted(split_model(Tied(), 3, at=["middle", "head"], example=torch.randn(4, WIDTH)).ties) == [
        (0, "embed.weight", 2, "head.weight"),
        (1, "middle.weight", 2, "middle.weight"),
    ]
    assert split_model(Tied(), 1, example=torch.randn(4, WIDTH)).ties == []


class Unnamed(nn.Module):
    def forward(self, *values: Any) -> Any:
        return values


REFUSED: dict[str, tuple[Callable[[], Any], int, dict[str, Any], str]] = {
    "no module": (lambda: [linear()], 1, {}, "model must be a module"),
    "a name": (sequence, 2, {"at": "2"}, "at must be a list of the names of modules, not '2'"),
    "an unknown name": (Layers, 2, {"at": ["layer.1"]}, r"no module 'layer.1' with .* There are 'layers'"),
    "an unknown part": (Layers, 2, {"at": ["layers.9"]}, "There are 'layers.0', 'layers.1', 'layers.2', 'layers.3'"),
    "a part of a leaf": (sequence, 2, {"at": ["2.weight"]}, "no module '2.weight' .* '2' has no submodules"),
    "the first": (sequence, 2, {"at": ["0"]}, "a stage would be empty"),
    "the first, traced": (Layers, 2, {"at": ["layers.0"]}, "a stage would be empty"),
    "one twice": (sequence, 3, {"at": ["2", "2"]}, "a stage would be empty"),
    "one and its first part": (Inside, 3, {"at": ["encoder", "encoder.layers.0"]}, "a stage would be empty"),
    "a list": (Layers, 2, {"at": ["layers"]}, "'layers' is not called directly"),
    "values that choose": (Choosing, 2, {"at": ["last"]}, r"Choosing cannot be cut at 'last'.*\n.*by hand"),
    "no name of an input": (Unnamed, 2, {}, "Unnamed.forward has no named argument"),
    "no example": (Layers, 2, {"example": None}, r"needs an example: Pipeline.split\(model, workers, example=inputs\)"),
    "an empty example": (
        Layers,
        2,
        {"example": torch.ones(0, WIDTH)},
        "`example` must consist of tensors with the samples",
    ),
    "a wrong sum": (sequence, 2, {"balance": [2, 2]}, r"\[2, 2\] does not"),
    "an empty stage": (sequence, 3, {"balance": [5, 0, 0]}, "balance must be a whole number, 1 or more, not 0"),
    "too many stages": (sequence, 4, {}, r"can only begin with \['2', '4'\]. Name fewer workers"),
    "nothing to train": (lambda: nn.Sequential(nn.ReLU(), nn.Tanh()), 2, {}, r"can only begin with \[\]"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_models_that_cannot_be_cut(what: str) -> None:
    make, count, where, said = REFUSED[what]
    with pytest.raises(UsageError, match=said):
        split_model(make(), count, **{"example": torch.randn(4, WIDTH), **where})


class Slow(nn.Module):
    def __init__(self, others: Callable[[], None]) -> None:
        super().__init__()
        self.first, self.second, self.others = linear(), linear(), others

    def forward(self, value: Tensor) -> Tensor:
        self.others()
        return self.second(self.first(value))


def test_other_threads_can_use_their_modules_during_a_cut() -> None:
    other, inputs = Layers(), torch.randn(5, WIDTH)
    found: list[Tensor] = []

    def meanwhile() -> None:
        found.extend(in_threads(lambda: other(inputs)))

    split_model(Slow(meanwhile), 2, at=["second"], example=inputs, check=False)  # Slow changes `found`
    assert found[0].shape == (5, WIDTH)


class Twins(nn.Module):
    """Has a weight under three names, two of them in late layers."""

    def __init__(self) -> None:
        super().__init__()
        self.early, self.late, self.last = linear(), linear(), linear()
        self.late.weight = self.last.weight = self.early.weight

    def forward(self, value: Tensor) -> Tensor:
        return self.last(self.late(self.early(value)))


def test_a_weight_with_two_names_in_a_stage_is_tied_once() -> None:
    made = split_model(Twins(), 2, at=["late"], example=torch.randn(4, WIDTH))
    assert made.ties == [(0, "early.weight", 1, "late.weight")]
    assert {"late.weight", "last.weight"} <= set(made.stages[1].state_dict())
