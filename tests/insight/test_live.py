"""The history of a running group, the dashboard's figures, and the tables of `telegrad top`."""

import json
import math
from collections.abc import Mapping
from typing import Any

import pytest

from telegrad._core.events import BACKWARD_PASS, CALLED, CONNECTED, RAN, STAGED, STEPPED, Event
from telegrad.errors import UsageError
from telegrad.insight import top
from telegrad.insight.history import (
    BOUNDS,
    KEPT,
    LATE,
    MOST,
    SECONDS,
    Flow,
    GroupHistory,
    GroupSnapshot,
    functions,
    gantt,
    lanes,
    notable,
    percentile,
    snapshot,
    spend,
    training,
)
from telegrad.insight.top import Columns, Row, Table, TopView, amount, count, detail, duration, lines, of_group, texts
from telegrad.reporting import CALLS, FAILED, KEPT_TIME, MEMORY, RUNNING, Rate
from tests.insight.accounts import DAY, START
from tests.insight.group import WORKERS, Group, account


def ran(ended: float) -> Event:
    return (RAN, ended - 0.25, ended, "a", 1, "f", "")


def called(begun: float, ended: float, function: str = "f", failure: str = "") -> Event:
    return (CALLED, begun, ended, "b", 1, function, 0, failure)


def staged(batch: int, begun: float, kind: str = "forward") -> Event:
    return (STAGED, begun, begun + 1, f"p {batch}", kind, 0, 0)


def history_of(*sights: GroupSnapshot) -> GroupHistory:
    history = GroupHistory()
    for sight in sights:
        history.add(sight)
    return history


# History


def test_events_are_converted_to_one_clock() -> None:
    history = GroupHistory()
    far = account("b", 7.0) | {"time": DAY, "host": "other"}
    assert history.add(GroupSnapshot([account("a"), far], {})) == {"a": START - SECONDS, "b": 7.0 - SECONDS}
    history.add_events({"a": [ran(START - 1)], "b": [ran(6.0)], "stranger": [ran(1.0)]})
    assert (history.epoch, history.now) == (DAY, 0)
    assert history.recent(5) == ({"a": [ran(-1.0)], "b": [ran(-1.0)]}, 5)


def test_an_event_that_is_recorded_after_later_ones_is_found_once() -> None:
    class Ring:
        events_now: tuple[Event, ...] = ()

        def look(self) -> GroupSnapshot:
            return GroupSnapshot([account("a")], {})

        def events(self, after: Mapping[str, float]) -> dict[str, list[Event]]:
            return {"a": [event for event in self.events_now if event[2] > after["a"]]}

    ring, history = Ring(), GroupHistory()
    ended = START, START - 0.01, START, START - 0.02, START + 1, START + 0.99
    recorded = [called(START - 5, each, f"f{number}") for number, each in enumerate(ended)]
    for upto in (1, 2, 3, 3, 4, 5, 6, 6):
        ring.events_now = tuple(recorded[:upto])
        history.update(ring)
        assert [event[5] for event in history.recent(60.0).events["a"][::-1]] == [f"f{n}" for n in range(upto)]


def test_each_event_is_stored_once() -> None:
    history = history_of(GroupSnapshot([account("a")], {}))
    history.add_events({"a": [ran(START - 1), ran(START)]})
    assert history.add(GroupSnapshot([account("a", START + 1)], {})) == {"a": START - LATE}
    history.add_events({"a": []})
    another = account("a", 50.0, pid=9) | {"time": DAY + 2}  # another process, with another clock
    assert history.add(GroupSnapshot([another], {})) == {"a": 50.0 - SECONDS}
    history.add_events({"a": [ran(49.0)]})
    assert [event[2] for event in history.recent(5).events["a"]] == [1.0, 0.0, -1.0]


def test_old_events_are_not_recent_and_calls_do_not_displace_steps() -> None:
    history = history_of(GroupSnapshot([account("a", START + 10)], {}))
    history.add_events({"a": [(STEPPED, START + 9, START + 9, 1, "SGD"), ran(START), ran(START + 7), ran(START + 9)]})
    assert sorted(event[2] for event in history.recent(5).events["a"]) == [-3, -1, -1]
    history.add_events({"a": [ran(START + 9.5)] * (KEPT + 10)})
    recent = history.recent(60)
    assert len(recent.events["a"]) == KEPT + 1
    assert recent.window == pytest.approx(0.5)


