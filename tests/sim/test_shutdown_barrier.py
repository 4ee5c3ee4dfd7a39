"""The shutdown barrier under a seeded scheduler: messages in any order between workers, calls begun and ended, deaths.

A failing seed is printed as SEED=...; `TELEGRAD_SEED=... pytest tests/sim/test_shutdown_barrier.py` replays it alone.
"""

import random
from collections.abc import Iterator
from typing import Any

import pytest

from telegrad._core.membership.shutdown_barrier import (
    DONE,
    LEAVING,
    WAITING,
    Ask,
    Entered,
    Leave,
    Left,
    Letter,
    Missing,
    Quiet,
    ShutdownBarrier,
    Who,
)
from tests.seeds import by_day_and_night, run_each

SEEDS = range(1000)


class World:
    """Workers, the letters between them (in order per pair, as connections keep it), and calls in flight."""

    def __init__(
        self,
        seed: int,
        deaths: bool,
        breaks: bool = False,
        make: type[ShutdownBarrier] = ShutdownBarrier,
        tears: int = 0,
        ticks: int = 0,
    ) -> None:
        """`tears` limits the faults of connections between living workers; with `ticks`, nobody notices some of them.

        Each tick, all workers in shutdown ask again. It comes once nothing else can happen.
        """
        self.random = random.Random(seed)
        self.count = self.random.randint(1, 7)
        self.machines = {i: make(i, set(range(self.count))) for i in range(self.count)}
        self.lines: dict[tuple[int, int], list[Any]] = {}  # (sender, to) -> letters
        self.calls: list[tuple[int, int, int]] = []  # (caller, callee, calls it will make): on their way to the callee
        self.running: list[tuple[int, int, int]] = []  # calls that have come, and are not answered
        self.begun = dict.fromkeys(range(self.count), 0)
        self.alive = set(range(self.count))
        self.deaths = self.random.randint(1, 2) if deaths and self.count > 1 else 0
        self.notices: list[tuple[int, int]] = []  # (for whom, about whose death)
        self.gone: set[int] = set()  # left in good order
        self.dead: set[int] = set()
        self.breaks = self.random.randint(1, 3) if breaks else 0
        self.reminders: list[tuple[int, int]] = []  # (sender, to): lines on which letters were lost
        self.tears, self.ticks = self.random.randint(min(1, tears), tears), ticks
        self.is_torn = bool(tears)
        self.questions = 0 if tears else 5  # how often a worker may ask for whom it waits
        for worker in range(self.count):
            for _ in range(self.random.randint(0, 3)):
                self.begin(worker, 2)

    def begin(self, caller: int, depth: int) -> None:
        callee = self.random.randrange(self.count)
        self.begun[caller] += 1
        if callee in self.alive:
            self.calls.append((caller, callee, depth))

    def post(self, sender: int, letters: list[Any]) -> None:
        for to, message in letters:
            if to == sender:
                raise AssertionError("a letter to oneself")
            if isinstance(message, Missing) and not self.is_torn:
                assert all(self.may_seem_missing(id_, sender) for id_ in message.ids)
            self.lines.setdefault((sender, to), []).append(message)

    def may_seem_missing(self, worker: int, leader: int) -> bool:
        """Return True if a worker has not entered or has died, or its message is under way or to come."""
        told = any(isinstance(letter, Entered) for letter in self.lines.get((worker, leader), []))
        here = self.machines[worker].inside and worker in self.alive
        told |= (worker, leader) in self.reminders
        return not here or told or any(hears == worker for hears, _ in self.notices)

    def choices(self) -> Iterator[tuple[Any, ...]]:
        """Yield everything that may happen next."""
        for worker in sorted(self.alive - self.gone):
            machine = self.machines[worker]
            if not machine.inside:
                yield self.enter, worker
            elif machine.asked and self.is_quiet(worker):
                yield self.quiet, worker
            if machine.inside and self.questions:
                yield self.ask_who, worker
            if machine.state == DONE:
                yield self.leave, worker
        for line, letters in sorted(self.lines.items()):
            if letters:
                yield self.deliver, line
        yield from ((self.begin_to_run, call) for call in self.calls)
        yield from ((self.end_call, call) for call in self.running)
        yield from ((self.hear, notice) for notice in self.notices)
        yield from self.faults()

    def faults(self) -> Iterator[tuple[Any, ...]]:
        if self.breaks:
            yield from ((self.cut, line) for line, letters in sorted(self.lines.items()) if letters)
        yield from ((self.remind, line) for line in self.reminders)
        if self.tears:
            yield from ((self.tear, line) for line, letters in sorted(self.lines.items()) if letters)
            present = sorted(self.alive - self.gone)
            waiting = [each for each in present if self.machines[each].inside and self.machines[each].state == WAITING]
            yield from ((self.doubt, worker) for worker in waiting if len(present) > 1)
        if self.deaths:
            for worker in sorted(self.alive - self.gone):
                if self.machines[worker].state == WAITING:
                    yield self.die, worker

    def is_quiet(self, worker: int) -> bool:
        """Return True if the worker knows of no call, as it does not know of calls that are on their way to it."""
        calls = any(caller == worker for caller, _, _ in self.calls + self.running)
        return not calls and not any(callee == worker for _, callee, _ in self.running)

    def enter(self, worker: int) -> None:
        self.post(worker, self.machines[worker].enter(self.begun[worker] if self.is_quiet(worker) else None))

    def quiet(self, worker: int) -> None:
        self.post(worker, self.machines[worker].quiet(self.begun[worker]))

    def leave(self, worker: int) -> None:
        """Close the connections of a worker; the others hear of it."""
        assert self.is_torn or self.machines[worker].lost_ones <= self.dead, "missed one who left in good order"
        self.gone.add(worker)
        self.notices += [(other, worker) for other in self.alive - self.gone]

    def deliver(self, line: tuple[int, int]) -> None:
        message = self.lines[line].pop(0)
        sender, to = line
        if to in self.alive - self.gone:
            if isinstance(message, Leave):
                is_split = any(machine.lost_ones - self.dead for machine in self.machines.values())
                assert is_split or not self.calls + self.running, "told to leave while a call is in flight"
            self.post(to, self.machines[to].receive(sender, message))
            if isinstance(message, Leave) and sender in self.alive and not self.is_torn:
                assert self.machines[to].lost_ones >= self.machines[sender].lost_ones

    def cut(self, line: tuple[int, int]) -> None:
        """Lose the letters of a line for which no connection could be made; their receiver hears nothing of that."""
        self.breaks -= 1
        self.lines[line] = []
        if line[1] not in self.gone:  # otherwise nobody listens any more
            self.reminders.append(line)

    def tear(self, line: tuple[int, int]) -> None:
        """Lose the letters of one direction. Their sender notices, maybe the receiver too; with ticks, any or none."""
        self.tears -= 1
        self.lines[line] = []
        ends = [line, line[::-1]]
        self.reminders += self.random.choice([ends, ends[:1], *([ends[1:], []] if self.ticks else [])])

    def doubt(self, worker: int) -> None:
        """Let a worker take a living one for dead, because its handshakes fail; its probes are answered later."""
        self.tears -= 1
        other = self.random.choice(sorted(self.alive - self.gone - {worker}))
        self.post(worker, self.machines[worker].lost(other))
        if not self.ticks:
            self.reminders.append((worker, other))

    def tick(self) -> None:
        self.ticks -= 1
        for worker in sorted(self.alive - self.gone):
            self.post(worker, self.machines[worker].ask_who())

    def remind(self, line: tuple[int, int]) -> None:
        self.reminders.remove(line)
        sender, to = line
        if {sender, to} <= self.alive - self.gone:
            self.post(sender, self.machines[sender].remind(to))

    def begin_to_run(self, call: tuple[int, int, int]) -> None:
        self.calls.remove(call)
        self.running.append(call)

    def end_call(self, call: tuple[int, int, int]) -> None:
        self.running.remove(call)
        _, callee, depth = call
        if depth and self.random.random() < 0.5:  # the function called on before it returned
            self.begin(callee, depth - 1)

    def hear(self, notice: tuple[int, int]) -> None:
        other, worker = notice
        if self.lines.get((worker, other), []) and worker in self.gone:
            return  # a connection that is closed in good order delivers what was sent on it first
        self.notices.remove(notice)
        if other in self.alive - self.gone:
            self.post(other, self.machines[other].lost(worker, worker in self.dead))

    def ask_who(self, worker: int) -> None:
        self.questions -= 1
        self.post(worker, self.machines[worker].ask_who())

    def die(self, worker: int) -> None:
        self.deaths -= 1
        self.dead.add(worker)
        self.alive.discard(worker)
        self.calls = [call for call in self.calls if worker not in call[:2]]
        self.running = [call for call in self.running if worker not in call[:2]]
        for line in self.lines:
            if worker in line:
                self.lines[line] = []
        self.notices += [(other, worker) for other in self.alive - self.gone]

    def run(self) -> None:
        for _ in range(20_000):
            if self.alive <= self.gone:
                return
            options = list(self.choices()) or ([(World.tick, self)] if self.ticks else [])
            assert options, f"stuck: {[(i, m.state) for i, m in self.machines.items()]}"
            action, subject = self.random.choice(options)
            action(subject)
        raise AssertionError("no end")


