"""Each example runs in a small setting, and has learnt something in the end."""

import os
import pathlib
import subprocess
import sys

import pytest

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"
PATIENCE = 100  # seconds; an example takes 5 to 15

IN_MAKE_TEST = "first_calls.py"
RUNS = {
    "parameter_server.py --mode sync --steps 100": "of the same, in one process",
    "reinforcement.py --steps 12": "oldest weights",
    IN_MAKE_TEST: "per second",
}
VARIANTS = {
    "rnn.py --steps 30": "loss per character",
    "pipeline.py --steps 12 --chunks 4": "step by step",
    "multi_machine.py --steps 150": "largest difference of outputs",
    "embeddings.py --steps 300": "largest difference of outputs",
    "federated.py --steps 8": "accuracy",
    "reinforcement.py --steps 12 --ask": "observers answered at once",
    "parameter_server.py --mode async --steps 200": "of the same, in one process",
    "recovering.py --steps 200": "largest difference of outputs",
    "pipeline.py --steps 30 --chunks 4 --schedule zero-bubble": "step by step",
}


# Runs an example with workers that need no imports, which take most of an example's time.
FORKING = """
import multiprocessing, os, runpy, sys
fork = multiprocessing.get_context("fork")
multiprocessing.get_context = lambda method=None: fork
sys.argv.pop(0)
sys.path[0] = os.path.dirname(sys.argv[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""
SPAWNING = (IN_MAKE_TEST,)  # run as by users, as are all variants


@pytest.mark.timeout(3 * PATIENCE + 20)
@pytest.mark.parametrize(
    "run", [pytest.param(run, marks=() if run == IN_MAKE_TEST else pytest.mark.nightly) for run in RUNS | VARIANTS]
)
def test_an_example_runs(run: str, tmp_path: pathlib.Path) -> None:
    name, *options = run.split()
    how = ["-c", FORKING] if run in RUNS and name not in SPAWNING else []
    command = [sys.executable, *how, str(EXAMPLES / name), *options]
    environment = {**os.environ, "TELEGRAD_PROGRESS": "0"}  # no lines about waiting, which occur on a busy machine
    ran = subprocess.run(command, capture_output=True, text=True, timeout=3 * PATIENCE, cwd=tmp_path, env=environment)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stderr == "" or run in VARIANTS  # workers die in some variants
    assert (RUNS | VARIANTS)[run] in ran.stdout
    if name == "pipeline.py":
        assert (tmp_path / "pipeline_loss.png").stat().st_size > 1000


def test_every_example_is_run() -> None:
    assert {run.split()[0] for run in RUNS | VARIANTS} == {path.name for path in EXAMPLES.glob("*.py")} - {
        "common.py",
        "server.py",
    }  # the server has a test of its own
