"""The targets of the fuzzer: their initial inputs in every run, and ten minutes of fuzzing each at night."""

import pathlib
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.strangers import corpus, fuzz

ROOT = pathlib.Path(__file__).parent.parent.parent
SECONDS = 600


@pytest.mark.parametrize("target", fuzz.NAMES)
def test_the_initial_inputs_pass(target: str) -> None:
    beginnings = [*corpus.beginnings(target)]
    assert len(beginnings) > 5
    for data in beginnings:
        corpus.TARGETS[target](data)


@pytest.mark.parametrize("target", fuzz.NAMES)
def test_any_bytes_are_an_input(target: str) -> None:
    @settings(deadline=None, max_examples=100)
    @given(st.binary(max_size=300))
    def run(data: bytes) -> None:
        corpus.TARGETS[target](data)

    run()


@pytest.mark.nightly
@pytest.mark.timeout(SECONDS + 120)
@pytest.mark.skipif(not fuzz.installed(), reason="atheris is not installed: pip install atheris")
@pytest.mark.parametrize("target", fuzz.NAMES)
def test_ten_minutes_of_fuzzing_find_nothing(target: str, tmp_path: pathlib.Path) -> None:
    command = [sys.executable, "-m", "tests.strangers.fuzz", "--seconds", str(SECONDS), "--findings", str(tmp_path)]
    # A shell starts the fuzzer: memory of this process would count as memory of its own child.
    between = ["sh", "-c", '"$@"; exit $?', "sh"]
    ran = subprocess.run([*between, *command, target], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert "stat::number_of_executed_units" in ran.stderr
