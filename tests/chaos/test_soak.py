"""What the soak takes for growth."""

from __future__ import annotations

from tests.chaos.soak import SPARE_MEMORY, Sample, grown


def samples(*memory: int) -> list[Sample]:
    return [Sample(each, 50 + number, 10) for number, each in enumerate(memory)]


def test_memory_that_comes_and_goes_is_no_growth() -> None:
    assert grown(samples(300 << 20, 500 << 20, 600 << 20, 301 << 20)) == []


def test_memory_that_stays_is_growth() -> None:
    base = 300 << 20
    more = base + int(base * 0.02) + SPARE_MEMORY + 1
    assert grown(samples(base, base, more, more)) == [f"memory grew from {base:,} to {more:,} bytes"]
