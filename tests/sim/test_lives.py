"""Calls to workers that come back under their names: what was meant for one life reaches no other, and runs once.

A failing seed is printed as SEED=...; `TELEGRAD_SEED=... pytest tests/sim/test_lives.py` replays it alone.
"""

from __future__ import annotations

import os
from math import inf
from typing import Any

import pytest

from telegrad.rpc.ledger import LONGEST, Entry, Key, Ledger
from telegrad.rpc.lobby import FIRST_PAUSE, LONGEST_PAUSE, LONGEST_REST, Fate, Lobby, Manner, rest, verdict
from tests.sim.lives_world import Asked, Life, Run, Side, World

SEEDS = range(1000)
AT_NIGHT = range(1000, 101_000)


def run(seeds: range, world: type[World] = World, **kinds: Any) -> None:
    if "TELEGRAD_SEED" in os.environ:
        seeds = range(int(os.environ["TELEGRAD_SEED"]), int(os.environ["TELEGRAD_SEED"]) + 1)
    for seed in seeds:
        try:
            world(seed, **kinds).run()
        except AssertionError as error:
            raise AssertionError(f"SEED={seed} {error}") from error


def test_no_life_gets_what_was_meant_for_another() -> None:
    run(SEEDS)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_no_life_gets_what_was_meant_for_another_in_many_worlds() -> None:
    run(AT_NIGHT)


class OpensToAnybody(World):
    """Nobody looks who it is that listens where an earlier life did."""

    def door(self, wanted: Life) -> Life | None:
        return self.doors.get(wanted.place)


class NotesTooLate(World):
    """What was looked up before a name was forgotten is noted after it."""

    def note(self, names: dict[str, Side], to: str, side: Side) -> None:
        self.names[to] = side


class KeepsNames(World):
    """A life that was struck out goes on being called by its name, as long as it lives."""

    def forget_names(self) -> None:
        pass


class RepeatsAnything(World):
    """What may have run is made once more, though it is not said to be idempotent."""

    def goes_on(self, asked: Asked, fate: Fate) -> bool:
        return super().goes_on(asked, fate) or (fate is Fate.MAY_HAVE_RUN and asked.manner.waits)


class HasAnotherKeyEachTime(World):
    """The callee cannot know that it is the same call."""

    def key(self, asked: Asked) -> Key:
        return Key("me", 1000 * asked.number + self.chance.randrange(1000))

    def finish(self, life: Life, attempt: Any, run: Run) -> None:
        run.done = True
        self.answer(run)


class AppliesToAnyLife(World):
    """What is for one life goes to whoever has its name."""

    def attempt(self, asked: Asked) -> Any:
        bound, asked.bound = asked.bound, None
        yield from super().attempt(asked)
        asked.bound = bound


class LooksOnce(Lobby[Asked]):
    """Who was not there at the first look is never looked for again."""

    def not_there(self, to: str | int, now: float, hopeless: bool = False) -> list[Asked]:
        failed = super().not_there(to, now, hopeless)
        if to in self._doors:
            self._doors[to].due = inf
        return failed


class ForgetsThoseWhoRest(Lobby[Asked]):
    """Those who may not go on yet are not looked after any more."""

    def there(self, to: str | int, now: float) -> list[Asked]:
        ready = super().there(to, now)
        if to in self._doors:
            self._doors[to].due = inf
        return ready


class FailsAll(Lobby[Asked]):
    """Nobody waits for a return."""

    def not_there(self, to: str | int, now: float, hopeless: bool = False) -> list[Asked]:
        return super().not_there(to, now, hopeless=True)


class ForgetsAtOnce(Ledger[Run]):
    """Answers are not kept."""

    def ended(self, key: Key, weight: int = 0) -> list[Entry[Run]]:
        return super().ended(key, weight) or [self._take_out(key)]


class ForgetsWhatRuns(Ledger[Run]):
    """What has not ended is not known."""

    def find(self, key: Key, left: float, now: float) -> Entry[Run] | None:
        entry = super().find(key, left, now)
        return entry if entry is not None and entry.ended else None


class ForgetsTooEarly(Ledger[Run]):
    """Answers go whose calls may still be made again."""

    def expire(self, now: float) -> list[Entry[Run]]:
        return super().expire(inf)


WRONG_WORLDS = [OpensToAnybody, NotesTooLate, KeepsNames, RepeatsAnything, HasAnotherKeyEachTime, AppliesToAnyLife]
WRONG_LOBBIES = [LooksOnce, ForgetsThoseWhoRest, FailsAll]
WRONG_LEDGERS = [ForgetsAtOnce, ForgetsWhatRuns, ForgetsTooEarly]


@pytest.mark.parametrize("wrong", WRONG_WORLDS)
def test_a_wrong_world_is_found(wrong: type[World]) -> None:
    with pytest.raises(AssertionError, match="SEED"):
        run(SEEDS, wrong)


@pytest.mark.parametrize("wrong", WRONG_LOBBIES)
def test_a_wrong_lobby_is_found(wrong: type[Lobby[Asked]]) -> None:
    with pytest.raises(AssertionError, match="SEED"):
        run(SEEDS, lobby=wrong)


