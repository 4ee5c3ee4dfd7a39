"""The graph of a context, collected from workers."""

import os
import pathlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import telegrad.autograd as autograd
import telegrad.rpc as rpc
from telegrad.errors import ContextEnded, PeerLost, UsageError
from telegrad.insight import autograd_graph
from telegrad.insight.autograd_graph import (
    LEAF,
    OPERATION,
    RECEIVE,
    ROOT,
    SEND,
    GradientGraph,
    GraphNode,
    SentTensor,
    WorkerPart,
    graph,
    joined,
    limited,
)
from telegrad.nn import RemoteModule
from telegrad.rpc import RRef
from tests.insight.picture import drawn

pytestmark = pytest.mark.usefixtures("here")  # this thread uses w0 of five workers


def double(tensor: Tensor) -> Tensor:
    return tensor * 2


def ask(to: str, tensor: Tensor) -> Tensor:
    return rpc.rpc_sync(to, double, (tensor,)) + 1


def names(found: GradientGraph, worker: str) -> Counter[str]:
    return Counter(" ".join(node[:2]) for node in found.parts[worker].nodes)


def edges(found: GradientGraph, worker: str) -> set[tuple[str, str]]:
    part = found.parts[worker]
    return {(part.nodes[start].name or RECEIVE, part.nodes[end].name) for start, end in part.edges}


@pytest.mark.nightly
def test_the_picture_of_the_documentation() -> None:
    found = drawn("w1", "w2")
    leaves = [f"leaf Sequential.{layer}.{name}" for layer in (0, 2) for name in ("weight", "bias")]
    operations = ["operation TBackward0", "operation AddmmBackward0"] * 2 + ["operation ReluBackward0"]
    assert names(found, "w1") == Counter([*leaves, *operations, "send encode"])
    assert names(found, "w2")["receive decode"] == names(found, "w2")["send decode"] == 1
    assert {"receive encode", "receive decode", "send decode", "root root", "leaf leaf"} <= set(names(found, "w0"))
    assert {(each.sender, each.receiver, each.name) for each in found.messages} == {
        ("w1", "w0", "encode"),
        ("w0", "w2", "decode"),
        ("w2", "w0", "decode"),
    }
    assert GraphNode(LEAF, "Sequential.0.weight", "16 × 8") in found.parts["w1"].nodes
    assert GraphNode(OPERATION, "AddmmBackward0", "5 × 16") in found.parts["w1"].nodes
    assert GraphNode(ROOT, "root", "scalar") in found.parts["w0"].nodes
    assert str(found).endswith(": 3 workers, 28 nodes, 3 messages")


def test_workers_that_were_called_indirectly_are_asked() -> None:
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
        kept.future().wait()
        found = graph(context_id, [kept])
    assert edges(found, "w3") == {("double", "MulBackward0"), ("MulBackward0", "root")}


def test_collecting_a_graph_does_not_change_it() -> None:
    with autograd.context() as context_id:
        value = rpc.rpc_sync("w1", double, (torch.ones(3, requires_grad=True),))
        assert str(graph(context_id, value)) == str(graph(context_id, value))
        autograd.backward(context_id, value.sum())
        assert len(autograd.get_gradients(context_id)) == 1


