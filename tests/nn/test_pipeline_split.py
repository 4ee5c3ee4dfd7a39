"""A model that is split over workers trains as in one process, and keeps its names."""

import pathlib
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import telegrad.autograd as autograd
import telegrad.checkpoint as checkpoint
from telegrad.errors import UsageError
from telegrad.nn import Pipeline, RemoteModule
from telegrad.optim import DistributedOptimizer
from telegrad.pipeline.pipeline_schedule import SCHEDULES
from tests.nn.test_cutting import WIDTH, Layers, Own, Tied, named, sequence
from tests.nn.training import train_both

pytestmark = pytest.mark.usefixtures("here")

WORKERS = ["w1", "w2", "w0"]


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)  # before the layers, though it is used after them
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, value: Tensor, mask: Tensor) -> Tensor:
        given = value
        for layer in self.layers:
            value = layer(value).tanh().masked_fill(mask, 0.0) + given
        return self.norm(value)


def masked_batch() -> tuple[Any, Tensor]:
    inputs = {"value": torch.randn(10, WIDTH).double(), "mask": torch.rand(10, WIDTH) > 0.5}
    return inputs, torch.randn(10, WIDTH).double()


def plain_batch() -> tuple[Any, Tensor]:
    return torch.randn(10, WIDTH).double(), torch.randn(10, WIDTH).double()


def trains_alike(pipeline: Pipeline, model: nn.Module, batch: Callable[[], tuple[Any, Tensor]]) -> None:
    ours = train_both(pipeline, model, torch.optim.Adam, (batch() for _ in range(3)), lr=0.05)
    # a torch optimizer loads the state by position
    assert ours.state_dict()["param_groups"][0]["params"] == [name for name, _ in model.named_parameters()]
    state = pipeline.state_dict()
    assert list(state) == list(model.state_dict())
    for name, value in model.state_dict().items():
        assert torch.allclose(state[name], value, rtol=1e-6, atol=1e-9), name


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_sequence_trains_as_in_one_process(schedule: str) -> None:
    model = named().double()
    trains_alike(Pipeline.split(model, WORKERS, at=["layers.1", "layers.3"], schedule=schedule), model, plain_batch)


@pytest.mark.parametrize(
    "schedule",
    ["interleaved", *(pytest.param(each, marks=pytest.mark.nightly) for each in SCHEDULES if each != "interleaved")],
)
def test_a_model_with_skip_connections_trains_as_in_one_process(schedule: str) -> None:
    model = Masked().double()
    workers = ["w1", "w0", "w1", "w0"]
    pipeline = Pipeline.split(
        model, workers, at=[f"layers.{number}" for number in (1, 2, 3)], schedule=schedule, example=masked_batch()[0]
    )
    trains_alike(pipeline, model, masked_batch)


def test_a_model_is_split_automatically() -> None:
    model = Masked().double()
    pipeline = Pipeline.split(model, WORKERS, chunks=3, example=masked_batch()[0])
    assert [stage.on for stage in pipeline.stages] == WORKERS
    inputs, _ = masked_batch()
    with torch.no_grad():
        assert torch.allclose(pipeline(inputs), model(**inputs))
        assert torch.allclose(pipeline((inputs["value"], inputs["mask"])), model(**inputs))


def test_the_model_is_copied_and_the_state_has_its_names() -> None:
    model, other, inputs = sequence(), sequence(), torch.randn(5, WIDTH)
    pipeline = Pipeline.split(model, ["w0", "w1/cpu"], balance=[2, 3], chunks=1)
    assert all(isinstance(stage, RemoteModule) for stage in pipeline.stages)
    with torch.no_grad():
        wanted = model(inputs)
        model.load_state_dict(other.state_dict())
        assert torch.equal(pipeline(inputs), wanted)
        other.load_state_dict(pipeline.state_dict())
        assert torch.equal(other(inputs), wanted)
        pipeline.load_state_dict(model.state_dict())
        assert torch.equal(pipeline(inputs), model(inputs))


