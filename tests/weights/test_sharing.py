"""Readers get the published values, types and strides, and tensors that share memory as the published ones do."""

import contextlib
import itertools
import random
from collections import OrderedDict
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from telegrad._core.worker.current import Worker
from telegrad.errors import CannotEncode, InvalidArgument
from telegrad.weights import Publisher, Shard, ShardedPublisher, ShardedSubscriber, Subscriber, Version, tree_layout
from telegrad.weights.deltas import DeltaEncoder, apply_deltas, rows_of
from telegrad.weights.transfer import VersionInfo
from telegrad.weights.tree_layout import Layout, Rounding, Snapshots, bare, named, publish_dtype
from tests.weights.test_weights import on, on_hosts, speaking_for
from tests.weights.trees import Maker, assert_equal, assert_shared_alike, bits, filled, published

SEEDS = st.integers(0, 1 << 32)
QUICK = settings(max_examples=60, deadline=None)
THOROUGH = settings(max_examples=5000, deadline=None)
BF16 = torch.bfloat16
_names = (f"tree{number}" for number in itertools.count())


# Any tree


def in_one_process(seed: int) -> None:
    """Publish several versions; read them whole, by deltas, and into other tensors."""
    maker, layouts, reading, apart = Maker(seed), Snapshots(), Snapshots(), dict[str, Tensor]()
    torch.manual_seed(seed)
    before: tuple[Layout, Tensor] | None = None
    for step in range(4):
        tree = maker.tree()
        layout, memory = filled(layouts, tree)
        if before is not None and before[0] is layout:
            assert_rebuilt(layout, before[1], memory)
        before = layout, memory.clone()
        told = Layout(layout.number, layout.description)
        state = told.tree(told.tensors(memory))
        assert_equal(state, tree)
        assert_loaded(tree, reading, apart)
        assert_shared_alike(state, tree, seed + step)


def assert_rebuilt(layout: Layout, old: Tensor, new: Tensor) -> None:
    info = VersionInfo(layout.number, layout.description, layout.size, 1000)
    found = DeltaEncoder("small").encode(layout, info, old, new)
    made = new.clone()
    for piece, delta in found.items():
        made[piece * info.piece : (piece + 1) * info.piece] = 0
        apply_deltas(layout, info, old, made, piece, [delta])
    whole = info._replace(piece=layout.size)
    for one, other in zip(rows_of(layout, whole, made, 0), rows_of(layout, whole, new, 0), strict=True):
        assert torch.equal(one, other)


def assert_loaded(tree: dict[str, Any], layouts: Snapshots, apart: dict[str, Tensor]) -> None:
    """Load a tree into separate tensors, and into ones that share memory as the published ones do."""
    version, other = published(tree, layouts), published(tree)
    values = dict(named(version.state))
    for name, value in values.items():
        if name not in apart or (apart[name].shape, apart[name].dtype) != (value.shape, value.dtype):
            apart[name] = torch.zeros_like(bare(value).contiguous())
    for name in apart.keys() - values.keys():
        del apart[name]
    version.load_into(apart)
    alike = other.state
    other._memory.zero_()
    version.load_into(alike)
    assert_equal(alike, version.state)
    for name, value in values.items():
        assert torch.equal(bits(apart[name]), bits(value)), name


@given(SEEDS)
@QUICK
def test_any_tree(seed: int) -> None:
    in_one_process(seed)


@pytest.mark.nightly
@given(SEEDS)
@THOROUGH
def test_any_tree_thoroughly(seed: int) -> None:
    in_one_process(seed)


@pytest.fixture(scope="module")
def workers() -> Iterator[list[Worker]]:
    with pytest.MonkeyPatch.context() as patch, on_hosts(patch, "A", "A", "B", "B", "C") as made:
        yield made


WHOLE = torch.randn(6, 4)


def rows(first: int, end: int) -> dict[str, Any]:
    part = WHOLE[first:end]
    return {name: Shard(each, (first, 0), (6, 4)) for name, each in (("w", part), ("tied", part.detach()))}


def all_rows() -> dict[str, Any]:
    return {"whole": WHOLE, "again": WHOLE, "view": WHOLE[1:5]}


