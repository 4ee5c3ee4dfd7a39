"""A short run of the chaos tests: a few seeds of each kind of fault, and a check that violations are found.

A failing seed is printed as SEED=...; `TELEGRAD_SEED=... pytest tests/chaos/test_chaos.py` runs that one alone, and
`python -m tests.chaos` runs as many as you like.
"""

import os
import sys

import pytest

from tests.chaos import functions, leaks, life
from tests.chaos.plan import NETWORK, PROCESS, Plan, make_plan
from tests.chaos.schedule import prepared, run
from tests.chaos.soak import SPARE_MEMORY, Sample, grown
from tests.cluster import wait_until

WORKERS = 3
SEEDS = [int(os.environ["TELEGRAD_SEED"])] if "TELEGRAD_SEED" in os.environ else [1]
WEATHER = {
    "cuts": ("cut", "truncate", "replay"),
    "slow": ("delay", "trickle"),
    "lost": ("drop", "refuse"),
    "processes": ("kill", "stop"),
    "memory": ("squeeze",),
}
SQUEEZED = [
    pytest.mark.nightly,
    pytest.mark.timeout(120),
    pytest.mark.xfail(strict=False, reason="CPython's Thread.start can wait for ever for a thread without memory"),
]
MARKS = {"memory": SQUEEZED, "slow": [pytest.mark.nightly], "lost": [pytest.mark.nightly]}

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="faults and leaks are made and seen by way of /proc"),
    pytest.mark.timeout(300),  # a schedule that fails waits for each of its limits before it reports
]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("weather", [pytest.param(name, marks=MARKS.get(name, [])) for name in WEATHER])
def test_a_group_goes_on_after_faults(weather: str, seed: int) -> None:
    plan = make_plan(seed, WORKERS, WEATHER[weather], rounds=1)
    report = run(plan)
    print(f"SEED={seed}", plan, report, *report.violations, sep="\n")
    assert not report.violations
    assert report.faults
    assert report.operations


def test_plans_come_from_their_seeds() -> None:
    assert all(make_plan(seed, 4) == make_plan(seed, 4) for seed in range(50))
    kinds = {fault.kind for seed in range(50) for round_ in make_plan(seed, 4).rounds for fault in round_}
    assert kinds == set(NETWORK + PROCESS)


def sabotage(rank: int) -> None:
    """Let one worker give wrong answers, and the other keep a file open."""
    leaks.PATIENCE = 1.0
    if rank:
        vars(life)["kept"] = open(os.devnull)  # noqa: SIM115
    else:
        functions.mirror.__code__ = (lambda token, value: (token + 1, value)).__code__


@pytest.mark.nightly
def test_violations_are_found() -> None:
    with prepared(Plan(1, 2, "auto", [])) as schedule:

        def spoil() -> None:
            schedule.on_all(sabotage)
            wait_until(schedule.told)

        report = schedule.run(spoil)
    assert any("wrong result" in violation for violation in report.violations)
    assert any(os.devnull in violation for violation in report.violations)


# Growth in a soak


def samples(*memory: int) -> list[Sample]:
    return [Sample(each, 50 + number, 10) for number, each in enumerate(memory)]


def test_memory_that_comes_and_goes_is_no_growth() -> None:
    assert grown(samples(300 << 20, 500 << 20, 600 << 20, 301 << 20)) == []


def test_memory_that_stays_is_growth() -> None:
    base = 300 << 20
    more = base + int(base * 0.02) + SPARE_MEMORY + 1
    assert grown(samples(base, base, more, more)) == [f"memory grew from {base:,} to {more:,} bytes"]
