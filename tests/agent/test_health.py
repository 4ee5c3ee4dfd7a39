"""Tests of the signs of life of other workers, and of reports that there are none."""

import ctypes
import itertools
import logging
import sys
import threading
import time
from typing import Any

import pytest

from telegrad._core import processes
from telegrad._core.agent import health
from telegrad._core.agent.health import Health
from telegrad._core.reactor import leader_threads
from telegrad.errors import PeerSilent
from tests.cluster import agents, in_background, wait_until

LIMIT = 10.0


class Connection:
    """The part of a `Link` that is watched."""

    peer = "w1"

    def __init__(self, process: int = 0) -> None:
        self.process = process
        self.taken = self.written = self.asked = 0
        self.is_sending, self.unread = False, False

    def ask(self) -> None:
        self.asked += 1
        self.written += 40

    def has_unread(self) -> bool:
        return self.unread


class Watch:
    """A worker that watches another one at the times that it chooses."""

    def __init__(self, link: Connection, silence: float = 0.0, heartbeat: float = 0.0) -> None:
        self.now = 0.0
        self.told: list[tuple[float, str]] = []
        self.health = Health(silence, heartbeat, lambda _, why: self.note(why))
        self.links: list[Any] = [link]

    def note(self, why: PeerSilent) -> None:
        self.told.append((self.now, str(why)))

    def until(self, end: float, meanwhile: Any = lambda: None) -> None:
        while self.now < end and not self.told:
            due = self.health.tick(self.now, self.links)
            assert due > self.now
            self.now = min(due, self.now + 1.0)
            meanwhile()


def test_a_worker_that_does_not_answer_is_reported_after_the_limit() -> None:
    link = Connection()
    watch = Watch(link, heartbeat=LIMIT)
    watch.until(100.0, lambda: setattr(link, "taken", 40 * link.asked))  # each heartbeat is answered
    assert not watch.told
    assert 20 < link.asked < 60
    watch.until(200.0)
    ((when, why),) = watch.told
    assert 100 + LIMIT <= when < 100 + 2 * LIMIT
    assert "worker 'w1' is silent: it has not answered for 10 s" in why


def test_a_quiet_worker_gets_one_heartbeat() -> None:
    link = Connection()
    watch = Watch(link, heartbeat=LIMIT)
    watch.until(200.0)
    assert watch.told
    assert link.asked == 1


def test_a_worker_that_takes_data_is_alive() -> None:
    link = Connection()
    watch = Watch(link, heartbeat=LIMIT)
    link.is_sending = True

    def take() -> None:
        link.written += 1000

    watch.until(100.0, take)
    assert not watch.told
    watch.until(200.0)
    assert watch.told


def test_unread_data_is_a_sign_of_life() -> None:
    link = Connection()
    link.unread = True
    watch = Watch(link, heartbeat=LIMIT)
    watch.until(100.0)
    assert not watch.told


def test_a_stopped_process_on_this_host_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {7: ("S", 5)}
    monkeypatch.setattr(processes, "state_of", told.get)
    watch = Watch(Connection(process=7), silence=LIMIT)
    watch.until(100.0)
    assert not watch.told
    told[7] = ("T", 6)
    watch.until(200.0)
    ((when, why),) = watch.told
    assert 100 + LIMIT <= when < 100 + 2 * LIMIT
    assert "kill -CONT 7" in why


def test_a_process_that_cannot_be_seen_is_not_reported_as_stopped() -> None:
    watch = Watch(Connection(), silence=LIMIT)
    watch.until(100.0)
    assert not watch.told


def test_a_connection_that_has_gone_is_not_watched() -> None:
    watch = Watch(Connection(), heartbeat=LIMIT)
    watch.until(12.0)
    watch.links.clear()
    watch.until(100.0)
    assert not watch.told


def test_without_limits_no_connection_is_watched() -> None:
    link = Connection(process=1)
    watch = Watch(link)
    assert watch.health.tick(0.0, watch.links) == float("inf")
    watch.until(100.0)
    assert not watch.told
    assert not link.asked


# The watch of a worker over itself; tests/rpc/test_losses.py tests the report of a stop


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is known of one thread")
def test_a_held_interpreter_is_no_stop(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """A C function that keeps the interpreter while it sleeps uses no processor time, like a stopped process."""
    monkeypatch.setattr(health, "TICKS", 0.1)
    monkeypatch.setattr(health, "LATEST", 20)  # 0.1 s
    watch, ticks, over = Health(0.1, 0.0, lambda *_: None), list[float](), threading.Event()
    ticked = threading.Semaphore(0)

    def tick() -> None:
        while not over.is_set():
            now = time.monotonic()
            watch.look_at_itself(now)
            ticks.append(now)
            ticked.release()
            over.wait(0.005)

    with caplog.at_level(logging.WARNING, "telegrad"), in_background(tick):
        try:
            assert ticked.acquire(timeout=10.0)
            seen = len(ticks)
            ctypes.PyDLL(None).usleep(900_000)  # PyDLL keeps the interpreter
            while len(ticks) <= seen + 1:
                assert ticked.acquire(timeout=10.0)
        finally:
            over.set()
    assert max(after - before for before, after in itertools.pairwise(ticks)) > 0.5
    assert "did not run" not in caplog.text


def test_a_stop_is_reported_though_works_ran_before_it(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While works run and a moment longer, the timer thread wakes up more often than it ticks."""
    stopped = 0.0
    for clock in ("monotonic", "perf_counter"):
        real = getattr(time, clock)
        monkeypatch.setattr(leader_threads, clock, lambda real=real: real() + stopped)
    ticked = threading.Event()

    def tick(now: float) -> float:
        ticked.set()
        return now + 1.0

    with caplog.at_level(logging.WARNING, "telegrad"), agents(1, silence=2.0) as (worker,):
        agent = worker.agent
        wait_until(lambda: not agent._timer.is_watching)
        agent.ticking.append(tick)
        assert ticked.wait(10.0)
        assert agent.call("w0", abs, (-3,), None) == 3
        wait_until(lambda: agent._timer.is_watching)
        wait_until(lambda: not agent._timer.is_watching)
        stopped = 3.5
        agent._timer.wake()
        wait_until(lambda: "this process did not run for 4 s" in caplog.text, 10.0)
