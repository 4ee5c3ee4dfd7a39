"""Compare Telegrad with torch.distributed.rpc: `python -m benchmarks [words of row names] [--quick]`.

Pipelines are also compared with torch.distributed.pipelining. Prints the tables. A full run also writes `latest.json`,
`latest.md`, `latest.png` and `times.png` to `benchmarks/results`. A run with selected rows, `--quick` or another number
of threads writes them only to the folder of `--results`. `python -m benchmarks.floods` measures calls while another
caller floods the callee.
"""

from __future__ import annotations

import json

from benchmarks.command import choose, machine, run
from benchmarks.limits import LIMITS
from benchmarks.plot import draw, draw_times
from benchmarks.report import table
from benchmarks.results import Run
from benchmarks.rows import ROWS
from benchmarks.turns import measure_limits, take_all


def main() -> int:
    chosen = choose("benchmarks", __doc__, ROWS)
    limits: dict[str, list[float]] = {}
    measure_limits(LIMITS, limits)
    found = Run(machine(chosen.rows), take_all(chosen.rows, chosen.rounds, limits), limits)
    print(table(found))
    if chosen.folder:
        chosen.folder.mkdir(parents=True, exist_ok=True)
        (chosen.folder / "latest.md").write_text(table(found))
        (chosen.folder / "latest.json").write_text(json.dumps(found.as_json(), indent=1))
        draw(found, chosen.folder / "latest.png")
        draw_times(found, chosen.folder / "times.png")
    return 1 if any(result.ours_failed for result in found.results) else 0


if __name__ == "__main__":
    run(main)