def test_many_workers_give_their_latest_events() -> None:
    names = [str(number) for number in range(100)]
    history = history_of(GroupSnapshot([account(name, START + 1) for name in names], {}))
    history.add_events({name: [ran(START + n / 1000) for n in range(1000)] for name in names})
    events, window = history.recent(60)
    assert sum(map(len, events.values())) == MOST
    assert events["99"][0][2] == pytest.approx(-0.001)
    assert window == pytest.approx(MOST / 100 / 1000, rel=0.01)


def test_a_wrong_time_of_day_does_not_change_the_clock() -> None:
    history = history_of(GroupSnapshot([account("a"), account("b"), account("c") | {"time": DAY + 9999}], {}))
    assert history.now == 0
    history.add_events({"c": [ran(START - 1)]})
    assert len(history.recent(5).events["c"]) == 1


def test_a_silent_group_keeps_its_time_and_last_states() -> None:
    one, two = (
        GroupSnapshot([account("a", memory=1)], {}),
        GroupSnapshot([account("a", START + 1, memory=2)], {"b": "gone"}),
    )
    history = history_of(one, two)
    assert (history.before, history.sight) == (one, two)
    assert [point[MEMORY] for point in history.series_after(0)["a"]] == [1, 2]
    history.add(GroupSnapshot([], {"a": "does not answer"}))
    assert (history.now, history.sight.silent, list(history.last)) == (1, {"a": "does not answer"}, ["a"])
    history.add(GroupSnapshot([account("c", START + 2)], {}))
    assert list(history.last) == ["c"]


def test_a_failing_source_is_asked_again() -> None:
    history, group = GroupHistory(), Group()
    history.update(group)
    group.failure = ConnectionError("gone")
    history.update(group)
    assert (history.trouble, len(history.sight.accounts)) == ("ConnectionError: gone", 4)
    group.failure = None
    history.update(group)
    assert history.trouble == ""


def test_rates_need_two_answers_of_one_process() -> None:
    before = GroupSnapshot([account("a", calls_done=10, bytes_out={"b": 100}, bytes_in={"b": 5})], {})
    after = account("a", START + 2, calls_done=30, bytes_out={"b": 300, "c": 100}, bytes_in={"b": 5})
    assert history_of(before, GroupSnapshot([after], {})).rates() == {"a": Rate(10, 150, 0)}
    assert history_of(GroupSnapshot([after], {})).rates() == {}
    assert history_of(before, GroupSnapshot([after | {"pid": 101}], {})).rates() == {}


def test_processor_use_needs_two_answers_that_tell_it() -> None:
    before, after = account("a", processor=5.0), account("a", START + 2, processor=8.0)
    assert history_of(GroupSnapshot([before], {}), GroupSnapshot([after], {})).rates()["a"].processor == 1.5
    del before["processor"]
    assert history_of(GroupSnapshot([before], {}), GroupSnapshot([after], {})).rates()["a"].processor is None


def test_calls_of_observers_are_left_out() -> None:
    history = history_of(GroupSnapshot([account("a")], {}))
    own, other = "telegrad.insight.trace", "telegrad.insights"
    history.add_events({"a": [called(START - 1, START, own), called(START - 1, START, other)]})
    assert [each.name for each in functions(history.recent(5).events)] == [other]


def test_ten_minutes_of_figures_are_kept_in_bounded_memory_and_sent_once() -> None:
    history = GroupHistory()
    shown: list[list[float]] = []
    after = 0.0
    for now in range(1500):
        own = account("a", START + now, calls_done=10 * now, bytes_out={"b": 300 * now}, bytes_in={"b": 200 * now})
        failed = [called(START + now - 0.5, START + now, failure="ValueError")] * (now == 1400)
        history.add(GroupSnapshot([own | {"processor": now / 2, "memory": now}], {}))
        history.add_events({"a": failed})
        shown += history.series_after(after).get("a", [])
        after = history.epoch + history.now
    assert [point[0] for point in shown] == list(range(1500))
    kept = history.series_after(0)["a"]
    assert len(kept) <= 60 + 10 + (KEPT_TIME - 60) / 10
    assert 890 <= kept[0][0] < 920  # the end of a part of ten seconds
    assert kept[0][CALLS:] == [10, 0, 500, kept[0][0], 0.5]
    assert [point for point in kept if point[FAILED]] == [[1409, 10, 0.1, 500, 1409, 0.5]]
    history.add(GroupSnapshot([account("b", START + 2200)], {}))
    assert list(history.series_after(0)) == ["b"]


