"""Models whose weights are tied, from a publisher to the model of a reader."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from telegrad._core.worker.worker import Worker
from telegrad.weights import Publisher, ShardedPublisher, ShardedSubscriber, Subscriber
from tests.cluster import agents
from tests.weights.test_weights import on

_names = (f"tied{number}" for number in itertools.count())


class Language(nn.Module):
    """The embedding of whose tokens is the weight of its last layer."""

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


@pytest.fixture(scope="module")
def pair() -> Iterator[list[Worker]]:
    with agents(2) as workers:
        yield workers


KINDS = [lambda: Language(50, 8), lambda: Language(8, 8), Albert]
IDS = ["language", "all of one shape", "albert"]


@pytest.mark.parametrize("make", KINDS, ids=IDS)
@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "parts"])
@pytest.mark.parametrize("way", ["load_into", "swap_into"])
def test_a_reader_computes_what_the_publisher_does(pair: list[Worker], make: Any, sharded: bool, way: str) -> None:
    learner, actor = pair
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


@pytest.mark.parametrize("large", [2, 100_000])
def test_one_tensor_under_two_names_again_and_again(pair: list[Worker], large: int) -> None:
    learner, actor = pair
    tensor, name = torch.full((3,), 1.0), next(_names)
    state = {"a": tensor, "c": tensor, "b": torch.full((large,), 2.0), "d": torch.full((3,), 3.0)}
    publisher = on(learner, Publisher, name, state)
    reader = on(actor, Subscriber, "w0", name)
    for _ in range(3):
        tensor.add_(1)
        found = reader.at_least(publisher.publish()).state
        assert [*found] == [*state]
        assert all(torch.equal(found[key], state[key]) for key in state)
    reader.close()
    on(learner, publisher.close)
