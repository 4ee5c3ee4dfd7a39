"""Telegrad's figures beside those of its peers."""

from __future__ import annotations

import statistics
from typing import NamedTuple

from benchmarks.measuring import Row
from benchmarks.report import spread


class Line(NamedTuple):
    """One row: the figures of each, Telegrad first, and why some are missing."""

    row: Row
    figures: list[list[float]]
    failures: list[str]


def beside(line: Line, index: int) -> str:
    """A peer's figures, and how many times better Telegrad's are."""
    ours, theirs = line.figures[0], line.figures[index]
    told = spread(theirs, line.failures[index])
    if not ours or not theirs:
        return told.removeprefix("not measured: ") if "not run: " in told else told
    factor = statistics.median(theirs) / statistics.median(ours)
    if line.row.higher_is_better:
        factor = 1 / factor
    return f"{told}, {factor:.1f} times" if factor >= 0.1 else f"{told}, {factor:.2f} times"


def table(machine: str, names: list[str], lines: list[Line]) -> str:
    """Markdown of everything."""
    text = [
        machine,
        "",
        "Medians and ranges; behind each peer's figure, how many times better Telegrad's is.",
        "",
        f"| row | unit | Telegrad | {' | '.join(names)} |",
        f"| --- | --- | --- |{' --- |' * len(names)}",
    ]
    for line in lines:
        peers = " | ".join(beside(line, index + 1) for index in range(len(names)))
        text.append(f"| {line.row.name} | {line.row.unit} | {spread(line.figures[0], line.failures[0])} | {peers} |")
    return "\n".join(text) + "\n"