def test_workers_that_left_long_ago_are_forgotten() -> None:
    history = GroupHistory()
    for now in range(0, 6000, 60):
        name = f"w{now}"
        history.add(GroupSnapshot([account(name, START + now)], {}))
        history.add_events({name: [ran(START + now)]})
    assert len(history.recent(60).events) <= KEPT_TIME / 60 + 1
    assert len(history.add(GroupSnapshot([], {}))) <= KEPT_TIME / 60 + 1


def test_failures_before_the_first_look_are_no_rate() -> None:
    history = history_of(GroupSnapshot([account("a")], {}), GroupSnapshot([account("a", START + 2)], {}))
    history.add_events({"a": [called(START - 9, START - 8, failure="X"), called(START, START + 1, failure="X")]})
    assert history.series_after(0)["a"][-1][FAILED] == 0.5


def test_flows_are_known_from_either_end() -> None:
    call = {"caller": "b", "number": 1, "function": "f", "age": 0.0, "state": "running", "thread": None}
    after = account("a", START + 1, bytes_out={"b": 150}, bytes_in={"b": 7}, calls_in=[call])
    history = history_of(GroupSnapshot([account("a", bytes_out={"b": 100})], {}), GroupSnapshot([after], {"b": "gone"}))
    assert history.flows() == [Flow("a", "b", 0, 150, 50), Flow("b", "a", 1, 7, 7)]


def test_lost_workers_are_shown_unless_another_has_their_name() -> None:
    gone = {"b": "it died", "c": "it left early"}
    assert history_of(GroupSnapshot([account("a", gone=gone), account("c")], {})).lost() == {"b": "it died"}


def test_functions() -> None:
    assert percentile([float(value) for value in range(1, 101)], 0.5) == 51
    own = [called(0, each / 1000) for each in range(1, 101)] + [called(0, 1000, "g", "ValueError")]
    served: list[Event] = [(RAN, 0.0, 0.002, "a", 1, "f", "ValueError"), (RAN, 0.0, 1.0, "c", 2, "h", "")]
    g, f, h = functions({"a": own, "b": served})
    assert (g.name, g.calls, g.failures, g.running) == ("g", 1, 1, None)
    assert (f.name, f.calls, f.failures, f.running, f.p50, f.p99) == ("f", 100, 0, 0.002, 0.051, 0.1)
    assert (h.name, h.calls, h.p50) == ("h", 1, 1.0)
    assert sum(f.histogram) == 100
    assert f.histogram[BOUNDS.index(0.001)] == g.histogram[-1] == 1


# The dashboard's figures


LANES: dict[str, tuple[list[Event], dict[str, Any], list[tuple[int, float, float, int]]]] = {
    "short calls become one": (
        [called(0, 5), called(1, 3), called(4, 5)] + [called(6 + n / 1000, 6.0005 + n / 1000) for n in range(10)],
        {"parts": 100},
        [(0, 0, 5, 1), (0, 6, 6.0095, 10), (1, 1, 3, 1), (1, 4, 5, 1)],
    ),
    "more at once than rows share the last": (
        [called(n, 9, failure="X" if n == 4 else "") for n in range(5)],
        {"rows": 2},
        [(0, 0, 9, 1), (1, 1, 9, 4)],
    ),
    "calls that have not ended lie below": (
        [called(n, n + 5.0 if n < 3 else math.inf) for n in range(6)],
        {"rows": 2},
        [(0, 0, 5, 1), (1, 1, 7, 2), (2, 3, 99, 1), (3, 4, 99, 2)],
    ),
    "only calls of that time": ([called(-3, -1), called(-2, 4), called(16, 19)], {}, [(0, -2, 4, 1)]),
}


