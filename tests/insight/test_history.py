"""What is kept of a group's last minute."""

from __future__ import annotations

import pytest

from telegrad.insight.history import KEPT, MOST, History
from telegrad.insight.source import Sight
from telegrad.instruments import RAN, STEPPED, Event
from tests.insight.group import DAY, START, account


def ran(ended: float) -> Event:
    return (RAN, ended - 0.25, ended, "a", 1, "f", "")


def test_events_come_onto_one_clock() -> None:
    history = History()
    far = account("b", 7.0) | {"time": DAY, "host": "other"}
    assert history.take(Sight([account("a"), far], {})) == {}
    history.add({"a": [ran(START - 1)], "b": [ran(6.0)], "stranger": [ran(1.0)]})
    assert (history.epoch, history.now) == (DAY, 0)
    assert history.recent(5).events == {"a": [ran(-1.0)], "b": [ran(-1.0)]}


def test_each_event_is_asked_for_once() -> None:
    history = History()
    history.take(Sight([account("a")], {}))
    history.add({"a": [ran(START - 1), ran(START)]})
    assert history.take(Sight([account("a", START + 1)], {})) == {"a": START}
    history.add({"a": []})
    assert history.take(Sight([account("a", START + 2, pid=9)], {})) == {}  # another process


def test_what_is_old_is_not_recent() -> None:
    history = History()
    history.take(Sight([account("a", START + 10)], {}))
    history.add({"a": [ran(START), ran(START + 7), ran(START + 9)]})
    assert history.recent(5).whole
    assert [event[2] for event in history.recent(5).events["a"]] == [-1, -3]


def test_many_calls_do_not_drive_out_a_step() -> None:
    history = History()
    history.take(Sight([account("a", START + 1)], {}))
    history.add({"a": [(STEPPED, START, START, 1, "SGD")] + [ran(START + 0.5)] * (KEPT + 10)})
    assert len(history.recent(60).events["a"]) == KEPT + 1


def test_of_many_workers_not_all_is_given() -> None:
    history = History()
    names = [str(number) for number in range(100)]
    history.take(Sight([account(name, START + 1) for name in names], {}))
    history.add({name: [ran(START + n / 1000) for n in range(1000)] for name in names})
    assert sum(map(len, history.recent(60).events.values())) == MOST
    assert not history.recent(60).whole
    assert history.recent(60).events["99"][0][2] == pytest.approx(-0.001)  # the latest


def test_the_last_two_sights_and_memory() -> None:
    history = History()
    one, two = Sight([account("a", memory=1)], {}), Sight([account("a", START + 1, memory=2)], {"b": "gone"})
    history.take(one)
    history.take(two)
    assert (history.before, history.sight) == (one, two)
    assert [each.resident for each in history.memory["a"]] == [1, 2]


def test_a_clock_that_is_far_off_moves_nothing() -> None:
    history = History()
    history.take(Sight([account("a"), account("b"), account("c") | {"time": DAY + 9999}], {}))
    assert history.now == 0


def test_a_group_that_is_silent_keeps_its_time() -> None:
    history = History()
    history.take(Sight([account("a")], {}))
    history.take(Sight([], {"a": "does not answer"}))
    assert (history.now, history.sight.silent) == (0, {"a": "does not answer"})
