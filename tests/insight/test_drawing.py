"""Pictures: nothing overlaps, values flow down, and what reads SVG can read them."""

from __future__ import annotations

import itertools
import random
import re
from xml.etree import ElementTree

import pytest

from telegrad.insight import drawing, graphs
from telegrad.insight.graphs import LEAF, OPERATION, RECEIVE, ROOT, SEND, Message, Node, Part
from telegrad.insight.layout import LONGEST, Layout, placed

SVG = "{http://www.w3.org/2000/svg}"


def made(seed: int) -> tuple[dict[str, Part], list[Message]]:
    """A random graph of a few workers, whose messages lead on only."""
    shaken = random.Random(seed)
    names = [f"worker{i}" for i in range(shaken.randint(1, 4))]
    parts = {name: Part([], [], {}, {}) for name in names}
    sent: list[tuple[str, int, str]] = []
    for step in range(60):
        name = shaken.choice(names)
        part, to = parts[name], shaken.choice(names)
        before = [i for i, node in enumerate(part.nodes) if node.kind != SEND]
        came = [each for each in sent if each[2] == name]
        if came and shaken.random() < 0.5:
            sender, number, _ = came[0]
            sent.remove(came[0])
            part.receives[sender, number] = len(part.nodes)
            part.nodes.append(Node(RECEIVE, "", sender))
        elif before and to != name and shaken.random() < 0.2:
            part.sends[step] = len(part.nodes)
            part.edges.append((shaken.choice(before), len(part.nodes)))
            part.nodes.append(Node(SEND, "f", to))
            sent.append((name, step, to))
        elif before and shaken.random() < 0.8:
            chosen = shaken.sample(before, min(len(before), shaken.randint(1, 3)))
            part.edges.extend((each, len(part.nodes)) for each in chosen)
            part.nodes.append(Node(OPERATION, "AddBackward0", "3 × 4"))
        else:
            part.nodes.append(Node(LEAF, "weight" * shaken.randint(1, 4), "3 × 4"))
    return graphs.completed(parts)


def check_layout(parts: dict[str, Part], messages: list[Message], layout: Layout) -> None:
    """L1: boxes are apart. L2: edges lead down. L3: all is inside of its column, and columns are apart."""
    for worker, part in parts.items():
        boxes = [layout.boxes[worker, index] for index in range(len(part.nodes))]
        for one, other in itertools.combinations(boxes, 2):
            apart = (
                abs(one.x - other.x) - (one.width + other.width) / 2,
                abs(one.y - other.y) - (one.height + other.height) / 2,
            )
            assert max(apart) > 1, "L1"
        for start, end in part.edges:
            assert boxes[start].y + boxes[start].height / 2 < boxes[end].y - boxes[end].height / 2, "L2"
        column = layout.columns[worker]
        for box in boxes:
            assert column.x <= box.x - box.width / 2, "L3"
            assert box.x + box.width / 2 <= column.x + column.width, "L3"
            assert 0 < box.y < layout.height
    for each in messages:
        assert layout.boxes[each.sender, each.start].y < layout.boxes[each.receiver, each.end].y, "L2"
    columns = list(layout.columns.values())
    assert all(left.x + left.width < right.x for left, right in itertools.pairwise(columns)), "L3"
    assert all(column.x + column.width <= layout.width for column in columns), "L3"


@pytest.mark.parametrize("seed", range(30))
def test_random_graphs_are_drawn_in_order(seed: int) -> None:
    parts, messages = made(seed)
    check_layout(parts, messages, placed(parts, messages))
    ElementTree.fromstring(drawing.svg("title", "summary", parts, messages))


def test_edges_keep_clear_of_boxes() -> None:
    """A long edge passes beside what stands between its ends."""
    chain = [Node(OPERATION, "AddBackward0")] * 10
    part = Part(chain, [*((i, i + 1) for i in range(9)), (0, 9)], {}, {})
    layout = placed({"a": part}, [])
    path = next(path for _, path in layout.edges if len(path) > 2)
    for key, index in zip(path[1:-1], range(1, 9), strict=True):
        box, passing = layout.boxes["a", index], layout.boxes[key]
        assert passing.y == box.y
        assert abs(passing.x - box.x) >= (box.width + passing.width) / 2


def test_what_is_used_often_is_led_along_one_way() -> None:
    steps = LONGEST * 3
    part = Part(
        [Node(LEAF, "w"), *([Node(OPERATION, "MulBackward0")] * steps)],
        [*((0, i) for i in range(1, steps + 1)), *((i, i + 1) for i in range(1, steps))],
        {},
        {},
    )
    layout = placed({"a": part}, [])
    check_layout({"a": part}, [], layout)
    assert len(layout.boxes) < len(part.nodes) + LONGEST


def test_a_message_leads_down_by_one_row_into_the_other_column() -> None:
    parts, messages = graphs.completed({"a": Part([Node(LEAF, "w"), Node(SEND, "f", "b")], [(0, 1)], {1: 1}, {})})
    layout = placed(parts, messages)
    assert layout.boxes["a", 1].y < layout.boxes["b", 0].y
    assert layout.boxes["a", 1].x < layout.columns["b"].x


def test_an_svg_says_what_it_shows() -> None:
    parts = {"a<b>": Part([Node(LEAF, 'w"&', "3 × 4"), Node(ROOT, "root")], [(0, 1)], {}, {}, 12)}
    text = drawing.svg("A <title>", "a & b", parts, [])
    root = ElementTree.fromstring(text)
    assert root.get("role") == "img"
    assert [child.tag for child in root][:2] == [f"{SVG}title", f"{SVG}desc"]
    assert [child.text for child in root][:2] == ["A <title>", "a & b"]
    shown = [each.text for each in root.iter(f"{SVG}text")]
    assert shown == ["a<b> (12 more nodes)", 'w"&', "3 × 4", "root", drawing.LEGEND]


def test_every_class_has_a_style_in_light_and_dark() -> None:
    parts, messages = made(3)
    used = set(
        re.findall(r"tg-\w+", re.sub(r"<style>.*</style>", "", drawing.svg("", "", parts, messages), flags=re.S))
    )
    light, dark = drawing.STYLE.split("@media")
    painted = used - {"tg-head"}  # its colour is that of all text
    assert {name for name in painted if not re.search(rf"\.{name}\b", light)} == set()
    assert {name for name in painted if not re.search(rf"\.{name}\b", dark)} == set()


def test_text_for_graphviz() -> None:
    parts, messages = graphs.completed({"a": Part([Node(LEAF, 'w"', "3"), Node(SEND, "f", "b")], [(0, 1)], {7: 1}, {})})
    assert drawing.dot("it", parts, messages).splitlines() == [
        'digraph "it" {',
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


def test_nothing_is_a_picture_too() -> None:
    ElementTree.fromstring(drawing.svg("", "", {}, []))
    ElementTree.fromstring(drawing.svg("", "", {"a": Part([], [], {}, {})}, []))
