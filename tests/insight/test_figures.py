"""Figures from made-up accounts and events."""

from __future__ import annotations

import math

import pytest

from telegrad.insight import figures
from telegrad.insight.figures import BOUNDS, Flow, Rate
from telegrad.insight.source import Sight
from telegrad.instruments import CALLED, CONNECTED, PASSED, RAN, STAGED, STEPPED, Event
from tests.insight.group import START, account


def called(begun: float, ended: float, function: str = "f", failure: str = "") -> Event:
    return (CALLED, begun, ended, "b", 1, function, 0, failure)


def test_percentile() -> None:
    values = [float(value) for value in range(1, 101)]
    assert figures.percentile(values, 0.5) == 51
    assert figures.percentile(values, 0.99) == 100
    assert figures.percentile([3.0], 0.99) == 3


def test_rates_are_between_two_sights() -> None:
    before = Sight([account("a", calls_done=10, bytes_out={"b": 100}, bytes_in={"b": 5})], {})
    after = Sight([account("a", START + 2, calls_done=30, bytes_out={"b": 300, "c": 100}, bytes_in={"b": 5})], {})
    assert figures.rates(before, after) == {"a": Rate(10, 150, 0)}
    assert figures.rates(None, after) == {"a": Rate(0, 0, 0)}


def test_a_worker_that_began_anew_has_no_rate() -> None:
    before = Sight([account("a", calls_done=10)], {})
    after = Sight([account("a", START + 1, pid=101, calls_done=500)], {})
    assert figures.rates(before, after) == {"a": Rate(0, 0, 0)}


def test_a_flow_is_known_from_either_end() -> None:
    before = Sight([account("a", bytes_out={"b": 100})], {})
    call = {"caller": "b", "number": 1, "function": "f", "age": 0.0, "state": "running", "thread": None}
    after = Sight([account("a", START + 1, bytes_out={"b": 150}, bytes_in={"b": 7}, calls_in=[call])], {"b": "stuck"})
    assert figures.flows(before, after) == [Flow("a", "b", 0, 150, 50), Flow("b", "a", 1, 7, 7)]


def test_functions() -> None:
    own = [called(0, each / 1000) for each in range(1, 101)] + [called(0, 9, "g", "ValueError")]
    served: list[Event] = [(RAN, 0.0, 0.002, "a", 1, "f", "ValueError"), (RAN, 0.0, 1.0, "c", 2, "h", "")]
    g, f, h = figures.functions({"a": own, "b": served})
    assert (g.name, g.calls, g.failures, g.running) == ("g", 1, 1, None)
    assert (f.name, f.calls, f.failures, f.running) == ("f", 100, 0, 0.002)
    assert (f.p50, f.p99) == (0.051, 0.1)
    assert (h.name, h.calls, h.p50) == ("h", 1, 1.0)
    assert sum(f.histogram) == 100
    assert f.histogram[BOUNDS.index(0.001)] == 1
    assert g.histogram[BOUNDS.index(10.0)] == 1


def test_what_is_slower_than_all_bounds_is_counted() -> None:
    assert figures.functions({"a": [called(0, 1000)]})[0].histogram[-1] == 1


def test_calls_at_once_lie_in_rows_and_short_ones_are_put_together() -> None:
    own = [called(0, 5), called(1, 3), called(4, 5)] + [called(6 + n / 1000, 6.0005 + n / 1000) for n in range(10)]
    (lane,) = figures.lanes({"a": own}, 0, 10, parts=100)
    assert [(span.row, span.begun, span.calls) for span in lane.spans] == [(0, 0, 1), (0, 6, 10), (1, 1, 1), (1, 4, 1)]


def test_more_calls_at_once_than_rows_share_the_last() -> None:
    (lane,) = figures.lanes({"a": [called(n, 9, failure="X" if n == 4 else "") for n in range(5)]}, 0, 10, rows=2)
    assert [(span.row, span.calls, span.failure) for span in lane.spans] == [(0, 1, ""), (1, 4, "X")]


def test_calls_that_have_not_ended_lie_below_and_are_never_joined_to_others() -> None:
    (lane,) = figures.lanes({"a": [called(n, n + 5.0 if n < 3 else math.inf) for n in range(6)]}, 0, 10, rows=2)
    assert [(s.row, s.begun, s.ended, s.calls) for s in lane.spans] == [
        (0, 0, 5, 1),
        (1, 1, 7, 2),
        (2, 3, math.inf, 1),
        (3, 4, math.inf, 2),
    ]


def test_lanes_hold_what_reaches_into_the_time() -> None:
    own = [called(0, 1), called(2, 4), called(6, 9)]
    (lane,) = figures.lanes({"a": own, "b": []}, 3, 5)
    assert [span.begun for span in lane.spans] == [2]


def staged(batch: int, begun: float, kind: str = "forward") -> Event:
    return (STAGED, begun, begun + 1, ("p", batch), kind, 0, 0)


def test_the_gantt_chart_is_of_the_latest_whole_batch() -> None:
    events = {"a": [staged(1, 0), staged(2, 2), staged(3, 4)], "b": [staged(1, 1), staged(2, 3)]}
    found = figures.gantt(events)
    assert found is not None
    assert found.batch == "p 2"
    assert [bar.worker for bar in found.bars] == ["a", "b"]
    assert (found.begun, found.ended, found.idle) == (2, 4, 0.5)
    assert figures.gantt({"a": [called(0, 1)]}) is None


def test_training() -> None:
    own: list[Event] = [
        called(0, 4),
        staged(1, 1),
        staged(1, 2, "weights"),
        staged(1, 2, "lend"),  # counts as nothing
        (PASSED, 3.0, 3.5, 7, 1, ""),
        (STEPPED, 5.0, 6.0, 7, "SGD"),
        (STEPPED, 8.0, 9.0, 8, "SGD"),
        (CONNECTED, 9.0, 9.0, "b", "tcp"),
    ]
    found = figures.training({"a": own, "b": [(STEPPED, 5.0, 6.5, 7, "SGD")]}, 0, 10, parts=10)
    assert (found.steps, found.passes, found.pass_p50) == (2, 1, 0.5)
    assert found.series == [0, 0, 0, 0, 0, 0, 1, 0, 0, 1]
    assert found.spent["a"] == pytest.approx({"optimizer": 2, "backward": 1.5, "forward": 1, "waits": 1.5, "calls": 0})


def test_a_moment_counts_once() -> None:
    spans = [(0.0, 4.0, "waits"), (1.0, 2.0, "backward"), (1.5, 3.0, "optimizer"), (3.5, 99.0, "calls")]
    assert figures.spend(spans, 0, 10) == {"optimizer": 1.5, "backward": 0.5, "forward": 0, "waits": 2, "calls": 6}
