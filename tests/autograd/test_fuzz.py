"""Random programs: on workers as in one place. `TELEGRAD_SEED=... pytest tests/autograd/test_fuzz.py` replays one."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator

import pytest

from telegrad.rpc import current
from telegrad.rpc.worker import Worker
from tests.autograd import programs
from tests.cluster import PATIENCE, agents

SEED = os.environ.get("TELEGRAD_SEED")
SEEDS: Iterable[int] = [int(SEED)] if SEED else range(400)
MANY_SEEDS: Iterable[int] = [int(SEED)] if SEED else range(400, 10_400)


@pytest.fixture(scope="module")
def five() -> Iterator[list[Worker]]:
    with agents(5) as workers:
        current.enter(workers[0])
        yield workers


def run(seeds: Iterable[int], workers: list[Worker]) -> None:
    compared = 0
    for seed in seeds:
        try:
            compared += programs.check(seed)
        except Exception as error:
            raise AssertionError(f"SEED={seed} {error}") from error
    assert compared
    for worker in workers:
        wait_until_empty(worker)


def wait_until_empty(worker: Worker) -> None:
    deadline = time.monotonic() + PATIENCE
    while len(worker.conductor.contexts) or any(worker.references.counts().values()):
        assert time.monotonic() < deadline, (len(worker.conductor.contexts), worker.references.counts())
        time.sleep(0.01)


def test_random_programs(five: list[Worker]) -> None:
    run(SEEDS, five)


@pytest.mark.nightly
def test_ten_thousand_random_programs(five: list[Worker]) -> None:
    run(MANY_SEEDS, five)
