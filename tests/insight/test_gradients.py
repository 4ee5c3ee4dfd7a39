"""The graph of a context, as workers find it."""

from __future__ import annotations

import pathlib
from collections import Counter
from collections.abc import Callable
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor, nn

import telegrad.autograd as autograd
import telegrad.rpc as rpc
from telegrad.errors import ContextEnded, PeerLost, UsageError
from telegrad.insight import gradients
from telegrad.insight.gradients import GradientGraph, graph
from telegrad.insight.graphs import FOLDED, LEAF, OPERATION, RECEIVE, ROOT, SEND, Node
from telegrad.nn import RemoteModule
from telegrad.rpc import RRef
from tests.insight.picture import drawn

pytestmark = pytest.mark.usefixtures("here")  # this thread is w0 of five


def double(tensor: Tensor) -> Tensor:
    return tensor * 2


def ask(to: str, tensor: Tensor) -> Tensor:
    return rpc.rpc_sync(to, double, (tensor,)) + 1


def many(tensor: Tensor) -> Tensor:
    for _ in range(3000):
        tensor = tensor + 1
    return tensor


def names(found: GradientGraph, worker: str) -> Counter[str]:
    return Counter(" ".join(node[:2]) for node in found.parts[worker].nodes)


def edges(found: GradientGraph, worker: str) -> set[tuple[str, str]]:
    part = found.parts[worker]
    return {(part.nodes[start].name or RECEIVE, part.nodes[end].name) for start, end in part.edges}


def test_the_picture_of_the_documentation() -> None:
    found = drawn("w1", "w2")
    assert names(found, "w1") == {
        "leaf Sequential.0.weight": 1,
        "leaf Sequential.0.bias": 1,
        "leaf Sequential.2.weight": 1,
        "leaf Sequential.2.bias": 1,
        "operation TBackward0": 2,
        "operation AddmmBackward0": 2,
        "operation ReluBackward0": 1,
        "send encode": 1,
    }
    assert names(found, "w2")["receive decode"] == names(found, "w2")["send decode"] == 1
    assert {"receive encode", "receive decode", "send decode", "root root", "leaf leaf"} <= set(names(found, "w0"))
    assert {(each.sender, each.receiver, each.name) for each in found.messages} == {
        ("w1", "w0", "encode"),
        ("w0", "w2", "decode"),
        ("w2", "w0", "decode"),
    }
    assert Node(LEAF, "Sequential.0.weight", "16 × 8") in found.parts["w1"].nodes
    assert Node(OPERATION, "AddmmBackward0", "5 × 16") in found.parts["w1"].nodes
    assert Node(ROOT, "root", "scalar") in found.parts["w0"].nodes
    assert str(found).endswith(": 3 workers, 28 nodes, 3 messages")
    text = found._repr_svg_()
    ElementTree.fromstring(text)
    assert all(name in text for name in ("Sequential.2.bias", "send encode", "receive decode"))


def test_workers_that_others_have_called_are_asked_too() -> None:
    with autograd.context() as context_id:
        rpc.rpc_sync("w1", ask, ("w2", torch.ones(3, requires_grad=True)))
        found = graph(context_id)
    assert set(found.parts) == {"w0", "w1", "w2"}
    assert edges(found, "w2") == {("double", "MulBackward0"), ("MulBackward0", "double")}
    assert edges(found, "w1") == {("ask", "double"), ("double", "AddBackward0"), ("AddBackward0", "ask")}
    assert names(found, "w0") == {"leaf leaf": 1, "send ask": 1, "receive ask": 1}, "the last is not kept by anybody"
    assert len(found.messages) == 4


def test_roots_of_other_workers() -> None:
    with autograd.context() as context_id:
        kept = rpc.remote("w3", double, (torch.ones(3, requires_grad=True),))
        found = graph(context_id, [kept])
    assert edges(found, "w3") == {("double", "MulBackward0"), ("MulBackward0", "root")}


def test_to_look_is_no_part_of_it() -> None:
    with autograd.context() as context_id:
        value = rpc.rpc_sync("w1", double, (torch.ones(3, requires_grad=True),))
        assert str(graph(context_id, value)) == str(graph(context_id, value))
        autograd.backward(context_id, value.sum())
        assert len(autograd.get_gradients(context_id)) == 1


def test_a_long_graph_is_folded() -> None:
    with autograd.context() as context_id:
        value = rpc.rpc_sync("w1", many, (torch.ones(3, requires_grad=True),))
        found = graph(context_id, value)
    assert [node[:2] for node in found.parts["w1"].nodes] == [
        (SEND, "many"),
        (FOLDED, "3000 operations"),
        (RECEIVE, "many"),
    ]


class HalfBuilt(nn.Module):
    def __init__(self) -> None:
        pass

    def named_parameters(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("a program's own method")


def test_names_are_found_without_asking_modules() -> None:
    others = [HalfBuilt(), RemoteModule("w1/cpu", nn.Linear, (3, 3))]
    circle = nn.Sequential(nn.Linear(3, 2))
    circle.add_module("again", circle)
    with autograd.context() as context_id:
        found = graph(context_id, circle[0](torch.ones(3)).sum())
    named = {node.name for node in found.parts["w0"].nodes if node.kind == LEAF}
    assert named in ({"Linear.weight", "Linear.bias"}, {"Sequential.0.weight", "Sequential.0.bias"})
    del others


def test_shapes_and_types() -> None:
    layer = nn.Embedding(10, 4, dtype=torch.float64)
    with autograd.context() as context_id:
        found = graph(context_id, layer(torch.tensor([1])).sum())
    assert Node(LEAF, "Embedding.weight", "10 × 4 float64") in found.parts["w0"].nodes


def test_what_is_said_where_a_worker_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(to: str, function: Callable[..., Any], args: Any, timeout: float) -> Any:
        raise PeerLost(f"worker {to!r} is lost\nand more")

    with autograd.context() as context_id:
        rpc.rpc_sync("w1", double, (torch.ones(3, requires_grad=True),))
        monkeypatch.setattr(gradients, "rpc_async", fail)
        found = graph(context_id)
    assert found.silent == {"w1": "worker 'w1' is lost"}
    assert str(found).endswith("1 message; w1 did not answer: worker 'w1' is lost")
    assert names(found, "w1") == {"receive double": 1}, "as w0 knows of it"


def test_a_graph_is_saved_as_its_suffix_says(tmp_path: pathlib.Path) -> None:
    with autograd.context() as context_id:
        found = graph(context_id, torch.ones(3, requires_grad=True).sum())
    found.save(tmp_path / "graph.svg")
    assert (tmp_path / "graph.svg").read_text().startswith("<svg")
    found.save(str(tmp_path / "graph.dot"))
    assert (tmp_path / "graph.dot").read_text().startswith("digraph")
    with pytest.raises(UsageError, match=r"not as \.png"):
        found.save(tmp_path / "graph.png")


def test_what_cannot_be_drawn() -> None:
    with pytest.raises(ContextEnded):
        graph(77)
    with autograd.context() as context_id:
        with pytest.raises(UsageError, match="roots are tensors"):
            graph(context_id, 1.0)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="not int"):
            graph(context_id, RRef(3))
        with pytest.raises(UsageError, match="not int"):
            graph(context_id, rpc.remote("w1", abs, (-3,)))
