"""The seeds of simulations and random programs: those of a test, or TELEGRAD_SEED alone."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")
ONLY = [int(os.environ["TELEGRAD_SEED"])] if "TELEGRAD_SEED" in os.environ else []


def run_each(seeds: Iterable[int], run: Callable[[int], T]) -> list[T]:
    """Run a simulation for each seed; an error names its seed."""
    results = []
    for seed in ONLY or seeds:
        try:
            results.append(run(seed))
        except Exception as error:
            raise AssertionError(f"SEED={seed} {type(error).__name__}: {error}") from error
    return results
