"""The trace of a real group: clocks of processes, torch's profiler on all of them."""

from __future__ import annotations

import gzip
import json
import pathlib
from collections.abc import Mapping
from time import perf_counter
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.autograd.profiler import record_function

import telegrad.rpc as rpc
from telegrad.errors import UsageError
from telegrad.insight import clocks, collect
from telegrad.insight.source import Sight
from telegrad.instruments import CALLED, RAN, STEPPED, Event
from tests.cluster import Process
from tests.insight.checking import check

SKEW = 50e-6  # seconds that clocks of one host may seem apart
APART = 100e-6  # seconds between a region as torch's profiler has it and as perf_counter does

_recorded: list[Event] = []  # of this process


def recorded() -> list[Event]:
    return _recorded


class Recorders:
    """A source of events: what processes have put into their `_recorded`."""

    def look(self) -> Sight:
        return Sight([], {})

    def events(self, after: Mapping[str, float]) -> dict[str, list[Event]]:
        found = {worker.name: rpc.rpc_sync(worker.name, recorded) for worker in rpc.workers()}
        return {name: [each for each in own if each[1] >= after.get(name, 0)] for name, own in found.items()}


def work(caller: str, number: int) -> torch.Tensor:
    begun = perf_counter()
    with record_function("work of the test"):
        value = torch.ones(50, 50) @ torch.ones(50, 50)
    _recorded.append((RAN, begun, perf_counter(), caller, number, "work", ""))
    return value


def call(to: str, number: int) -> None:
    own, begun = rpc.get_worker_info().name, perf_counter()
    rpc.rpc_sync(to, work, (own, number))
    _recorded.append((CALLED, begun, perf_counter(), to, number, "work", 0, ""))


# Each of these runs on worker0.


def skews() -> dict[str, tuple[float, float]]:
    names = [worker.name for worker in rpc.workers()]
    found = {name: clocks.relate(collect.measure(name, 200)) for name in names[1:]}
    return {name: (each.offset, each.uncertainty) for name, each in found.items()}


def traced(path: str, profile: bool) -> str:
    _recorded.append((STEPPED, perf_counter(), perf_counter(), 1, "before"))
    with patch.object(collect, "own_group", Recorders), collect.tracing(path, profile) as tracing:
        for number in range(20):
            call(f"worker{number % 4}", number)
    _recorded.clear()
    return str(tracing)


def aligned() -> dict[str, clocks.Relation]:
    return collect.align([*(worker.name for worker in rpc.workers()), "nobody"])


def aligned_over_hosts() -> dict[str, clocks.Relation]:
    real = collect._which_clock
    collect._which_clock = lambda: "another host's"
    try:
        return aligned()
    finally:
        collect._which_clock = real


def regions() -> list[tuple[float, float]]:
    """How far the ends of a region are from where perf_counter sees them, once the profile is placed by its marks."""
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
    relation = clocks.of_profile(named)
    assert relation is not None
    placed = sorted((begun, ended) for name, begun, ended in named if name == "region")
    pairs = zip(seen, placed, strict=True)
    return [(relation.to_reference(p[0]) - s[0], relation.to_reference(p[1]) - s[1]) for s, p in pairs]


def file_of(path: pathlib.Path) -> dict[str, Any]:
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    file = json.loads(text)
    check(file)
    return file


def test_clocks_of_one_host_are_the_same(workers: list[Process]) -> None:
    for offset, uncertainty in workers[0].run(skews).values():
        assert abs(offset) <= SKEW
        assert abs(offset) <= uncertainty


def test_and_nothing_is_measured_then(workers: list[Process]) -> None:
    found = workers[0].run(aligned)
    assert [each.how for each in found.values()] == [clocks.REFERENCE, *[clocks.SAME] * 3, clocks.UNKNOWN]
    assert {each.offset for each in found.values()} == {0.0}


def test_clocks_of_several_hosts_are_compared(workers: list[Process]) -> None:
    found = workers[0].run(aligned_over_hosts)
    assert [each.how for each in found.values()] == [clocks.REFERENCE, *[clocks.MEASURED] * 3, clocks.UNKNOWN]
    assert all(abs(each.offset) <= each.uncertainty < 1e-3 for each in list(found.values())[1:4])


