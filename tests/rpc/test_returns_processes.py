"""Tests of worker processes that are killed and restarted under their names while another worker calls them."""

from __future__ import annotations

import itertools
import os
import random
import threading
import time
from collections.abc import Callable

import pytest

import telegrad.rpc as rpc
from telegrad.errors import PeerError, PeerLost, RRefError, ShutDown, UnknownWorker
from tests.cluster import PATIENCE, Process, context, pause, processes
from tests.rpc.members import join

NAMES = ("x", "y")
PAUSE = 2e-3  # seconds between the calls of one thread
SOON = 2.0  # seconds within which a restarted worker answers

has_run: set[tuple[str, int]] = set()  # in this incarnation
stopped = threading.Event()
violations: list[str] = []
counts: dict[str, int] = {}


def run_once(key: tuple[str, int]) -> int:
    """Fail if a key comes twice in one incarnation; return the process id."""
    assert key not in has_run, f"{key} has run twice in one life"
    has_run.add(key)
    return os.getpid()


class Token:
    """A value that belongs to one incarnation."""

    def __init__(self) -> None:
        self.pid = os.getpid()

    def is_of(self) -> int:
        assert self.pid == os.getpid()
        return self.pid


# The load, on the worker that calls


def call_plainly(name: str, key: tuple[str, int]) -> None:
    rpc.rpc_sync(name, run_once, (key,))


def call_patiently(name: str, key: tuple[str, int]) -> None:
    rpc.rpc_sync(name, run_once, (key,), wait_for_worker=True)


def call_until_it_has_run(name: str, key: tuple[str, int]) -> None:
    rpc.rpc_sync(name, run_once, (key,), wait_for_worker=True, idempotent=True)
    counts["repeated"] = counts.get("repeated", 0) + 1


def use_a_reference(name: str, key: tuple[str, int]) -> None:
    reference = rpc.remote(name, Token, wait_for_worker=True)
    first = reference.rpc_sync().is_of()
    for _ in range(5):
        stopped.wait(PAUSE)
        assert reference.rpc_sync().is_of() == first


MAY_FAIL: dict[Callable[[str, tuple[str, int]], None], tuple[type[Exception], ...]] = {
    call_plainly: (PeerError, UnknownWorker),
    call_patiently: (PeerLost, ShutDown),  # it may have run
    call_until_it_has_run: (),
    use_a_reference: (PeerError, RRefError, UnknownWorker),
}


def load(name: str, act: Callable[[str, tuple[str, int]], None]) -> None:
    for number in itertools.count():
        if stopped.wait(PAUSE):
            return
        try:
            act(name, (act.__name__, number))
        except MAY_FAIL[act]:
            pass
        except Exception as error:
            violations.append(f"{act.__name__} of {name}: {type(error).__name__}: {error}")
            return


threads: list[threading.Thread] = []


def begin_load() -> None:
    for name in NAMES:
        for act in MAY_FAIL:
            threads.append(threading.Thread(target=load, args=(name, act)))
            threads[-1].start()


def end_load() -> tuple[list[str], int]:
    stopped.set()
    for thread in threads:
        thread.join(PATIENCE)
        if thread.is_alive():
            violations.append("a call hangs")
    return violations, counts["repeated"]


def time_to_call(name: str, pid: int) -> float:
    """Return the seconds until the incarnation with that process id answers."""
    began = time.monotonic()
    while rpc.rpc_sync(name, os.getpid, wait_for_worker=True, idempotent=True) != pid:
        assert time.monotonic() - began < PATIENCE
    return time.monotonic() - began


@pytest.mark.parametrize(
    ("kills", "seed"), [(4, 0), *(pytest.param(50, seed, marks=pytest.mark.nightly) for seed in (1, 2))]
)
def test_calls_to_workers_that_are_killed_and_restarted(tcp: str, kills: int, seed: int) -> None:
    chance = random.Random(seed)
    with processes(1) as made:
        boss, workers = made[0], dict[str, Process]()
        try:
            boss.run(join, "boss", tcp, 0)
            for name in NAMES:
                workers[name] = Process(context(), name)
                workers[name].run(join, name, tcp)
            boss.run(begin_load)
            for _ in range(kills):
                pause(chance.random() * 0.5)
                name = chance.choice(NAMES)
                old, workers[name] = workers[name], Process(context(), name)
                old.kill()
                old.join()
                workers[name].run(join, name, tcp)
                assert boss.run(time_to_call, name, workers[name].pid) < SOON
            wrong, repeated = boss.run(end_load, patience=2 * PATIENCE)
            assert not wrong, f"seed {seed}: {wrong}"
            assert repeated > kills
        finally:
            for process in workers.values():
                process.stop()