@pytest.mark.parametrize("case", LANES)
def test_lanes(case: str) -> None:
    own, options, expected = LANES[case]
    (lane,) = lanes({"a": own, "b": []}, 0, 10, **options)
    assert [(s.row, s.begun, round(min(99, s.ended), 6), s.calls) for s in lane["spans"]] == expected
    assert [s.failure for s in lane["spans"] if s.failure] == [event[-1] for event in own if event[-1]]


def test_the_gantt_chart_shows_the_latest_complete_batch() -> None:
    found = gantt({"a": [staged(1, 0), staged(2, 2), staged(3, 4)], "b": [staged(1, 1), staged(2, 3)]})
    assert found is not None
    assert [bar["worker"] for bar in found.pop("bars")] == ["a", "b"]
    assert found == {"batch": "p 2", "begun": 2, "ended": 4, "idle": 0.5}
    assert gantt({"a": [called(0, 1)]}) is None


def test_figures_of_training_and_spent_time() -> None:
    own: list[Event] = [
        called(0, 4),
        staged(1, 1),
        staged(1, 2, "weights"),
        staged(1, 2, "lend"),  # not counted
        (BACKWARD_PASS, 3.0, 3.5, 7, 1, ""),
        (STEPPED, 5.0, 6.0, 7, "SGD"),
        (STEPPED, 8.0, 9.0, 8, "SGD"),
        (CONNECTED, 9.0, 9.0, "b", "tcp"),
    ]
    found = training({"a": own, "b": [(STEPPED, 5.0, 6.5, 7, "SGD")]}, 0, 10, parts=10)
    assert (found["steps"], found["passes"], found["pass_p50"]) == (2, 1, 0.5)
    assert found["series"] == [0, 0, 0, 0, 0, 0, 1, 0, 0, 1]
    spent = {"optimizer": 2, "backward": 1.5, "forward": 1, "waits": 1.5, "calls": 0}
    assert found["spent"]["a"] == pytest.approx(spent)
    spans = [(0.0, 4.0, "waits"), (1.0, 2.0, "backward"), (1.5, 3.0, "optimizer"), (3.5, 99.0, "calls")]
    assert spend(spans, 0, 10) == {"optimizer": 1.5, "backward": 0.5, "forward": 0, "waits": 2, "calls": 6}


def test_snapshot_of_a_group_that_trains() -> None:
    history, group = GroupHistory(), Group()
    for _ in range(3):
        history.update(group)
    found = json.loads(json.dumps(snapshot(history, 15)))
    assert [worker["worker"] for worker in found["workers"]] == WORKERS
    assert found["workers"][0]["rate"]["sent"] > 0
    assert found["workers"][1]["queued"] == 0
    assert {function["name"] for function in found["functions"]} == {"Pipeline.batch", "torch.add"}
    assert found["training"]["spent"].keys() == set(WORKERS)
    assert [len(own) for own in history.series_after(0).values()] == [3] * len(WORKERS)
    assert [len(own) for own in history.series_after(history.epoch + 1).values()] == [1] * len(WORKERS)
    assert history.series_after(history.epoch + history.now) == {}
    assert (found["size"], found["whole"], len(found["gantt"]["bars"])) == (4, True, 48)
    group.silent = {"trainer": "stuck"}
    history.update(group)
    shown = list(dict.fromkeys(lane["worker"] for lane in snapshot(history, 15)["lanes"]))
    assert shown == [*WORKERS[1:], "trainer"]  # by rank, then silent workers


def test_notable_lanes_are_those_of_the_longest_and_of_failed_calls() -> None:
    failed = {30: "ValueError", 31: ""}
    found = [
        {"worker": f"w{at}", "kind": "ran", "spans": [[0, 10.0 - at / 10, None, 1, "f", "a", failed.get(at, "")]]}
        for at in range(60)
    ]
    assert [int(lane["worker"][1:]) for lane in notable({"now": 10.0, "lanes": found}, "w3")] == [3, 30, *range(40, 60)]


