"""When calls run out of time."""

from __future__ import annotations

from math import inf

from telegrad.agent.deadlines import KEPT, Deadlines


def test_deadlines_expire_in_time_and_once() -> None:
    table: Deadlines[str] = Deadlines()
    assert table.add("slow", 60, when=60)
    assert table.add("quick", 1, when=1)
    assert not table.add("later", 1, when=1.5)
    assert table.next() == 1
    assert table.due(0.9) == []
    assert table.due(1.2) == ["quick"]
    table.remove("later", 1)
    assert table.next() == 60
    assert table.due(100) == ["slow"]
    assert table.next() == inf
    table.remove("slow", 60)  # already gone


def test_calls_that_have_each_their_own_timeout_leave_little_behind() -> None:
    table: Deadlines[int] = Deadlines()
    assert table.add(-1, 60, when=60)
    for key in range(10_000):
        assert table.add(key, 50 + key / 10_000, when=50)
        table.remove(key, 50 + key / 10_000)
    assert len(table._tables()) <= KEPT
    assert table.next() == 60
