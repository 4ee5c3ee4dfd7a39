"""Traces of a real group: clocks of processes, and torch's profiler on all of them."""

import contextlib
import gzip
import json
import pathlib
from collections import Counter
from collections.abc import Mapping
from time import perf_counter
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.autograd.profiler import record_function

import telegrad.rpc as rpc
from telegrad import insight
from telegrad._core.events import CALLED, RAN, Event
from telegrad.errors import UsageError
from telegrad.insight import collect
from telegrad.insight.chrome_trace import MEASURED, REFERENCE, SAME, UNKNOWN, ClockOffset, offset_of_profile
from telegrad.insight.history import GroupSnapshot
from tests.cluster import Process
from tests.insight.checking import check

SKEW = 50e-6  # seconds of apparent difference between clocks of one host
APART = 100e-6  # seconds between a region's times of torch's profiler and of perf_counter


def work() -> torch.Tensor:
    with record_function("work of the test"):
        return torch.ones(50, 50) @ torch.ones(50, 50)


def earlier() -> None:
    pass


def compared(clock: str) -> tuple[list[ClockOffset], list[int]]:
    """Return the clocks of the group, compared by a worker whose clock is `clock`, and the numbers of exchanges."""
    with patch.object(collect, "_which_clock", lambda: clock) if clock else contextlib.nullcontext():
        comparison = collect.ClockComparison()
        comparison.names.append("nobody")
        comparison.look()
        counts = [len(own) for own in comparison._exchanges.values()]
        return [comparison.offset(name) for name in comparison.names], counts


def traced(path: str, profile: bool) -> str:
    rpc.rpc_sync("worker1", earlier)
    with insight.tracing(path, profile) as tracing:
        for number in range(20):
            rpc.rpc_sync(f"worker{number % 4}", work)
    return str(tracing)


def regions() -> list[tuple[float, float]]:
    """Return the differences between the ends of regions in a profile and by perf_counter."""
    assert collect.begin_profile()
    assert not collect.begin_profile(), "one at a time"
    seen = []
    for _ in range(10):
        begun = perf_counter()
        with record_function("region"):
            torch.ones(300, 300) @ torch.ones(300, 300)
        seen.append((begun, perf_counter()))
    events = json.loads(gzip.decompress(collect.end_profile()))["traceEvents"]
    assert collect.end_profile() == b""
    named = [(e["name"], e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6) for e in events if e["ph"] == "X"]
    offset = offset_of_profile(named)
    assert offset is not None
    pairs = zip(seen, sorted((begun, ended) for name, begun, ended in named if name == "region"), strict=True)
    return [(offset.to_reference(p[0]) - s[0], offset.to_reference(p[1]) - s[1]) for s, p in pairs]


def file_of(path: pathlib.Path) -> list[dict[str, Any]]:
    file = json.loads(gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes())
    check(file)
    return file["traceEvents"]


def test_clocks_of_one_host_are_not_measured(workers: list[Process]) -> None:
    found, counts = workers[0].run(compared, "")
    assert [each.how for each in found] == [REFERENCE, *[SAME] * 3, UNKNOWN]
    assert (counts, {each.offset for each in found}) == ([], {0.0})


def test_each_foreign_clock_is_measured_once(workers: list[Process]) -> None:
    found, counts = workers[0].run(compared, "another host's")
    assert [each.how for each in found] == [REFERENCE, *[MEASURED] * 3, UNKNOWN]
    assert counts == [collect.EXCHANGES]
    assert all(abs(each.offset) <= min(each.uncertainty, SKEW) for each in found[1:4])


def test_regions_of_torchs_profiler_agree_with_perf_counter(workers: list[Process]) -> None:
    found = workers[1].run(regions)
    assert sum(abs(begun) < APART and abs(ended) < APART for begun, ended in found) >= 5, found


@pytest.mark.parametrize(("name", "profile"), [("trace.json.gz", False), ("trace.json", True)])
def test_trace_of_a_group(workers: list[Process], tmp_path: pathlib.Path, name: str, profile: bool) -> None:
    told = workers[0].run(traced, str(tmp_path / name), profile)
    events = file_of(tmp_path / name)
    slices = [event for event in events if event["ph"] == "X"]
    shown = Counter(event["name"].rpartition(".")[2] for event in slices if event["cat"] in (CALLED, RAN))
    assert shown == {"work": 20} | {f"work → worker{number}": 5 for number in range(4)}
    assert sum(event["ph"] == "s" and event["cat"] == "telegrad" for event in events) >= 40
    assert told.startswith(f"{tmp_path / name}: 4 workers, ")
    assert "clock: the same clock as the reference" in told
    for pid in range(1, 5) if profile else ():
        own = [event for event in slices if event["pid"] == pid]
        ran = [event for event in own if event["cat"] == RAN]
        profiled = [event for event in own if event["name"] == "work of the test"]
        assert any(event["name"] == "aten::mm" for event in own)
        for run, region in zip(ran, profiled, strict=True):  # a region lies within its function
            assert run["ts"] - 100 <= region["ts"]
            assert region["ts"] + region["dur"] <= run["ts"] + run["dur"] + 100


def test_a_trace_contains_earlier_calls(workers: list[Process], tmp_path: pathlib.Path) -> None:
    workers[0].run(rpc.rpc_sync, "worker1", earlier)
    assert "4 workers" in workers[0].run(insight.trace, str(tmp_path / "trace.json"))
    assert any(event["name"].endswith("earlier → worker1") for event in file_of(tmp_path / "trace.json"))


class Outside:
    """A source of states for an outside observer: two workers, one of which has died."""

    def look(self) -> GroupSnapshot:
        account: Any = {"worker": "a", "host": "x", "clock": 5.0, "phase": "member", "gone": {"b": "it died"}}
        return GroupSnapshot([account], {"c": "it is stopped"})

    def events(self, after: Mapping[str, float]) -> dict[str, list[Event]]:
        called = (CALLED, 10.0, 10.5, "b", 7, "work", 0, "")
        return {"b": [(RAN, 20.1, 20.4, "a", 7, "work", "")], "a": [called] if after.get("a", 0) < 10 else []}


@pytest.mark.parametrize("seconds", [None, 0.0])
def test_a_trace_from_outside_of_a_group(tmp_path: pathlib.Path, seconds: float | None) -> None:
    told = collect.trace_from_outside(tmp_path / "trace.json", Outside(), seconds)
    file_of(tmp_path / "trace.json")
    assert told.splitlines()[0].endswith("2 workers, 2 events, 2 arrows")
    assert told.splitlines()[2].endswith("clock: from recorded calls: +10,000,000.0 µs, ± 100,000.0 µs")
    assert told.splitlines()[3:] == ["  c: no events; it is stopped"]  # b is gone; its events are known


def test_wrong_arguments_are_refused_before_recording(tmp_path: pathlib.Path) -> None:
    for write in (insight.trace, insight.tracing, lambda path: collect.trace_from_outside(path, Outside(), 1e9)):
        with pytest.raises(FileNotFoundError, match="no such folder"):
            write(tmp_path / "nowhere" / "trace.json")
    path = tmp_path / "trace.json"
    for seconds in (-1, float("nan"), float("inf")):
        with pytest.raises(UsageError, match="a number of seconds"):
            collect.trace_from_outside(path, Outside(), seconds)
        with pytest.raises(UsageError, match="a number of seconds"):
            insight.trace(path, seconds)
    with pytest.raises(UsageError, match="seconds="):
        insight.trace(path, profile=True)
