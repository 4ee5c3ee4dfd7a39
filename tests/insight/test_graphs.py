"""Graphs as plain data: messages are joined, chains are folded."""

from __future__ import annotations

from telegrad.insight.graphs import FOLDED, LEAF, OPERATION, RECEIVE, SEND, Message, Node, Part, completed, folded


def chain(length: int, left_out: int = 0) -> Part:
    """A leaf, operations one after the other, and a send of the last."""
    nodes = [Node(LEAF, "w"), *(Node(OPERATION, f"op{i}") for i in range(length)), Node(SEND, "f", "b")]
    return Part(nodes, [(i, i + 1) for i in range(length + 1)], {1: length + 1}, {}, left_out)


def test_a_send_is_joined_with_what_came_of_it() -> None:
    receiver = Part([Node(OPERATION, "op"), Node(RECEIVE, "", "a")], [(1, 0)], {}, {("a", 1): 1})
    parts, messages = completed({"a": chain(1), "b": receiver})
    assert messages == [Message("a", "b", 1, 2, 1, "f")]
    assert parts["b"].nodes[1] == Node(RECEIVE, "f", "a"), "the sender knows what it was"


def test_a_message_that_led_nowhere_ends_all_the_same() -> None:
    given = {"a": chain(1), "b": Part([], [], {}, {})}
    parts, messages = completed(given)
    assert messages == [Message("a", "b", 1, 2, 0, "f")]
    assert parts["b"].nodes == [Node(RECEIVE, "f", "a")]
    assert given["b"].nodes == [], "what was given stays as it is"
    assert list(completed({"a": chain(1)})[0]) == ["a", "b"], "also where the receiver did not answer"


def test_a_small_graph_stays_as_it_is() -> None:
    assert folded(chain(10)) == chain(10)


def test_chains_become_one_node() -> None:
    assert folded(chain(5000)) == Part(
        [Node(LEAF, "w"), Node(FOLDED, "5000 operations", "op0 … op4999"), Node(SEND, "f", "b")],
        [(0, 1), (1, 2)],
        {1: 2},
        {},
    )


def test_only_what_has_one_input_and_one_user_is_folded() -> None:
    #  0 -> 1 -> 2 -> 4 -> 5, 1 -> 3 -> 4
    part = Part([Node(OPERATION, str(i)) for i in range(6)], [(0, 1), (1, 2), (1, 3), (2, 4), (3, 4), (4, 5)], {}, {})
    found = folded(part, 5)
    assert [node.name for node in found.nodes] == ["2 operations", "2", "3", "2 operations"]
    assert found.edges == [(0, 1), (0, 2), (1, 3), (2, 3)]


def test_what_is_still_too_much_is_left_out_and_counted() -> None:
    nodes = [Node(SEND, "f", "b"), *(Node(LEAF, f"w{i}") for i in range(3000)), Node(RECEIVE, "", "b")]
    part = Part(nodes, [(i, 0) for i in range(1, 3002)], {1: 0}, {("b", 9): 3001})
    found = folded(part, 100)
    assert len(found.nodes) == 100
    assert found.left_out == 2902
    assert found.nodes[found.sends[1]].kind == SEND
    assert found.nodes[found.receives["b", 9]].kind == RECEIVE
    assert len(found.edges) == 99


def test_texts_of_other_processes_are_safe() -> None:
    part = Part([Node(SEND, "f\x1b[2J", "w1"), Node(OPERATION, "g", "\u202e(3)")], [], {1: 0}, {})
    found, messages = completed({"w0": part})
    assert [node.name for node in found["w0"].nodes] == [r"f\x1b[2J", "g"]
    assert found["w0"].nodes[1].detail == r"\u202e(3)"
    assert [each.name for each in messages] == [r"f\x1b[2J"]