def test_the_state_of_an_outer_model_has_the_names_of_the_whole_model() -> None:
    model, other = nn.ModuleDict({"body": named(), "head": nn.Linear(2, 2)}), named()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model["body"] = Pipeline.split(other, WORKERS)
    model.load_state_dict(state)
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert "body.layers.0" in vars(model.state_dict())["_metadata"]
    with pytest.raises(RuntimeError, match=r"Missing key.*embed.weight[\s\S]*Unexpected key.*body.strange"):
        model.load_state_dict({name: state[name] for name in state if "embed" not in name} | {"body.strange": None})


@pytest.mark.parametrize("make", [named, Masked])
def test_state_that_the_forward_pass_does_not_use_is_kept(make: Callable[[], nn.Module]) -> None:
    model = make().double()
    for module in (model, model.get_submodule("layers")):
        module.register_buffer("note", torch.ones(1))
        module.register_parameter("spare", nn.Parameter(torch.ones(1)))
    if make is Masked:
        model.add_module("unused", nn.Linear(1, 1))
    example = masked_batch()[0] if make is Masked else None
    pipeline = Pipeline.split(model, ["w1", "w0"], at=["layers.1"], example=example)
    pipeline.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
    model.load_state_dict(pipeline.state_dict())
    assert model.get_submodule("layers").note == model.spare == 2
    trains_alike(pipeline, model, masked_batch if make is Masked else plain_batch)


def test_shared_buffers_are_loaded_into_each_stage() -> None:
    model, other = Own().eval(), Own().eval()
    inputs = torch.randn(5, WIDTH)
    pipeline = Pipeline.split(model, WORKERS, at=["first", "second"], chunks=1, example=inputs)
    with torch.no_grad():
        other.bias.fill_(7)
        pipeline.load_state_dict(other.state_dict())
        other.table.copy_(model.table)  # these two are not in the state
        other.plain = model.plain
        assert torch.allclose(pipeline(inputs), other(inputs))


def test_train_and_eval_reach_the_stages() -> None:
    model, inputs = Layers(), torch.randn(5, WIDTH)
    pipeline = Pipeline.split(model, ["w1", "w2"], chunks=1, example=inputs)
    with torch.no_grad():
        wanted = model.eval()(inputs)
        assert not torch.allclose(pipeline(inputs), wanted)
        assert torch.allclose(pipeline.eval()(inputs), wanted)


def test_names_of_a_model_with_an_attribute_stages() -> None:
    model = nn.Sequential(OrderedDict(norm=nn.LayerNorm(WIDTH), stages=nn.Sequential(named(), named())))
    pipeline = Pipeline.split(model, ["w1", "w2", "w0"], at=["stages.0.layers", "stages.1"])
    wanted = {name: torch.randn_like(value) for name, value in model.state_dict().items()}
    pipeline.load_state_dict(wanted)
    found = pipeline.state_dict()
    assert list(found) == list(wanted)
    assert all(torch.equal(value, found[name]) for name, value in wanted.items())


def trained(pipeline: Pipeline, optimizer: DistributedOptimizer, inputs: Any, targets: Tensor) -> Tensor:
    with autograd.context() as context:
        loss = pipeline.forward_backward(context, inputs, targets, mse_loss)
        optimizer.step(context)
    return loss


