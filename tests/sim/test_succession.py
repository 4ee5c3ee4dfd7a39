"""Dynamic groups whose store moves, under a seeded scheduler: deaths, leaves, joins, servers that are out of reach.

Afterwards all use one store, in which all who live are listed, and no others; and nobody who lives was ever seen to
go, nor anybody to come twice. A failing seed is printed as SEED=...; `TELEGRAD_SEED=... pytest
tests/sim/test_succession.py` replays it alone.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

from telegrad.group import succession
from telegrad.group.succession import Changes, Look, Orphaned, Seat, Serve, Succession, Tell, Use, compared
from tests.sim.succession_world import World

SEEDS = [int(os.environ["TELEGRAD_SEED"])] if "TELEGRAD_SEED" in os.environ else range(1500)


def run(seeds: Any) -> None:
    for seed in seeds:
        try:
            World(seed).run()
        except (AssertionError, ValueError) as error:
            raise AssertionError(f"SEED={seed} {error}") from error


def test_all_come_to_one_store_and_nobody_comes_or_goes_because_of_it() -> None:
    run(SEEDS)


@pytest.mark.nightly
def test_all_come_to_one_store_in_many_worlds() -> None:
    run(range(1500, 101_500))


# Machines that are wrong


def of_the_same_term_none(self: Seat, other: Seat) -> bool:
    return self.term > other.term


def with_all_that_are_missing(present: Any, listed: Any, met: Any, gone: Any) -> Changes:
    return compared(present, listed, present.keys(), gone)


def with_ghosts(present: Any, listed: Any, met: Any, gone: Any) -> Changes:
    return compared(present, listed, met, ())


def the_lower_term_holds(self: Seat, other: Seat) -> bool:
    return (self.term, self.id) < (other.term, other.id)


def who_never_passes_over(self: Succession, now: float, candidates: Any) -> list[Any]:
    self._since, self._passed = now, set()
    return REAL_STEP(self, now, candidates)


def in_the_same_term(self: Succession) -> list[Any]:
    return [] if self.orphaned else [Serve(self.store.term)]


REAL_STEP = Succession.step

WRONG = {
    "a term of two": (Seat, "beats", of_the_same_term_none),
    "missing is gone": (succession, "compared", with_all_that_are_missing),
    "ghosts come": (succession, "compared", with_ghosts),
    "silence is waited for": (Succession, "step", who_never_passes_over),
    "the lower holds": (Seat, "beats", the_lower_term_holds),
    "home in the same term": (Succession, "move", in_the_same_term),
    "never home": (Succession, "move", lambda _: []),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_found(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*WRONG[what])
    with pytest.raises(AssertionError, match="SEED="):
        run(range(2000))


# One by one

STORE = Seat(1, 0, "a", "h", 1)


def orphan(me: str = "b") -> Succession:
    machine = Succession(me, f"entry of {me}", STORE)
    machine.lost()
    return machine


def test_the_first_serves_in_the_next_term() -> None:
    machine = orphan("a")
    assert machine.step(0, ["a", "b"]) == [Serve(2)]
    seat = Seat(2, 0, "a", "h", 2)
    assert machine.served(seat, ["b"]) == [Tell("b", seat)]
    assert machine.serves
    assert machine.step(0, ["a", "b"]) == []


def test_a_store_that_answers_moves_in_the_next_term() -> None:
    machine = Succession("a", "", STORE)
    assert machine.move() == [Serve(2)]
    seat = Seat(2, 0, "a", "h", 2)
    assert machine.served(seat, ["b"]) == [Tell("b", seat)]
    machine.lost()
    assert machine.move() == []


def test_others_ask_the_first_again_and_again_and_pass_over_who_is_silent() -> None:
    machine = orphan()
    asked = [Tell("a", Orphaned(1, "entry of b"))]
    assert machine.step(0, ["a", "b"]) == asked
    assert machine.step(0.1, ["a", "b"]) == []
    assert machine.step(0.6, ["a", "b"]) == asked
    assert machine.step(5, ["a", "b"]) == [Serve(3)]


def test_a_server_that_is_known_to_be_silent_is_not_asked() -> None:
    machine = Succession("c", "entry of c", STORE)
    machine.lost(silent=True)
    assert machine.step(0, ["a", "b", "c"]) == [Tell("b", Orphaned(1, "entry of c"))]
    assert machine.step(0, ["a", "c"]) == [Serve(3)]


def test_who_is_asked_looks_and_tells() -> None:
    machine = Succession("a", "", STORE)
    assert machine.receive("b", Orphaned(1, "")) == [Look()]
    assert machine.answers() == [Tell("b", STORE)]
    assert machine.receive("b", Orphaned(1, "")) == [Look()]
    machine.lost()
    assert machine.receive("c", Orphaned(1, "")) == []
    assert machine.served(Seat(2, 0, "a", "h", 2), ["d"])[-1] == Tell("c", machine.store)
    assert machine.receive("b", Orphaned(1, "")) == [Tell("b", machine.store)]


def test_a_store_that_answers_others_is_tried_again() -> None:
    machine = orphan()
    machine.step(0, ["a", "b"])
    assert machine.receive("a", STORE) == [Use(STORE)]
    assert machine.receive("a", STORE) == []


def test_whoever_serves_in_a_lower_term_is_told() -> None:
    machine = Succession("a", "", STORE)
    better = Seat(2, 5, "c", "h", 2)
    assert machine.receive("c", better) == [Use(better)]
    assert machine.receive("b", STORE) == [Tell("b", better)]
    assert Seat(2, 4, "x", "h", 2).beats(better)
    assert "term 2" in repr(machine)
