"""Bids to a published value under a seeded scheduler: workers come, ask, die and are missed in any order.

    at most one living worker has the value, at any moment
    once all is quiet, one has it, if any worker that lives publishes it

A failing seed is printed as SEED=...; `TELEGRAD_SEED=... pytest tests/sim/test_bids.py` replays it alone.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable, Mapping

import pytest

from telegrad.rpc.bids import ASKS, NOTHING, OWNS, STANDS_BY, Bid, Rank

SEED = os.environ.get("TELEGRAD_SEED")
SEEDS = [int(SEED)] if SEED else range(2000)
STEPS = 60


class Worker:
    """What the rim keeps around a bid."""

    def __init__(self, rank: int, number: int, kind: type[Bid]) -> None:
        self.me: Rank = rank, f"{number:04}"
        self.bid = kind(self.me)
        self.view: set[Worker] = set()
        self.answers: dict[Rank, str] = {}
        self.round = 0
        self.lives = True
        self.publishes = self.deciding = self.again = False


class World:
    """Questions and answers under way, deaths of which not all have heard."""

    def __init__(self, seed: int, kind: type[Bid]) -> None:
        self.random = random.Random(seed)
        self.kind = kind
        self.workers: list[Worker] = []
        self.acts: list[Callable[[], None]] = []  # that may happen next, in any order
        for _ in range(self.random.randint(2, 4)):
            self.join()

    def living(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.lives]

    def join(self) -> None:
        taken = {worker.me[0] for worker in self.living()}
        free = [rank for rank in range(8) if rank not in taken]
        new = Worker(self.random.choice(free[:3]), len(self.workers), self.kind)
        self.workers.append(new)
        new.view = set(self.living()) - {new}
        for other in new.view:
            self.acts.append(lambda other=other: self.meet(other, new))  # type: ignore[misc]

    def meet(self, worker: Worker, new: Worker) -> None:
        """A worker hears of one that has come; whoever asks already asks it, too."""
        if new.lives and new not in worker.view:
            worker.view.add(new)
            if worker.lives and worker.deciding:
                number = worker.round
                self.acts.append(lambda: self.asked(worker, new, number))

    def die(self) -> None:
        dead = self.random.choice(self.living())
        dead.lives = False
        for other in self.living():
            self.acts.append(lambda other=other: self.hear(other, dead))  # type: ignore[misc]

    def hear(self, worker: Worker, dead: Worker) -> None:
        worker.view.discard(dead)
        if worker.lives and worker.publishes:
            self.look(worker)
            self.decide(worker)

    def publish(self, worker: Worker) -> None:
        worker.publishes = True
        self.decide(worker)

    def decide(self, worker: Worker) -> None:
        worker.again = worker.deciding
        if worker.deciding or not worker.bid.begin():
            return
        worker.deciding = True
        self.ask(worker)

    def ask(self, worker: Worker) -> None:
        worker.view |= {other for other in self.living() if other is not worker}  # it looks who is there
        worker.answers = {}
        worker.round += 1
        for other in sorted(worker.view, key=lambda each: each.me):
            self.acts.append(lambda other=other, number=worker.round: self.asked(worker, other, number))  # type: ignore[misc]
        self.look(worker)

    def asked(self, asker: Worker, other: Worker, number: int) -> None:
        if not other.lives:
            return  # the asker will hear of its death
        state = other.bid.asked(asker.me) if other.publishes else NOTHING
        self.acts.append(lambda: self.answer(asker, other, state, number))

    def answer(self, asker: Worker, other: Worker, state: str, number: int) -> None:
        if asker.lives and asker.round == number:
            asker.answers[other.me] = state
            self.look(asker)

    def look(self, worker: Worker) -> None:
        """Whether all have answered that are there."""
        late = [other for other in worker.view if other.me not in worker.answers]
        if not worker.deciding or late:
            return
        again, worker.again = worker.again, False
        state = worker.bid.answered({other.me: worker.answers[other.me] for other in worker.view})
        if state == OWNS or (state == STANDS_BY and not again):
            worker.deciding = False
        else:
            worker.bid.begin()
            self.ask(worker)

    def run(self) -> None:
        for _ in range(STEPS):
            chance = self.random.random()
            silent = [worker for worker in self.living() if not worker.publishes]
            if chance < 0.1 and silent:
                self.publish(self.random.choice(silent))
            elif chance < 0.14 and len(self.living()) > 1:
                self.die()
            elif chance < 0.2 and len(self.living()) < 6:
                self.join()
            else:
                self.step()
            self.check()
        for _ in range(10_000):
            if not self.acts:
                break
            self.step()
            self.check()
        assert not self.acts, "it never comes to rest"
        if any(worker.publishes for worker in self.living()):
            assert len(self.owners()) == 1, f"nobody has the value: {[w.bid for w in self.living()]}"

    def step(self) -> None:
        if self.acts:
            self.acts.pop(self.random.randrange(len(self.acts)))()

    def owners(self) -> list[Worker]:
        return [worker for worker in self.living() if worker.bid.state == OWNS]

    def check(self) -> None:
        assert len(self.owners()) <= 1, f"several have the value: {[worker.bid for worker in self.owners()]}"


def run(seeds: Iterable[int], kind: type[Bid] = Bid) -> None:
    for seed in seeds:
        try:
            World(seed, kind).run()
        except AssertionError as error:
            raise AssertionError(f"SEED={seed} {error}") from error


def test_one_worker_has_the_value() -> None:
    run(SEEDS)


@pytest.mark.nightly
def test_one_worker_has_the_value_in_many_more_schedules() -> None:
    run(range(2000, 100_000))


class Forgetful(Bid):
    """Does not remember who has asked meanwhile."""

    def asked(self, who: Rank) -> str:
        return self.state


class Polite(Bid):
    """Leaves the value to whoever wants it, too."""

    def answered(self, answers: Mapping[Rank, str]) -> str:
        self.state = STANDS_BY if any(state != NOTHING for state in answers.values()) else OWNS
        return self.state


class Greedy(Bid):
    """Heeds only who has the value."""

    def answered(self, answers: Mapping[Rank, str]) -> str:
        self.state = STANDS_BY if OWNS in answers.values() else OWNS
        return self.state


class Trusting(Bid):
    """Leaves the value to whoever has asked, be it a dead one."""

    def answered(self, answers: Mapping[Rank, str]) -> str:
        if super().answered(answers) == ASKS:
            self.state = STANDS_BY
        return self.state


@pytest.mark.parametrize("wrong", [Forgetful, Polite, Greedy, Trusting])
def test_wrong_variants_are_found(wrong: type[Bid]) -> None:
    with pytest.raises(AssertionError, match="SEED="):
        run(range(2000), wrong)


def test_a_bid_that_is_given_up_stands_by() -> None:
    bid = Bid((1, "a"))
    assert bid.begin()
    assert bid.state == ASKS
    bid.give_up()
    assert bid.state == STANDS_BY
    assert "rank 1: stands by" in repr(bid)
    assert bid.begin()
    assert bid.answered({}) == OWNS
    assert not bid.begin()
    assert bid.asked((0, "b")) == OWNS
