"""Figures of whole programs into a table."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from benchmarks.report import spread
from benchmarks.results import Result, Run
from benchmarks.targets import OfPeer

NATIVE, DROP_IN = "Telegrad", "drop-in"
SIDES = (NATIVE, DROP_IN)
EACH, MEDIAN = OfPeer(0.95), 0.8  # targets: of each program's time, and of the median of their ratios


def name_of(program: str, side: str, what: str) -> str:
    return f"{program}, {what}, {side}"


def table(run: Run, programs: Iterable[str], ways: Iterable[str], figures: Iterable[str]) -> str:
    """Markdown of everything."""
    results = {(each.name, each.way): each for each in run.results}
    lines = [
        run.machine,
        "",
        "Medians and ranges; a ratio is to the reference's time, below 1 is faster.",
        "",
        "| program | each has | time | Telegrad | drop-in | torch.distributed.rpc | ratio | ratio, drop-in | met |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for way in ways:
        for program in programs:
            for what in figures:
                own = [results[name_of(program, side, what), way] for side in SIDES]
                lines.append(_line(run, program, way, what, own))
    return "\n".join([*lines, "", *_summaries(run)]) + "\n"


def _line(run: Run, program: str, way: str, what: str, own: list[Result]) -> str:
    unit = own[0].unit
    cells = [
        program,
        way,
        f"{what}, {unit}",
        *(spread(each.ours, each.ours_failed) for each in own),
        spread(own[0].theirs, own[0].theirs_failed),
        *("" if each.ratio is None else f"{each.ratio:.2f}" for each in own),
        ", ".join(_met(each.met) for result in own for each in run.checked(result)),
    ]
    return f"| {' | '.join(cells)} |"


def _met(met: bool | None) -> str:
    return {True: "yes", False: "**no**", None: "unknown"}[met]


def _summaries(run: Run) -> list[str]:
    """What is asked of all programs together."""
    said = []
    for side in SIDES:
        ratios = [each.ratio for each in run.results if each.targets and each.name.endswith(side) and each.ratio]
        if ratios:
            middle = statistics.median(ratios)
            said.append(
                f"{side}: from start to exit, the median of the ratios is {middle:.2f} (target: at most {MEDIAN:g}, "
                f"{'met' if middle <= MEDIAN else 'not met'}), the largest {max(ratios):.2f} "
                f"(at most {EACH.factor:g}, {'met' if max(ratios) <= EACH.factor else 'not met'})."
            )
    return said