@pytest.mark.parametrize("wrong", WRONG_LEDGERS)
def test_a_wrong_ledger_is_found(wrong: type[Ledger[Run]]) -> None:
    with pytest.raises(AssertionError, match="SEED"):
        run(SEEDS, ledger=wrong)


# One by one


def asked(to: str = "x", waits: bool = True, until: float = inf, rests: float = 0.0) -> Asked:
    return Asked(to, Manner(waits, True), None, 1, until, rests)


def test_what_a_failure_means() -> None:
    patient, again, both, plain = Manner(True, False), Manner(False, True), Manner(True, True), Manner(False, False)
    absent, lost, over = Fate.NOT_RUN, Fate.MAY_HAVE_RUN, Fate.OVER
    assert [verdict(each, absent, False) for each in (patient, again, both, plain)] == [True, False, True, False]
    assert [verdict(each, lost, True) for each in (patient, again, both, plain)] == [False, True, True, False]
    assert not any(verdict(each, over, False) for each in (patient, again, both, plain))
    assert verdict(both, absent, True)  # a repeated one waits, too


def test_who_may_have_run_rests_ever_longer() -> None:
    assert rest(0) == 0.0
    rests = [rest(repeats) for repeats in range(1, 12)]
    assert rests == sorted(rests)
    assert rests[-1] == LONGEST_REST


def test_one_look_is_made_for_all_who_wait_for_a_worker() -> None:
    lobby: Lobby[Asked] = Lobby()
    first, second, other = asked(), asked(), asked("y")
    for each in (first, second, other):
        assert lobby.enter(each, 1.0)
    assert lobby.looks(1.0) == ["x", "y"]
    assert lobby.looks(1.0) == []
    assert lobby.there("x", 1.1) == [first, second]
    assert len(lobby) == 1
    assert repr(lobby) == "<Lobby: 1 for 'y'>"
    assert lobby.there("x", 1.1) == lobby.not_there("x", 1.1) == []  # nobody waits any more


def test_looks_become_rarer() -> None:
    lobby: Lobby[Asked] = Lobby()
    lobby.enter(asked(), 0.0)
    now, pauses = 0.0, []
    for _ in range(8):
        assert lobby.looks(now) == ["x"]
        assert lobby.next() == inf
        assert lobby.not_there("x", now) == []
        pauses.append(lobby.next() - now)
        now = lobby.next()
    assert pauses[0] == FIRST_PAUSE
    assert pauses[-1] == pytest.approx(LONGEST_PAUSE)


def test_who_does_not_wait_fails_with_the_first_look() -> None:
    lobby: Lobby[Asked] = Lobby()
    patient, hasty = asked(), asked(waits=False)
    lobby.enter(patient, 0.0)
    lobby.enter(hasty, 0.0)
    lobby.looks(0.0)
    assert lobby.not_there("x", 0.1) == [hasty]
    assert lobby.not_there("x", 0.2, hopeless=True) == [patient]
    assert not len(lobby)


def test_who_rests_goes_on_later() -> None:
    lobby: Lobby[Asked] = Lobby()
    tired = asked(rests=2.0)
    lobby.enter(tired, 0.0)
    lobby.looks(0.0)
    assert lobby.there("x", 1.0) == []
    assert lobby.next() == 2.0
    assert lobby.looks(2.0) == ["x"]
    assert lobby.there("x", 2.0) == [tired]


def test_time_and_leaving() -> None:
    lobby: Lobby[Asked] = Lobby()
    late, gone, last = asked(until=3.0), asked(), asked("y")
    for each in (late, gone, last):
        lobby.enter(each, 0.0)
    lobby.looks(0.0)
    assert lobby.next() == 3.0
    assert lobby.expired(2.9) == []
    assert lobby.expired(3.0) == [late]
    assert lobby.leave(gone)
    assert not lobby.leave(gone)
    assert lobby.close() == [last]
    assert not lobby.enter(asked(), 4.0)
    assert lobby.next() == inf


def test_an_answer_is_kept_until_it_is_settled_or_out_of_time() -> None:
    ledger: Ledger[str] = Ledger()
    keys = [Key("a", number) for number in range(4)]
    for key in keys:
        assert ledger.find(key, 5.0, 0.0) is None
        ledger.begin(key, f"outcome {key.number}", 5.0, 0.0)
    assert ledger.settled(keys[0]) is None  # it runs still
    assert [entry.outcome for entry in ledger.ended(keys[0])] == ["outcome 0"]
    assert ledger.ended(keys[1]) == []
    assert ledger.settled(keys[1]).outcome == "outcome 1"
    assert ledger.settled(keys[1]) is None
    assert ledger.ended(keys[2]) == []
    assert ledger.find(keys[2], 0.0, 1.0).outcome == "outcome 2"  # now without a limit
    assert ledger.find(keys[3], 1.0, 1.0).outcome == "outcome 3"
    assert repr(ledger) == "<Ledger: 1 run, 1 answers kept>"
    assert ledger.expire(LONGEST) == []
    assert len(ledger.expire(1.0 + LONGEST)) == 1
    assert len(ledger) == 1  # what runs stays
