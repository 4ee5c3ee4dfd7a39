"""A short run of chaos under `telegrad run`, and a check that violations are found.

`python -m tests.chaos --supervised` runs as many schedules as you like.
"""

import sys
from typing import Any

import pytest

from tests.chaos.supervised.judge import BACK, LONG, Blow, violations
from tests.chaos.supervised.plan import IN_ORDER, KEPT, KILLED, KINDS, SERVED, Event, Plan, make_plan
from tests.chaos.supervised.record import Life, Note
from tests.chaos.supervised.schedule import run

A, B = Life("a", 1), Life("b", 2)
AGAIN = Life("b", 3)  # has b's name after it
KILL = Blow("kill", "b", B.pid, 20.0, float("inf"))
KILL_AGAIN = Blow("kill", "b", AGAIN.pid, 21.5 + LONG / 2, float("inf"))


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="who serves the store is found by way of /proc")
@pytest.mark.timeout(300)
def test_a_group_outlives_its_workers() -> None:
    plan = Plan(1, SERVED, IN_ORDER, [[Event("store", "", 0.0, 0.0), Event("stop", "b1", 0.2, 0.5)]])
    report = run(plan)
    print(plan, report, *report.violations, sep="\n")
    assert not report.violations
    assert report.operations


def test_plans_come_from_their_seeds() -> None:
    plans = [make_plan(seed) for seed in range(100)]
    assert plans == [make_plan(seed) for seed in range(100)]
    assert {(plan.store, plan.end) for plan in plans} == {(s, e) for s in (KEPT, SERVED) for e in (IN_ORDER, KILLED)}
    assert {event.kind for plan in plans for round_ in plan.rounds for event in round_} == set(KINDS)


def note(at: float, life: Life, what: str, *told: Any) -> Note:
    return Note(at, life, what, list(told))


def ended(operation: str, answer: Life | None = None, failure: str = "") -> Note:
    return note(2.0, A, "ended", operation, "b", f"{operation} 1", answer, failure, 0.1)


LIVES = [note(0.0, life, what, 1.0) for life in (A, B) for what in ("joins", "joined")]
COMES_BACK = [*LIVES, note(21.0, AGAIN, "joins", 1.0), note(21.5, AGAIN, "joined")]
LET_WAIT = [*COMES_BACK, note(22.0, A, "met", AGAIN), note(30.0, Life("b", 4), "joins", 1.0)]
MADE = [note(1.0, B, "made"), note(21.0, A, "made")]


def ran(operation: str, *lives: Life) -> list[Note]:
    return [note(1.0, life, "ran", f"{operation} 1") for life in lives]


@pytest.mark.parametrize(
    ("notes", "blows", "seen"),
    [
        ([note(1.0, A, "wrong", "it is")], [], "it is"),
        (ran("plain", B, AGAIN), [], "more than once"),
        (ran("once", B, AGAIN), [], ""),
        (ran("once", B, B), [], "more than once"),
        ([*ran("plain", B), ended("plain", B)], [], ""),
        ([*ran("plain", B), ended("plain", AGAIN)], [], "was answered by b (process 3"),
        ([*ran("plain", A), ended("plain", A)], [], "was answered by a"),
        ([ended("plain")], [], "by nobody"),
        ([*ran("plain", B), ended("plain", failure="PeerUnreachable")], [], "failed with PeerUnreachable"),
        ([*ran("plain", B), ended("plain", failure="PeerLost")], [], ""),
        (MADE, [], "made the table while"),
        (MADE, [KILL], ""),
        ([*COMES_BACK, note(22.0, A, "met", AGAIN)], [KILL], ""),
        ([*COMES_BACK, note(21.1 + BACK, A, "met", AGAIN)], [KILL], "reached it after 3.10 s"),
        (COMES_BACK, [KILL], "reached it never"),
        ([*COMES_BACK, note(19.0, A, "leaves")], [KILL], ""),
        (LET_WAIT, [KILL, KILL_AGAIN], ""),
        ([note(9.0, A, "late", B, 8.8, 0.2)], [], "took 0.200 s"),
        ([note(9.0, A, "late", B, 8.8, 0.2), note(8.9, B, "noise", 0.06)], [], ""),
        ([note(20.2, A, "late", B, 20.0, 0.2)], [KILL], ""),
    ],
)
def test_violations_are_found(notes: list[Note], blows: list[Blow], seen: str) -> None:
    found = violations(notes, blows)
    assert bool(found) == bool(seen)
    assert all(seen in text for text in found)
