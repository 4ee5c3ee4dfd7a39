"""The reference protocol: single flows and their messages, then any schedule of a seeded cluster.

A failing seed is printed as SEED=...; `TELEGRAD_SEED=... pytest tests/sim/test_references.py` replays it alone.
"""

from collections import Counter
from typing import Any

import pytest

from telegrad._core.references import Holders, Owned
from telegrad._core.references.reference_protocol import (
    ASK,
    CAME_LATE,
    CONFIRM,
    CONFIRMED,
    DROPPED,
    FORGOT,
    GONE,
    MISSING,
    MOST_REMEMBERED,
    OWNER_DIED,
    SETTLED,
    STILLBORN,
    VALUE_GONE,
    WANTED,
    References,
)
from tests.seeds import by_day_and_night, run_each, tonight
from tests.sim.references_world import Worker, World, run

SEEDS = range(100)
WEATHER = {
    "calm": {"faults": False, "crashes": False, "mistakes": False},
    "loss and doubling": {"faults": True, "crashes": False, "mistakes": False},
    "deaths": {"faults": False, "crashes": True, "mistakes": False},
    "false deaths": {"faults": False, "crashes": False, "mistakes": True},
    "returns": {"faults": False, "crashes": True, "mistakes": False, "returns": True},
    "all at once": {"faults": True, "crashes": True, "mistakes": True, "returns": True},
}


class Trio:
    """Three machines whose messages arrive at once, and are counted."""

    def __init__(self) -> None:
        self.machines = {name: References(name) for name in "abc"}
        self.seen: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return self.machines[name]

    def post(self) -> None:
        """Deliver until nothing is left."""
        while any(machine.messages for machine in self.machines.values()):
            for name, machine in self.machines.items():
                messages, machine.messages = machine.messages, []
                for to, message in messages:
                    self.seen.append(message.kind)
                    self.machines[to].receive(name, message)

    def messages(self) -> Counter[Any]:
        """Return the number of messages of each kind since the last call."""
        self.post()
        seen, self.seen = self.seen, []
        return Counter(seen)

    def created(self, creator: str = "a", owner: str = "b") -> tuple[str, int]:
        """Return a reference made by a remote call."""
        ref, fork = self.machines[creator].create(owner)
        assert self.machines[owner].expect(ref, fork, creator)
        self.machines[creator].created(ref, fork, owner)
        return ref

    def passed(self, ref: tuple[str, int], owner: str, sender: str, receiver: str) -> str:
        return self.machines[receiver].arrive(ref, self.machines[sender].fork(ref, receiver), owner, sender)

    def dropped(self, ref: tuple[str, int], *users: str) -> Counter[Any]:
        """Drop the last handles of these users, after which nothing is left; return the number of messages."""
        for user in users:
            self.machines[user].drop(ref)
        found = self.messages()
        assert self.is_empty()
        return found

    def is_empty(self) -> bool:
        return not any(machine.shares or machine.owned for machine in self.machines.values())


@pytest.fixture
def trio() -> Trio:
    return Trio()


# The number of messages of each way, for any number of workers


def test_creation_takes_no_letter(trio: Trio) -> None:
    ref = trio.created()
    assert trio.messages() == {}
    assert trio.dropped(ref, "a") == {DROPPED: 1}


@pytest.mark.parametrize(("sender", "receiver", "letters"), [("b", "a", {}), ("a", "b", {SETTLED: 1})])
def test_owner_to_user_takes_no_letter_and_user_to_owner_one(
    trio: Trio, sender: str, receiver: str, letters: dict[Any, int]
) -> None:
    ref = trio.b.own() if sender == "b" else trio.created()
    trio.passed(ref, "b", sender, receiver)
    assert trio.messages() == letters
    assert trio.dropped(ref, sender, receiver) == {DROPPED: 1}


def test_user_to_user_takes_three_letters_and_a_second_handle_is_the_same_fork(trio: Trio) -> None:
    ref = trio.created()
    trio.passed(ref, "b", "a", "c")
    assert trio.messages() == {CONFIRM: 1, CONFIRMED: 1, SETTLED: 1}
    trio.passed(ref, "b", "a", "c")
    assert trio.messages() == {SETTLED: 1}
    assert len(trio.b.owned[ref].forks) == 2
    assert trio.dropped(ref, "c", "c", "a") == {DROPPED: 2}


