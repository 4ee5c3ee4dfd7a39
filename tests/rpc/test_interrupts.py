"""Tests of Ctrl-C, and of exceptions of other signal handlers, at any point of any call: later calls work, no leaks.

A failing seed is printed as SEED=...; `TELEGRAD_SEED=... pytest tests/rpc/test_interrupts.py` runs that seed alone.
"""

import os
from collections.abc import Iterator

import pytest

from tests.cluster import Process, group, processes
from tests.rpc import interrupting
from tests.rpc.interrupting import SCENES

pytestmark = pytest.mark.skipif(os.name == "nt", reason="Windows has no such signals")

SEED = int(os.environ.get("TELEGRAD_SEED", "1"))
LONG = 20 * 60.0  # seconds


@pytest.fixture(scope="module")
def three() -> Iterator[list[Process]]:
    with group(3) as made:
        yield made


def test_interrupts_at_points_of_every_call(three: list[Process]) -> None:
    points = 6 * len(SCENES)
    assert three[0].run(interrupting.sweep, list(SCENES), points, SEED) == points


@pytest.mark.parametrize(
    ("seed", "count"), [(SEED, 80), *(pytest.param(SEED + more, 1000, marks=pytest.mark.nightly) for more in range(5))]
)
def test_signals_at_random_times(three: list[Process], seed: int, count: int) -> None:
    assert three[0].run(interrupting.signals_at_random, seed, count, patience=LONG) == count


def test_an_exception_of_a_signal_handler_is_raised_once(three: list[Process]) -> None:
    assert three[0].run(interrupting.other_handlers, SEED, 3) > 30


@pytest.mark.parametrize("one_in", [2, pytest.param(1, marks=pytest.mark.nightly)])
def test_exceptions_of_handlers_in_code_of_the_user(three: list[Process], one_in: int) -> None:
    assert three[0].run(interrupting.in_own_code, one_in) == 4 // one_in * len(interrupting.OWN_CODE)


def test_calls_of_other_threads_go_on(three: list[Process]) -> None:
    assert three[0].run(interrupting.beside_another_thread, SEED) > 0


@pytest.mark.parametrize("one_in", [len(interrupting.WAITS), pytest.param(1, marks=pytest.mark.nightly)])
def test_handlers_that_make_calls(three: list[Process], one_in: int) -> None:
    three[0].run(interrupting.calls_in_handlers, SEED, one_in)


@pytest.mark.parametrize("count", [6, pytest.param(400, marks=pytest.mark.nightly)])
def test_interrupts_of_init_rpc_and_shutdown(count: int) -> None:
    with processes(1) as made:
        made[0].run(interrupting.lives, SEED, count, patience=LONG)


@pytest.mark.nightly
@pytest.mark.parametrize("name", SCENES)
def test_interrupts_at_each_point(three: list[Process], name: str) -> None:
    assert three[0].run(interrupting.sweep, [name], 0, SEED, patience=LONG) > 100
