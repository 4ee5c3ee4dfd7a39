"""Values through both halves, as calls take them: encode and pack, unpack and decode."""

from __future__ import annotations

import collections
import dataclasses
import enum
import sys
import types
import typing
import weakref
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from telegrad import errors
from telegrad._core.pickling import function_names
from telegrad._core.pickling.pickling import decode, encode
from telegrad._core.wire.packing import pack
from telegrad._core.wire.unpacking import unpack
from tests.naming import alike


def journey(value: Any, same_program: bool = True) -> Any:
    body, tensors, *_ = encode(value, same_program)
    meta, blobs = pack(tensors)
    return decode(body, unpack(meta, [blob.clone() for blob in blobs]))


class Color(enum.Enum):
    RED = 1


class Pair(typing.NamedTuple):
    first: int
    second: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Record:
    first: int
    second: torch.Tensor


MAIN = """
import enum
import torch
weight = torch.ones(5000)
class Color(enum.Enum):
    RED = 1
class Base:
    def value(self): return 1
class Heir(Base):
    def value(self): return super().value() + weight.sum().item()
def factorial(n): return 1 if n < 2 else n * factorial(n - 1)
def even(n): return n == 0 or odd(n - 1)
def odd(n): return n != 0 and even(n - 1)
"""


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A main program of its own."""
    module = types.ModuleType("__main__")
    exec(MAIN, module.__dict__)
    monkeypatch.setitem(sys.modules, "__main__", module)
    function_names.program.cache_clear()
    yield module
    function_names.program.cache_clear()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_modules_in_any_mode(mode: type[Any]) -> None:
    module: Any = nn.Sequential(nn.Conv2d(3, 40, 5), nn.BatchNorm2d(40), nn.Flatten())
    with mode():
        back = journey(module)
    assert [type(p) for p in back.parameters()] == [nn.Parameter] * 4
    assert all(p.requires_grad and p.is_leaf and not p.is_inference() for p in back.parameters())
    assert torch.equal(back[0].weight, module[0].weight)
    back(torch.ones(2, 3, 8, 8)).sum().backward()
    assert back[0].weight.grad is not None


def test_lazy_parameters() -> None:
    back = journey(nn.LazyLinear(4))
    assert back(torch.ones(3)).shape == (4,)
    assert type(back.weight) is nn.Parameter


def test_tied_weights_stay_tied() -> None:
    module: Any = nn.ModuleDict({"embed": nn.Embedding(100, 20), "head": nn.Linear(20, 100)})
    module.head.weight = module.embed.weight
    module.view = module.embed.weight.data[50:]
    back = journey(module)
    assert back.head.weight is back.embed.weight
    back.view.zero_()
    assert not back.head.weight[50:].any()
    assert back.head.weight[:50].any()


def test_an_optimizer_comes_with_its_parameters() -> None:
    module = nn.Linear(200, 30)
    optimizer = torch.optim.Adam(module.parameters())
    module(torch.ones(200)).sum().backward()
    optimizer.step()
    there, optimizer_there = journey([module, optimizer])
    assert optimizer_there.param_groups[0]["params"][0] is there.weight
    assert torch.equal(optimizer_there.state[there.weight]["exp_avg"], optimizer.state[module.weight]["exp_avg"])


@pytest.mark.parametrize("same_program", [True, False])
@pytest.mark.parametrize("value", [Pair(1, torch.ones(3)), Record(1, torch.ones(5000))], ids=["tuple", "dataclass"])
def test_records(value: Pair | Record, same_program: bool) -> None:
    back = journey(value, same_program)
    assert type(back) is type(value)
    assert back.first == 1
    assert torch.equal(back.second, value.second)


def test_what_is_one_stays_one() -> None:
    assert journey([Color.RED, None, torch.float32, Ellipsis]) == [Color.RED, None, torch.float32, Ellipsis]
    key = torch.ones(1)
    table, same = journey([{key: "found"}, key])
    assert table[same] == "found"
    ordered = journey(collections.OrderedDict(b=1, a=2))
    assert isinstance(ordered, collections.OrderedDict)
    assert list(ordered) == ["b", "a"]


def test_a_tensor_that_holds_itself() -> None:
    tensor: Any = torch.ones(2)
    tensor.held = [tensor]
    back = journey(tensor)
    assert back.held[0] is back


@pytest.mark.parametrize("size", [10, 100_000])
def test_an_array_and_a_tensor_of_one_memory_stay_together(size: int) -> None:
    array = numpy.zeros(size)
    there, tensor, part = journey([array, torch.from_numpy(array), torch.from_numpy(array[1:3])])
    tensor[2] = 7
    assert part.tolist() == [0, 7]
    if size > 10:  # a small array is part of the pickle
        assert there[2] == 7


def test_named_results_and_packed_sequences() -> None:
    back = journey(torch.arange(6.0).view(2, 3).max(dim=1))
    assert back.indices.tolist() == [2, 2]
    sequence = nn.utils.rnn.pack_padded_sequence(torch.ones(2, 2, 1), [2, 1])
    assert torch.equal(journey(sequence).data, sequence.data)


@pytest.mark.parametrize("same_program", [True, False])
def test_the_main_program_by_name_and_by_value(main: ModuleType, same_program: bool) -> None:
    heir = main.Heir()
    sent = encode([main.factorial, main.even, heir, main.Color.RED], same_program)
    assert bool(sent.tensors) != same_program  # what a class uses comes along with it
    factorial, even, heir, red = journey([main.factorial, main.even, heir, main.Color.RED], same_program)
    assert factorial is main.factorial  # however it travels, it comes to the same program
    assert (factorial(5), even(4), heir.value(), red.name) == (120, True, 5001, "RED")


class Open:
    def __init__(self) -> None:
        self.rows = (row for row in range(3))


class Unsayable(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


class Refusing:
    def __reduce__(self) -> Any:
        raise Unsayable


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ((1, {"rows": (x for x in "")}), r"\[1\]\['rows'\] \(builtins.generator\) cannot be sent"),
        (((torch.ones(1), Open()), {}), r"argument 1\.rows \(builtins.generator\) cannot be sent"),
        (((Refusing(),), {}), r"argument 0 \(.*Refusing\) cannot be sent: \(its text could not be formatted\)"),
        ([weakref.ref(Open)], r"\[0\] \(weakref.ReferenceType\) cannot be sent"),
        (((), {"file": sys.stdout.buffer}), r"argument 'file' \(_io\..*\) cannot be sent"),
    ],
    ids=alike,
)
def test_what_cannot_be_sent_is_named(value: Any, text: str) -> None:
    with pytest.raises(errors.CannotEncode, match=text):
        journey(value)


def test_what_is_nested_without_end_is_refused() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(errors.CannotEncode, match="recursion"):
        journey(deep)


def test_a_tensor_without_memory_is_refused_wherever_it_is() -> None:
    freed = torch.ones(5)
    freed.untyped_storage().resize_(0)
    with pytest.raises(errors.CannotEncode, match="freed"):
        journey({"deep": [freed]})