def test_a_reference_may_arrive_before_its_creation(trio: Trio) -> None:
    ref, fork = trio.a.create("b")
    trio.passed(ref, "b", "a", "c")
    assert trio.messages() == {CONFIRM: 1, WANTED: 1, CONFIRMED: 1, SETTLED: 1}
    assert trio.b.expect(ref, fork, "a")
    trio.a.created(ref, fork, "b")
    trio.dropped(ref, "a", "c")


# Deaths and broken connections


def test_users_learn_of_the_owners_death(trio: Trio) -> None:
    ref = trio.created()
    trio.passed(ref, "b", "a", "c")
    trio.post()
    for user in (trio.a, trio.c):
        user.dead("b")
        assert user.fault(ref) == OWNER_DIED
        user.drop(ref)
        assert user.messages == []
        assert not user.shares


def test_a_lost_message_is_asked_for_and_refused_when_it_comes(trio: Trio) -> None:
    ref = trio.b.own()
    lost = trio.b.fork(ref, "a")
    trio.b.drop(ref)
    trio.b.ask("a")
    assert trio.messages() == {ASK: 1, MISSING: 1}
    assert trio.is_empty()
    assert trio.a.arrive(ref, lost, "b", "b") == CAME_LATE


def test_users_learn_that_a_creating_call_never_arrived(trio: Trio) -> None:
    ref, fork = trio.a.create("b")
    trio.passed(ref, "b", "a", "c")
    trio.messages()
    trio.a.stillborn(ref, fork, "b")
    assert trio.messages() == {STILLBORN: 1, GONE: 1, MISSING: 1}
    assert trio.b.hopeless == [ref]
    assert trio.a.fault(ref) == trio.c.fault(ref) == VALUE_GONE
    assert not trio.b.expect(ref, fork, "a")
    trio.dropped(ref, "a", "c")


def test_a_creation_that_was_never_sent_leaves_nothing(trio: Trio) -> None:
    ref, _ = trio.a.create("b")
    trio.a.cancel(ref)
    assert trio.messages() == {}
    assert trio.is_empty()


def test_a_limited_number_of_dead_workers_is_remembered() -> None:
    machine = References("a")
    for number in range(MOST_REMEMBERED + 8):
        machine.dead(f"w{number}")
    assert len(machine._dead) == MOST_REMEMBERED


# Living workers that were declared dead


def taken_for_dead(trio: Trio, by: str, who: str) -> None:
    """Let one worker declare another one dead, until it speaks again."""
    trio.machines[by].dead(who)
    trio.machines[by].alive(who)


def test_references_of_a_creator_that_forgot_the_owner_are_taken_back(trio: Trio) -> None:
    ref = trio.created()
    taken_for_dead(trio, "a", "b")
    assert trio.messages() == {FORGOT: 1, ASK: 1, MISSING: 1}
    assert not trio.b.owned
    assert trio.a.fault(ref) == OWNER_DIED
    trio.dropped(ref, "a")


def test_an_owner_that_forgot_its_user_knows_it_again(trio: Trio) -> None:
    ref = trio.created()
    trio.passed(ref, "b", "a", "b")  # the owner keeps the value
    trio.messages()
    taken_for_dead(trio, "b", "a")
    messages = trio.messages()
    assert messages[FORGOT] == messages[CONFIRM] == 1
    assert GONE not in messages
    assert trio.a.fault(ref) == ""
    trio.b.drop(ref)
    assert ref in trio.b.owned
    trio.dropped(ref, "a")


def test_a_value_that_was_freed_by_mistake_is_known_to_be_gone(trio: Trio) -> None:
    ref = trio.b.own()
    trio.passed(ref, "b", "b", "a")
    trio.b.drop(ref)
    taken_for_dead(trio, "b", "a")
    assert trio.messages() == {FORGOT: 1, CONFIRM: 1, GONE: 1, DROPPED: 1}
    assert trio.a.fault(ref) == VALUE_GONE
    trio.dropped(ref, "a")


