"""A worker counts as silent after its limit, if this worker ran in the meantime."""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from telegrad._core.processes import STOPPED, Stops, state_of
from telegrad._core.transport.silence import LATE, Silence
from tests.cluster import wait_until

LIMIT = 10.0


def watch(silence: Silence, begin: float, end: float, heard: bool, late: float = 0.0) -> float | None:
    """Look at the times that `silence` asks for, each time `late`; return the time at which it reports silence."""
    now = begin
    while now < end:
        if silence.look(now, heard):
            return now
        now += silence.pause + late
    return None


def test_silence_is_reported_soon_after_the_limit() -> None:
    chance = random.Random(1)
    for _ in range(200):
        silence = Silence(LIMIT)
        stops = chance.uniform(50, 60)
        now = 0.0
        while now < stops:
            assert not silence.look(now, True)
            now += silence.pause + chance.random() * 0.05
        told = watch(silence, now, 100, False, chance.random() * 0.05)
        assert told is not None
        assert stops + LIMIT <= told < stops + 1.5 * LIMIT


def test_one_sign_of_life_within_the_limit_is_enough() -> None:
    silence, now = Silence(LIMIT), 0.0
    for at in range(2000):
        assert not silence.look(now, heard=at % 19 == 0)
        now += LIMIT / 20
    assert watch(silence, now, now + 2 * LIMIT, False) is not None


def test_time_in_which_this_worker_did_not_run_does_not_count() -> None:
    silence = Silence(LIMIT)
    assert not silence.look(0, False)
    assert not silence.look(0.6 * LIMIT, False)  # all processes were stopped for a while
    assert not silence.look(100 * LIMIT, False)
    assert not silence.look(100.05 * LIMIT, True)
    assert watch(silence, 200 * LIMIT, 202 * LIMIT, False) is not None


def test_without_a_limit_silence_is_never_reported() -> None:
    silence = Silence(0)
    assert not silence.look(0, False)
    assert not silence.look(1e9, False)
    assert silence.pause == float("inf")


def test_it_is_silent_at_its_limit() -> None:
    silence = Silence(LIMIT)
    assert not silence.look(0, False)  # the first check proves nothing about the time before
    assert not silence.look(LATE * LIMIT, False)  # just in time
    assert silence.look(LIMIT, False)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="this platform tells nothing of other processes")
def test_a_process_that_ran_since_the_last_look_is_not_stopped() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        try:
            stops = Stops(busy.pid)
            assert not stops.look()
            _stop(busy.pid)
            assert [stops.look(), stops.look()] == [True, True]
            used = _used(busy.pid)
            os.kill(busy.pid, signal.SIGCONT)
            wait_until(lambda: _used(busy.pid) != used)
            _stop(busy.pid)
            assert [stops.look(), stops.look()] == [False, True]
        finally:
            busy.kill()
    assert not stops.look()


def _stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: (found := state_of(pid)) is None or found[0] in STOPPED)


def _used(pid: int) -> int:
    found = state_of(pid)
    assert found is not None
    return found[1]