@by_day_and_night(range(300), range(300, 3_000))
@pytest.mark.parametrize("breaks", [False, True], ids=["all arrives", "some is lost"])
@pytest.mark.parametrize("deaths", [False, True], ids=["all live", "some die"])
def test_all_workers_leave_and_only_when_nothing_is_in_flight(deaths: bool, breaks: bool, seeds: range) -> None:
    run_each(seeds, lambda seed: World(seed, deaths, breaks).run())


@by_day_and_night(range(200), range(200, 3_000))
@pytest.mark.parametrize("ticks", [0, 3], ids=["all is noticed", "ticks"])
@pytest.mark.parametrize("deaths", [False, True], ids=["all live", "some die"])
def test_all_workers_leave_once_the_network_is_quiet(deaths: bool, ticks: int, seeds: range) -> None:
    """Broken connections lose letters in any direction, and living workers seem dead."""
    run_each(seeds, lambda seed: World(seed, deaths, tears=6, ticks=ticks).run())


class AsksNotAgain(ShutdownBarrier):
    """The leader repeats only its greeting."""

    def remind(self, other: int) -> list[Letter]:
        return super().remind(other)[:1]


class SendsLeaveOnce(ShutdownBarrier):
    def _ask_again(self, other: int) -> list[Letter]:
        return [] if self.state == LEAVING else super()._ask_again(other)