def test_regions_of_torchs_profiler_are_where_perf_counter_sees_them(workers: list[Process]) -> None:
    found = workers[1].run(regions)
    assert sum(abs(begun) < APART and abs(ended) < APART for begun, ended in found) >= 5, found


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_trace_of_a_group(workers: list[Process], tmp_path: pathlib.Path, name: str) -> None:
    told = workers[0].run(traced, str(tmp_path / name), False)
    file = file_of(tmp_path / name)
    shown = [event["name"] for event in file["traceEvents"] if event["ph"] == "X"]
    assert sorted(shown) == sorted(["work"] * 20 + [f"work → worker{number % 4}" for number in range(20)])
    assert sum(event["ph"] == "s" for event in file["traceEvents"]) == 40
    assert told.startswith(f"{tmp_path / name}: 4 workers, 40 events, 40 arrows\n")
    assert "clock: the same clock as the reference" in told


def test_with_torchs_profiler_on_all_workers(workers: list[Process], tmp_path: pathlib.Path) -> None:
    workers[0].run(traced, str(tmp_path / "trace.json"), True)
    events = file_of(tmp_path / "trace.json")["traceEvents"]
    for pid in range(1, 5):
        own = [event for event in events if event["pid"] == pid and event["ph"] == "X"]
        ran = [event for event in own if event["cat"] == RAN]
        profiled = [event for event in own if event["name"] == "work of the test"]
        assert len(ran) == len(profiled) == 5
        assert any(event["name"] == "aten::mm" for event in own)
        for run, region in zip(ran, profiled, strict=True):  # a region lies in what perf_counter says of its function
            assert run["ts"] - 100 <= region["ts"]
            assert region["ts"] + region["dur"] <= run["ts"] + run["dur"] + 100


def test_what_was_recorded_until_now(workers: list[Process], tmp_path: pathlib.Path) -> None:
    def lately(path: str) -> str:
        _recorded.append((STEPPED, perf_counter(), perf_counter(), 1, "before"))
        with patch.object(collect, "own_group", Recorders):
            return collect.trace(path)

    assert "4 workers" in workers[0].run(lately, str(tmp_path / "trace.json"))
    file_of(tmp_path / "trace.json")


class Outside:
    """A source that looks on from outside: two workers, one of whom has died."""

    def look(self) -> Sight:
        account: Any = {"worker": "a", "host": "x", "clock": 5.0, "gone": {"b": "it died"}}
        return Sight([account], {"c": "it is stopped"})

    def events(self, after: Mapping[str, float]) -> dict[str, list[Event]]:
        called = (CALLED, 10.0, 10.5, "b", 7, "work", 0, "")
        return {"b": [(RAN, 20.1, 20.4, "a", 7, "work", "")], "a": [called] if after.get("a", 0) < 10 else []}


@pytest.mark.parametrize("seconds", [None, 0.0])
def test_from_outside_of_a_group(tmp_path: pathlib.Path, seconds: float | None) -> None:
    told = collect.trace_from_outside(tmp_path / "trace.json", Outside(), seconds)
    file_of(tmp_path / "trace.json")
    assert told.splitlines()[0].endswith("2 workers, 2 events, 2 arrows")
    assert told.splitlines()[2].endswith("clock: from recorded calls: +10,000,000.0 µs, ± 100,000.0 µs")
    assert told.splitlines()[3:] == ["  c: nothing; it is stopped"]  # b is gone, but left its events


def test_what_cannot_be_written_is_said_before_anybody_waits(tmp_path: pathlib.Path) -> None:
    nowhere = tmp_path / "nowhere" / "trace.json"
    for write in (collect.trace, collect.tracing):
        with pytest.raises(FileNotFoundError, match="no such folder"):
            write(nowhere)
    with pytest.raises(FileNotFoundError, match="no such folder"):
        collect.trace_from_outside(nowhere, Outside(), 1e9)
    for seconds in (-1, float("nan"), float("inf")):
        with pytest.raises(UsageError, match="a number of seconds"):
            collect.trace_from_outside(tmp_path / "trace.json", Outside(), seconds)
        with pytest.raises(UsageError, match="a number of seconds"):
            collect.trace(tmp_path / "trace.json", seconds)


def test_a_profile_needs_a_time() -> None:
    with pytest.raises(UsageError, match="seconds="):
        collect.trace("trace.json", profile=True)
