"""The parts that need no worker: places, and the order of micro-batches."""

from __future__ import annotations

import random

import pytest
import torch

from telegrad.errors import UsageError
from telegrad.nn.place import parse_place
from telegrad.nn.schedule import Backward, Forward, Schedule


@pytest.mark.parametrize(
    ("text", "worker", "device"),
    [
        ("trainer0/cpu", "trainer0", "cpu"),
        ("trainer0", "trainer0", None),
        ("ps0/cuda:0", "ps0", "cuda:0"),
        ("rank:1/cuda:1", 1, "cuda:1"),
        ("rank:12", 12, None),
        ("a:b/meta", "a:b", "meta"),
    ],
)
def test_places(text: str, worker: int | str, device: str | None) -> None:
    assert parse_place(text) == (worker, torch.device(device) if device else None)


@pytest.mark.parametrize("text", ["", "cpu", "cuda:0", "/cpu", "a/", "a/b", "a/cpu/cpu", "rank:x/cpu", "rank:"])
def test_what_is_no_place(text: str) -> None:
    with pytest.raises(UsageError, match="is no place for a module"):
        parse_place(text)


def run(kind: str, batches: int, stages: int, seed: int) -> tuple[list[Backward | Forward], int]:
    """Let what has begun end in a random order; the steps as they begin, and the most forwards without a backward."""
    chance = random.Random(seed)
    schedule = Schedule(kind, batches, stages)
    steps = schedule.begin()
    begun = list(steps)
    held = most = 0
    while steps:
        step = steps.pop(chance.randrange(len(steps)))
        fresh = schedule.ended(step)
        held += 1 if isinstance(step, Forward) else -len(step.batches)
        most = max(most, held)
        steps += fresh
        begun += fresh
    assert schedule.done
    return begun, most


@pytest.mark.parametrize("seed", range(50))
@pytest.mark.parametrize("kind", ["1f1b", "gpipe"])
def test_each_micro_batch_goes_forward_and_backward_once(kind: str, seed: int) -> None:
    chance = random.Random(seed)
    batches, stages = chance.randint(1, 20), chance.randint(1, 6)
    begun, most = run(kind, batches, stages, seed)
    assert [step.batch for step in begun if isinstance(step, Forward)] == list(range(batches))
    passes = [step.batches for step in begun if isinstance(step, Backward)]
    assert sorted(batch for group in passes for batch in group) == list(range(batches))
    if kind == "1f1b":
        assert len(passes) == batches
        assert most <= stages
    else:
        assert len(passes) == 1
        assert most == batches


def test_one_backward_begins_before_the_last_forward() -> None:
    schedule = Schedule("1f1b", 3, 2)
    assert schedule.begin() == [Forward(0), Forward(1)]
    assert schedule.ended(Forward(0)) == [Backward((0,))]
    assert schedule.ended(Forward(1)) == [Backward((1,))]
    assert schedule.ended(Backward((0,))) == [Forward(2)]
