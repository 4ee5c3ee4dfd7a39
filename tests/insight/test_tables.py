"""Tables for terminals, and what they come from."""

from __future__ import annotations

import pytest

from telegrad.insight.source import Sight
from telegrad.insight.tables import (
    Column,
    Row,
    Table,
    amount,
    as_text,
    calls_in,
    count,
    duration,
    narrowed,
    ordered,
    shown,
    threads,
)
from telegrad.insight.watching import KEPT, WINDOW, Watch, functions, peers, troubles, workers
from telegrad.instruments import CALLED, Event
from telegrad.witness.account import RUNNING, CallIn, Thread
from tests.insight.group import START, account

PAIR = Table("Pairs", (Column("name", "", str), Column("size", "", amount, 5)))


def calls(number: int, until: float, seconds: float, function: str = "f") -> list[Event]:
    """So many, the last of which ended at `until`, one after another in `seconds`."""
    ends = [until - seconds * each / number for each in range(number)]
    return [(CALLED, end - 0.001, end, "b", at, function, 0, "") for at, end in enumerate(reversed(ends))]


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (0.25, "0.2"), (7, "7"), (9999, "9999"), (12_345, "12k"), (999_600, "1.0M"), (4e15, "4000T")],
)
def test_counts_are_short(number: float, text: str) -> None:
    assert count(number) == text


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0"), (999, "999"), (1000, "1.0K"), (1023 * 1024, "1.0M"), (5 * 2**30, "5.0G")]
)
def test_amounts_are_short(size: float, text: str) -> None:
    assert amount(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0us"),
        (0.00002, "20us"),
        (0.0123, "12ms"),
        (0.9996, "1.0s"),
        (9.96, "10s"),
        (99.4, "99s"),
        (99.6, "1:39"),
        (3600 * 2, "2h00"),
        (86400 * 5, "5d"),
    ],
)
def test_durations_are_short(seconds: float, text: str) -> None:
    assert duration(seconds) == text
    assert len(text) <= 6


def test_rows_are_ordered_as_people_count_and_what_is_unknown_comes_last() -> None:
    rows = [Row(name, (name, size)) for name, size in [("w10", 1), ("w2", None), ("W1", 3)]]
    assert [row.key for row in ordered(rows, 0, descending=False)] == ["W1", "w2", "w10"]
    assert [row.key for row in ordered(rows, 1, descending=False)] == ["w10", "W1", "w2"]
    assert [row.key for row in ordered(rows, 1, descending=True)] == ["W1", "w10", "w2"]


def test_rows_are_narrowed_to_those_that_show_all_words() -> None:
    rows = [Row("a", ("Server push", 1)), Row("b", ("server pull", 2048))]
    assert [row.key for row in narrowed(PAIR, rows, "SERVER 2.0k")] == ["b"]
    assert narrowed(PAIR, rows, "") == rows


def test_what_terminals_take_for_commands_is_not_shown() -> None:
    assert shown(PAIR, Row("a", ("x\x1b[2J\ny", None))) == [r"x\x1b[2J\ny", "-"]


def test_plain_tables_have_marks_and_even_columns() -> None:
    assert as_text(PAIR, [Row("a", ("long name", 5)), Row("b", ("b", 2048), trouble=True)]).splitlines() == [
        "name       size",
        "long name     5",
        "! b        2.0K",
    ]


def test_a_thread_that_runs_a_call_and_waits() -> None:
    thread: Thread = {"number": 5, "name": "t", "at": None, "stack": [], "wait": None, "asleep": None}
    thread["wait"] = {"what": "backward", "on": ["b", "c"], "about": ""}
    call: CallIn = {"caller": "z", "number": 3, "function": "", "age": 1.0, "state": RUNNING, "thread": 5}
    told = account("a", threads=[thread], calls_in=[call])
    assert threads(told)[0].values == ("t", "runs call 3 for z, waits for backward of b, c", None, None)
    assert calls_in(told)[0].values == (1.0, "z", "running", None, None, "t", "3")


def test_rates_need_two_sights_of_one_process() -> None:
    watch = Watch()
    first = watch.take(Sight([account("a", START, calls_done=5)], {}), {})
    assert first.rates == {}
    assert workers(first)[0].values[3] is None
    second = watch.take(Sight([account("a", START + 2, calls_done=25)], {}), {})
    assert workers(second)[0].values[3] == 10
    assert watch.take(Sight([], {"a": "busy"}), {}).rates == {}


def test_events_are_asked_for_since_the_last_that_came() -> None:
    watch = Watch()
    sight = Sight([account("a", START)], {})
    assert watch.after(sight) == {"a": START - WINDOW}
    view = watch.take(sight, {"a": calls(20, START - 1, 2.0)})
    assert view.called == {"a": 2.0}
    assert functions(view)[0].values == (2.0, pytest.approx(0.001), pytest.approx(0.001), None, 0, "f")
    later = Sight([account("a", START + 5)], {})
    assert watch.after(later) == {"a": START - 1}
    assert watch.take(later, {"a": calls(20, START + 5, 1.0)}).called == {"a": 4.0}


def test_a_worker_that_was_started_anew_has_another_clock() -> None:
    watch = Watch()
    watch.take(Sight([account("a", START)], {}), {"a": calls(20, START, 2.0)})
    again = Sight([account("a", 50.0, pid=7)], {})
    assert watch.after(again) == {"a": 50.0 - WINDOW}
    assert watch.take(again, {}).called == {"a": 0.0}


def test_where_there_are_too_many_events_a_shorter_time_counts_for_all() -> None:
    watch = Watch()
    sight = Sight([account("a", START), account("b", START)], {})
    view = watch.take(sight, {"a": calls(KEPT, START, 10.0), "b": calls(100, START, 10.0, "g")})
    assert view.window == pytest.approx(5.0, rel=0.01)
    assert view.called == {"a": pytest.approx(KEPT / 10, rel=0.01), "b": pytest.approx(10, rel=0.05)}
    assert [each.name for each in view.functions] == ["f", "g"]


def test_who_has_gone_is_told_unless_another_of_its_name_is_there() -> None:
    gone = {"b": "it died", "c": "it left early"}
    members = {"a": "h0", "b": "h1", "c": "h2"}
    view = Watch().take(Sight([account("a", gone=gone, members=members), account("c", rank=2)], {"d": "?"}), {})
    assert [(row.key, row.values[2], row.values[-1], row.trouble) for row in workers(view)] == [
        ("a", "member", "node", False),
        ("c", "member", "node", False),
        ("d", "silent", None, True),
        ("b", "gone", "h1", True),
    ]
    assert troubles(view) == ["d is silent: ?", "b has gone: it died"]
    assert [(row.key, row.trouble) for row in sorted(peers(view, view.last["a"]))] == [("b", True), ("c", False)]
