"""Benchmarks of encryption over TCP: `python -m benchmarks.encryption [words of row names] [--quick]`.

Two groups take turns in one run: one with encryption, and one with plain connections after the same handshake. Telegrad
has no option for plain connections, so this program patches it. Each turn measures both groups one after the other,
because other programs slow both down; the ratio is the median over the turns. Also prints the ratios of the best turns
and of the processor times of both processes. `python -m benchmarks.encryption_floor` measures the same without
Telegrad.
"""

from __future__ import annotations

import statistics
from functools import partial
from multiprocessing.connection import Connection
from typing import Any
from unittest.mock import patch

from benchmarks.calls import bandwidth, calls_per_second, sync_empty, sync_small_echo
from benchmarks.command import choose, run
from benchmarks.groups import Group, work
from benchmarks.measuring import MB, TELEGRAD, Row
from benchmarks.turns import take_turns
from telegrad._core.transport.connect import OpenedChannel

_TCP = ("tcp",)
AT_MOST = {  # ratio of encrypted to plain
    "empty rpc_sync, p50": 1.1,
    "1 KB tensor echo": 1.1,
    "16 MB echo": 1.3,
    "64 MB echo": 1.3,
}


def _echo(name: str, size: int) -> Row:
    return Row(f"{name} echo", "GB/s", True, partial(bandwidth, size=size, direction="echo"), _TCP, workers=2)


ROWS = [
    Row("empty rpc_sync, p50", "µs", False, partial(sync_empty, at=0.5), _TCP, workers=2),
    Row("1 KB tensor echo", "µs", False, sync_small_echo, _TCP, workers=2),
    Row(
        "rpc_async, 1000 in flight",
        "calls/s",
        True,
        partial(calls_per_second, window=1000, total=10_000),
        _TCP,
        workers=2,
    ),
    *(_echo(name, size) for name, size in (("64 KB", 64 << 10), ("1 MB", MB), ("16 MB", 16 * MB), ("64 MB", 64 * MB))),
]


def work_in_plain(pipe: Connection, *args: Any) -> None:
    """Run a worker with plain connections."""
    behind = OpenedChannel.behind
    with patch.object(OpenedChannel, "behind", lambda *given: behind(*given)._replace(ciphers=None)):
        work(pipe, *args)


class Workers:
    """Two workers that take turns with another group of two."""

    def __init__(self, run: Any) -> None:
        self._group = Group(TELEGRAD, "tcp", 2, run=run)
        self.processors: list[float] = []  # processor seconds of each turn

    def measure(self, row: Row) -> float:
        begun = self._group.processor_time()
        figure = self._group.measure(row.measure, row.patience)
        self.processors.append(self._group.processor_time() - begun)
        return figure

    def close(self) -> None:
        self._group.close()

    def kill(self) -> None:
        self._group.kill()


def main() -> int:
    chosen = choose("benchmarks.encryption", __doc__, ROWS)
    sides = [Workers(work_in_plain), Workers(work)]
    try:
        print(f"{'over TCP':28} {'plain':>12} {'encrypted':>12}          times as long: median, best, processor time")
        for row in chosen.rows:
            for side in sides:
                side.processors.clear()
            figures, failures = take_turns(row, sides, 3 * chosen.rounds)
            if any(failures):
                print(f"{row.name}: {' '.join(failures)}")
                return 1
            plain, encrypted = map(statistics.median, figures)
            turns = zip(*(figures if row.higher_is_better else reversed(figures)), strict=True)
            longer = statistics.median(more / less for more, less in turns)
            best = max(figures[0]) / max(figures[1]) if row.higher_is_better else min(figures[1]) / min(figures[0])
            used = zip(*(side.processors for side in reversed(sides)), strict=True)
            busier = statistics.median(more / less for more, less in used)
            target = AT_MOST.get(row.name)
            verdict = "" if target is None else f"target {target}: {'met' if longer <= target else 'missed'}"
            ratios = f"{longer:.2f} {best:.2f} {busier:.2f}"
            print(
                f"{row.name:28} {plain:12,.2f} {encrypted:12,.2f} {row.unit:8} {ratios}   {verdict}".rstrip(),
                flush=True,
            )
        return 0
    finally:
        for side in sides:
            side.kill()


if __name__ == "__main__":
    run(main)