def test_a_checkpoint_is_loaded_into_another_cut_and_the_whole_model(tmp_path: pathlib.Path) -> None:
    model, other, (inputs, targets) = Own().double().eval(), Own().double(), plain_batch()
    other.table, other.plain = model.table, model.plain  # these are not in the state
    first = Pipeline.split(model, ["w1", "w1", "w2"], at=["first", "second"], chunks=1, example=inputs)
    second = Pipeline.split(other, ["w2", "w0"], at=["second"], chunks=1, example=inputs).eval()
    states: list[dict[str, Any]] = []
    for pipeline in (first, second):
        optimizer = DistributedOptimizer.for_module(torch.optim.Adam, pipeline, lr=0.05)
        states.append({"model": pipeline, "optimizer": optimizer})
    for _ in range(2):
        trained(first, states[0]["optimizer"], inputs, targets)
    checkpoint.save(states[0], tmp_path)
    saved = first.state_dict()
    checkpoint.load(states[1], tmp_path)
    assert {name for name, _ in model.named_parameters()} == set(states[1]["optimizer"].param_groups[0]["param_names"])
    for _ in range(2):  # the second step depends on the loaded state of the optimizer
        one, other_one = (trained(each["model"], each["optimizer"], inputs, targets) for each in states)
        assert torch.allclose(one, other_one)
    flat = {f"model.{name}": torch.empty_like(value) for name, value in model.state_dict().items()}
    torch.distributed.checkpoint.load(flat, checkpoint_id=tmp_path, no_dist=True)
    assert set(flat) == {f"model.{name}" for name in saved}
    assert all(torch.equal(flat[f"model.{name}"], value) for name, value in saved.items())


@pytest.mark.parametrize(
    "workers",
    [["w1", "w2", "w1"], *(pytest.param(each, marks=pytest.mark.nightly) for each in (WORKERS, ["w1", "w1", "w1"]))],
)
def test_parameters_that_stages_share_are_tied(workers: list[str], tmp_path: pathlib.Path) -> None:
    model = Tied().double()
    pipeline = Pipeline.split(model, workers, at=["middle", "head"], chunks=3, example=plain_batch()[0])
    trains_alike(pipeline, model, plain_batch)
    state = pipeline.state_dict()
    assert state.keys() == model.state_dict().keys()
    assert all(torch.allclose(state[name], value) for name, value in model.state_dict().items())
    Tied().double().load_state_dict(state)
    checkpoint.save({"model": pipeline}, tmp_path)
    flat = {f"model.{name}": torch.empty_like(value) for name, value in model.state_dict().items()}
    torch.distributed.checkpoint.load(flat, checkpoint_id=tmp_path, no_dist=True)
    for name, value in model.state_dict().items():  # borrowed weights have the values of the last step, too
        assert torch.allclose(flat[f"model.{name}"], value, rtol=1e-6, atol=1e-9), name
    other = Pipeline.split(Tied().double(), workers, at=["middle", "head"], chunks=3, example=plain_batch()[0])
    checkpoint.load({"model": other}, tmp_path)
    inputs, _ = plain_batch()
    with torch.no_grad():
        assert torch.allclose(other(inputs), model(inputs))


class Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor, shift: Tensor | None = None) -> Tensor:
        value = self.first(value)
        return self.last(value if shift is None else value + shift)


def test_a_tuple_is_spread_over_arguments_with_defaults_too() -> None:
    model, given = Shifted().double(), (torch.randn(6, WIDTH).double(), torch.randn(6, WIDTH).double())
    pipeline = Pipeline.split(model, WORKERS[:2], at=["last"], chunks=2, example=given)
    with torch.no_grad():
        assert torch.allclose(pipeline(given), model(*given))
    with pytest.raises(UsageError, match=r"the arguments value, shift, .* has 3 elements\..*\{'value': \.\.\.\}"):
        pipeline((*given, given[0]))
    with pytest.raises(UsageError, match="one has 1 elements"):
        Pipeline.split(Masked(), WORKERS[:2], at=["norm"], example=given[:1])


def test_wrong_arguments_of_split() -> None:
    with pytest.raises(UsageError, match=r"`workers` must be a list.*Pipeline.split\(model, \[\"w1\", \"w2\"\]\)"):
        Pipeline.split(sequence(), "w1")
    with pytest.raises(UsageError, match="'cpu' is not a place for a module"):
        Pipeline.split(sequence(), ["w1", "cpu"])
    with pytest.raises(UsageError, match="chunks must be a number of parts of a batch"):
        Pipeline.split(sequence(), ["w1"], chunks=0)
    with pytest.raises(ValueError, match="w9"):
        Pipeline.split(sequence(), ["w1", "w9"])
