"""The right to read: one reader at a time, no answer lies unread while a caller waits, and the end is handled once.

Threads go on in any order at the edges of the lock, and whenever a field is read without it.
"""

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from telegrad._core.transport.reading import ReadOwner, ReadRight
from tests.seeds import by_day_and_night, run_each
from tests.sim.fibers import Fibers, Lock

SEEDS = 400
AT_NIGHT = 5000
LOOKS = 2000  # limit for loops that wait


fibers = Fibers()


class Peeked(ReadRight):
    """Another thread may go on after each read of the owner without the lock, too."""

    _owner = ReadOwner.NOBODY

    @property
    def owner(self) -> ReadOwner:
        owner = self._owner
        fibers.suspend()
        return owner

    @owner.setter
    def owner(self, owner: ReadOwner) -> None:
        self._owner = owner


class World:
    """A connection over which answers come, in any order, and threads that wait for them."""

    def __init__(self, seed: int, make: type[ReadRight]) -> None:
        self.chance = random.Random(seed)
        reader: Any = SimpleNamespace(awaits_lanes=False)  # lanes are simulated in `read`
        self.reading = make(Lock(fibers, fibers.suspend), self.arm, self.expects, self.finish, reader, bool)
        self.expected: set[int] = set()
        self.come: deque[int] = deque()  # answers that were not read yet; a negative one waits for a lane
        self.lane: list[Callable[[], None]] = []  # continuations for the time after the lane has brought its part
        self.armed = self.ended = False
        self.finished = self.readers = 0
        self.callers = self.chance.randint(1, 3)
        self.left = 0  # number of callers that have not ended
        self.leads = True

    def run(self) -> None:
        self.left = self.callers
        jobs = [lambda number=number: self.caller(number) for number in range(self.callers)]
        try:
            for job in (*jobs, self.leader, self.lanes):
                fibers.start(job)
            while waiting := fibers.suspended:
                fibers.resume(self.chance.choice(waiting))
        finally:
            fibers.kill_all()
        assert self.finished == (1 if self.ended else 0), f"its end was seen to {self.finished} times"
        assert not self.expected, "an answer lies unread"

    def arm(self, read: bool) -> None:
        assert self.armed != read, "the poller was told the same twice"
        self.armed = read

    def expects(self) -> bool:
        expected = bool(self.expected)
        fibers.suspend()
        return expected

    def finish(self) -> None:
        self.finished += 1

    @contextmanager
    def read(self) -> Iterator[None]:
        self.readers += 1
        assert self.readers == 1, "two read at once"
        fibers.suspend()
        while self.come:
            answer = self.come.popleft()
            if answer < 0:
                self.readers -= 1
                self.reading.pass_on()
                self.lane.append(self.go_on)
                self.expected.discard(-answer)
                yield
                return
            self.expected.discard(answer)
            fibers.suspend()
        self.readers -= 1
        yield
        self.reading.give_back()

    def go_on(self) -> None:
        with self.read():
            pass

    def caller(self, number: int) -> None:
        """Make calls, wait for some in place, and leave others to the leader."""
        for call in range(1, self.chance.randint(2, 5)):
            answer = 100 * (number + 1) + call
            self.expected.add(answer)
            fibers.suspend()
            waits = self.chance.random() < 0.6
            if not waits:
                self.reading.watch()
            if self.ended:
                self.expected.discard(answer)
                continue
            self.come.append(-answer if self.chance.random() < 0.2 else answer)
            if waits:
                self.wait(answer)
            if self.chance.random() < 0.05 and not self.ended:
                self.ended = True
                self.expected.clear()
                self.reading.end()
        self.left -= 1

    def wait(self, answer: int) -> None:
        for _ in range(LOOKS):
            if answer not in self.expected:
                return
            if self.reading.take():
                with self.read():
                    pass
            else:
                fibers.suspend()
        raise AssertionError("who waits is not told")

    def leader(self) -> None:
        for _ in range(LOOKS):
            if not self.left and (not self.expected or self.ended):
                break
            if self.armed and self.come and self.reading.begin():
                with self.read():
                    pass
            fibers.suspend()
        self.leads = False

    def lanes(self) -> None:
        for _ in range(LOOKS):
            if self.lane:
                self.lane.pop()()
            elif not self.left and not self.leads:
                return
            fibers.suspend()


def run(seeds: range, make: type[ReadRight] = Peeked) -> None:
    run_each(seeds, lambda seed: World(seed, make).run())


@by_day_and_night(range(SEEDS), range(SEEDS, SEEDS + AT_NIGHT))
def test_no_answer_lies_unread_while_a_caller_waits(seeds: range) -> None:
    run(seeds)


class PeeksAtAnyOwner(Peeked):
    """A thread leaves the check for expected answers to any owner, who may have checked before."""

    def watch(self) -> None:
        if self.owner is ReadOwner.NOBODY:
            super().watch()


class LooksTooEarly(Peeked):
    """The check for expected answers comes before the lock is taken."""

    def give_back(self) -> None:
        expected = self._expected()
        before, self._expected = self._expected, lambda: expected
        try:
            super().give_back()
        finally:
            self._expected = before


class TakesFromTheLeader(Peeked):
    """A waiter takes the right from a leader that reads."""

    def take(self) -> bool:
        self._at_it = False
        return super().take()


class FinishesWhileReading(Peeked):
    """The end does not wait for the reader."""

    def end(self) -> None:
        super().end()
        self._finish()


@pytest.mark.parametrize("wrong", [PeeksAtAnyOwner, LooksTooEarly, TakesFromTheLeader, FinishesWhileReading])
def test_wrong_code_is_found(wrong: type[Peeked]) -> None:
    with pytest.raises(AssertionError, match="SEED"):
        run(range(4 * SEEDS), wrong)
