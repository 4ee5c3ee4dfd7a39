"""The change of generations under a seeded scheduler: letters in any order, steps, deaths, impatience.

A failing seed is printed as SEED=...; `TELEGRAD_SEED=... pytest tests/sim/test_steps.py` replays it alone.
"""

import random
from collections.abc import Iterator
from typing import Any

import pytest

from telegrad._core.membership.generations import (
    FINISH,
    HERE,
    LEAVING,
    MOVE,
    SERVING,
    STAY,
    Finish,
    GenerationBarrier,
    Impatient,
    Letter,
    Message,
    Move,
    Stay,
    StepReport,
)
from tests.seeds import by_day_and_night, run_each, tonight

SEEDS = range(2000)
MOST_STEPS = 4


class World:
    """Workers, and the letters between them, in order per pair; a connection may break and lose its letters."""

    def __init__(self, seed: int, faults: bool, make: type[GenerationBarrier] = GenerationBarrier) -> None:
        self.random = random.Random(seed)
        self.count = self.random.randint(1, 6)
        ranks = range(self.count)
        self.machines = {rank: make(rank, ranks) for rank in ranks}
        self.lines: dict[tuple[int, int], list[Any]] = {}
        self.serves = {rank for rank in ranks if self.random.random() < 0.3}
        self.steps = dict.fromkeys(ranks, 0)  # how often the worker was told to stay
        self.most = self.random.randint(0, MOST_STEPS)  # steps until a worker leaves
        self.standing: set[int] = set()
        self.alive = set(ranks)
        self.out: dict[int, str] = {}  # the last order of workers that do nothing any more
        self.notices: list[tuple[int, int]] = []  # (for whom, about whose death)
        self.broken: list[tuple[int, int]] = []  # (for whom, the other end of the connection that broke)
        self.deaths = self.random.randint(0, 2) if faults else 0
        self.breaks = self.random.randint(0, 2) if faults else 0
        self.impatient = self.random.randint(0, 1) if faults else 0
        self.failures = self.random.randint(0, 2) if faults else 0  # connections that could not be made
        self.mistakes = self.random.randint(0, 2) if faults and self.random.random() < 0.5 else 0
        self.calm = not faults
        self.waits = self.random.random() < 0.3  # a worker waits to be admitted

    def choices(self) -> Iterator[tuple[Any, ...]]:
        """Yield everything that may happen next."""
        for rank in sorted(self.alive - self.out.keys()):
            if rank not in self.standing:
                yield self.stand, rank
            elif self.impatient and self.machines[rank].told == "" and rank not in self.serves:
                yield self.give_up, rank
        for line, letters in sorted(self.lines.items()):
            if letters:
                yield self.deliver, line
                if self.breaks:
                    yield self.cut, line
                if self.failures:
                    yield self.lose, line
        yield from ((self.hear, notice) for notice in self.notices)
        yield from ((self.hear_of_end, pair) for pair in self.broken)
        if self.mistakes:
            living = sorted(self.alive - self.out.keys())
            yield from ((self.mistake, (rank, other)) for rank in living for other in living if rank != other)
        if self.deaths:
            yield from ((self.die, rank) for rank in sorted(self.alive - self.out.keys()))
        if self.waits:
            yield from ((self.want, rank) for rank in sorted(self.alive) if self.machines[rank].leader == rank)

    def post(self, sender: int, letters: list[Letter]) -> None:
        for to, message in letters:
            assert to != sender, "a letter to oneself"
            self.lines.setdefault((sender, to), []).append(message)
        for rank in sorted(self.alive & self.standing - self.out.keys()):
            self.see(rank)

    def see(self, rank: int) -> None:
        """Let a worker follow its orders."""
        told = self.machines[rank].told
        if told == STAY and rank not in self.serves:
            self.standing.discard(rank)
            self.steps[rank] += 1
            self.check_in_step(rank)
        elif told in (MOVE, FINISH):
            self.out[rank] = told
            # The worker's connections of this generation end. The end of a leader's is hidden: letters must suffice.
            if told == MOVE and self.machines[rank].leader != rank:
                self.notices += [(other, rank) for other in self.alive - self.out.keys()]

    def check_in_step(self, rank: int) -> None:
        """Check that no worker is a step ahead of one that is in the step before, unless that serves or leaves."""
        for other in self.alive - self.serves - self.out.keys():
            assert self.steps[other] >= self.steps[rank] - 1, "a step ahead"

    def stand(self, rank: int) -> None:
        self.standing.add(rank)
        leaves = self.steps[rank] >= self.most
        self.post(rank, self.machines[rank].stand(SERVING if rank in self.serves else LEAVING if leaves else HERE))

    def give_up(self, rank: int) -> None:
        self.impatient -= 1
        self.post(rank, self.machines[rank].give_up())

    def want(self, rank: int) -> None:
        self.waits = False
        self.post(rank, self.machines[rank].want(True))

    def deliver(self, line: tuple[int, int]) -> None:
        sender, to = line
        message = self.lines[line].pop(0)
        if to in self.alive:
            self.post(to, self.machines[to].receive(sender, message))

    def cut(self, line: tuple[int, int]) -> None:
        """Lose the letters of a line; both ends hear of it, sooner or later."""
        self.breaks -= 1
        self.lines[line] = []
        self.broken += [line, line[::-1]]

    def lose(self, line: tuple[int, int]) -> None:
        """Lose the letters of a line for which no connection could be made: only their sender hears of that."""
        self.failures -= 1
        self.lines[line] = []
        self.broken.append(line)

    def mistake(self, pair: tuple[int, int]) -> None:
        """Let one worker declare another dead that was silent for long, and end their connections."""
        self.mistakes -= 1
        rank, other = pair
        self.lines[pair] = []
        self.lines[pair[::-1]] = []
        self.broken.append(pair[::-1])
        self.post(rank, self.machines[rank].lost(other))

    def hear_of_end(self, pair: tuple[int, int]) -> None:
        self.broken.remove(pair)
        rank, other = pair
        if rank in self.alive:
            self.post(rank, self.machines[rank].remind(other))

    def die(self, rank: int) -> None:
        self.deaths -= 1
        self.alive.discard(rank)
        for line in self.lines:
            if rank in line and self.random.random() < 0.5:
                self.lines[line] = []
        self.notices += [(other, rank) for other in self.alive]

    def hear(self, notice: tuple[int, int]) -> None:
        self.notices.remove(notice)
        rank, dead = notice
        if rank in self.alive:
            self.post(rank, self.machines[rank].lost(dead))

    def run(self) -> None:
        for _ in range(20_000):
            options = list(self.choices())
            if not options:
                break
            act, argument = self.random.choice(options)
            act(argument)
        else:
            raise AssertionError("it does not end")
        self.check_end()

    def check_end(self) -> None:
        """Check that only workers that serve alone or leave still wait: the farewell is next."""
        waiting = self.alive - self.out.keys()
        for rank in waiting:
            machine = self.machines[rank]
            assert rank in self.serves or machine._how == LEAVING, f"{machine!r} waits for good"
        moved = {rank for rank in self.alive if self.out.get(rank) == MOVE}
        serving = waiting & self.serves
        if moved:
            assert not serving, f"{serving} serve on alone, {moved} have gone"
        if self.calm and moved:
            assert not waiting, f"{waiting} were not told that {moved} have gone"
        if self.calm and not moved:
            assert len({self.steps[rank] for rank in self.alive - self.serves}) <= 1