def test_parts_of_workers(workers: list[Worker]) -> None:
    """A tensor has two names and is owned in parts; readers get one tensor for both names."""
    with speaking_for(workers[0]):
        publisher = ShardedPublisher("parts", {"w1": partial(rows, 0, 2), "w2": partial(rows, 2, 6), "w3": all_rows})
        reader = on(workers[4], ShardedSubscriber, "w0", "parts")
        for number in range(1, 4):
            WHOLE.add_(number)
            publisher.publish()
            found = on(workers[4], reader.at_least, number).state
            for name in ("w", "tied", "whole", "again"):
                assert torch.equal(found[name], WHOLE)
            assert torch.equal(found["view"], WHOLE[1:5])
            assert found["w"].data_ptr() == found["tied"].data_ptr()
            assert found["whole"].data_ptr() == found["again"].data_ptr() == found["view"].data_ptr() - 16
        reader.close()
        publisher.close()


def test_parts_of_several_types_are_refused(workers: list[Worker]) -> None:
    source = {
        "w1": lambda: {"w": Shard(torch.ones(1, 2), (0, 0), (2, 2))},
        "w2": lambda: {"w": Shard(torch.ones(1, 2).half(), (1, 0), (2, 2))},
    }
    with speaking_for(workers[0]):
        publisher = ShardedPublisher("types", source)
        publisher.publish()
        with speaking_for(workers[3]), pytest.raises(InvalidArgument, match="'w' are of several types"):
            ShardedSubscriber("w0", "types").newest()
        publisher.close()


# Modules


def tied_model(seed: int) -> nn.Sequential:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    layers: list[Any] = [nn.Linear(3, 3), nn.Linear(3, 3), nn.Embedding(3, 3), nn.BatchNorm1d(3)]
    layers += [layers[1] if rng.random() < 0.3 else nn.Linear(3, 3) for _ in range(2)]
    square = [layer for layer in layers if not isinstance(layer, nn.BatchNorm1d)]
    for _ in range(rng.randint(0, 3)):
        first, other = rng.sample(square, 2)
        other.weight = first.weight if rng.random() < 0.7 else nn.Parameter(first.weight.detach().t())
    layers[0].register_buffer("seen", layers[0].weight.detach()[1:] if rng.random() < 0.3 else torch.rand(2, 3))
    return nn.Sequential(*layers)


def fits(target: nn.Module, state: dict[str, Tensor]) -> bool:
    target.load_state_dict(state)
    return all(torch.equal(bits(value), bits(state[name])) for name, value in target.state_dict().items())


@given(SEEDS, SEEDS)
@settings(max_examples=20, deadline=None)
def test_modules_that_tie_other_weights(seed: int, other: int) -> None:
    model, layouts = tied_model(seed), Snapshots()
    for _ in range(2):
        version = published(model.state_dict(), layouts)
        state = {name: value.clone() for name, value in model.state_dict().items()}
        for make in (seed, other):
            for way in ("load_into", "swap_into"):
                target = tied_model(make)
                wanted = {name: value.clone() for name, value in target.state_dict().items()}
                if make == seed or (way == "load_into" and fits(tied_model(make), state)):
                    getattr(version, way)(target)
                    wanted = state
                else:
                    with contextlib.suppress(InvalidArgument):
                        getattr(version, way)(target)
                        wanted = state
                assert all(torch.equal(bits(value), bits(wanted[name])) for name, value in target.state_dict().items())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)


