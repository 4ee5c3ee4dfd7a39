"""Tests of how much of a caller is read, with a simulated clock: callers that send without end, and others."""

import random
from collections import deque
from math import inf
from typing import Any

import pytest

from telegrad._core.agent import backlog as module
from telegrad._core.agent.backlog import AHEAD, LOOK_AGAIN, MOST_UNREAD, READ_ON, STALLED_AFTER, BackPressure
from telegrad._core.agent.incoming import Caller
from telegrad._core.membership.members import Identity
from telegrad._core.reactor.reactor import STUCK_AFTER, TURN
from telegrad._core.reactor.scheduler import Scheduler, Work, WorkQueue
from telegrad._core.transport.link import Link

READ = 128  # calls that one read brings
RUNS = 20e-6  # seconds that a quick call takes
SLOTS = 16


class FakeLink(Link):
    """A connection of which only the right to read is used."""

    def __init__(self) -> None:
        self.is_held = False
        self.sent = self.left = self.pulses = 0
        self.reading = self  # type: ignore[assignment]

    def hold(self, is_held: bool) -> None:
        self.is_held = is_held

    def send(self, message: Any, later: bool = False) -> bool:
        self.pulses += 1
        return True

    @property
    def is_sending(self) -> bool:
        return self.left > 0

    is_congested = is_sending

    def __repr__(self) -> str:
        return f"<FakeLink: {'held' * self.is_held}>"


