"""Clocks, and the trace file for Perfetto, from made-up events."""

import json
import random
from collections import Counter
from typing import Any

import pytest

from telegrad._core import events as instruments
from telegrad._core.events import (
    BACKWARD_PASS,
    BACKWARD_TASKS,
    CALLED,
    CONNECTED,
    JOINED,
    LOST,
    MADE,
    NOTED,
    RAN,
    STAGED,
    STEPPED,
    Event,
)
from telegrad.insight import chrome_trace
from telegrad.insight.chrome_trace import (
    CALLS,
    REFERENCE,
    SAME,
    UNKNOWN,
    ClockOffset,
    Exchange,
    WorkerTrace,
    clocks_of,
    estimate,
    mark,
    merge,
    offset_of_profile,
    offsets_from,
)
from tests.insight.checking import check

HERE = ClockOffset(0.0, 0.0, how=REFERENCE)
BESIDE = ClockOffset(0.0, 0.0, how=SAME)


# Clocks


def exchange(ahead: float, sent: float, there: float, back: float, serving: float = 0, drift: float = 0.0) -> Exchange:
    """Return an exchange with a clock that is `ahead` at zero; the two ways take `there` and `back`."""
    came = sent + there
    left = came + serving
    return Exchange(sent, came + ahead + drift * came, left + ahead + drift * left, left + back)


def test_offset_lies_within_its_uncertainty() -> None:
    shaken = random.Random(7)
    for _ in range(200):
        ahead = shaken.uniform(-1e6, 1e6)
        ways = [[shaken.expovariate(1e4) for _ in range(3)] for _ in range(20)]
        found = estimate([exchange(ahead, i * 1e-4, *each) for i, each in enumerate(ways)])
        assert abs(found.offset - ahead) <= found.uncertainty + 1e-9
        asked_there = {("b", "a"): [exchange(-ahead, ahead + i * 1e-4, *each) for i, each in enumerate(ways)]}
        turned = offsets_from("a", asked_there)["b"]
        assert abs(turned.offset - ahead) <= turned.uncertainty + 1e-9


@pytest.mark.parametrize(
    ("exchanges", "offset", "uncertainty", "drift"),
    [
        # the shortest round trip counts
        ([exchange(5, 0, 0.5, 0.1), exchange(5, 1e-3, 1e-5, 1e-5), exchange(5, 2e-3, 0.1, 0.9)], 5, 1e-5, 0),
        # the time of serving adds no uncertainty
        ([exchange(-3, 0, 1e-5, 1e-5, serving=2)], -3, 1e-5, 0),
        # two exchanges far apart give the drift
        ([exchange(5, at, 1e-5, 1e-5, drift=5e-5) for at in (10, 10.1, 20, 20.1)], 5.0005, 1e-5, 5e-5),
        # the drift is unknown for exchanges close together
        ([exchange(5, 0, 2e-5, 0), exchange(5, 2, 0, 2e-5)], 5, 1e-5, 0),
        ([exchange(5, at, 1e-5, 1e-5, drift=1e-2) for at in (0, 0.1)], 5.001, 1e-5, 0),
    ],
)
def test_estimates(exchanges: list[Exchange], offset: float, uncertainty: float, drift: float) -> None:
    found = estimate(exchanges)
    assert found.offset == pytest.approx(offset, abs=2e-5)
    assert found.uncertainty == pytest.approx(uncertainty, rel=0.01)
    assert found.drift == pytest.approx(drift, rel=0.05)


def test_times_of_a_drifting_clock_are_converted() -> None:
    found = estimate([exchange(5.0, at, 1e-5, 1e-5, drift=5e-5) for at in (10.0, 10.1, 20.0, 20.1)])
    for at in (10.0, 15.0, 30.0):
        assert found.to_reference(at + 5.0 + 5e-5 * at) == pytest.approx(at, abs=2e-5)


