"""The seeds of simulations and random programs: those of a test, or TELEGRAD_SEED alone.

TELEGRAD_SEEDS is how many of them are enough.
"""

import datetime
import os
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any, TypeVar, cast

import pytest

T = TypeVar("T")
S = TypeVar("S", bound=Sequence[Any])
ONLY = [int(os.environ["TELEGRAD_SEED"])] if "TELEGRAD_SEED" in os.environ else []
TODAY = datetime.date.today().toordinal()
NIGHTS = 10  # in which nightly tests run all of their seeds
MOST = int(os.environ["TELEGRAD_SEEDS"]) if "TELEGRAD_SEEDS" in os.environ else None


def tonight(seeds: S) -> S:
    """Return a part of the seeds, another one each night."""
    return cast("S", seeds[TODAY % NIGHTS :: NIGHTS])


def by_day_and_night(day: Sequence[Any], night: Sequence[Any]) -> pytest.MarkDecorator:
    """Run a test with the seeds of each run, and at night also with many others."""
    marks = [pytest.mark.nightly, pytest.mark.timeout(1800)]
    return pytest.mark.parametrize("seeds", [pytest.param(day, id="some"), pytest.param(night, marks=marks, id="many")])


def run_each(seeds: Iterable[int], run: Callable[[int], T]) -> list[T]:
    """Run a simulation for each seed; an error names its seed."""
    results = []
    for seed in islice(ONLY or seeds, MOST):
        try:
            results.append(run(seed))
        except Exception as error:
            raise AssertionError(f"SEED={seed} {type(error).__name__}: {error}") from error
    return results
