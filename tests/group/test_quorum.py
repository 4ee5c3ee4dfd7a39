"""Who is in the next generation."""

from __future__ import annotations

import random

import pytest

from telegrad.group.members import Member
from telegrad.group.quorum import Arrival, Before, Limits, Quorum, Verdict, members_of


def member(name: str, id_: int = -1, life: int = 0) -> Member:
    return Member(name, id_, f"{name}/{life}", "program", "host", "", ("127.0.0.1", 1))


def generation(number: int, *names: str, without: tuple[str, ...] = (), me: str = "") -> Before:
    members = tuple(member(name, rank) for rank, name in enumerate(names) if name not in without)
    return Before(number, members, tuple(f"{name}/0" for name in without), f"{me}/0" if me else "")


def again(name: str, before: Before) -> Arrival:
    """One who was in that generation."""
    return Arrival(member(name, life=1), before._replace(me=f"{name}/0"))


def new(name: str, rank: int = -1) -> Arrival:
    return Arrival(member(name, rank, life=2))


def quorum(limits: Limits, *arrivals: Arrival) -> Quorum:
    made = Quorum(limits)
    for place, arrival in enumerate(arrivals, 1):
        made.come(place, arrival)
    return made


def names(made: Quorum, quiet: bool = False, late: bool = False) -> list[str]:
    """Of the next generation, by rank."""
    verdict = made.decide(quiet, late)
    return [made.at(place).member.name for place in verdict.places] if verdict is not None else []


def test_the_first_generation_waits_for_the_most_or_for_a_last_call() -> None:
    limits = Limits(2, 3)
    assert names(quorum(limits, new("a")), quiet=True) == []
    assert names(quorum(limits, new("a"), new("b"))) == []
    assert names(quorum(limits, new("a"), new("b")), quiet=True) == ["a", "b"]
    assert names(quorum(limits, new("a"), new("b"), new("c"))) == ["a", "b", "c"]
    assert names(quorum(limits, new("a"), new("b"), new("c"), new("d"))) == ["a", "b", "c"]
    assert quorum(limits, new("a"), new("b"), new("c")).decide(False, False) == Verdict(1, (1, 2, 3))


def test_ranks_that_are_wished_are_heeded_among_those_who_are_new() -> None:
    assert names(quorum(Limits(1, 4), new("b"), new("c", 2), new("a", 0)), quiet=True) == ["a", "c", "b"]


def test_survivors_come_first_by_their_ranks() -> None:
    before = generation(4, "a", "b", "c")
    made = quorum(Limits(2, 4), new("x"), again("c", before), again("b", generation(4, "b", "c")), new("y"))
    assert made.awaited() == [member("a", 0)]
    assert "'a'" in made.lacks()
    assert made.missing() == ["a"]
    assert names(made) == []
    made.dead = {"a/0"}
    assert made.decide(False, False).number == 5
    assert made.decide(False, False).survivors == 2
    assert names(made) == ["c", "b", "x", "y"] or names(made) == ["b", "c", "x", "y"]


def test_who_does_not_come_is_waited_for_until_it_is_late() -> None:
    before = generation(1, "a", "b", "c")
    made = quorum(Limits(2), again("a", before), again("b", before))
    assert names(made) == []
    assert names(made, late=True) == ["a", "b"]
    assert names(quorum(Limits(3), again("a", before)), late=True) == []


def test_who_was_left_out_is_not_waited_for() -> None:
    before = generation(1, "a", "b", "c", without=("b",))
    made = quorum(Limits(2), again("a", before), again("c", generation(1, "a", "b", "c")))
    assert names(made) == ["a", "c"]


def test_who_was_left_out_comes_back_as_a_new_one() -> None:
    now = generation(2, "a", "c")
    made = quorum(Limits(1), again("b", generation(1, "a", "b", "c")), again("a", now), again("c", now))
    verdict = made.decide(False, False)
    assert verdict == Verdict(3, (2, 3, 1), 2)


def test_those_who_are_new_wait_for_a_generation_that_runs() -> None:
    made = quorum(Limits(1), new("x"))
    made.running = generation(7, "a", "b")
    assert names(made, quiet=True) == []
    made.dead = {"a/0", "b/0"}
    assert names(made, quiet=True) == ["x"]
    assert made.decide(True, False).number == 8


def test_what_one_knows_of_a_generation_holds_where_the_store_has_forgotten_it() -> None:
    spare = Arrival(member("x"), generation(7, "a", "b"))
    assert names(quorum(Limits(1), spare, new("y")), quiet=True) == []


def test_a_name_is_refused_to_the_second_who_has_it() -> None:
    before = generation(1, "a", "b")
    made = quorum(Limits(1), new("a"), again("a", before), again("b", before), new("c"))
    assert made.decide(False, False) == Verdict(2, (2, 3, 4), 2, ((1, 2),))


def test_who_has_no_name_gets_one_by_its_role_and_rank() -> None:
    arrivals = [Arrival(member("", life=number)._replace(role="actor", incarnation=str(number))) for number in range(3)]
    made = quorum(Limits(3, 3), *arrivals)
    assert made.decide(False, False).places == (1, 2, 3)
    assert [each.name for each in members_of(arrivals)] == ["actor0", "actor1", "actor2"]
    assert [each.id for each in members_of(arrivals)] == [0, 1, 2]


def test_room_is_for_survivors_first() -> None:
    before = generation(1, "a", "b")
    made = quorum(Limits(1, 2), new("x"), again("b", before), again("a", before))
    assert names(made) == ["a", "b"]


@pytest.mark.parametrize("limits", [Limits(2), Limits(2, 5)])
def test_what_is_lacking_is_told(limits: Limits) -> None:
    assert "1 worker of 2 " in quorum(limits, new("a")).lacks()
    assert "2 workers" in quorum(limits, new("a"), new("b")).lacks()
    assert "'a', 'b'; more may come" in quorum(limits, new("a"), new("b")).lacks()
    assert repr(limits.least) in repr(quorum(limits))


def test_all_travels_as_text() -> None:
    arrival = again("a", generation(3, "a", "b", without=("b",)))
    assert Arrival.from_json(arrival.to_json()) == arrival
    verdict = Verdict(3, (2, 1), 1, ((4, 2),))
    assert Verdict.from_json(verdict.to_json()) == verdict


def test_the_order_of_coming_changes_nothing_for_survivors() -> None:
    before = generation(1, *"abcde")
    for seed in range(50):
        chance = random.Random(seed)
        arrivals = [again(name, before) for name in "abcde"]
        chance.shuffle(arrivals)
        assert names(quorum(Limits(1), *arrivals)) == list("abcde")
