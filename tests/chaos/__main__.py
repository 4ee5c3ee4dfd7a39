"""Workers under faults: `python -m tests.chaos [--seconds 60] [--seed N] [--workers 4] [--kinds cut,kill] [--soak]`.

A seed that fails is printed as SEED=...; `--seed N --schedules 1` runs it alone. The exit code is 1 after violations.
"""

import argparse
import os
import random
import sys
import time
from collections.abc import Callable
from typing import TypeVar

from tests.chaos import soak
from tests.chaos.plan import KINDS, make_plan
from tests.chaos.report import Report
from tests.chaos.schedule import run
from tests.chaos.supervised.plan import make_plan as make_supervised_plan
from tests.chaos.supervised.schedule import run as run_supervised

P = TypeVar("P")  # a plan


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="schedules begin for that long")
    parser.add_argument("--seed", type=int, default=None, help="of the first schedule; the next have the next numbers")
    parser.add_argument("--schedules", type=int, default=0, help="so many, however long it takes")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument(
        "--kinds", default="", help=f"of faults, by commas, of {','.join(KINDS)}; else the seed decides"
    )
    parser.add_argument("--supervised", action="store_true", help="a group of `telegrad run` that outlives its workers")
    parser.add_argument("--soak", action="store_true", help="no faults: watch memory meanwhile, and what is left")
    chosen = parser.parse_args()
    seed = chosen.seed
    if seed is None:
        seed = int(os.environ.get("TELEGRAD_SEED") or random.SystemRandom().randrange(1_000_000))
    if chosen.soak:
        return soak.run(chosen.seconds, chosen.workers, seed)
    if chosen.supervised:
        return _run_all(seed, chosen, ["--supervised"], make_supervised_plan, run_supervised)
    kinds = [kind for kind in chosen.kinds.split(",") if kind]
    if unknown := set(kinds) - set(KINDS):
        parser.error(f"no such faults: {', '.join(sorted(unknown))}")
    if chosen.workers < 2:
        parser.error("chaos needs two workers at least")
    again = ["--workers", str(chosen.workers), *(["--kinds", chosen.kinds] if kinds else [])]
    return _run_all(seed, chosen, again, lambda seed: make_plan(seed, chosen.workers, kinds), run)


def _run_all(
    first: int, chosen: argparse.Namespace, again: list[str], make: Callable[[int], P], live: Callable[[P], Report]
) -> int:
    """Run schedule after schedule and return the exit code. `again`: options with which a seed gives the same plan."""
    total = Report()
    until = time.monotonic() + chosen.seconds
    while total.schedules < chosen.schedules if chosen.schedules else time.monotonic() < until:
        seed = first + total.schedules
        began = time.monotonic()
        plan = make(seed)
        report = live(plan)
        total.add(report)
        print(
            f"SEED={seed} {report.faults.total()} faults, {report.operations} operations, "
            f"{report.errors.total()} errors, {time.monotonic() - began:.1f} s, {len(report.violations)} violations",
            flush=True,
        )
        if report.violations:
            command = ["python -m tests.chaos --seed", str(seed), "--schedules 1", *again]
            print(plan, *report.violations, f"again: {' '.join(command)}", sep="\n", flush=True)
    print(f"\n{total}")
    return int(bool(total.violations))


if __name__ == "__main__":
    sys.exit(main())