class Language(nn.Module):
    """A language model whose last layer uses the weight of its embedding."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.head = nn.Linear(width, tokens, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        found = self.embedding(tokens)
        for layer in self.layers:
            found = torch.tanh(layer(found))
        return self.head(found)


class Albert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        first, other = nn.Linear(8, 8), nn.Linear(8, 8)
        self.layers = nn.Sequential(first, nn.Tanh(), other, nn.Tanh(), first)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.layers(torch.nn.functional.one_hot(tokens, 8).float())


KINDS = [lambda: Language(50, 8), lambda: Language(8, 8), Albert]
IDS = ["language", "all of one shape", "albert"]


@pytest.mark.parametrize("make", KINDS, ids=IDS)
@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "parts"])
@pytest.mark.parametrize("way", ["load_into", "swap_into"])
def test_a_reader_computes_what_the_publisher_does(workers: list[Worker], make: Any, sharded: bool, way: str) -> None:
    learner, actor, *_ = workers
    model, twin, name = make(), make(), next(_names)
    tokens = torch.arange(8)
    if sharded:
        _models["w0"] = model
        publisher = on(learner, ShardedPublisher, name, {"w0": state_here})
        reader = on(actor, ShardedSubscriber, "w0", name)
    else:
        publisher = on(learner, Publisher, name, model)
        reader = on(actor, Subscriber, "w0", name)
    for _ in range(3):
        with torch.no_grad():
            for number, parameter in enumerate(model.parameters()):
                parameter.mul_(1.5).add_(0.01 * number)
        version = on(actor, reader.at_least, on(learner, publisher.publish))
        getattr(version, way)(twin)
        assert torch.equal(twin(tokens), model(tokens))
    reader.close()
    on(learner, publisher.close)


_models: dict[str, nn.Module] = {}


def state_here() -> dict[str, Tensor]:
    return dict(_models["w0"].state_dict())


def test_a_language_model_with_tied_weights() -> None:
    model, twin = Language(50, 8), Language(50, 8)
    version = published(model.state_dict())
    assert version._memory.numel() < model.embedding.weight.nbytes + 2 * (8 * 8 * 4 + 64) + 64  # stored only once
    version.load_into(twin)
    assert all(torch.equal(value, twin.state_dict()[name]) for name, value in model.state_dict().items())
    version.swap_into(twin)
    assert twin.head.weight is twin.embedding.weight
    untied = Language(50, 8)
    untied.head.weight = nn.Parameter(torch.zeros(50, 8))
    with pytest.raises(InvalidArgument, match=r"share memory in another way: embedding\.weight, head\.weight"):
        version.swap_into(untied)
    with torch.no_grad():
        model.head.weight = nn.Parameter(model.head.weight + 1)  # ends the tie
    with pytest.raises(InvalidArgument, match=r"embedding\.weight, head\.weight share memory here"):
        published(model.state_dict()).load_into(twin)
    with pytest.raises(
        InvalidArgument, match=r"share memory in another way: embedding\.weight, head\.weight\. load_into"
    ):
        published(model.state_dict()).swap_into(twin)


class Extra(nn.Module):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.value = value

    def get_extra_state(self) -> Any:
        return self.value

    def set_extra_state(self, state: Any) -> None:
        self.value = state


@pytest.mark.parametrize("value", [{"scale": 3}, torch.ones(2)], ids=["object", "tensor"])
def test_extra_state_of_modules(value: Any) -> None:
    model, twin = Extra(value), Extra(torch.zeros(2) if isinstance(value, Tensor) else {"scale": 0})
    nn.init.ones_(model.weight)
    version = published(model.state_dict())
    version.load_into(twin)
    assert twin.weight.tolist() == [1, 1]
    assert torch.equal(twin.value, value) if isinstance(value, Tensor) else twin.value == value
    with pytest.raises(InvalidArgument, match="swapped into Extra, whose state has more than"):
        version.swap_into(twin)


def test_modules_with_parametrized_weights() -> None:
    for wrap in (parametrizations.weight_norm, parametrizations.spectral_norm, torch.nn.utils.weight_norm):
        model, twin = wrap(nn.Linear(4, 4)), wrap(nn.Linear(4, 4))
        model(torch.ones(1, 4))
        published(model.state_dict()).load_into(twin)
        model.eval()
        twin.eval()
        assert torch.equal(model(torch.ones(1, 4)), twin(torch.ones(1, 4)))


def test_lazy_modules() -> None:
    model, twin = nn.Linear(4, 3), nn.LazyLinear(3)
    with pytest.raises(InvalidArgument, match="'weight' has no values yet"):
        published(twin.state_dict())
    published(model.state_dict()).load_into(twin)
    assert torch.equal(twin.weight, model.weight)


def test_modules_on_the_meta_device_or_of_another_type() -> None:
    model = nn.BatchNorm1d(3)
    version = published(model.state_dict())
    with pytest.raises(InvalidArgument, match="is on the meta device"):
        version.load_into(nn.BatchNorm1d(3, device="meta"))
    with pytest.raises(InvalidArgument, match=r"without a loss: running_mean \(torch\.int64 here, torch\.float32"):
        version.load_into({**model.state_dict(), "running_mean": torch.zeros(3, dtype=torch.int64)})
    with torch.inference_mode():
        frozen = nn.BatchNorm1d(3)
        nn.init.zeros_(frozen.weight)
    version.load_into(frozen)
    assert torch.equal(frozen.weight, model.weight)


def test_a_version_whose_state_was_read_is_loaded_from_that_state() -> None:
    layout, memory = filled(Snapshots(), {"w": torch.ones(3), "t": torch.ones(2, 3).t()})
    target = {"w": torch.zeros(3), "t": torch.zeros(3, 2)}
    Version(1, layout, memory).load_into(target)  # makes the plan
    version, before = Version(2, layout, memory, torch.zeros_like(memory)), target["w"]._version
    version.load_into(target)
    assert not target["w"].any()
    assert not target["t"].any()
    assert target["w"]._version > before
    assert version.state["w"].all()
    version.load_into(target)
    assert target["w"].all()
    assert target["t"].all()


def test_a_version_whose_state_another_thread_reads_as_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    layout, memory = filled(Snapshots(), {"w": torch.ones(3)})
    target = {"w": torch.zeros(3)}
    Version(1, layout, memory).load_into(target)  # makes the plan
    version, read = Version(2, layout, memory), [memory]
    kept = property(lambda _: read.pop() if read else None)  # None after the first look
    monkeypatch.setattr(Version, "_unwritten", kept, raising=False)
    version.load_into(target)
    assert target["w"].all()


def test_dictionaries_in_dictionaries() -> None:
    models = {"actor": nn.Linear(2, 2), "critic": nn.Linear(2, 1)}
    version = published({name: model.state_dict() for name, model in models.items()})
    twins = {"actor": nn.Linear(2, 2), "critic": nn.Linear(2, 1)}
    version.load_into({name: model.state_dict() for name, model in twins.items()})
    version.load_into(nn.ModuleDict(twins))
    for name, model in models.items():
        assert torch.equal(twins[name].weight, model.weight)
    with pytest.raises(InvalidArgument, match=r"only in it: critic\.bias"):
        version.load_into({"actor": models["actor"].state_dict()})
    layouts = Snapshots()
    for number in range(3):  # with the plan of the previous version, or a new one
        nn.init.constant_(models["actor"].weight, number)
        for each in (dict(models["actor"].named_parameters()), models["actor"].state_dict()):
            published(each, layouts).load_into(twins["actor"])
            assert twins["actor"].weight.unique().tolist() == [number]


# Changes that a publisher notices


class Labelled(dict):  # type: ignore[type-arg]
    label = 0


def test_changes_of_attributes_beside_the_tensors() -> None:
    layouts = Snapshots()
    weights: Any = Labelled(w=torch.ones(2))
    for weights.label in range(3):
        assert published(weights, layouts).state.label == weights.label
    ordered: Any = OrderedDict(w=torch.ones(2))
    ordered._metadata = {"version": 1}
    for version in range(3):
        ordered._metadata["version"] = version
        assert published(ordered, layouts).state._metadata == {"version": version}
    assert [*published({1: torch.ones(1)}, layouts).state] == [1]
    assert [type(key) for key in published({True: torch.ones(1)}, layouts).state] == [bool]


def test_a_refused_tree_is_refused_again() -> None:
    layouts, memory = Snapshots(), torch.zeros(16, dtype=torch.uint8)
    published({"a": torch.ones(2), "b": torch.ones(2)}, layouts)
    split = torch.from_numpy(memory.numpy()[2:10]).view(torch.float32)
    for _ in range(2):
        with pytest.raises(InvalidArgument, match="overlap in memory by a part of an element"):
            published({"b": memory[:8].view(torch.float32), "c": split}, layouts)
        with pytest.raises(InvalidArgument, match="is on the meta device"):
            published({"a": torch.ones(2), "b": torch.ones(2, device="meta")}, layouts)
    other = {"c": torch.zeros(2), "d": torch.ones(2)}
    assert_equal(published(other, layouts).state, other)


def test_parameters_arrive_as_such_and_other_tensors_without_gradients() -> None:
    values = {"leaf": torch.ones(2, requires_grad=True), "parameter": nn.Parameter(torch.ones(2))}
    found = published(values).state.values()
    assert [(type(each), each.requires_grad) for each in found] == [(Tensor, False), (nn.Parameter, True)]


def test_zeros_without_memory_are_published_as_zeros() -> None:
    assert torch.equal(published({"z": torch._efficientzerotensor(5)}).state["z"], torch.zeros(5))


def test_tensors_whose_memory_was_freed() -> None:
    layouts = Snapshots()
    for size in (4, 1_000_000):
        weights = {"w": torch.ones(size)}
        published(weights, layouts)
        weights["w"].untyped_storage().resize_(size // 2)
        with pytest.raises(CannotEncode, match="it has no memory, or its memory was freed"):
            published(weights, layouts)


def test_a_source_that_changes_while_it_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, left, copy = {"w": torch.zeros(3), "b": torch.zeros(3)}, [2], tree_layout._move

    def copy_late(*args: Any) -> None:
        if left[0]:
            left[0] -= 1
            weights["w"].add_(1)
        copy(*args)

    monkeypatch.setattr(tree_layout, "_move", copy_late)
    assert published(weights).state["w"].tolist() == [2, 2, 2]
    left[0] = 99
    with pytest.raises(InvalidArgument, match="were changed by another thread while they were copied"):
        published(weights)


# Rounding


def test_tensors_that_share_memory_are_rounded_together() -> None:
    weight = torch.randn(4, 6)
    tree = {
        "w": weight,
        "row": weight[1],
        "turned": weight.t(),
        "columns": weight[:, ::5],
        "one": torch.ones(1).expand(3),
    }
    state = published(tree, rounding=BF16).state
    for name, tensor in tree.items():
        assert torch.equal(state[name], tensor.bfloat16())
    state["w"][1, 5] = 9
    assert state["row"][5] == state["turned"][5, 1] == state["columns"][1, 1] == 9


def test_tensors_of_several_types_that_share_memory_are_not_rounded() -> None:
    weight = torch.randn(4, dtype=torch.complex64)
    for tree in (
        {"w": weight, "real": weight.real},
        {"w": weight.real, "bytes": torch.view_as_real(weight).view(torch.uint8)},
    ):
        assert_equal(published(tree, rounding=BF16).state, tree)


def test_a_dtype_for_only_one_name_of_shared_memory_is_refused() -> None:
    def only_the_head(name: str, _: Tensor) -> torch.dtype | None:
        return BF16 if name == "head" else None

    weight = torch.ones(2, 3)
    for tree in (
        {"head": weight, "embedding": weight.detach()},
        {"head": weight, "embedding": weight},
        {"head": weight, "b": weight[1]},
    ):
        with pytest.raises(
            InvalidArgument, match=r"share memory, and are to be published as torch\.bfloat16, torch\.float32"
        ):
            published(tree, rounding=only_the_head)
    assert published({"head": weight, "b": torch.ones(3)}, rounding=only_the_head).state["head"].dtype is BF16


@pytest.mark.parametrize(
    ("own", "published"),
    [
        (torch.float64, BF16),
        (torch.float32, BF16),
        (torch.bfloat16, BF16),
        (torch.float16, torch.float16),  # not larger than bfloat16
        (torch.float8_e4m3fn, torch.float8_e4m3fn),
        (torch.complex64, torch.complex64),
        (torch.int64, torch.int64),
        (torch.uint8, torch.uint8),
        (torch.bool, torch.bool),
    ],
    ids=str,
)
def test_a_dtype_rounds_only_larger_floating_types(own: torch.dtype, published: torch.dtype) -> None:
    assert publish_dtype(BF16, "weight", torch.zeros(3, dtype=own)) is published
    assert publish_dtype(None, "weight", torch.zeros(3, dtype=own)) is own


def test_a_function_chooses_the_dtype_by_name() -> None:
    def only_weights(name: str, tensor: torch.Tensor) -> torch.dtype | None:
        return BF16 if name.endswith("weight") else None

    half = torch.zeros(3, dtype=torch.float16)
    assert publish_dtype(only_weights, "layer.weight", half) is BF16
    assert publish_dtype(only_weights, "layer.bias", half) is torch.float16
    assert publish_dtype(only_weights, "steps.weight", torch.zeros(3, dtype=torch.int64)) is torch.int64


@pytest.mark.parametrize("rounding", [torch.int8, torch.bool, torch.complex32, lambda *_: torch.int8, lambda *_: "f16"])
def test_weights_are_rounded_to_floating_numbers_only(rounding: Any) -> None:
    wrong: Rounding = rounding
    with pytest.raises(InvalidArgument, match=r"'w' cannot be published as .*torch\.bfloat16"):
        publish_dtype(wrong, "w", torch.zeros(3, dtype=torch.float64))