@pytest.mark.parametrize("broken", [AsksNotAgain, SendsLeaveOnce])
def test_wrong_code_is_found(broken: type[ShutdownBarrier]) -> None:
    with pytest.raises(AssertionError, match=r"no end|stuck"):
        run_each(SEEDS, lambda seed: World(seed, False, True, broken).run())


def test_the_leader_waits_for_two_rounds_without_a_new_call() -> None:
    worker, leader = ShutdownBarrier(1, {0, 1}), ShutdownBarrier(0, {0, 1})
    letters = leader.enter() + [letter for _, m in worker.enter() for letter in leader.receive(1, m)]
    worker.receive(0, [m for to, m in letters if to == 1][-1])
    for begun in (3, 4, 4):  # the worker began a call between the first and the second round
        assert leader.state == WAITING
        leader.quiet(0)
        ((_, answer),) = worker.quiet(begun)
        assert isinstance(answer, Quiet)
        for _, message in leader.receive(1, answer):
            worker.receive(0, message)
    assert (leader.state, worker.state) == (LEAVING, DONE)


def test_a_waiting_worker_can_ask_which_workers_have_not_entered() -> None:
    members = {0, 1, 2}
    leader, worker = ShutdownBarrier(0, members), ShutdownBarrier(1, members)
    for _, message in worker.enter():
        leader.receive(1, message)
    assert (leader.missing, worker.missing) == ({0, 2}, set())  # the worker does not know
    ((to, question),) = worker.ask_who()
    ((back, answer),) = leader.receive(1, question)
    worker.receive(to, answer)
    assert (to, back, worker.missing) == (0, 1, {0, 2})
    assert leader.ask_who() == []


def test_a_waiting_worker_can_ask_which_workers_are_not_quiet() -> None:
    members = {0, 1, 2}
    leader, asker, busy = (ShutdownBarrier(each, members) for each in members)
    letters = [*leader.enter(), *asker.enter(), *busy.enter()]
    asked = [letter for sender in (1, 2) for letter in leader.receive(sender, Entered())]
    assert not leader.missing
    assert letters
    for to, message in asked:
        (asker if to == 1 else busy).receive(0, message)
    for machine in (leader, asker):
        for to, message in machine.quiet(5):
            assert (to, machine) == (0, asker)
            leader.receive(1, message)
    assert (leader.busy, asker.busy) == ({2}, set())  # the asker does not know
    ((_, question),) = asker.ask_who()
    ((_, answer),) = leader.receive(1, question)
    asker.receive(0, answer)
    assert (asker.missing, asker.busy) == (set(), {2})


def test_a_group_without_calls_since_its_entries_leaves_after_one_round() -> None:
    leader = ShutdownBarrier(0, {0, 1, 2})
    assert leader.remind(1) == []  # this worker has not called shutdown
    assert leader.enter(5) == [(1, Entered()), (2, Entered())]
    assert leader.receive(1, Entered(3)) == []
    assert leader.receive(2, Entered(4)) == [(1, Ask(1)), (2, Ask(1))]
    assert leader.asked
    assert leader.receive(1, Quiet(1, 3)) == []
    assert leader.receive(2, Quiet(0, 4)) == []  # of another round
    assert (leader.busy, leader.quiet(5)) == ({0, 2}, [])
    assert leader.receive(2, Quiet(1, 4)) == [(1, Leave()), (2, Leave())]
    assert leader.remind(1) == [(1, Entered()), (1, Leave())]
    assert leader.receive(1, Entered()) == [(1, Leave())]
    for other, state in ((1, LEAVING), (2, DONE)):
        assert (leader.receive(other, Left()), leader.state) == ([], state)
    assert leader.remind(1) == []


def test_a_follower_knows_who_was_lost_before_the_group_left() -> None:
    follower = ShutdownBarrier(1, {0, 1, 2})
    assert follower.enter(7) == [(0, Entered(7))]
    assert follower.receive(5, Ask(1)) == []  # no member
    assert (follower.asked, follower.remind(5)) == (False, [])
    assert follower.receive(2, Who()) == [(2, Entered())]  # only the leader knows
    assert follower.lost(2) == []
    assert follower.receive(0, Leave((3,))) == [(0, Left())]
    assert (follower.state, follower.lost_ones) == (DONE, {2, 3})
    assert follower.lost(0) == []


def test_the_barrier_of_a_group_that_has_ended_is_over() -> None:
    barrier = ShutdownBarrier(1, {0, 1, 2})
    barrier.enter()
    assert (barrier.over(), barrier.state) == ([], DONE)
