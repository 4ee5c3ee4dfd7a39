"""Workers under faults: `python -m tests.chaos [--seconds 60] [--seed N] [--workers 4] [--kinds cut,kill] [--soak]`.

A seed that fails is printed as SEED=...; `--seed N --schedules 1` runs it alone. Ends with 1 after violations.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time

from tests.chaos import soak
from tests.chaos.plan import KINDS, make_plan
from tests.chaos.report import Report
from tests.chaos.schedule import run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="schedules begin for that long")
    parser.add_argument("--seed", type=int, default=None, help="of the first schedule; the next have the next numbers")
    parser.add_argument("--schedules", type=int, default=0, help="so many, however long it takes")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument(
        "--kinds", default="", help=f"of faults, by commas, of {','.join(KINDS)}; else the seed decides"
    )
    parser.add_argument("--soak", action="store_true", help="no faults: watch memory meanwhile, and what is left")
    chosen = parser.parse_args()
    seed = chosen.seed
    if seed is None:
        seed = int(os.environ.get("TELEGRAD_SEED") or random.SystemRandom().randrange(1_000_000))
    if chosen.soak:
        return soak.run(chosen.seconds, chosen.workers, seed)
    kinds = [kind for kind in chosen.kinds.split(",") if kind]
    if unknown := set(kinds) - set(KINDS):
        parser.error(f"no such faults: {', '.join(sorted(unknown))}")
    if chosen.workers < 2:
        parser.error("chaos needs two workers at least")
    total = _run_all(seed, chosen.seconds, chosen.schedules, chosen.workers, kinds)
    print(f"\n{total}")
    return bool(total.violations)


def _run_all(first: int, seconds: float, schedules: int, workers: int, kinds: list[str]) -> Report:
    total = Report()
    until = time.monotonic() + seconds
    while total.schedules < schedules if schedules else time.monotonic() < until:
        seed = first + total.schedules
        began = time.monotonic()
        plan = make_plan(seed, workers, kinds)
        report = run(plan)
        total.add(report)
        print(
            f"SEED={seed} {report.faults.total()} faults, {report.operations} operations, "
            f"{report.errors.total()} errors, {time.monotonic() - began:.1f} s, {len(report.violations)} violations",
            flush=True,
        )
        if report.violations:
            again = f"python -m tests.chaos --seed {seed} --schedules 1 --workers {workers}"
            again += f" --kinds {','.join(kinds)}" if kinds else ""
            print(plan, *report.violations, f"again: {again}", sep="\n", flush=True)
    return total


if __name__ == "__main__":
    sys.exit(main())