def test_an_owner_stops_waiting_for_the_call_of_a_creator_that_forgot_it(trio: Trio) -> None:
    ref, _ = trio.a.create("b")
    trio.passed(ref, "b", "a", "c")
    trio.messages()
    trio.c.seek(ref)
    taken_for_dead(trio, "a", "b")
    assert trio.messages()[STILLBORN]
    assert trio.b.hopeless == [ref]
    assert trio.c.fault(ref) == VALUE_GONE


# Any schedule


def run_seeds(seeds: range, weather: str, make: type[World] = World) -> None:
    run_each(seeds, lambda seed: run(seed, **WEATHER[weather], make=make))


@by_day_and_night(range(40), tonight(range(40, 30_040)))
@pytest.mark.parametrize("weather", WEATHER)
def test_no_reference_is_lost_or_leaks_in_any_schedule(weather: str, seeds: range) -> None:
    run_seeds(seeds, weather)


@pytest.mark.parametrize("size", [3, 10, pytest.param(50, marks=pytest.mark.nightly)])
def test_letters_do_not_grow_with_the_workers(size: int) -> None:
    """The limits: CONFIRM, CONFIRMED, SETTLED, DROPPED for each pass; WANTED, STILLBORN, DROPPED for each creation."""
    world = run(0, faults=False, crashes=False, mistakes=False, events=2000, size=size)
    assert 0 < sum(world.sent.values()) <= 4 * world.passes + 3 * len(world.values)


BREAKS: dict[str, tuple[str, str, dict[Any, Any]]] = {
    "a parent that does not wait": ("_end_if_unused", "children", {}),
    "an owner that forgets its users": ("_free_if_unused", "forks", {}),
}


@pytest.mark.parametrize("rule", BREAKS)
def test_the_simulation_finds_broken_rules(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    method, field, ignored = BREAKS[rule]
    original = getattr(References, method)

    def broken(self: References, ref: tuple[str, int], *rest: Any) -> None:
        record = (self.shares if method == "_end_if_unused" else self.owned)[ref]
        kept = getattr(record, field)
        setattr(record, field, ignored)
        original(self, ref, *rest)
        setattr(record, field, kept)

    monkeypatch.setattr(References, method, broken)
    with pytest.raises(AssertionError, match="SEED="):
        run_seeds(SEEDS, "calm")


OMISSIONS = {
    "nobody is told": ("alive", lambda self, worker: self._dead.pop(worker, None)),
    "nothing is asked for": ("ask", lambda *_: None),
    "nothing is confirmed anew": ("_confirm_anew", lambda *_: None),
}


@pytest.mark.parametrize("omission", OMISSIONS)
def test_the_simulation_finds_omissions_after_false_deaths(omission: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(References, *OMISSIONS[omission])
    with pytest.raises(AssertionError, match="SEED="):
        run_seeds(SEEDS, "false deaths")


class KeepsItsKey(World):
    """A worker that comes back has the same key as before."""

    def new_key(self, lives: list[str]) -> str:
        self.dead.discard(lives[-1])
        return lives[-1]


class DeliversByName(World):
    """A message for one life goes to any life of its name."""

    def reached(self, to: str) -> Worker | None:
        return super().reached(self.lives[to.partition("#")[0]][-1])


@pytest.mark.parametrize("wrong", [KeepsItsKey, DeliversByName])
def test_the_simulation_finds_wrong_keys_of_workers_that_return(wrong: type[World]) -> None:
    with pytest.raises(AssertionError, match="SEED="):
        run_seeds(SEEDS, "returns", wrong)


def test_forks_are_counted_by_their_holders() -> None:
    holders, first, second = Holders(), Owned(True), Owned(True)
    holders.add(first, ("a", 1), "a")
    holders.add(second, ("a", 2), "a")
    assert holders.counts == {"a": 2}
    holders.add(first, ("a", 1), "b")  # it has moved
    assert (holders.counts, first.forks) == ({"a": 1, "b": 1}, {("a", 1): "b"})
    holders.end(first, ("a", 2))  # of the other
    assert holders.counts == {"a": 1, "b": 1}
    holders.end(second, ("a", 2))
    assert (holders.counts, second.forks) == ({"b": 1}, {})
