"""Measure Telegrad beside torch.distributed.rpc: `python -m benchmarks [words of row names] [--quick]`.

Both libraries' workers stand all the while and take turns, row by row and round by round, so that a drift of the
machine meets both. Writes `benchmarks/results/latest.json` and `latest.md`.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import platform
import sys

import torch

from benchmarks import limits
from benchmarks.groups import TELEGRAD, TORCH, Group
from benchmarks.report import Result, table
from benchmarks.rows import ROWS

RESULTS = pathlib.Path(__file__).parent / "results"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("words", nargs="*", help="measure only rows whose names contain one of these")
    parser.add_argument("--quick", action="store_true", help="two rounds instead of five")
    chosen = parser.parse_args()
    rounds = 2 if chosen.quick else 5
    ceilings = limits.measure()
    results: list[Result] = []
    chosen_rows = [
        (index, row)
        for index, row in enumerate(ROWS)
        if not chosen.words or any(word in row.name for word in chosen.words)
    ]
    for way, workers in dict.fromkeys((way, row.workers) for _, row in chosen_rows for way in row.ways):
        ours, theirs = Group(TELEGRAD, way, workers), Group(TORCH, way, workers)
        for index, row in chosen_rows:
            if way not in row.ways or row.workers != workers:
                continue
            print(f"\r{way}: {row.name:40}", end="", file=sys.stderr, flush=True)
            pairs = [(ours.measure(index), theirs.measure(index)) for _ in range(rounds)]
            figures = [list(column) for column in zip(*pairs, strict=True)]
            results.append(Result(row.name, way, row.unit, row.higher_is_better, *figures))
        ours.close()
        theirs.close()
    print(file=sys.stderr)
    machine = f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    text = f"{machine}\n\n{table(results, ceilings)}"
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "latest.md").write_text(text)
    rows_json = [dict(result._asdict(), ratio=result.ratio) for result in results]
    (RESULTS / "latest.json").write_text(json.dumps({"rows": rows_json, "limits": ceilings}, indent=1))
    print(text)


if __name__ == "__main__":
    main()
