"""Compare this checkout with an earlier revision: `python -m benchmarks.compare --to REVISION [words of row names]`.

Both take turns in each row, with the benchmarks of this checkout. Fails if a row was more than 3% slower in each round.
Rows that start their own workers are left out.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import pathlib
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence

from benchmarks.command import choose, run
from benchmarks.measuring import TELEGRAD, Row
from benchmarks.report import number
from benchmarks.rows import ROWS
from benchmarks.turns import Workers, closed, take_turns

SLOWER = 1.03
ROOT = pathlib.Path(__file__).parent.parent


class Earlier(Workers):
    """Workers that import the package from another folder."""

    def __init__(self, folder: str, way: str, workers: int, threads: int | None) -> None:
        super().__init__(TELEGRAD, way, workers, threads)
        self._folder = folder

    def measure(self, row: Row) -> float:
        sys.path.insert(0, self._folder)  # new processes copy it; this process imports nothing of the package
        try:
            return super().measure(row)
        finally:
            sys.path.remove(self._folder)


@contextlib.contextmanager
def exported(revision: str) -> Iterator[str]:
    """Write the package of a revision to a folder; yield the folder."""
    done = subprocess.run(["git", "archive", revision, "telegrad"], cwd=ROOT, capture_output=True)
    if done.returncode:
        sys.exit(f"git has no package at {revision!r}: {done.stderr.decode().strip()}")
    with tempfile.TemporaryDirectory() as folder, tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(folder, filter="data")
        yield folder


def times_slower(row: Row, now: Sequence[float], before: Sequence[float]) -> list[float]:
    """Return for each round how many times slower the row has become, or how many times larger its memory."""
    pairs = zip(before, now, strict=True) if row.higher_is_better else zip(now, before, strict=True)
    return [one / other for one, other in pairs]


def compare(row: Row, way: str, sides: Sequence[Workers], rounds: int) -> bool:
    """Measure a row and print its line. Return True if it has become slower, or has failed."""
    (now, before), (failed, _) = take_turns(row, sides, rounds)
    if failed or not (now and before):
        print(f"| {row.name} | {way} | {row.unit} | not measured {failed} |", flush=True)
        return bool(failed)
    ratios = times_slower(row, now, before)
    slower = min(ratios) > SLOWER
    figures = " | ".join(number(statistics.median(each)) for each in (now, before))
    ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    print(f"| {row.name} | {way} | {row.unit} | {figures} | {ratio} |{' **slower** |' * slower}", flush=True)
    return slower


def main() -> int:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--to", default="")
    given, rest = parser.parse_known_args()
    chosen = choose("benchmarks.compare --to REVISION", __doc__, ROWS, rest)
    if not given.to:
        sys.exit("name the revision to compare with: --to REVISION, or make bench-compare TO=REVISION")
    rows = [row for row in chosen.rows if not row.alone and TELEGRAD in row.libraries]
    slower = 0
    with exported(given.to) as folder:
        print("| row | over | unit | now | before | times slower |\n| --- | --- | --- | --- | --- | --- |")
        for way, workers, threads in dict.fromkeys((way, row.workers, row.threads) for row in rows for way in row.ways):
            sides = Workers(TELEGRAD, way, workers, threads), Earlier(folder, way, workers, threads)
            with closed(sides):
                for row in rows:
                    if way in row.ways and (row.workers, row.threads) == (workers, threads):
                        slower += compare(row, way, sides, chosen.rounds)
    print(f"\n{slower} rows are slower in each round, or failed.")
    return 1 if slower else 0


if __name__ == "__main__":
    run(main)
