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


class Hook:
    """Copies the gradients of one worker at its turn."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.seen: list[dict[torch.Tensor, torch.Tensor]] = []

    def gradients(self, context: int) -> dict[torch.Tensor, torch.Tensor]:
        return {leaf: each.detach().clone() for leaf, each in self.worker.conductor.gradients(context).items()}

    def step_in_pass(self, context: int, request: bytes) -> str:
        self.seen.append(self.gradients(context))
        return request.decode()


class Riding:
    """Checks after each pass that each hook had its turn when all gradients were complete."""

    step_id = 1
    request = b"now"

    def __init__(self, workers: list[Worker]) -> None:
        self.fused_steps = {worker.me.name: Hook(worker) for worker in workers}
        self.turns, self._context = 0, 0
        for hook in self.fused_steps.values():
            hook.worker.conductor.fused_steps[self.step_id] = hook

    def _telegrad_fused(self, context: int) -> Riding:
        self._context = context
        for hook in self.fused_steps.values():
            hook.seen.clear()  # left by a failed pass
        return self

    def end(self, stepped: Mapping[str, tuple[bool, Any]]) -> None:
        for name, outcome in stepped.items():
            assert outcome == (True, "now"), f"the hook of {name} failed: {outcome}"
            (seen,), self.fused_steps[name].seen = self.fused_steps[name].seen, []
            found = self.fused_steps[name].gradients(self._context)
            assert seen.keys() == found.keys(), f"the hook of {name} missed gradients"
            for leaf, gradient in found.items():
                assert torch.equal(gradient.to_dense(), seen[leaf].to_dense()), f"the hook of {name} was too early"
        assert not any(hook.seen for hook in self.fused_steps.values()), "a hook had a turn that nobody heard of"
        self.turns += len(stepped)


def run(seeds: Iterable[int], workers: list[Worker]) -> None:
    assert sum(run_each(seeds, programs.check))
    for worker in workers:
        wait_until(lambda worker=worker: not len(worker.conductor.contexts))  # type: ignore[misc]
        wait_until(lambda worker=worker: not any(worker.references.counts().values()))  # type: ignore[misc]


def run_with_hooks(seeds: Iterable[int], workers: list[Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    riding = Riding(workers)
    monkeypatch.setattr(programs, "step", riding)
    run(seeds, workers)
    assert riding.turns


def test_random_programs(five: list[Worker]) -> None:
    run(SEEDS[:75], five)


def test_fused_steps_of_random_programs(five: list[Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    run_with_hooks(SEEDS[75:], five, monkeypatch)


@pytest.mark.nightly
def test_ten_thousand_random_programs(five: list[Worker]) -> None:
    run(MANY_SEEDS, five)


@pytest.mark.nightly
def test_riders_of_ten_thousand_random_programs(five: list[Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    run_with_hooks(MANY_SEEDS, five, monkeypatch)