def test_clocks_are_compared_through_other_clocks() -> None:
    ways = {("a", "b"): 1.0, ("c", "b"): 10.0, ("c", "d"): 100.0}
    compared = {pair: [exchange(ahead, 50.0, 1e-5, 1e-5)] for pair, ahead in ways.items()}
    found = offsets_from("a", compared)
    assert {name: round(each.offset, 9) for name, each in found.items()} == {"a": 0.0, "b": 1.0, "c": -9.0, "d": 91.0}
    assert found["d"].uncertainty == pytest.approx(3e-5)
    assert offsets_from("x", compared) == {"x": BESIDE}
    better = [exchange(-1.5, 50.0, 1e-6, 1e-6)]
    assert offsets_from("a", {("a", "b"): [exchange(1.0, 50.0, 1e-3, 0.0)], ("b", "a"): better})["b"].offset == 1.5


def test_marks_give_the_clock_of_a_profile() -> None:
    regions = [(mark(50.0 + i * 1e-4), 3.0 + i * 1e-4 + 2e-6, 3.0 + i * 1e-4 + 5e-6) for i in range(10)]
    found = offset_of_profile([("work", 1.0, 2.0), *regions])
    assert found is not None
    assert abs(found.offset + 47.0) <= found.uncertainty < 1e-4
    assert offset_of_profile([("work", 1.0, 2.0)]) is None


def test_texts_of_offsets() -> None:
    assert str(ClockOffset(1.5e-3, 2e-5)) == "measured by exchanges: +1,500.0 µs, ± 20.0 µs"
    drifting = str(ClockOffset(0.0, 1e-6, -3e-6, how=CALLS))
    assert drifting == "from recorded calls: +0.0 µs, ± 1.0 µs, drifts by -3.0 µs per second"
    assert [str(ClockOffset(0.0, 0.0, how=how)) for how in (REFERENCE, SAME, UNKNOWN)] == [REFERENCE, SAME, UNKNOWN]


# The file


CALL = (CALLED, 10.0, 10.5, "b", 7, "add", 64, "")
RUN = (RAN, 10.1, 10.4, "a", 7, "add", "")


def moved(event: Event, by: float) -> Event:
    kind, begun, ended, *rest = event
    return (kind, begun + by, ended + by, *rest)


