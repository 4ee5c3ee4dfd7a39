"""The thread that knows the time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic
from typing import Any

from telegrad.agent.clock import LONGEST_PAUSE, Clock


class IdleReactor:
    """One that has nothing to do, so that nothing but the clock's own times wakes it."""

    runs = 0
    watched = False
    backed_up = False

    def unstick(self, now: float) -> None:
        pass


def ticks_of(act: Callable[[Clock, float, int], float], count: int) -> list[float]:
    """When a clock has ticked, so many times; `act` is told of each, with its number, and says when the next is due."""
    ticks: list[float] = []
    enough = threading.Event()

    def tick(now: float) -> float:
        ticks.append(now)
        if len(ticks) == count:
            enough.set()
        return act(clock, now, len(ticks))

    clock = Clock(tick)
    reactor: Any = IdleReactor()
    clock.start(reactor)
    try:
        assert enough.wait(10)
    finally:
        clock.close()
    return ticks


def test_a_time_that_is_asked_for_while_a_tick_runs_is_kept() -> None:
    def act(clock: Clock, now: float, number: int) -> float:
        if number == 1:
            clock.before(now + 0.05)
        return now + 60

    first, second = ticks_of(act, 2)[:2]
    assert second - first < LONGEST_PAUSE / 2


def test_it_comes_to_the_time_that_the_tick_told() -> None:
    start = monotonic()
    ticks = ticks_of(lambda clock, now, number: now + 0.05, 3)
    assert ticks[2] - start >= 0.1


def test_a_tick_that_fails_is_not_the_last() -> None:
    def act(clock: Clock, now: float, number: int) -> float:
        if number == 1:
            clock.before(now + 0.01)
            raise ValueError("boom")
        return now + 60

    ticks_of(act, 2)
