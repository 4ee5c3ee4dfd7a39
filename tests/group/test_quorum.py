"""Tests of the decision which workers form the next generation."""

import random
from typing import cast

import pytest

from telegrad._core.membership.generation_monitor import arrivals_in, gone_on, is_wanted
from telegrad._core.membership.generations import (
    COME,
    GENERATION,
    NONE,
    Arrival,
    Before,
    Formed,
    GroupSize,
    Quorum,
    end,
    lives_in,
    look,
)
from telegrad._core.membership.members import Member
from telegrad._core.stores.directory import ABSENT, Directory, Swap
from tests.directory.naive import Naive

ANY = GroupSize(1)


def member(name: str, id_: int = -1, life: int = 0) -> Member:
    return Member(name, id_, f"{name}/{life}", "program", "host", "", ("127.0.0.1", 1))


def generation(number: int, *names: str, has_ended: bool = False) -> Formed:
    return Formed(number, tuple(member(name, rank) for rank, name in enumerate(names)), has_ended=has_ended)


def again(name: str, number: int, without: tuple[str, ...] = (), limits: GroupSize = ANY) -> Arrival:
    """Return the request of a worker that was in the generation of this number."""
    before = Before(number, "group", tuple(f"{each}/0" for each in without), f"{name}/0")
    return Arrival(member(name, life=1), before, str(limits))


def new(name: str, rank: int = -1, limits: GroupSize = ANY) -> Arrival:
    return Arrival(member(name, rank, life=2), limits=str(limits))


def quorum(limits: GroupSize, *arrivals: Arrival, running: Formed = NONE, dead: tuple[str, ...] = ()) -> Quorum:
    same = [each._replace(limits=str(limits)) for each in arrivals]
    return Quorum(limits, running, same, {f"{name}/0" for name in dead})


def names(made: Quorum, quiet: bool = False, late: bool = False) -> list[str]:
    """Return the names in the next generation, by rank."""
    formed = made.decide(quiet, late)
    return [each.name for each in formed.members] if formed is not None else []


def test_the_first_generation_waits_for_the_maximum_or_a_last_call() -> None:
    limits = GroupSize(2, 3)
    assert names(quorum(limits, new("a")), quiet=True) == []
    assert names(quorum(limits, new("a"), new("b"))) == []
    assert names(quorum(limits, new("a"), new("b")), quiet=True) == ["a", "b"]
    assert names(quorum(limits, new("a"), new("b"), new("c"))) == ["a", "b", "c"]
    assert names(quorum(limits, new("a"), new("b"), new("c"), new("d"))) == ["a", "b", "c"]
    formed = quorum(limits, new("a"), new("b"), new("c")).decide(False, False)
    assert formed is not None
    assert (formed.number, formed.survivors, formed.limits, formed.has_ended) == (1, 0, "2 to 3", False)
    assert [each.id for each in formed.members] == [0, 1, 2]


def test_ranks_that_new_workers_ask_for_are_respected() -> None:
    assert names(quorum(GroupSize(1, 4), new("b"), new("c", 2), new("a", 0)), quiet=True) == ["a", "c", "b"]


def test_workers_with_other_limits_are_not_counted() -> None:
    limits = GroupSize(2)
    assert names(Quorum(limits, NONE, [new("a", limits=limits), new("b", limits=GroupSize(3))]), quiet=True) == []


@pytest.mark.parametrize(
    ("limits", "text"),
    [((1, 1), "1 worker"), ((1, 0), "1 or more workers"), ((1, 2), "1 to 2 workers"), ((2, 2), "2 workers")],
)
def test_limits_are_told_by_their_count(limits: tuple[int, int], text: str) -> None:
    assert GroupSize(*limits).workers == text


def test_survivors_come_first_by_their_ranks() -> None:
    running = generation(4, "a", "b", "c")
    come = new("x"), again("c", 4), again("b", 4), new("y")
    made = quorum(GroupSize(2, 4), *come, running=running)
    assert made.awaited() == [member("a", 0)]
    assert made.lacks() == "generation 4 is running until 'a' calls rendezvous_again(), or is lost"
    assert made.missing() == ["a"]
    assert names(made) == []
    made = quorum(GroupSize(2, 4), *come, running=running, dead=("a",))
    assert names(made) == ["b", "c", "x", "y"]
    formed = made.decide(False, False)
    assert formed is not None
    assert (formed.number, formed.survivors) == (5, 2)


def test_a_missing_survivor_is_waited_for_until_the_deadline() -> None:
    running = generation(1, "a", "b", "c")
    made = quorum(GroupSize(2), again("a", 1), again("b", 1), running=running)
    assert names(made) == []
    assert names(made, late=True) == ["a", "b"]
    assert names(quorum(GroupSize(3), again("a", 1), running=running), late=True) == []


def test_a_worker_that_was_left_out_is_not_waited_for() -> None:
    made = quorum(GroupSize(2), again("a", 1, without=("b",)), again("c", 1), running=generation(1, "a", "b", "c"))
    assert names(made) == ["a", "c"]


def test_a_worker_that_was_left_out_comes_back_as_a_new_member() -> None:
    running = generation(2, "a", "c")
    late = again("b", 1, without=("a",))  # its knowledge of its own generation does not hold for this one
    assert quorum(GroupSize(1), late, running=running).missing() == ["a", "c"]
    formed = quorum(GroupSize(1), late, again("a", 2), again("c", 2), running=running).decide(False, False)
    assert formed is not None
    assert [each.name for each in formed.members] == ["a", "c", "b"]
    assert formed.survivors == 2