def written(workers: dict[str, WorkerTrace], hidden: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    file = json.loads(json.dumps(merge(workers, hidden)))
    check(file)
    return file["traceEvents"]


def of_two(a: list[Event], b: list[Event], clock: ClockOffset = BESIDE) -> list[dict[str, Any]]:
    return written({"a": WorkerTrace(a, HERE), "b": WorkerTrace(b, clock)})


def arrows(events: list[dict[str, Any]]) -> list[tuple[str, Any, Any]]:
    def inside(end: dict[str, Any]) -> str:
        return next(
            each["name"]
            for each in events
            if each["ph"] == "X"
            and (each["pid"], each["tid"]) == (end["pid"], end["tid"])
            and each["ts"] <= end["ts"] < each["ts"] + each["dur"]
        )

    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    return sorted((e["name"], inside(e), inside(ends[e["id"]])) for e in events if e["ph"] == "s")


CALLING, ANSWERING = ("call", "add → b", "add"), ("answer", "add", "add → b")
ARROWS: dict[str, tuple[list[Event], list[Event], list[tuple[str, str, str]]]] = {
    "call": ([CALL], [RUN], [ANSWERING, CALLING]),
    "another number": ([CALL], [(RAN, 10.1, 10.4, "a", 8, "add", "")], []),
    "another caller": ([CALL], [(RAN, 10.1, 10.4, "c", 7, "add", "")], []),
    "no length": ([(*CALL[:2], 10.0, *CALL[3:])], [(RAN, 10.0, 10.0, "a", 7, "add", "")], [ANSWERING, CALLING]),
    "to itself": (
        [(CALLED, 1.0, 2.0, "a", 1, "f", 0, ""), (RAN, 1.2, 1.8, "a", 1, "f", "")],
        [],
        [("answer", "f", "f → a"), ("call", "f → a", "f")],
    ),
    "given up": ([(*CALL[:-1], "CallTimeout")], [RUN], [("call", "add → b (CallTimeout)", "add")]),
    "failed": (
        [(*CALL[:-1], "KeyError")],
        [(*RUN[:-1], "KeyError")],
        [("answer", "add (KeyError)", "add → b (KeyError)"), ("call", "add → b (KeyError)", "add (KeyError)")],
    ),
    "pass, its parts and its steps": (
        [(BACKWARD_PASS, 1.0, 2.0, 99, 1, ""), (BACKWARD_TASKS, 1.0, 1.1, 99, "a", 1), (STEPPED, 2.1, 2.2, 99, "SGD")],
        [
            (BACKWARD_TASKS, 1.3, 1.4, 99, "a", 1),
            (BACKWARD_TASKS, 1.6, 1.7, 99, "a", 1),
            (STEPPED, 1.8, 1.9, 99, "SGD"),
        ],
        [("pass", "backward", "part in the pass of a")] * 2 + [("step", "backward", "SGD")] * 2,
    ),
    "stages": (
        [(STAGED, 1.0, 1.1, 5, "forward", 0, 2), (STAGED, 1.6, 1.8, 5, "backward", 0, 2)],
        [(STAGED, 1.2, 1.3, 5, "forward", 1, 2), (STAGED, 1.3, 1.5, 5, "backward", 1, 2)],
        [
            ("activation", "forward 0, micro-batch 2", "forward 1, micro-batch 2"),
            ("gradient", "backward 1, micro-batch 2", "backward 0, micro-batch 2"),
            ("its gradient", "forward 0, micro-batch 2", "backward 0, micro-batch 2"),
            ("its gradient", "forward 1, micro-batch 2", "backward 1, micro-batch 2"),
        ],
    ),
}


@pytest.mark.parametrize("case", ARROWS)
def test_arrows(case: str) -> None:
    a, b, expected = ARROWS[case]
    assert arrows(of_two(a, b)) == expected


def test_a_run_without_its_call_is_shown() -> None:
    (run,) = [event for event in of_two([], [RUN]) if event["ph"] == "X"]
    assert run["args"] == {"caller": "a", "number": 7, "function": "add", "failure": ""}
    assert run["dur"] == pytest.approx(0.3e6)


def test_a_repeated_number_is_joined_with_the_nearer_run() -> None:
    events = of_two([CALL, moved(CALL, 100)], [RUN, moved(RUN, 100)])
    starts, ends = ([e["ts"] for e in events if e["ph"] == ph and e["name"] == "call"] for ph in "sf")
    assert [round(end - start) for start, end in zip(starts, ends, strict=True)] == [100_000, 100_000]


def test_clocks_are_named_and_applied() -> None:
    file = merge({"a": WorkerTrace([CALL], HERE), "b": WorkerTrace([moved(RUN, 1000)], ClockOffset(1000.0, 1e-5))})
    check(file)
    (run,) = [event for event in file["traceEvents"] if event.get("cat") == RAN]
    assert run["ts"] == pytest.approx(1e5, abs=0.01)
    assert file["otherData"]["workers"]["b"]["uncertainty_us"] == pytest.approx(10.0)
    labels = [event["args"]["labels"] for event in file["traceEvents"] if event["name"] == "process_labels"]
    assert labels == ["clock: the reference", "clock: measured by exchanges: +1,000,000,000.0 µs, ± 10.0 µs"]
    assert chrome_trace.summary(file).splitlines() == [
        "2 workers, 2 events, 2 arrows",
        "  a       1 events; clock: the reference",
        "  b       1 events; clock: measured by exchanges: +1,000,000,000.0 µs, ± 10.0 µs",
    ]


def test_no_arrow_points_back_in_time() -> None:
    shaken = random.Random(3)
    for _ in range(300):  # clocks are wrong by up to twice the length of the call
        of_two([CALL], [RUN], ClockOffset(shaken.uniform(-1, 1), 0.0))


def test_concurrent_calls_are_spread_over_lanes() -> None:
    shaken = random.Random(5)
    calls, runs = [], []
    for number in range(300):
        begun = shaken.uniform(0, 1)
        calls.append((CALLED, begun, begun + 0.2, "b", number, "f", 0, ""))
        runs.append((RAN, begun + 0.05, begun + 0.05 + shaken.uniform(0, 0.1), "a", number, "f", ""))
    events = of_two(sorted(calls, key=lambda e: e[2]), sorted(runs, key=lambda e: e[2]))
    assert Counter(event["cat"] for event in events if event["ph"] in "Xi") == {CALLED: 300, RAN: 300}
    names = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert "calls made (64)" in names
    assert "calls made (65)" not in names
    moments = [event for event in events if event["ph"] == "i"]
    assert moments
    assert all(event["args"]["took_us"] == pytest.approx(2e5) for event in moments)


def test_moments_unknown_kinds_and_hidden_calls() -> None:
    own = [
        (JOINED, 1.0, 1.0, "a", 0, 2),
        (CONNECTED, 1.0, 1.1, "b", "unix"),
        (LOST, 2.0, 2.0, "b", "it died"),
        (MADE, 1.5, 1.5, "b", 3),
        (NOTED, 1.0, 1.2, "of an extension", "what it says"),
        ("of tomorrow", 1.0, 1.2, "what?"),
        CALL,
    ]
    events = written({"a": WorkerTrace(own, HERE)}, hidden=("add",))
    shown = {event["name"]: event["ph"] for event in events if event["ph"] in "Xi"}
    moments, spans = ("joined as a", "lost b", "made"), ("connected to b", "of an extension", "of tomorrow")
    assert shown == dict.fromkeys(moments, "i") | dict.fromkeys(spans, "X")
    kinds = {value for name, value in vars(instruments).items() if name.isupper() and isinstance(value, str)}
    assert kinds == set(chrome_trace.KINDS)


def test_empty_file() -> None:
    assert written({}) == []
    assert not [event for event in written({"a": WorkerTrace([], HERE)}) if event["ph"] != "M"]


def test_clocks_from_recorded_calls_and_hosts() -> None:
    events = {"a": [CALL], "b": [moved(RUN, -50)], "c": []}
    found = clocks_of(events, "a", {"a": "x", "d": "x", "b": "y", "e": "y", "f": "z"})
    assert {name: each.how for name, each in found.items()} == {
        "a": REFERENCE, "d": SAME, "b": CALLS, "e": CALLS, "f": UNKNOWN, "c": UNKNOWN
    }  # fmt: skip
    assert found["e"] == found["b"]
    assert found["b"].offset == pytest.approx(-50.0)
    assert found["b"].uncertainty == pytest.approx(0.1)
    assert clocks_of(events, "a")["b"].offset == pytest.approx(-50.0)


def profile(marks: bool) -> dict[str, Any]:
    """Return a profile as torch writes it: its clock is at 500 s when the worker's perf_counter is at 10."""
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
    """The clock of such a profile is unknown, so its events would be years away from the others."""
    traces = {
        "a": WorkerTrace([CALL], HERE, profile(marks=False)),
        "b": WorkerTrace([RUN], BESIDE, profile(marks=True)),
    }
    file = merge(traces)
    assert [e["pid"] for e in file["traceEvents"] if e["name"] == "aten::mm"] == [2]
    assert max(event["ts"] for event in file["traceEvents"] if "ts" in event) < 1e7
    first, second = chrome_trace.summary(file).splitlines()[1:]
    assert "none of torch's profiler, which dropped the marks" in first
    assert "7 of torch's profiler;" in second


def test_profiles_are_converted_to_the_common_clock() -> None:
    seen = profile(marks=True)
    events = written({"a": WorkerTrace([CALL], HERE, seen), "b": WorkerTrace([RUN], BESIDE, seen)})
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
    assert not [event for event in events if event["name"].startswith(chrome_trace.MARK)]
    numbers = [event["id"] for event in events if event["ph"] == "s"]
    assert len(set(numbers)) == 4, "two of calls, and one of each profile"