def test_snapshots_of_unfinished_calls_and_of_a_silent_group() -> None:
    found = [(lane["worker"], lane["kind"], lane["spans"]) for lane in snapshot(history_of(Group().look()), 5)["lanes"]]
    out = [[0, -1, None, 1, "torch.add", "stage1", ""], [1, -1, None, 1, "torch.add", "stage2", ""]]
    come = [[0, -0.9, None, 1, "torch.add", "trainer", ""]]
    assert found == [("trainer", "called", out), ("stage1", "ran", come), ("stage2", "ran", come)]
    assert snapshot(GroupHistory(), 5)["workers"] == []
    json.dumps(silent := snapshot(history_of(GroupSnapshot([], {"a": "stuck"})), 5))
    assert (silent["silent"], silent["place"], silent["lanes"], silent["gantt"]) == ({"a": "stuck"}, "", [], None)


# Tables


SHOWN = [
    (count, 0, "0"), (count, 0.25, "0.2"), (count, 7, "7"), (count, 9999, "9999"), (count, 12_345, "12k"),
    (count, 999_600, "1.0M"), (count, 4e15, "4000T"),
    (amount, 0, "0"), (amount, 999, "999"), (amount, 1000, "1.0K"), (amount, 1023 * 1024, "1.0M"),
    (amount, 5 * 2**30, "5.0G"),
    (duration, 0, "0.0us"), (duration, 0.00002, "20us"), (duration, 0.0123, "12ms"), (duration, 0.9996, "1.0s"),
    (duration, 9.96, "10s"), (duration, 99.4, "99s"), (duration, 99.6, "1:39"), (duration, 7200, "2h00"),
    (duration, 86400 * 5, "5d"),
]  # fmt: skip
COLUMNS: Columns = {"name": str, "size": amount}


@pytest.mark.parametrize(("show", "number", "text"), SHOWN)
def test_texts_of_numbers_are_short(show: Any, number: float, text: str) -> None:
    assert show(number) == text
    assert len(text) <= 6


def test_rows_are_sorted_filtered_and_escaped() -> None:
    table = Table("Pairs", COLUMNS, [Row((name, size)) for name, size in [("w10", 1), ("w2", None), ("W1", 3072)]])
    assert [row[0] for row in texts(table)] == ["W1", "w2", "w10"]
    assert [row[0] for row in texts(table, "size")] == ["W1", "w10", "w2"]  # the highest first, unknown ones last
    assert texts(table, "none of it", "w1 3.0k") == [["W1", "3.0K"]]
    assert texts(Table("Pairs", COLUMNS, [Row(("x\x1b[2J\ny", None))])) == [[r"x\x1b[2J\ny", "-"]]
    marked = texts(Table("Pairs", COLUMNS, [Row(("long name", 5)), Row(("b", 2048), trouble=True)]), "size")
    assert lines(COLUMNS, marked)[0] == ["name       size", "! b        2.0K", "long name     5"]


def training_group() -> list[GroupSnapshot]:
    """Return two snapshots, a second apart, of a parameter server, a trainer and a silent worker."""
    line = {"file": "/home/me/train.py", "line": 88, "function": "step", "text": "    loss = push(grads)"}
    main = {"number": 1, "name": "MainThread", "at": line, "stack": ["x.py:1 run", "train.py:88 step"], "wait": None}
    reader = {"number": 7, "name": "reader", "at": None, "stack": [], "asleep": None}
    waits = {"what": "future", "on": ["ps"], "about": "a value"}
    out = {"to": "ps", "number": 31, "function": "Server.push", "age": 12.4, "timeout": 60.0, "thread": 1}
    come = {"caller": "z", "number": 3, "function": "", "age": 1.0, "state": RUNNING, "thread": 7}
    members = {"ps": "node0", "w2": "node1", "w10": "node2"}
    gone, refused = {"w9": "it died", "w2": "before it came again"}, "its process 204 is stopped (SIGSTOP)"
    return [
        GroupSnapshot(
            [
                account(
                    "ps", START + time, members=members, gone=gone, calls_done=60 * time,
                    bytes_out={"w2": 5000 * time},
                ),
                account(
                    "w2", START + time, rank=2, members=members, busy=1, host="node1", calls_out=[out], calls_in=[come],
                    threads=[main | {"asleep": True}, reader | {"wait": waits}], references={"owners": 3, "users": 4},
                    passes=[{"context": 4, "number": 1, "age": 0.02, "owing": ["ps"]}], bytes_out={"w10": 9},
                    processor=1.5 * time, devices={"cuda:1": 2**31},
                    kinds=[{"kind": "torch.Tensor", "number": 7, "age": 75.0, "line": "train.py:9 in load"}],
                    log=[
                        {"number": 1, "age": 60.0, "level": "WARNING", "logger": "root", "text": "slow"},
                        {"number": 2, "age": 5.0, "level": "ERROR", "logger": "telegrad", "text": "lost"},
                    ],
                ),
            ],
            {"w10": refused},
        )
        for time in (1, 2)
    ]  # fmt: skip