def test_new_workers_wait_for_a_generation_that_runs() -> None:
    running = generation(7, "a", "b")
    assert names(quorum(GroupSize(1), new("x"), running=running), quiet=True) == []
    made = quorum(GroupSize(1), new("x"), running=running, dead=("a", "b"))
    assert names(made, quiet=True) == ["x"]
    formed = made.decide(True, False)
    assert formed is not None
    assert (formed.number, formed.survivors) == (8, 0)


def test_a_member_that_missed_its_generation_is_waited_for_not_added() -> None:
    running = Formed(1, (new("a").member._replace(id=0), member("b", 1)))
    made = quorum(GroupSize(1), new("a"), again("b", 1), running=running)
    assert made.missing() == ["a"]
    assert names(made, late=True) == ["b"]


def test_the_numbers_go_on_after_a_group_has_ended() -> None:
    running = generation(3, "a", "b", has_ended=True)
    made = quorum(GroupSize(1), new("x"), again("a", 3), running=running)
    assert made.awaited() == []
    formed = made.decide(True, False)
    assert formed is not None
    assert (formed.number, formed.survivors, len(formed.members)) == (4, 0, 2)


def test_a_name_is_refused_to_the_second_worker() -> None:
    made = quorum(GroupSize(1), new("a"), again("a", 1), again("b", 1), new("c"), running=generation(1, "a", "b"))
    formed = made.decide(False, False)
    assert formed is not None
    assert [each.incarnation for each in formed.members] == ["a/1", "b/1", "c/2"]


def test_a_worker_without_a_name_gets_one_by_its_role_and_rank() -> None:
    arrivals = [Arrival(member("", life=number)._replace(role="actor", incarnation=str(number))) for number in range(3)]
    formed = quorum(GroupSize(3, 3), *arrivals).decide(False, False)
    assert formed is not None
    assert [each.name for each in formed.members] == ["actor0", "actor1", "actor2"]
    assert [each.id for each in formed.members] == [0, 1, 2]


def test_survivors_get_a_place_before_new_workers() -> None:
    made = quorum(GroupSize(1, 2), new("x"), again("b", 1), again("a", 1), running=generation(1, "a", "b"))
    assert names(made) == ["a", "b"]


@pytest.mark.parametrize("limits", [GroupSize(2), GroupSize(2, 5)])
def test_the_reason_of_waiting_is_reported(limits: GroupSize) -> None:
    assert "1 worker of 2 " in quorum(limits, new("a")).lacks()
    assert "2 workers" in quorum(limits, new("a"), new("b")).lacks()
    assert "'a', 'b'; more may join" in quorum(limits, new("a"), new("b")).lacks()


def test_arrivals_and_generations_survive_conversion_to_json() -> None:
    arrival = again("a", 3, without=("b",))
    assert Arrival.from_json(arrival.to_json()) == arrival
    formed = generation(3, "a", "b")._replace(survivors=1, limits="2", has_ended=True)
    assert Formed.from_json(formed.to_json()) == formed
    assert Formed.from_json(formed._replace(group="group").to_json()).group == ""


def test_the_order_of_arrivals_does_not_change_the_ranks_of_survivors() -> None:
    for seed in range(50):
        chance = random.Random(seed)
        arrivals = [again(name, 1) for name in "abcde"]
        chance.shuffle(arrivals)
        assert names(quorum(GroupSize(1), *arrivals, running=generation(1, *"abcde"))) == list("abcde")


class Kept(Naive):
    """The part of a directory that elastic groups use."""

    def swap(self, key: str, value: bytes, expected: int = ABSENT) -> Swap:  # type: ignore[override]
        return cast("Swap", super().swap(key, value, expected, 0))


def test_the_state_of_an_elastic_group_is_read_and_ended() -> None:
    kept = Kept()
    directory = cast(Directory, kept)
    assert look(directory) == (0, NONE, ABSENT, (), {})
    assert not lives_in(directory, lambda _: True)
    late, early, formed = new("b"), new("a"), generation(3, "c", "d")
    kept.swap(COME + "z", early.to_json().encode())
    kept.swap(COME + "b", late.to_json().encode())
    kept.swap(GENERATION, formed.to_json().encode())
    assert look(directory) == (3, formed, 3, (early, late), {"z": 1, "b": 2})
    assert arrivals_in(directory) == [late, early]
    assert [lives_in(directory, lambda each, name=name: each.name == name) for name in "abcde"] == [True] * 4 + [False]  # type: ignore[misc]
    assert not end(directory, generation(2, "c", "d"))
    assert not look(directory).running.has_ended
    assert end(directory, formed)
    assert look(directory).running == formed._replace(has_ended=True)
    assert [lives_in(directory, lambda each, name=name: each.name == name) for name in "ac"] == [True, False]  # type: ignore[misc]


def test_who_has_left_a_generation_and_for_whom_the_next_one_is_wanted() -> None:
    mine = generation(1, "a", "b")
    assert gone_on([again("b", 1), new("c")], mine) == [1]

    def wanted(arrival: Arrival, most: int = 0) -> bool:
        assert not is_wanted([arrival], mine, most, lambda _: False)
        return is_wanted([arrival], mine, most, lambda each: each == arrival.member)

    assert wanted(new("c"))
    assert wanted(new("c"), 3)
    assert not wanted(new("c"), 2)
    assert not wanted(new("b"))  # the name is in use
    assert wanted(again("b", 1), 2)
    assert not wanted(Arrival(mine.members[0]))
