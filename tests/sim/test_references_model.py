"""An exhaustive search of the reference protocol in Promela: see references.pml."""

import pathlib
import shutil
import subprocess

import pytest

MODEL = pathlib.Path(__file__).with_name("references.pml")
TOOLS = ("spin", "gcc")
PATIENCE = 400

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not all(map(shutil.which, TOOLS)), reason="install spin and gcc (apt-get install spin gcc)"),
]


def search(folder: pathlib.Path, *defined: str) -> str:
    """Return the output of the exhaustive search."""
    run(folder, "spin", *(f"-D{name}" for name in defined), "-a", str(MODEL))
    run(folder, "gcc", "-O2", "-DSAFETY", "-DCOLLAPSE", "-DMEMLIM=4000", "-o", "pan", "pan.c")
    return run(folder, "./pan", "-m1000000")


def run(folder: pathlib.Path, *command: str) -> str:
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_the_protocol_holds_in_every_order_of_four_passes(tmp_path: pathlib.Path) -> None:
    """The search takes 8 million states, 1.5 GB, and 40 s."""
    said = search(tmp_path, "FORKS=5")
    assert "errors: 0" in said
    assert "not completed" not in said
    assert "too small" not in said
    assert "-end-" not in said.partition("unreached")[2], "the check at the end was never reached"


@pytest.mark.parametrize("rule", ["BROKEN_G1", "BROKEN_G2"])
def test_the_search_finds_broken_rules(tmp_path: pathlib.Path, rule: str) -> None:
    assert "errors: 1" in search(tmp_path, "FORKS=3", rule)
