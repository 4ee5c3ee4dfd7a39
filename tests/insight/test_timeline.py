"""The file for Perfetto, made of made-up events."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import pytest

from telegrad import instruments
from telegrad.insight import clocks, timeline
from telegrad.insight.clocks import Relation, mark
from telegrad.insight.timeline import Recorded, joined
from telegrad.instruments import CALLED, CONNECTED, JOINED, LOST, MADE, PASSED, RAN, STAGED, STEPPED, TOOK_PART, Event
from tests.insight.checking import check

HERE = Relation(0.0, 0.0, how=clocks.REFERENCE)
SAME = Relation(0.0, 0.0, how=clocks.SAME)


def written(workers: dict[str, Recorded], hidden: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """The events of the file, which is checked first, as it is read again."""
    file = json.loads(json.dumps(joined(workers, hidden)))
    check(file)
    return file["traceEvents"]


def of_two(a: list[Event], b: list[Event], clock: Relation = SAME) -> list[dict[str, Any]]:
    return written({"a": Recorded(a, HERE), "b": Recorded(b, clock)})


def arrows(events: list[dict[str, Any]]) -> list[tuple[str, Any, Any]]:
    """Their names, and the names of the slices that they join."""

    def inside(end: dict[str, Any]) -> str:
        return next(
            each["name"]
            for each in events
            if each["ph"] == "X"
            and (each["pid"], each["tid"]) == (end["pid"], end["tid"])
            and each["ts"] <= end["ts"] < each["ts"] + each["dur"]
        )

    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    return [(e["name"], inside(e), inside(ends[e["id"]])) for e in events if e["ph"] == "s"]


CALL = (CALLED, 10.0, 10.5, "b", 7, "add", 64, "")
RUN = (RAN, 10.1, 10.4, "a", 7, "add", "")


def test_a_call_leads_to_its_execution_and_that_to_the_answer() -> None:
    assert arrows(of_two([CALL], [RUN])) == [("call", "add → b", "add"), ("answer", "add", "add → b")]


def test_another_number_or_caller_is_another_call() -> None:
    others = [(RAN, 10.1, 10.4, "a", 8, "add", ""), (RAN, 10.1, 10.4, "c", 7, "add", "")]
    assert arrows(of_two([CALL], others)) == []


def test_what_ran_shows_where_its_call_was_forgotten() -> None:
    (run,) = [event for event in of_two([], [RUN]) if event["ph"] == "X"]
    assert run["args"] == {"caller": "a", "number": 7, "function": "add", "failure": ""}
    assert run["dur"] == pytest.approx(0.3e6)


def test_a_call_to_oneself() -> None:
    own = [(CALLED, 1.0, 2.0, "a", 1, "f", 0, ""), (RAN, 1.2, 1.8, "a", 1, "f", "")]
    assert len(arrows(of_two(own, []))) == 2


def test_a_number_that_came_again_is_joined_with_the_nearer_one() -> None:
    later = [(kind, begun + 100, ended + 100, *rest) for kind, begun, ended, *rest in (CALL, RUN)]
    starts = [e["ts"] for e in of_two([CALL, later[0]], [RUN, later[1]]) if e["ph"] == "s" and e["name"] == "call"]
    ends = [e["ts"] for e in of_two([CALL, later[0]], [RUN, later[1]]) if e["ph"] == "f" and e["name"] == "call"]
    assert [round(end - start) for start, end in zip(starts, ends, strict=True)] == [100_000, 100_000]


def test_a_call_that_was_given_up_has_no_answer() -> None:
    given_up = (CALLED, 10.0, 10.2, "b", 7, "add", 0, "CallTimeout")
    events = of_two([given_up], [RUN])
    assert arrows(events) == [("call", "add → b (CallTimeout)", "add")]


def test_the_answer_of_a_failure_is_one() -> None:
    events = of_two([(*CALL[:-1], "ValueError")], [(*RUN[:-1], "ValueError")])
    assert [name for name, *_ in arrows(events)] == ["call", "answer"]


def test_clocks_are_told_of_and_taken_into_account() -> None:
    ahead = Relation(1000.0, 1e-5)
    moved = [(kind, begun + 1000, ended + 1000, *rest) for kind, begun, ended, *rest in [RUN]]
    file = joined({"a": Recorded([CALL], HERE), "b": Recorded(moved, ahead)})
    check(file)
    (run,) = [event for event in file["traceEvents"] if event.get("cat") == RAN]
    assert run["ts"] == pytest.approx(1e5, abs=0.01)
    assert file["otherData"]["workers"]["b"]["uncertainty_us"] == pytest.approx(10.0)
    labels = [event["args"]["labels"] for event in file["traceEvents"] if event["name"] == "process_labels"]
    assert labels == ["clock: the reference", "clock: measured by exchanges: +1,000,000,000.0 µs, ± 10.0 µs"]
    assert timeline.summary(file).splitlines() == [
        "2 workers, 2 events, 2 arrows",
        "  a       1 events; clock: the reference",
        "  b       1 events; clock: measured by exchanges: +1,000,000,000.0 µs, ± 10.0 µs",
    ]


def test_no_arrow_points_back_in_time() -> None:
    shaken = random.Random(3)
    for _ in range(300):  # clocks that are wrong by up to twice the length of the call
        assert len(of_two([CALL], [RUN], Relation(shaken.uniform(-1, 1), 0.0)))


def test_many_calls_at_once_go_into_lanes() -> None:
    shaken = random.Random(5)
    calls, runs = [], []
    for number in range(300):
        begun = shaken.uniform(0, 1)
        calls.append((CALLED, begun, begun + 0.2, "b", number, "f", 0, ""))
        runs.append((RAN, begun + 0.05, begun + 0.05 + shaken.uniform(0, 0.1), "a", number, "f", ""))
    events = of_two(sorted(calls, key=lambda e: e[2]), sorted(runs, key=lambda e: e[2]))
    kinds = Counter(event["cat"] for event in events if event["ph"] in "Xi")
    assert kinds == {CALLED: 300, RAN: 300}
    names = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert "calls made (64)" in names
    assert "calls made (65)" not in names
    moments = [event for event in events if event["ph"] == "i"]
    assert moments
    assert all(event["args"]["took_us"] == pytest.approx(2e5) for event in moments)


def test_a_call_of_no_length_is_a_slice_still() -> None:
    assert len(arrows(of_two([(CALLED, 1.0, 1.0, "b", 1, "f", 0, "")], [(RAN, 1.0, 1.0, "a", 1, "f", "")]))) == 2


def test_a_pass_leads_to_its_parts_and_its_step() -> None:
    driver = [(PASSED, 1.0, 2.0, 99, 1, ""), (TOOK_PART, 1.0, 1.1, 99, "a", 1), (STEPPED, 2.1, 2.2, 99, "SGD")]
    other = [(TOOK_PART, 1.3, 1.4, 99, "a", 1), (TOOK_PART, 1.6, 1.7, 99, "a", 1), (STEPPED, 1.8, 1.9, 99, "SGD")]
    found = arrows(of_two(driver, other))
    assert sorted(found) == [
        ("pass", "backward", "part in the pass of a"),
        ("pass", "backward", "part in the pass of a"),
        ("step", "backward", "SGD"),
        ("step", "backward", "SGD"),
    ]


def test_stages_lead_on_and_forward_leads_to_its_gradient() -> None:
    first = [(STAGED, 1.0, 1.1, 5, "forward", 0, 2), (STAGED, 1.6, 1.8, 5, "backward", 0, 2)]
    second = [(STAGED, 1.2, 1.3, 5, "forward", 1, 2), (STAGED, 1.3, 1.5, 5, "backward", 1, 2)]
    assert sorted(arrows(of_two(first, second))) == [
        ("activation", "forward 0, micro-batch 2", "forward 1, micro-batch 2"),
        ("gradient", "backward 1, micro-batch 2", "backward 0, micro-batch 2"),
        ("its gradient", "forward 0, micro-batch 2", "backward 0, micro-batch 2"),
        ("its gradient", "forward 1, micro-batch 2", "backward 1, micro-batch 2"),
    ]


def test_moments_and_kinds_that_are_not_known() -> None:
    own = [
        (JOINED, 1.0, 1.0, "a", 0, 2),
        (CONNECTED, 1.0, 1.1, "b", "unix"),
        (LOST, 2.0, 2.0, "b", "it died"),
        (MADE, 1.5, 1.5, "b", 3),
        ("of tomorrow", 1.0, 1.2, "what?"),
    ]
    shown = {event["name"]: event["ph"] for event in of_two(own, []) if event["ph"] in "Xi"}
    assert shown == {"joined as a": "i", "connected to b": "X", "lost b": "i", "made": "i", "of tomorrow": "X"}


def test_every_kind_of_event_has_a_track() -> None:
    kinds = {value for name, value in vars(instruments).items() if name.isupper() and isinstance(value, str)}
    assert kinds == set(timeline.KINDS)


def test_own_calls_can_be_hidden() -> None:
    assert not [e for e in written({"a": Recorded([CALL], HERE)}, ("add",)) if e["ph"] == "X"]


def test_nothing_at_all() -> None:
    assert written({}) == []
    assert not [event for event in written({"a": Recorded([], HERE)}) if event["ph"] != "M"]


def test_clocks_from_recorded_calls() -> None:
    moved = [(kind, begun - 50, ended - 50, *rest) for kind, begun, ended, *rest in [RUN]]
    found = timeline.clocks_of({"a": [CALL], "b": moved, "c": []}, "a")
    assert found["b"].offset == pytest.approx(-50.0)
    assert found["b"].uncertainty == pytest.approx(0.1)
    assert [found[name].how for name in "abc"] == [clocks.REFERENCE, clocks.CALLS, clocks.UNKNOWN]


def test_workers_of_one_host_share_a_clock() -> None:
    moved = [(kind, begun - 50, ended - 50, *rest) for kind, begun, ended, *rest in [RUN]]
    found = timeline.clocks_of({"a": [CALL], "b": moved}, "a", {"a": "x", "d": "x", "b": "y", "e": "y", "f": "z"})
    assert found["d"] == SAME
    assert found["e"].offset == found["b"].offset == pytest.approx(-50.0)
    assert {name: each.how for name, each in found.items()} == {
        "a": clocks.REFERENCE,
        "d": clocks.SAME,
        "b": clocks.CALLS,
        "e": clocks.CALLS,
        "f": clocks.UNKNOWN,
    }


def profile(marks: bool) -> dict[str, Any]:
    """As torch writes one: its clock is at 500 s where the worker's perf_counter is at 10."""
    on: dict[str, Any] = {"pid": 4242, "tid": 4243}
    operator = {"Ev Idx": 1, "Concrete Inputs": ["3"]}
    span = {"pid": "Spans", "tid": "PyTorch Profiler"}
    regions = [(mark(9.0 + i * 1e-5), 499.0e6 + i * 10 + 3) for i in range(20)] if marks else []
    return {
        "baseTimeNanoseconds": 1_000_000 * 10**9,
        "traceEvents": [
            {"ph": "M", "name": "process_name", "ts": 0.0, "pid": 4242, "tid": 0, "args": {"name": "python"}},
            {"ph": "M", "name": "thread_name", "ts": 0.0, **on, "args": {"name": "thread 4243 (python)"}},
            *({"ph": "X", "cat": "user_annotation", "name": name, **on, "ts": ts, "dur": 4.0} for name, ts in regions),
            {"ph": "X", "cat": "cpu_op", "name": "aten::mm", **on, "ts": 500.1e6, "dur": 1e5, "args": operator},
            {"ph": "s", "cat": "ac2g", "name": "ac2g", **on, "id": 1, "ts": 500.15e6},
            {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": 500.2e6, "dur": 5e4, "args": {}},
            {"ph": "f", "cat": "ac2g", "name": "ac2g", "pid": 0, "tid": 7, "id": 1, "ts": 500.2e6, "bp": "e"},
            {"ph": "X", "cat": "Trace", "name": "PyTorch Profiler (0)", **span, "ts": 499e6, "dur": 2e6},
        ],
    }  # fmt: skip


def test_a_profile_without_marks_is_left_out() -> None:
    """Its clock is not known: its events would be years away from the others."""
    file = joined({"a": Recorded([CALL], HERE, profile(marks=False)), "b": Recorded([RUN], SAME, profile(marks=True))})
    assert [e["pid"] for e in file["traceEvents"] if e["name"] == "aten::mm"] == [2]
    assert max(event["ts"] for event in file["traceEvents"] if "ts" in event) < 1e7
    first, second = timeline.summary(file).splitlines()[1:]
    assert "none of torch's profiler, which has dropped the marks" in first
    assert "7 of torch's profiler;" in second


def test_what_torchs_profiler_saw_is_put_on_the_common_clock() -> None:
    events = written(
        {"a": Recorded([CALL], HERE, profile(marks=True)), "b": Recorded([RUN], SAME, profile(marks=True))}
    )
    for pid in (1, 2):
        own = {event["name"]: event for event in events if event["pid"] == pid and event["ph"] == "X"}
        assert own["aten::mm"]["ts"] - own["PyTorch Profiler (0)"]["ts"] == pytest.approx(1.1e6, abs=20)
        assert own["aten::mm"]["dur"] == pytest.approx(1e5, abs=0.01)
        assert own["aten::mm"]["args"] == {"Ev Idx": 1}, "no values"
        threads = {e["tid"]: e["args"]["name"] for e in events if e["pid"] == pid and e["name"] == "thread_name"}
        assert threads[own["aten::mm"]["tid"]] == "torch: thread 4243 (python)"
        assert threads[own["gemm"]["tid"]] == "torch: 0 7"
    calls = {event["cat"]: event["ts"] for event in events if event["ph"] == "X"}
    assert calls["cpu_op"] - calls[CALLED] == pytest.approx(1e5, abs=20)
    assert not [event for event in events if event["name"].startswith(clocks.MARK)]
    numbers = [event["id"] for event in events if event["ph"] == "s"]
    assert len(set(numbers)) == 4, "two of calls, and one of each profile"
