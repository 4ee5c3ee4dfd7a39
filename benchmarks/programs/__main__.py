"""Measure whole programs: `python -m benchmarks.programs [words of program names] [--quick]`.

Each is written once, and run in turn on Telegrad, on Telegrad in the place of torch.distributed.rpc
(`python -m telegrad`), and on that itself, with one and with two threads per process. A whole run writes `programs.md`
and `programs.json` to `benchmarks/results`; any other where `--results` says.
"""

from __future__ import annotations

import json
import sys

from benchmarks.command import choose, machine, run
from benchmarks.measuring import Row
from benchmarks.programs.report import DROP_IN, EACH, NATIVE, name_of, table
from benchmarks.programs.side import ProgramSide
from benchmarks.results import Result, Run
from benchmarks.turns import take_turns

PROGRAMS = (
    "reinforcement",
    "parameter_server",
    "rnn",
    "pipeline",
    "batching",
    "split",
    "hybrid",
    "federated",
    "actors",
)
WHOLE, STEP = "start to exit", "step"
WAYS = {1: "1 thread", 2: "2 threads"}


def _unused() -> float:
    raise AssertionError("a program is run by its side")


ROWS = [Row(name, "s", False, _unused, targets=(EACH,)) for name in PROGRAMS]


def measure(row: Row, threads: int, rounds: int) -> list[Result]:
    """A program's times with so many threads per process: whole runs and steps, of both of ours."""
    sides = [
        ProgramSide("telegrad", threads),
        ProgramSide("torch", threads, drop_in=True),
        ProgramSide("torch", threads),
    ]
    figures, failures = take_turns(row, sides, rounds)
    results = []
    for index, name in enumerate((NATIVE, DROP_IN)):
        why = failures[index], failures[2]
        about = WAYS[threads]
        whole = Result(name_of(row.name, name, WHOLE), about, "s", False, figures[index], figures[2], row.targets, *why)
        step = Result(name_of(row.name, name, STEP), about, "ms", False, sides[index].steps, sides[2].steps, (), *why)
        results += [whole, step]
    return results


def main() -> int:
    chosen = choose("benchmarks.programs", __doc__, ROWS)
    results: list[Result] = []
    for threads in WAYS:
        for row in chosen.rows:
            print(f"\r{WAYS[threads]}: {row.name:45}", end="", file=sys.stderr, flush=True)
            results += measure(row, threads, chosen.rounds)
    print(file=sys.stderr)
    found = Run(machine(), results, {})
    text = table(found, [row.name for row in chosen.rows], WAYS.values(), (WHOLE, STEP))
    print(text)
    if chosen.folder:
        chosen.folder.mkdir(parents=True, exist_ok=True)
        (chosen.folder / "programs.md").write_text(text)
        (chosen.folder / "programs.json").write_text(json.dumps(found.as_json(), indent=1))
    return 1 if any(result.ours_failed for result in results) else 0


if __name__ == "__main__":
    run(main)
