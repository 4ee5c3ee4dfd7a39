"""The thread that knows the time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic

import pytest

from telegrad._core.reactor.leader_threads import LONGEST_PAUSE, TimerThread


def ticks_of(act: Callable[[TimerThread, float, int], float], count: int) -> list[float]:
    """When a timer has ticked, so many times; `act` is told of each, with its number, and says when the next is due."""
    ticks: list[float] = []
    enough = threading.Event()

    def tick(now: float) -> float:
        ticks.append(now)
        if len(ticks) == count:
            enough.set()
        return act(timer, now, len(ticks))

    timer = TimerThread(tick)
    timer.start(lambda _: 0.0)  # nothing happens, so that only the timer's own times wake it
    try:
        assert enough.wait(10)
    finally:
        timer.close()
    return ticks


@pytest.mark.parametrize("fails", [False, True])
def test_a_time_that_is_asked_for_while_a_tick_runs_is_kept(fails: bool) -> None:
    def act(timer: TimerThread, now: float, number: int) -> float:
        if number == 1:
            timer.wake_by(now + 0.05)
            if fails:
                raise ValueError("boom")
        return now + 60

    first, second = ticks_of(act, 2)[:2]
    assert second - first < LONGEST_PAUSE / 2


def test_it_comes_to_the_time_that_the_tick_told() -> None:
    start = monotonic()
    ticks = ticks_of(lambda timer, now, number: now + 0.05, 3)
    assert ticks[2] - start >= 0.1