class Simulation:
    """A worker whose callers send `flood` calls at once, and whose clock goes on as calls run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, callers: int) -> None:
        self.now, self.due = 0.0, inf
        monkeypatch.setattr(module, "monotonic", lambda: self.now)
        monkeypatch.setattr(module, "unread", lambda link: link.left)
        self.scheduler = Scheduler(SLOTS)
        self.timer = self
        self.intake = BackPressure(self, 40_000, 1 << 28)  # type: ignore[arg-type]
        self.callers = [Caller(Identity(f"w{rank}", rank, "life"), False, ()) for rank in range(callers)]
        self.links = {caller: FakeLink() for caller in self.callers}
        self.sends = dict.fromkeys(self.callers, 0)  # calls that wait in the socket
        self.running: list[tuple[float, Caller, int]] = []
        self.numbers = 0
        self.most = 0  # calls of one caller that waited to begin
        self.took: dict[Caller, list[float]] = {caller: [] for caller in self.callers}

    def wake_by(self, when: float, rough: bool = False) -> None:
        self.due = min(self.due, when)

    def hold_up(self, queue: WorkQueue, is_held_up: bool) -> None:
        self.scheduler.hold_up(queue, is_held_up)

    def read(self) -> None:
        """Look at all connections once."""
        for caller, link in self.links.items():
            count = min(READ, self.sends[caller])
            if link.is_held or not count:
                continue
            self.sends[caller] -= count
            for _ in range(count):
                self.numbers += 1
                caller.calls[self.numbers] = None  # type: ignore[assignment]
                self.scheduler.add(deque([(Work(lambda _: None, (caller, self.numbers, self.now)), caller.queue)]))
            self.intake.check(caller, link)
            self.most = max(self.most, len(caller.queue))

    def run(self, takes: float) -> None:
        """Work as the leader does: run a work of each queue in turn, between two looks at the connections."""
        until = self.now + TURN
        while self.now <= until:
            work, _ = self.scheduler.next(self.scheduler.ready)
            if work is None:
                return
            caller, number, since = work.argument
            if takes > STUCK_AFTER:  # run by other threads
                self.running.append((self.now + takes, caller, number))
                continue
            self.now += takes
            self.end(caller, number)
            self.took[caller].append(self.now - since)

    def end(self, caller: Caller, number: int) -> None:
        self.scheduler.end(caller.queue)
        del caller.calls[number]
        if self.intake.stopped:
            self.intake.look(caller)
        self.scheduler.retry()

    def step(self, takes: float) -> None:
        self.read()
        before = self.now
        self.run(takes)
        if self.now == before:
            self.now += 1e-3
        for entry in [entry for entry in self.running if entry[0] <= self.now]:
            self.running.remove(entry)
            self.end(entry[1], entry[2])
        if self.now >= self.due:
            self.due = self.intake.tick(self.now)


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Simulation:
    return Simulation(monkeypatch, 2)


def test_few_quick_calls_of_a_flood_wait_at_a_time(two: Simulation) -> None:
    flooder, other = two.callers
    two.sends[flooder] = 50_000
    chance = random.Random(1)
    while two.sends[flooder]:
        if not len(other.queue) and chance.random() < 0.3:
            two.sends[other] = 1
        two.step(RUNS)
    assert two.most <= 2 * (AHEAD + READ)  # few enough not to start the garbage collector
    assert max(two.took[other]) < 5e-3
    assert len(two.took[other]) > 100


@pytest.mark.parametrize("seed", range(12))
def test_a_call_waits_only_for_a_turn_and_a_call_of_each_other_caller(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """The number of floods and the duration of their calls do not matter."""
    chance = random.Random(seed)
    simulation = Simulation(monkeypatch, chance.randint(2, 6))
    *flooders, other = simulation.callers
    takes = chance.choice([5e-6, RUNS, 80e-6, 1e-3])
    for flooder in flooders:
        simulation.sends[flooder] = 2_000
    took = simulation.took[other]
    while all(simulation.sends[flooder] for flooder in flooders):
        came = simulation.now
        simulation.step(takes)  # the call has come as a turn began
        read, count = simulation.now, len(took)
        simulation.sends[other] = 1
        for _ in range(len(simulation.callers) + 2):  # a turn holds one call at least
            if len(took) == count:
                simulation.step(takes)
        assert len(took) == count + 1
        assert read + took[-1] - came < TURN + (1 + len(simulation.callers)) * takes + 1e-9
    assert len(took) > 10


def test_reading_goes_on_while_calls_are_slow(two: Simulation) -> None:
    """A message behind them must be found: a CANCEL, or the call that opens a gate."""
    flooder = two.callers[0]
    count = two.sends[flooder] = 32_768  # as many as a caller with limits has in flight
    while two.sends[flooder] and two.now < 10:
        two.step(60.0)
    assert not two.sends[flooder]
    assert two.now < 1.0
    assert len(flooder.queue) == count - SLOTS


def test_a_connection_is_read_again_after_quick_calls(two: Simulation) -> None:
    flooder = two.callers[0]
    for _ in range(3):
        two.sends[flooder] = 10_000
        while len(flooder.calls) or two.sends[flooder]:
            two.step(RUNS)
        assert not two.links[flooder].is_held
        assert not two.intake.stopped
        assert len(flooder.queue) == 0


@pytest.mark.parametrize("is_late", [False, True])
def test_a_connection_is_read_on_if_its_calls_begin_as_it_is_stopped(two: Simulation, is_late: bool) -> None:
    """Another thread looks just before, or just after, the connection is no longer read."""
    flooder = two.callers[0]
    link = two.links[flooder]
    hold = link.hold

    def hold_amid(is_held: bool) -> None:
        link.hold = hold
        if is_late:
            hold(is_held)
        flooder.queue.works.clear()
        two.intake.look(flooder)
        if not is_late:
            hold(is_held)

    link.hold = hold_amid
    two.sends[flooder] = READ
    two.read()
    assert link.hold == hold
    assert not link.is_held
    assert not two.intake.stopped


def test_calls_that_are_held_up_are_read_slowly(two: Simulation) -> None:
    flooder = two.callers[0]
    flooder.queue.is_held_up = True
    two.sends[flooder] = 10_000
    while two.now < 3 * STALLED_AFTER:
        two.step(RUNS)
    assert len(flooder.queue) <= 2 * 2 * 2 * (AHEAD + READ)


def test_a_caller_that_does_not_read_its_answers_is_held_up(two: Simulation) -> None:
    flooder, other = two.callers
    for caller in (flooder, other):
        link = two.links[caller]
        for _ in range(20):
            link.sent += MOST_UNREAD // 16
            link.left = 1 if caller is flooder else 0
            two.intake.sent(caller, link)
    assert flooder.queue.is_held_up
    assert not other.queue.is_held_up
    two.intake.tick(two.now)
    assert flooder.queue.is_held_up
    two.links[flooder].left = 0
    assert two.intake.tick(two.now + LOOK_AGAIN) == inf
    assert not flooder.queue.is_held_up


def test_all_state_of_a_caller_that_has_gone_is_removed(two: Simulation) -> None:
    flooder = two.callers[0]
    two.sends[flooder] = 10_000
    two.read()
    link = two.links[flooder]
    link.sent, link.left = 2 * MOST_UNREAD, 1
    two.intake.sent(flooder, link)
    assert two.intake.stopped
    two.drop = lambda *_: []  # type: ignore[attr-defined]
    two.intake.lost(flooder)
    assert not two.intake.stopped
    assert two.intake.tick(two.now + READ_ON) == inf
