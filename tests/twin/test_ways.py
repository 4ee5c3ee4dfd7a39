"""A program shows the same in each way to start it."""

import pathlib
import re
from typing import Any

import pytest

from tests.seeds import TODAY
from tests.twin import solo, ways
from tests.twin.making import make
from tests.twin.sight import differences

NAMES = ["worker0", "worker1", "worker2"]
ROUNDS = 12

pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore::UserWarning")]


def check(name: str, seed: int, folder: pathlib.Path) -> None:
    way = ways.WAYS[name]
    program = make(seed, NAMES, ROUNDS, way.common)
    expected = solo.run(program.names, f"FOLDER = ''\n{program.text()}", sends_modes=not way.common)
    seen = ways.run(way, program, folder)
    if way.workers and not way.beside and is_refused(seen):
        return
    found = differences(expected, seen)
    if way.workers and not (way.beside or way.guarded):
        # A global number is sent again after a function binds it again, and a class with the changes of its sender.
        changing = re.findall(r"^def (\w+)\(.*\):\n    (?:global |.*\.known$)", program.text(), re.MULTILINE)
        found = [each for each in found if not re.search(rf"^ \w+ (?:{'|'.join(changing)})\b", each)]
    assert not found, "\n".join([f"SEED={seed}, {name}; {folder} has it", *found[:5]])


def is_refused(seen: dict[str, Any]) -> bool:
    """Return True if a global of the main program could not be sent: workers that import the program make their own."""
    return any("CannotEncode" in str(error) for error in seen[NAMES[0]].get("error", ()))


@pytest.mark.nightly
@pytest.mark.parametrize("seed", [0, 2 * TODAY, 2 * TODAY + 1])
@pytest.mark.parametrize("name", ways.WAYS)
def test_programs_in_each_way(name: str, seed: int, tmp_path: pathlib.Path) -> None:
    check(name, seed, tmp_path)
