"""The thread that knows the time."""

from __future__ import annotations

import threading
from time import monotonic

from telegrad.agent.clock import LONGEST_PAUSE, Clock


class IdleReactor:
    """One that has nothing to do, so that nothing but the clock's own times wakes it."""

    runs = 0
    watched = False
    backed_up = False

    def unstick(self, now: float) -> None:
        pass


def test_a_time_that_is_asked_for_while_a_tick_runs_is_kept():
    ticks = []
    enough = threading.Event()

    def tick(now: float) -> float:
        ticks.append(now)
        if len(ticks) == 1:
            clock.before(now + 0.05)
        else:
            enough.set()
        return now + 60

    clock = Clock(tick)
    clock.start(IdleReactor())
    try:
        assert enough.wait(10)
    finally:
        clock.close()
    assert ticks[1] - ticks[0] < LONGEST_PAUSE / 2


def test_it_comes_to_the_time_that_the_tick_told():
    ticks = []
    enough = threading.Event()

    def tick(now: float) -> float:
        ticks.append(now)
        if len(ticks) == 3:
            enough.set()
        return now + 0.05

    start = monotonic()
    clock = Clock(tick)
    clock.start(IdleReactor())
    try:
        assert enough.wait(10)
    finally:
        clock.close()
    assert ticks[2] - start >= 0.1


def test_a_tick_that_fails_is_not_the_last():
    ticks = []
    enough = threading.Event()

    def tick(now: float) -> float:
        ticks.append(now)
        if len(ticks) == 1:
            clock.before(now + 0.01)
            raise ValueError("boom")
        enough.set()
        return now + 60

    clock = Clock(tick)
    clock.start(IdleReactor())
    try:
        assert enough.wait(10)
    finally:
        clock.close()
