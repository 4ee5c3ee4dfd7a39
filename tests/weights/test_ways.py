"""Random trees, published and read in each way that there is.

A reader gets the published values, or the publisher gets an error. No reader sees the writes of another one to its
version.
"""

import itertools
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from telegrad._core.worker.current import Worker
from telegrad.errors import InvalidArgument
from telegrad.nn import Pipeline, RemoteModule
from telegrad.weights import Box, Publisher, Shard, ShardedPublisher, ShardedSubscriber, Subscriber
from telegrad.weights.tree_layout import bare, named
from tests.cluster import wait_until
from tests.weights.test_weights import on, on_hosts, speaking_for
from tests.weights.trees import Maker, assert_equal, assert_shared_alike, bits, published

STEPS = 3
HERE = ("dictionary", "function", "module")
_feeds = (f"feed{number}" for number in itertools.count())
_holders: "dict[str, Holder]" = {}


class Holder(nn.Module):
    """A module that holds the tensors of a tree as parameters and buffers."""

    def __init__(self, key: str = "") -> None:
        super().__init__()
        if key:
            _holders[key] = self

    def hold(self, tree: Any) -> None:
        self._parameters.clear()
        self._buffers.clear()
        for number, (name, tensor) in enumerate(named(tree)):
            if number % 2:
                self.register_buffer(name.replace(".", "_"), tensor.detach())
            else:
                self.register_parameter(name.replace(".", "_"), nn.Parameter(tensor, requires_grad=False))


class Source:
    def __init__(self, way: str, learner: Worker, name: str, deltas: Any) -> None:
        self._way = way
        self._learner = learner
        self._state: dict[str, Any] = {}
        self._holder = Holder()
        with speaking_for(learner):
            if way not in HERE:
                remote = RemoteModule("w1", Holder, (name,))
                self._holder = _holders.pop(name)
            made: dict[str, Callable[[], Any]] = {
                "dictionary": lambda: self._state,
                "function": lambda: lambda: {**self._state},
                "module": lambda: self._holder,
                "remote": lambda: remote,
                "reference": lambda: remote.get_module_rref(),
                "pipeline": lambda: Pipeline([remote]),
            }
            self.publisher = Publisher(name, made[way](), deltas=deltas)

    def publish(self, tree: Any) -> tuple[int, Any]:
        self._state.clear()
        self._state.update(tree)
        wanted = tree
        if self._way not in ("dictionary", "function"):
            self._holder.hold(tree)
            prefix = "stages.0." if self._way == "pipeline" else ""
            wanted = {prefix + name: value for name, value in self._holder.state_dict().items()}
        with speaking_for(self._learner):
            return self.publisher.publish(), wanted

    @property
    def is_here(self) -> bool:
        return self._way in HERE


def check(version: Any, wanted: Any, is_here: bool, seed: int) -> None:
    state = version.state
    if is_here:
        assert_equal(state, wanted)
    values, found = dict(named(wanted)), dict(named(state))
    assert found.keys() == values.keys()
    for name, value in values.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape)
        assert torch.equal(bits(found[name]), bits(value)), name
    own = {name: torch.zeros_like(bare(value).contiguous()) for name, value in values.items()}
    for _ in range(2):  # with a new plan, and with the same again
        version.load_into(own)
    assert all(torch.equal(bits(own[name]), bits(value)) for name, value in values.items())
    if is_here and all("." not in name for name in values):
        module = Holder()
        module.hold(published(wanted).state)
        version.swap_into(module)
        assert all(torch.equal(bits(value), bits(values[name])) for name, value in module.state_dict().items())
        assert_shared_alike(module.state_dict(), published(wanted).state, seed)  # the check writes to the module


REFUSED: list[Callable[[], Tensor]] = [
    lambda: torch.ones(3).to_sparse(),
    lambda: torch.ones(3, 3).to_sparse_csr(),
    lambda: torch._empty_affine_quantized([3], scale=1.0, zero_point=0, dtype=torch.qint8),
    lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    lambda: torch.ones(3, device="meta"),
]