class Looks:
    def __init__(self) -> None:
        self.sights = training_group()

    def look(self) -> GroupSnapshot:
        return self.sights.pop(0)

    def events(self, after: Any) -> dict[str, list[Event]]:
        calls = [(CALLED, START, START + 0.004, "ps", number, "Server.push", 4096, "") for number in range(40)]
        return {"w2": [event for event in calls if event[2] > after["w2"]]}


def squeezed(text: str) -> list[str]:
    """Return the lines, with a single blank between columns."""
    return [" ".join(line.split()) for line in text.splitlines()]


def test_top_once_shows_workers_functions_and_problems() -> None:
    text = top.once(Looks(), between=0.0)
    assert text.isascii()
    assert squeezed(text) == [
        "2 workers | 1 silent | store tcp://node:29500",
        "! w10 is silent: its process 204 is stopped (SIGSTOP)",
        "! w9 is no longer in the group: it died",
        "",
        "Workers:",
        "worker phase oldest run queue slots cpu mem in/s out/s flight sent/s got/s shared owned held ctx thr gen "
        "rank host",
        "! w10 silent - - - - - - - - - - - - - - - - - - node2",
        "! w2 member 12s 1 0 1/16 150% 300M 0 4 1 0 0 0 3 4 0 2 1 2 node1",
        "! w9 gone - - - - - - - - - - - - - - - - - - -",
        "ps member - 0 0 0/16 - 300M 60 0 0 4.9K 0 0 - - 0 0 1 0 node",
        "",
        "Functions:",
        "calls/s p50 p99 ran failed function",
        "4 4.0ms 4.0ms - 0 Server.push",
    ]


def test_top_of_one_worker() -> None:
    assert squeezed(top.once(Looks(), between=0.0, view=TopView(worker="w2", stacks=True)))[4:] == [
        "w2 rank 2 on node1, pid 100: train.py",
        "member for 62s, generation 1; slots 1/16; processor 150% of a core, memory 300M, lent 0, cuda:1 2.0G; "
        "contexts 0",
        "references: owners 3, users 4",
        "",
        "Thread MainThread, innermost first:",
        "train.py:88 step",
        "x.py:1 run",
        "",
        "Thread reader, innermost first:",
        "",
        "Calls out:",
        "age limit to function line thread number",
        "12s 60s ps Server.push train.py:88 step: loss = push(grads) MainThread 31",
        "",
        "Calls in:",
        "age from state function line thread number",
        "1.0s z running - - reader 3",
        "",
        "Threads:",
        "thread does line asleep",
        "MainThread waits for Server.push at ps train.py:88 step: loss = push(grads) yes",
        "reader runs call 3 for z, waits for future of ps (a value) - -",
        "",
        "Bytes:",
        "worker sent/s got/s sent got flight host",
        "! w10 0 0 9 0 0 node2",
        "ps 0 4.9K 0 0 1 node",
        "",
        "Passes:",
        "age context number owing",
        "20ms 4 1 ps",
        "",
        "References:",
        "number oldest type made at",
        "7 75s torch.Tensor train.py:9 in load",
        "",
        "Log:",
        "number age level logger text",
        "2 5.0s ERROR telegrad lost",
        "1 60s WARNING root slow",
    ]


