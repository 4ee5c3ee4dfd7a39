"""Tests of the conversion of values and references by the callee's annotations, with the number of messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Optional, TypeVar, Union

import pytest
import torch

import telegrad.rpc as rpc
from telegrad._core.references import Batch
from telegrad._core.worker.current import Worker
from tests.cluster import agents_here, wait_until
from tests.links import count_sent

T = TypeVar("T")


def plain(x: torch.Tensor) -> str:
    return type(x).__name__


def wanted(x: rpc.RRef[torch.Tensor]) -> str:
    return type(x).__name__


def bare(x: rpc.RRef) -> str:  # type: ignore[type-arg]
    return type(x).__name__


def free(x):  # type: ignore[no-untyped-def]
    return type(x).__name__


def anything(x: Any, y: object, z: T) -> list[str]:
    return [type(each).__name__ for each in (x, y, z)]


def either(x: Union[torch.Tensor, rpc.RRef[torch.Tensor]]) -> str:  # noqa: UP007
    return type(x).__name__


def perhaps(x: Optional[rpc.RRef[torch.Tensor]] = None, y: torch.Tensor | None = None) -> list[str]:  # noqa: UP045
    return [type(x).__name__, type(y).__name__]


def many(first: torch.Tensor, *rest: rpc.RRef[int], named: int = 0, **others: rpc.RRef[int]) -> list[str]:
    return [type(each).__name__ for each in (first, *rest, named, *others.values())]


def unknown(x: Missing) -> str:  # type: ignore[name-defined]  # noqa: F821
    return type(x).__name__


@rpc.functions.async_execution
def elsewhere(x: torch.Tensor) -> torch.futures.Future[str]:
    return rpc.rpc_async("w2", plain, (x,))


class Model:
    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def kind(self, x: torch.Tensor) -> str:
        return f"{type(self).__name__} {type(x).__name__}"


@pytest.fixture(scope="module")
def trio() -> Iterator[list[Worker]]:
    """Start three agents in this process; the first is current in this thread."""
    with agents_here(3) as made:
        yield made


@pytest.fixture
def sent(trio: list[Worker], monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the frames and messages that are sent, by their kinds."""
    for worker in trio:
        worker.references.flush()
    return count_sent(monkeypatch, lambda sent: [kind for kind, *_ in sent.messages] if isinstance(sent, Batch) else [])


def settled(trio: list[Worker], sent: Counter[str]) -> dict[str, int]:
    """Wait until no message is pending; return the counts, and reset them."""
    wait_until(lambda: not any(worker.references.counts()["pending_messages"] for worker in trio))
    counts = dict(sent)
    sent.clear()
    return counts


def on(owner: str) -> rpc.RRef[torch.Tensor]:
    """Return a reference to a tensor on that worker, which knows of it."""
    if owner == "w0":
        return rpc.RRef(torch.ones(2))
    ref = rpc.remote(owner, torch.ones, (2,))
    ref.future().wait()
    return ref


def test_a_value_for_a_value_takes_one_call(trio: list[Worker], sent: Counter[str]) -> None:
    assert (rpc.rpc_sync("w1", plain, (torch.ones(2),)), settled(trio, sent)) == ("Tensor", {"call": 1, "result": 1})


@pytest.mark.parametrize("function", [bare, wanted])
def test_a_value_becomes_a_reference(trio: list[Worker], sent: Counter[str], function: Callable[..., str]) -> None:
    assert rpc.rpc_sync("w1", function, [torch.ones(2)]) == "RRef"
    assert settled(trio, sent) == {"call": 1, "result": 1, "dropped": 1}


@pytest.mark.parametrize(("owner", "calls"), [("w0", 1), ("w1", 1), ("w2", 2)])
def test_a_reference_becomes_its_value(trio: list[Worker], sent: Counter[str], owner: str, calls: int) -> None:
    ref = on(owner)
    settled(trio, sent)
    assert (rpc.rpc_sync("w1", plain, (ref,)), settled(trio, sent)) == ("Tensor", {"call": calls, "result": calls})


@pytest.mark.parametrize(
    ("owner", "messages"),
    [
        ("w0", {"dropped": 1}),
        ("w1", {"settled": 1}),
        ("w2", {"confirm": 1, "confirmed": 1, "settled": 1, "dropped": 1}),
    ],
)
def test_a_reference_is_passed_on(trio: list[Worker], sent: Counter[str], owner: str, messages: dict[str, int]) -> None:
    ref = on(owner)
    settled(trio, sent)
    assert (rpc.rpc_sync("w1", wanted, (ref,)), settled(trio, sent)) == ("RRef", {"call": 1, "result": 1, **messages})


def test_without_a_clear_annotation_nothing_is_converted(trio: list[Worker]) -> None:
    ref, tensor = on("w1"), torch.ones(2)
    assert rpc.rpc_sync("w1", free, (ref,)) == "RRef"
    assert rpc.rpc_sync("w1", free, (tensor,)) == "Tensor"
    assert rpc.rpc_sync("w1", anything, (ref, ref, ref)) == ["RRef"] * 3
    assert rpc.rpc_sync("w1", either, (ref,)) == "RRef"
    assert rpc.rpc_sync("w1", either, (tensor,)) == "Tensor"
    assert rpc.rpc_sync("w1", unknown, (ref,)) == "RRef"


def test_optional_parameters(trio: list[Worker]) -> None:
    ref = on("w2")
    assert rpc.rpc_sync("w1", perhaps) == ["NoneType", "NoneType"]
    assert rpc.rpc_sync("w1", perhaps, [None, ref]) == ["NoneType", "Tensor"]
    assert rpc.rpc_sync("w1", perhaps, (ref,), {"y": ref}) == ["RRef", "Tensor"]


def test_all_kinds_of_parameters(trio: list[Worker]) -> None:
    ref = on("w2")
    kinds = rpc.rpc_sync("w1", many, (ref, 1, ref), {"named": rpc.RRef(3), "other": 4})
    assert kinds == ["Tensor", "RRef", "RRef", "int", "RRef"]


@pytest.mark.parametrize("owner", ["w0", "w1", "w2"])
def test_all_ways_to_call(trio: list[Worker], owner: str) -> None:
    ref = on(owner)
    assert rpc.rpc_async("w1", plain, (ref,)).wait() == "Tensor"
    assert rpc.remote("w1", plain, (ref,)).to_here() == "Tensor"
    assert rpc.rpc_sync("w1", plain, kwargs={"x": ref}) == "Tensor"
    assert rpc.rpc_sync("w1", elsewhere, (ref,)) == "Tensor"  # type: ignore[comparison-overlap]
    assert rpc.remote("w1", Model, (ref,)).to_here().weight.tolist() == [1, 1]
    assert rpc.rpc_sync("w1", Model(torch.zeros(1)).kind, (ref,)) == "Model Tensor"
    assert rpc.rpc_sync("w0", plain, (ref,)) == "Tensor"


def test_a_reference_may_be_dropped_while_its_call_runs(trio: list[Worker]) -> None:
    futures = [rpc.rpc_async("w1", plain, (rpc.remote("w2", torch.ones, (2,)),)) for _ in range(20)]
    assert [future.wait() for future in futures] == ["Tensor"] * 20


def test_a_call_raises_the_error_of_a_value_that_failed(trio: list[Worker]) -> None:
    failed: Any = rpc.remote("w2", torch.ones, ["x"])
    with pytest.raises(TypeError):
        rpc.rpc_sync("w1", plain, (failed,))