def one_feed(workers: list[Worker], seed: int) -> None:
    """Publish a few versions, some of them refused, to readers on three hosts, which also write to them."""
    rng, maker, name = random.Random(seed), Maker(seed), next(_feeds)
    torch.manual_seed(seed)
    way = rng.choice([*HERE, "remote", "reference", "pipeline"])
    source = Source(way, workers[0], name, rng.choice(["off", "fast", "small"]))
    places = [*workers[1:], rng.choice(workers)]
    rng.shuffle(places)
    readers: list[Subscriber] = []

    def add() -> None:
        readers.append(on(places.pop(), Subscriber, "w0", name))
        wait_until(lambda: len(source.publisher.subscribers) == len(readers))

    for _ in range(3):
        add()
    for step in range(STEPS):
        tree = maker.tree()
        if source.is_here and rng.random() < 0.3:
            with pytest.raises(InvalidArgument, match="cannot be published"):
                source.publish({**tree, "t0": rng.choice(REFUSED)()})
        number, wanted = source.publish(tree)
        wanted = published(wanted).state  # the state at this moment
        if step == 1:
            readers.pop(rng.randrange(len(readers))).close()  # possibly the source of the other readers of its host
            wait_until(lambda: len(source.publisher.subscribers) == len(readers))
            add()
        for reader in readers:
            check(reader.at_least(number), wanted, source.is_here, seed + step)
        if step == STEPS - 1:
            add()
            check(readers[-1].newest(), wanted, source.is_here, seed)
    for reader in readers:
        reader.close()
    on(workers[0], source.publisher.close)


_parts: dict[str, dict[str, Any]] = {"w1": {}, "w2": {}}


def parts_of(worker: str) -> dict[str, Any]:
    return _parts[worker]


def one_spread_feed(workers: list[Worker], seed: int) -> None:
    rng, maker, name = random.Random(seed), Maker(seed), next(_feeds)
    torch.manual_seed(seed)
    parts = _parts
    with speaking_for(workers[0]):
        publisher = ShardedPublisher(name, {worker: partial(parts_of, worker) for worker in parts})
    values: dict[str, Tensor] = {}
    for _ in range(STEPS):
        values = {"always": torch.randn(3), **dict(named(maker.tree()))}
        for each in parts.values():
            each.clear()
        for key, value in values.items():
            cut = rng.randint(0, len(value)) if value.dim() else 0
            if value.dim() and rng.random() < 0.6:
                parts["w1"][key] = Shard(value[:cut], (0,) * value.dim(), tuple(value.shape))
                parts["w2"][key] = Shard(value[cut:], (cut, *(0,) * (value.dim() - 1)), tuple(value.shape))
            else:
                parts[rng.choice(["w1", "w2"])][key] = value
        number = on(workers[0], publisher.publish)
        boxes: dict[str, Box | None] = {}
        for key, value in values.items():
            starts = [rng.randint(0, length) for length in value.shape]
            box = Box(tuple(starts), tuple(rng.randint(0, n - at) for n, at in zip(value.shape, starts, strict=True)))
            boxes[key] = rng.choice([None, box])
        with speaking_for(rng.choice(workers)), torch.no_grad():
            whole, some = ShardedSubscriber("w0", name), ShardedSubscriber("w0", name, boxes)
            own = {key: torch.zeros_like(bare(value).contiguous()) for key, value in values.items()}
            whole.at_least(number).load_into(own)
            found = some.at_least(number).state
            for key, value in values.items():
                assert torch.equal(bits(own[key]), bits(value)), key
                part, place = boxes[key], value
                for dimension, (start, size) in enumerate(zip(*part, strict=True) if part else ()):
                    place = place.narrow(dimension, start, size)
                assert torch.equal(bits(found[key]), bits(place)), key
            whole.close()
            some.close()
    with speaking_for(workers[0]):
        publisher.close()


@pytest.fixture(scope="module")
def workers() -> Iterator[list[Worker]]:
    with pytest.MonkeyPatch.context() as patch, on_hosts(patch, "A", "A", "B", "B", "B", "C") as made:
        yield made


SEEDS = st.integers(0, 1 << 32)


@given(SEEDS)
@settings(max_examples=12, deadline=None)
def test_any_way(workers: list[Worker], seed: int) -> None:
    one_feed(workers, seed)


@given(SEEDS)
@settings(max_examples=8, deadline=None)
def test_any_parts(workers: list[Worker], seed: int) -> None:
    one_spread_feed(workers, seed)


@pytest.mark.nightly
@pytest.mark.timeout(900)
@given(SEEDS)
@settings(max_examples=1000, deadline=None)
def test_any_way_thoroughly(workers: list[Worker], seed: int) -> None:
    (one_feed if seed % 3 else one_spread_feed)(workers, seed)