class HalfBuilt(nn.Module):
    def __init__(self) -> None:
        pass

    def named_parameters(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("a program's own method")


def test_names_are_found_without_calling_methods_of_modules() -> None:
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
    assert GraphNode(LEAF, "Embedding.weight", "10 × 4 float64") in found.parts["w0"].nodes


def test_the_text_names_a_worker_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(to: str, function: Callable[..., Any], args: Any, timeout: float) -> Any:
        raise PeerLost(f"worker {to!r} is lost\nand more")

    with autograd.context() as context_id:
        rpc.rpc_sync("w1", double, (torch.ones(3, requires_grad=True),))
        monkeypatch.setattr(autograd_graph, "rpc_async", fail)
        found = graph(context_id)
    assert found.silent == {"w1": "worker 'w1' is lost"}
    assert str(found).endswith("1 message; w1 did not answer: worker 'w1' is lost")
    assert names(found, "w1") == {"receive double": 1}, "as w0 knows of it"


@pytest.fixture
def small() -> GradientGraph:
    """Return a graph with a leaf, and a message that its receiver does not know."""
    return GradientGraph(
        1, {"a": WorkerPart([GraphNode(LEAF, 'w"', "3"), GraphNode(SEND, "f", "b")], [(0, 1)], {7: 1}, {})}, {}
    )


@pytest.fixture
def graphviz(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> pathlib.Path:
    """Reduce PATH to a folder with a `dot` program that wraps its input in a picture."""
    (tmp_path / "dot").write_text("#!/bin/sh\necho '<?xml?>'; echo '<svg>'; /bin/cat\n")
    (tmp_path / "dot").chmod(0o755)
    monkeypatch.setenv("PATH", os.fspath(tmp_path))
    return tmp_path


def test_text_for_graphviz(small: GradientGraph, tmp_path: pathlib.Path) -> None:
    small.save(str(tmp_path / "graph.dot"))
    assert (tmp_path / "graph.dot").read_text().splitlines() == [
        'digraph "context 1: 2 workers, 3 nodes, 1 message" {',
        '  node [shape=box, style=filled, fontname="sans-serif"];',
        "  subgraph cluster_0 {",
        '    label="a";',
        '    n0_0 [label="w\\"\\n3", fillcolor="#ddf4ff"];',
        '    n0_1 [label="send f\\nto b", fillcolor="#fff8c5"];',
        "    n0_0 -> n0_1;",
        "  }",
        "  subgraph cluster_1 {",
        '    label="b";',
        '    n1_0 [label="receive f\\nfrom a", fillcolor="#fff8c5"];',
        "  }",
        '  n0_1 -> n1_0 [label="f (a, message 7)", style=dashed];',
        "}",
    ]


def test_graphviz_draws_if_installed(small: GradientGraph, graphviz: pathlib.Path) -> None:
    picture = f"<svg>\n{small.dot()}"
    assert small._repr_svg_() == picture
    small.save(graphviz / "graph.svg")
    assert (graphviz / "graph.svg").read_text() == picture


def test_a_notebook_shows_the_text_without_graphviz(small: GradientGraph, graphviz: pathlib.Path) -> None:
    (graphviz / "dot").unlink()
    assert small._repr_svg_() is None
    with pytest.raises(UsageError, match="needs Graphviz: apt-get install graphviz"):
        small.save(graphviz / "graph.svg")
    with pytest.raises(UsageError, match=r"not as \.png"):
        small.save(graphviz / "graph.png")


def test_wrong_arguments() -> None:
    with pytest.raises(ContextEnded):
        graph(77)
    with autograd.context() as context_id:
        with pytest.raises(UsageError, match="roots must be tensors"):
            graph(context_id, 1.0)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="not int"):
            graph(context_id, RRef(3))
        with pytest.raises(UsageError, match="not int"):
            graph(context_id, rpc.remote("w1", abs, (-3,)))


# Parts of several workers


def chain(length: int) -> WorkerPart:
    """Return a part with a leaf, a chain of operations, and a send of the last one."""
    nodes = [GraphNode(LEAF, "w"), *(GraphNode(OPERATION, f"op{i}") for i in range(length)), GraphNode(SEND, "f", "b")]
    return WorkerPart(nodes, [(i, i + 1) for i in range(length + 1)], {1: length + 1}, {})


def test_a_send_is_joined_with_its_receive() -> None:
    receiver = WorkerPart([GraphNode(OPERATION, "op"), GraphNode(RECEIVE, "", "a")], [(1, 0)], {}, {("a", 1): 1})
    parts, messages = joined({"a": chain(1), "b": receiver})
    assert messages == [SentTensor("a", "b", 1, 2, 1, "f")]
    assert parts["b"].nodes == [GraphNode(OPERATION, "op"), GraphNode(RECEIVE, "f", "a")], "the sender knows its name"


def test_a_message_that_the_receiver_did_not_use_has_an_end() -> None:
    given = {"a": chain(1), "b": WorkerPart([], [], {}, {})}
    parts, messages = joined(given)
    assert messages == [SentTensor("a", "b", 1, 2, 0, "f")]
    assert parts["b"].nodes == [GraphNode(RECEIVE, "f", "a")]
    assert given["b"].nodes == [], "what was given stays as it is"
    assert list(joined({"a": chain(1)})[0]) == ["a", "b"], "also where the receiver did not answer"


def test_nodes_above_the_limit_are_left_out_and_counted() -> None:
    assert limited(chain(10)) == chain(10)
    nodes = [GraphNode(SEND, "f", "b"), *(GraphNode(LEAF, f"w{i}") for i in range(3000)), GraphNode(RECEIVE, "", "b")]
    part = WorkerPart(nodes, [(i, 0) for i in range(1, 3002)], {1: 0}, {("b", 9): 3001})
    found = limited(part, 100)
    assert (len(found.nodes), found.left_out, len(found.edges)) == (100, 2902, 99)
    assert found.nodes[found.sends[1]].kind == SEND
    assert found.nodes[found.receives["b", 9]].kind == RECEIVE
    assert "a (2,902 more nodes)" in GradientGraph(1, {"a": found}, {}).dot()


def test_texts_of_other_processes_are_escaped() -> None:
    part = WorkerPart([GraphNode(SEND, "f\x1b[2J", "w1"), GraphNode(OPERATION, "g", "\u202e(3)")], [], {1: 0}, {})
    found, messages = joined({"w0": part})
    assert [node.name for node in found["w0"].nodes] == [r"f\x1b[2J", "g"]
    assert found["w0"].nodes[1].detail == r"\u202e(3)"
    assert [each.name for each in messages] == [r"f\x1b[2J"]
