"""Weights of several stages, as actions between those of the stages."""

from __future__ import annotations

import pytest

from telegrad.errors import UsageError
from telegrad.nn.agenda import Agenda
from telegrad.nn.schedule import SCHEDULES, Action, plan
from telegrad.nn.ties import BORROW, COLLECT, LEND, RETURN, Tie, parse_ties, with_ties

STATIONS = (0, 1, 2)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_values_come_before_and_gradients_go_after_all_that_the_borrower_does(schedule: str) -> None:
    tie = Tie(0, "table", 2, "head")
    plans = with_ties(plan(schedule, STATIONS, 4), STATIONS, [tie], trains=True)
    assert plans[0][0] == Action(LEND, 0, 0)
    assert plans[0][-1] == Action(COLLECT, 0, 0)
    assert plans[2][0] == Action(BORROW, 2, 0)
    assert plans[2][-1] == Action(RETURN, 2, 0)
    assert plans[1] == plan(schedule, STATIONS, 4)[1]


def test_only_the_stage_that_borrows_waits() -> None:
    stations = (0, 1, 0, 1)
    plans = with_ties(plan("interleaved", stations, 2), stations, [Tie(0, "table", 3, "head")], trains=True)
    own = [action for action in plans[1] if action.stage == 3]
    assert own[0].kind == BORROW
    assert own[-1].kind == RETURN
    assert plans[1].index(own[0]) > 0


def test_inference_gives_nothing_back() -> None:
    plans = with_ties(plan("1f1b", STATIONS, 2, trains=False), STATIONS, [Tie(2, "head", 0, "table")], trains=False)
    assert plans[2][0].kind == LEND
    assert plans[0][0].kind == BORROW
    assert not {RETURN, COLLECT} & {action.kind for own in plans for action in own}


def test_an_agenda_waits_for_what_is_lent_and_given_back() -> None:
    tie = Tie(0, "table", 1, "head")
    first, second = with_ties(plan("gpipe", (0, 1), 1), (0, 1), [tie], trains=True)
    borrower = Agenda(second, 2)
    assert borrower.awaited() == (BORROW, 1, 0)
    borrower.come((BORROW, 1, 0), "value")
    assert borrower.begin() == (Action(BORROW, 1, 0), "value")
    owner = Agenda(first, 2)
    assert owner.begin() == (Action(LEND, 0, 0), None)
    owner.begin()
    owner.come(("backward", 0, 0), "gradients")
    owner.begin()
    assert owner.awaited() == (COLLECT, 0, 0)


def test_names() -> None:
    assert parse_ties(["0.a.weight", "2.b", "1.c"], 3) == [Tie(0, "a.weight", 2, "b"), Tie(0, "a.weight", 1, "c")]
    with pytest.raises(UsageError, match="named together"):
        parse_ties(["0.weight"], 3)
    for name in ("3.weight", "weight", "0", "x.weight"):
        with pytest.raises(UsageError, match="names no parameter of one of 3 stages"):
            parse_ties(["0.weight", name], 3)