def test_top_of_workers_that_do_not_answer() -> None:
    history = history_of(*training_group())
    assert "! w10 does not report its state: its process 204" in TopView(worker="w10").text(history)
    history.add(GroupSnapshot([training_group()[1].accounts[0] | {"time": DAY + 5.0}], {"w2": "no answer"}))
    text = TopView(worker="w2").text(history)
    assert (
        "! w2 does not report its state: no answer\nIts last report, 3.0s before those of the others:\nw2 rank 2"
        in text
    )
    assert "Server.push" in text
    assert TopView(worker="w2").text(GroupHistory()).startswith("0 workers")
    with pytest.raises(UsageError, match="no worker 'x' was found here; the workers are: ps, w2"):
        TopView(worker="x").text(history)
    with pytest.raises(UsageError, match="no table has a column 'x'; the columns are: worker, phase"):
        TopView(sort="x").text(history)
    assert detail(history, "x") == {"about": "no worker 'x' was found here; the workers are: ps, w2", "tables": []}


def test_top_fits_into_the_terminal() -> None:
    history = history_of(GroupSnapshot([account(f"w{n}", rank=n) for n in range(100)], {"x": "a", "y": "b"}))
    history.add_events({"w1": [called(START - 1, START, f"f{number}") for number in range(100)]})
    text = TopView("rank").text(history, 30, 200).splitlines()
    assert len(text) <= 30
    assert text[6].startswith("w99 ")
    assert len([line for line in text if line.startswith("... and ")]) == 2
    assert len(TopView().text(history).splitlines()) > 200
    silent = history_of(GroupSnapshot([], {str(number): "stuck" for number in range(10)}))
    assert TopView().text(silent, 30).splitlines()[3] == "! and 8 more"


def test_512_workers_in_a_small_terminal() -> None:
    members = {f"trainer-with-a-long-name-{number}": f"node{number // 8}" for number in range(511)}
    slow = {"to": "a", "number": 1, "function": "f", "age": 30.0, "timeout": 0.0, "thread": None}
    sick: dict[str, dict[str, Any]] = {
        "trainer-with-a-long-name-300": {"calls_out": [slow]},
        "trainer-with-a-long-name-200": {"busy": 16},
        "trainer-with-a-long-name-100": {"missing": ["a"]},
    }
    states = [account(name, host=host, **sick.get(name, {})) for name, host in members.items()]
    history = history_of(GroupSnapshot(states, {"a": "stopped"}))
    history.add_events({"trainer-with-a-long-name-0": [called(START - 1, START, f"f{n}") for n in range(5)]})
    text = TopView().text(history, 23, 80).splitlines()
    assert len(text) == 23 - 1  # the last line is empty
    assert max(map(len, text)) <= 80
    assert text[3].startswith("Workers, without 11 columns: flight, sent/s")
    assert text[4] == "worker                phase   oldest  run  queue  slots  cpu   mem  in/s  out/s"
    assert [line.split()[1] for line in text[5:8]] == ["a", "trai...ng-name-100", "trai...ng-name-200"]
    assert text[8] == "! trai...ng-name-300  member     30s    0      0   0/16    -  300M     -      0"
    assert text[13] == "... and 504 more"
    assert text[14:17] == ["", "Functions:", "calls/s   p50   p99  ran  failed  function"]
    short = TopView().text(history, 12, 80).splitlines()
    assert next(line for line in short if "more" in line) == "... and 510 more, of which 2 in trouble"


def test_rates_use_a_shorter_time_for_workers_with_many_calls() -> None:
    history = history_of(GroupSnapshot([account("a"), account("b")], {}))
    often = [called(START - 10 + n / 2000, START - 10 + n / 2000 + 0.001) for n in range(20_000)]
    seldom = [called(START - 10 + n / 10, START - 10 + n / 10, "g") for n in range(100)]
    history.add_events({"a": often, "b": seldom})
    workers, found = of_group(history)
    assert [row.values[9] for row in workers.rows] == [pytest.approx(2000, rel=0.01), pytest.approx(10, rel=0.1)]
    assert [row.values[0] for row in found.rows] == [pytest.approx(2000, rel=0.01), pytest.approx(10, rel=0.1)]
