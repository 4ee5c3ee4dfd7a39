"""What a station does next, and what it waits for."""

from __future__ import annotations

from telegrad.nn.agenda import Agenda, Need
from telegrad.nn.schedule import BACKWARD, FORWARD, Action, plan


def test_an_agenda_waits_for_what_its_next_action_needs() -> None:
    (own,) = (each for each in plan("1f1b", (0, 1, 2), 2) if each[0].stage == 1)
    agenda = Agenda(own, 3)
    onward: list[Need] = [(FORWARD, 1, 0), (FORWARD, 1, 1)]
    back: list[Need] = [(BACKWARD, 1, 0), (BACKWARD, 1, 1)]
    assert agenda.awaited() == onward[0]
    agenda.come(back[0], "gradients")
    agenda.come(onward[1], "second")
    assert agenda.awaited() == onward[0]
    agenda.come(onward[0], "first")
    done = []
    while agenda.awaited() is None and not agenda.done:
        done.append(agenda.begin())
    assert [what for _, what in done] == ["first", "second", "gradients"]
    assert agenda.awaited() == back[1]
    agenda.come(back[1], "more")
    assert agenda.begin() == (Action(BACKWARD, 1, 1), "more")
    assert agenda.done
    assert agenda.awaited() is None


def test_an_agenda_of_the_ends_waits_for_nobody() -> None:
    agenda = Agenda(plan("zero-bubble", (0,), 3)[0], 1)
    while not agenda.done:
        assert agenda.awaited() is None
        agenda.begin()
    assert "3 deliveries" not in repr(agenda)
    assert "done" in repr(agenda)


def test_shows_what_is_next() -> None:
    agenda = Agenda(plan("1f1b", (0, 1), 2)[1], 2)
    assert repr(agenda) == "<Agenda: 0 of 4, next forward of stage 1, 0; 0 deliveries wait>"
