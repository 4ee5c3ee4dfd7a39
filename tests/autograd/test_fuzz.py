"""Random programs on workers and in one place. `TELEGRAD_SEED=... pytest tests/autograd/test_fuzz.py` runs one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pytest
import torch

from telegrad._core.worker.current import Worker
from tests.autograd import programs
from tests.cluster import wait_until
from tests.seeds import run_each

pytestmark = pytest.mark.usefixtures("here")

SEEDS = range(150)
MANY_SEEDS = range(150, 10_150)


class Rider:
    """Copies the gradients of one worker at its turn."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.seen: list[dict[torch.Tensor, torch.Tensor]] = []

    def gradients(self, context: int) -> dict[torch.Tensor, torch.Tensor]:
        return {leaf: each.detach().clone() for leaf, each in self.worker.conductor.gradients(context).items()}

    def ride(self, context: int, request: bytes) -> str:
        self.seen.append(self.gradients(context))
        return request.decode()


class Riding:
    """Checks after each pass that each rider had its turn when all gradients were complete."""

    rider = 1
    request = b"now"

    def __init__(self, workers: list[Worker]) -> None:
        self.riders = {worker.me.name: Rider(worker) for worker in workers}
        self.turns = 0
        self._context = 0
        for rider in self.riders.values():
            rider.worker.conductor.riders[self.rider] = rider

    def _telegrad_ride(self, context: int) -> Riding:
        self._context = context
        for rider in self.riders.values():
            rider.seen.clear()  # left by a failed pass
        return self

    def end(self, rode: Mapping[str, tuple[bool, Any]]) -> None:
        for name, outcome in rode.items():
            assert outcome == (True, "now"), f"the rider of {name} failed: {outcome}"
            (seen,), self.riders[name].seen = self.riders[name].seen, []
            found = self.riders[name].gradients(self._context)
            assert seen.keys() == found.keys(), f"the rider of {name} missed gradients"
            for leaf, gradient in found.items():
                assert torch.equal(gradient.to_dense(), seen[leaf].to_dense()), f"the rider of {name} was too early"
        assert not any(rider.seen for rider in self.riders.values()), "a rider had a turn that nobody heard of"
        self.turns += len(rode)


def run(seeds: Iterable[int], workers: list[Worker]) -> None:
    assert sum(run_each(seeds, programs.check))
    for worker in workers:
        wait_until(lambda worker=worker: not len(worker.conductor.contexts))  # type: ignore[misc]
        wait_until(lambda worker=worker: not any(worker.references.counts().values()))  # type: ignore[misc]


def run_with_riders(seeds: Iterable[int], workers: list[Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    riding = Riding(workers)
    monkeypatch.setattr(programs, "step", riding)
    run(seeds, workers)
    assert riding.turns


def test_random_programs(five: list[Worker]) -> None:
    run(SEEDS[:75], five)


def test_riders_of_random_programs(five: list[Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    run_with_riders(SEEDS[75:], five, monkeypatch)


@pytest.mark.nightly
def test_ten_thousand_random_programs(five: list[Worker]) -> None:
    run(MANY_SEEDS, five)


@pytest.mark.nightly
def test_riders_of_ten_thousand_random_programs(five: list[Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    run_with_riders(MANY_SEEDS, five, monkeypatch)