@by_day_and_night(range(800), tonight(range(800, 100_000)))
def test_all_workers_get_the_same_orders(seeds: range) -> None:
    run_each(seeds, lambda seed: World(seed, True).run())


def test_all_workers_get_the_same_orders_without_faults() -> None:
    run_each(range(800), lambda seed: World(seed, False).run())


def to_others(message: Message) -> list[Letter]:
    return [(1, message), (2, message)]


@pytest.mark.parametrize(
    ("hows", "more", "letters", "told"),
    [
        ((HERE, HERE, HERE), {}, to_others(Stay(0)), STAY),
        ((HERE, SERVING, HERE), {}, [(2, Stay(0))], STAY),
        ((SERVING, SERVING, SERVING), {}, [], ""),
        ((LEAVING, SERVING, LEAVING), {}, to_others(Finish()), FINISH),
        ((HERE, HERE, LEAVING), {}, to_others(Move((2,))), MOVE),
        ((HERE, SERVING, HERE), {"wanted": True}, to_others(Move(())), MOVE),
        ((SERVING, HERE, HERE), {"broken": True}, to_others(Move(())), MOVE),
    ],
)
def test_a_leader_decides_once_it_has_all_reports(
    hows: tuple[str, ...], more: dict[str, bool], letters: list[Letter], told: str
) -> None:
    barrier = GenerationBarrier(0, range(3))
    assert barrier.want(more.get("wanted", False)) == []
    sent = barrier.stand(hows[0])
    for rank in (1, 2):
        assert (sent, barrier.told) == ([], "")
        sent = barrier.receive(rank, StepReport(hows[rank], 0, more.get("broken", False) and rank == 1))
    assert (sent, barrier.told) == (letters, told)


