"""Programs made from seeds show the same in a single process and on workers.

`TELEGRAD_SEED=... pytest tests/twin/test_twin.py` runs one of them. A program that differs is reduced, and printed as a
script.
"""

import contextlib
import os
import pathlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from tests.twin import solo
from tests.twin.group import Runner
from tests.twin.making import ANYWHERE, INSIDE, OUTSIDE, Program, make
from tests.twin.shrinking import shrink
from tests.twin.sight import describe, differences

SEED = os.environ.get("TELEGRAD_SEED")
SEEDS: Iterable[int] = [int(SEED)] if SEED else range(40)
MANY_SEEDS = [] if SEED else [range(first, first + 1_000) for first in range(40, 20_040, 1_000)]

pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore::UserWarning")]


@pytest.fixture(scope="module")
def workers() -> Iterator[Runner]:
    with contextlib.closing(Runner()) as made:
        yield made


class Comparing:
    """Runs programs in both ways, each time with an empty folder."""

    def __init__(self, workers: Runner, folder: pathlib.Path) -> None:
        self._workers = workers
        self._folder = folder
        self._runs = 0

    def differences(self, program: Program) -> list[str]:
        return differences(*self._run(program))

    def _run(self, program: Program) -> tuple[dict[str, Any], dict[str, Any]]:
        self._runs += 1
        text = f"FOLDER = {str(self._folder / str(self._runs))!r}\n{program.text()}"
        return solo.run(program.names, text), self._workers.run(program.names, text)

    def fails_like(self, program: Program) -> Callable[[Program], bool]:
        """Return a function that tells if a smaller program differs, with the same errors in both ways."""

        def errors(seen: dict[str, Any]) -> list[str]:
            return [error[1] for error in seen.get(program.names[0], {}).get("error", ())]

        wanted = list(map(errors, self._run(program)))

        def fails(smaller: Program) -> bool:
            try:
                both = self._run(smaller)
            except Exception:  # a definition that the import needs is missing
                return False
            return list(map(errors, both)) == wanted and bool(differences(*both))

        return fails

    def check(self, seeds: Iterable[int]) -> None:
        for seed in seeds:
            program = make(seed)
            if found := self.differences(program):
                smaller = shrink(program, self.fails_like(program))
                found = self.differences(smaller) or found
                lines = "\n".join(found[:5])
                raise AssertionError(f"SEED={seed} {lines}\nAs a script:\n\n{smaller.script()}")


@pytest.fixture
def comparing(workers: Runner, tmp_path: pathlib.Path) -> Comparing:
    return Comparing(workers, tmp_path)


def test_random_programs(comparing: Comparing) -> None:
    comparing.check(SEEDS)


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seeds", MANY_SEEDS, ids=str)
def test_twenty_thousand_random_programs(comparing: Comparing, seeds: range) -> None:
    comparing.check(seeds)


def test_each_part_is_in_a_program_of_the_usual_seeds() -> None:
    kinds = Counter(kind for seed in range(200) for kind in make(seed).kinds)
    assert not {each.__name__ for each in (*ANYWHERE, *INSIDE, *OUTSIDE)} - kinds.keys()


def test_programs_run_to_their_end() -> None:
    """An error would hide the rest of a program."""
    for seed in range(20):
        program = make(seed)
        assert "error" not in solo.run(program.names, f"FOLDER = ''\n{program.text()}")[program.names[0]], seed


PLANTED = Program(
    0,
    ["worker0", "worker1"],
    ["COUNT = 0", "def bump():\n    global COUNT\n    COUNT += 1\n    return COUNT", "def other():\n    return 1"],
    [
        "see('other', other())",
        "see('there', rpc.rpc_sync('worker1', bump))",
        "see('who', rpc.RRef(1).__module__)",  # differs, as the classes of references differ
        "see('here', bump())",
    ],
    ["planted"],
)


def test_a_program_that_differs_is_reduced(comparing: Comparing) -> None:
    assert comparing.differences(PLANTED)
    smaller = shrink(PLANTED, comparing.fails_like(PLANTED))
    assert smaller.lines == ["see('who', rpc.RRef(1).__module__)"]
    assert not smaller.definitions
    assert "see('who'" in smaller.script()


def test_descriptions_differ_in_dtype_shape_value_and_kind() -> None:
    import torch

    one, other = torch.ones(3), torch.ones(3)
    assert not differences(describe([one]), describe([other]))
    for different in (
        other.double(),
        other[:2],
        other * (1 + 1e-6),
        other.clone().requires_grad_(),
        torch.nn.Parameter(other, requires_grad=False),
        other.to_sparse(),
    ):
        assert differences(describe([one]), describe([different]))
    assert differences(describe(ValueError("a")), describe(ValueError("b")))
    assert differences(describe(ValueError("a")), describe(KeyError("a")))
    assert differences({"w": {"a": [1]}}, {"w": {}})
