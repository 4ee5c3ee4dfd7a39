"""A training goes on with the same losses after any of its workers is killed."""

import pathlib

import pytest

from tests.recovering import WORKERS, alone, train_through


def check(kills: int, seed: int, runs: pathlib.Path) -> None:
    losses, steps, killed = train_through(kills, seed, runs)
    assert len(killed) == kills
    assert set(killed) >= set(WORKERS[:kills])
    done = {step for step, _ in losses}
    assert done >= set(range(steps))
    expected = alone(max(done) + 1)  # the last steps may be missing, and are not needed
    assert [loss for _, loss in losses] == pytest.approx([expected[step] for step, _ in losses], rel=1e-9)


@pytest.mark.timeout(120)
def test_a_training_whose_workers_are_killed_ends_with_the_same_losses(tmp_path: pathlib.Path) -> None:
    check(4, 1, tmp_path)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_training_whose_workers_are_killed_50_times_ends_with_the_same_losses(tmp_path: pathlib.Path) -> None:
    check(50, 2, tmp_path)