def test_a_leader_whose_workers_all_serve_moves_for_a_worker_that_waits_to_join() -> None:
    barrier = GenerationBarrier(0, range(3))
    barrier.stand(SERVING)
    for rank in (1, 2):
        assert barrier.receive(rank, StepReport(SERVING, 0, False)) == []
    assert barrier.want(False) == []
    assert barrier.want(True) == to_others(Move(()))


def test_a_leader_does_not_wait_for_others_if_a_worker_between_steps_is_impatient() -> None:
    barrier = GenerationBarrier(0, range(3))
    barrier.stand(SERVING)
    assert barrier.receive(1, StepReport(HERE, 0, False)) == []
    assert barrier.receive(2, Impatient()) == []  # it has begun a step since
    assert barrier.receive(1, Impatient()) == [(1, Move((2,)))]
    assert barrier.receive(1, Impatient()) == []


@pytest.mark.parametrize(
    ("how", "message", "told"),
    [
        (HERE, Stay(0), STAY),
        (HERE, Stay(1), ""),
        (SERVING, Stay(0), ""),
        (HERE, Move((2,)), MOVE),
        (SERVING, Finish(), FINISH),
        (HERE, Finish(), ""),
    ],
)
def test_a_follower_obeys_between_its_steps(how: str, message: Message, told: str) -> None:
    barrier = GenerationBarrier(1, range(3))
    assert (barrier.receive(0, message), barrier.told) == ([], "")
    assert barrier.stand(how) == [(0, StepReport(how, 0, False))]
    assert barrier.receive(0, message) == []
    assert (barrier.told, barrier.without) == (told, message.without if isinstance(message, Move) else ())


def test_what_a_connection_may_have_lost_is_sent_again() -> None:
    barrier = GenerationBarrier(1, range(3))
    barrier.stand(HERE)
    assert barrier.remind(2) == []
    assert barrier.remind(0) == [(0, StepReport(HERE, 0, False))]
    barrier.receive(0, Move((2,)))
    assert barrier.remind(0) == [(0, Move((2,)))]


def test_an_impatient_worker_moves_alone_if_the_leader_is_silent() -> None:
    machine = GenerationBarrier(1, [0, 1, 2])
    assert machine.give_up() == [], "it is within a step"
    assert machine.stand(HERE) == [(0, StepReport(HERE, 0, False))]
    assert machine.give_up() == [(0, Impatient())]
    machine.move_alone()
    assert (machine.told, machine.without, machine.stand(HERE)) == (MOVE, (), [])
    assert machine.lost(7) == machine.receive(7, Impatient()) == []


def test_the_leader_goes_on_without_workers_that_do_not_come() -> None:
    leader = GenerationBarrier(0, [0, 1, 2])
    assert (leader.receive(1, StepReport(HERE, 0, False)), leader.missing) == ([], {0, 2})
    leader.stand(HERE)
    assert leader.give_up() == [(1, Move((2,)))]
    assert leader.receive(2, StepReport(HERE, 0, False)) == [(2, Move((2,)))]


class WithoutReminders(GenerationBarrier):
    """Letters that were lost with a connection are not repeated."""

    def remind(self, other: int) -> list[Letter]:
        return []


class WithoutEntry(GenerationBarrier):
    """The next leader gets no report."""

    def lost(self, other: int) -> list[Letter]:
        self.alive.discard(other)
        self._stands.pop(other, None)
        self.broken = True
        return self._conclude()


class Hasty(GenerationBarrier):
    """The leader does not wait for all."""

    @property
    def missing(self) -> set[int]:
        return set(list(super().missing)[1:])


class Forgetful(GenerationBarrier):
    """The leader takes a repeated report for one of the next step."""

    def _on_standing(self, sender: int, message: StepReport) -> list[Letter]:
        return super()._on_standing(sender, message._replace(step=self._led))


class Silent(GenerationBarrier):
    """A late worker does not learn that the others have gone."""

    def _on_standing(self, sender: int, message: StepReport) -> list[Letter]:
        return [each for each in super()._on_standing(sender, message) if not isinstance(each[1], Move)]


@pytest.mark.parametrize("broken", [WithoutReminders, WithoutEntry, Hasty, Forgetful, Silent])
def test_wrong_code_is_found(broken: type[GenerationBarrier]) -> None:
    with pytest.raises(AssertionError, match=r"SEED=\d+ AssertionError"):
        run_each(SEEDS, lambda seed: World(seed, True, broken).run())
