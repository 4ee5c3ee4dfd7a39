"""What the dashboard's pages are given."""

from __future__ import annotations

import json

from telegrad.insight.history import History
from telegrad.insight.snapshot import snapshot
from telegrad.insight.source import Sight
from tests.insight.group import WORKERS, Group


def test_a_group_that_trains() -> None:
    history, group = History(), Group()
    for _ in range(3):
        history.add(group.events(history.take(group.look())))
    found = json.loads(json.dumps(snapshot(history, 15)))
    assert [worker["worker"] for worker in found["workers"]] == WORKERS
    assert found["workers"][0]["rate"]["sent"] > 0
    assert found["workers"][1]["queued"] == 0
    assert {lane["worker"] for lane in found["lanes"]} == set(WORKERS)
    assert {function["name"] for function in found["functions"]} == {"Pipeline.batch", "torch.add"}
    assert found["training"]["spent"].keys() == set(WORKERS)
    assert [len(own) for own in found["memory"].values()] == [3] * len(WORKERS)
    assert (found["group"]["size"], found["whole"], len(found["gantt"]["bars"])) == (4, True, 48)


def test_lanes_are_in_the_order_of_ranks_and_then_those_who_no_longer_answer() -> None:
    history, group = History(), Group()
    history.add(group.events(history.take(group.look())))
    group.silent = {"trainer": "stuck"}
    history.take(group.look())
    assert list(dict.fromkeys(lane["worker"] for lane in snapshot(history, 15)["lanes"])) == [*WORKERS[1:], "trainer"]


def test_a_snapshot_of_nothing_and_of_a_group_that_is_silent() -> None:
    assert snapshot(History(), 5)["workers"] == []
    history = History()
    history.take(Sight([], {"a": "stuck"}))
    json.dumps(found := snapshot(history, 5))
    assert (found["silent"], found["group"], found["lanes"], found["gantt"]) == ({"a": "stuck"}, {}, [], None)


def test_calls_that_have_not_ended_are_in_the_lanes() -> None:
    history = History()
    history.take(Group().look())
    lanes = [(lane["worker"], lane["kind"], lane["spans"]) for lane in snapshot(history, 5)["lanes"]]
    out = [[0, -1, None, 1, "torch.add", "stage1", ""], [1, -1, None, 1, "torch.add", "stage2", ""]]
    come = [[0, -0.9, None, 1, "torch.add", "trainer", ""]]
    assert lanes == [("trainer", "called", out), ("stage1", "ran", come), ("stage2", "ran", come)]
