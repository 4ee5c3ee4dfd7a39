"""Tables of the results."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.costs import largest_cost
from benchmarks.limits import LIMITS
from benchmarks.results import Checked, Result, Run

_ANSWERS = {True: "yes", False: "**no**", None: "unknown"}


def number(figure: float) -> str:
    return f"{figure:,.0f}" if figure >= 100 else f"{figure:.1f}" if figure >= 10 else f"{figure:.2f}"


def spread(figures: Sequence[float], failed: str = "") -> str:
    """Return the median and the range, and the reason for missing figures. Empty if no figures are expected."""
    if not figures:
        return f"not measured: {_cell(failed)}" if failed else ""
    told = f"{number(statistics.median(figures))} ({number(min(figures))} to {number(max(figures))})"
    return f"{told}, then {_cell(failed)}" if failed else told


def verdict(result: Result, peer: Sequence[float]) -> str:
    """Return the ratio to a peer's figures, and how many times better or worse that is."""
    ratio = result.ratio_to(peer)
    if ratio is None:
        return ""
    factor = ratio if result.higher_is_better else 1 / ratio
    return f"{ratio:.2f}" + (f" ({factor:.1f} times better)" if factor >= 1 else f" ({1 / factor:.1f} times worse)")


def goal(result: Result, checked: Checked) -> str:
    """Return a target in the unit of its row, with the reason for it."""
    sign = "≥" if result.higher_is_better else "≤"
    if checked.threshold is None:
        return f"{checked.target.reason}"
    if checked.target.reason:
        return f"{sign} {number(checked.threshold)} ({checked.target.reason})"
    return f"{sign} {number(checked.threshold)}"


def table(run: Run) -> str:
    """Return all results as Markdown tables."""
    lines = [
        run.machine,
        "",
        "| row | over | unit | Telegrad | torch.distributed.rpc | ratio | target | met |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for r in run.results:
        checked = run.checked(r)
        lines.append(
            f"| {r.name} | {r.way} | {r.unit} | {spread(r.ours, r.ours_failed)} | {spread(r.theirs, r.theirs_failed)} "
            f"| {verdict(r, r.theirs)} | {'; '.join(goal(r, each) for each in checked)} "
            f"| {', '.join(_ANSWERS[each.met] for each in checked)} |"
        )
    met = [each.met for r in run.results for each in run.checked(r)]
    lines += ["", f"{met.count(True)} of {len(met)} targets met."]
    lines += _beside_pipelining([each for each in run.results if each.pipelining or each.pipelining_failed])
    lines += ["", "| limit of the machine | unit | figure |", "| --- | --- | --- |"]
    lines += [f"| {name} | {_unit(name)} | {spread(figures)} |" for name, figures in run.limits.items()]
    lines += _missed(run)
    return "\n".join(lines) + "\n"


def _beside_pipelining(results: Sequence[Result]) -> list[str]:
    if not results:
        return []
    rows = [
        f"| {r.name} | {r.unit} | {spread(r.ours, r.ours_failed)} | {spread(r.pipelining, r.pipelining_failed)} "
        f"| {verdict(r, r.pipelining)} |"
        for r in results
    ]
    return ["", "| row | unit | Telegrad | torch.distributed.pipelining | ratio |", f"|{' --- |' * 5}", *rows]


def _missed(run: Run) -> list[str]:
    """Return the table of targets that were missed."""
    rows = [
        f"| {r.name} | {r.way} | {spread(r.ours)} {r.unit} | {goal(r, each)} | {largest_cost(r)} |"
        for r in run.results
        for each in run.checked(r)
        if each.met is False and r.ours
    ]
    heads = "| missed target | over | Telegrad | target | largest cost |"
    return ["", heads, f"|{' --- |' * 5}", *rows] if rows else []


def _unit(limit: str) -> str:
    return LIMITS[limit].unit if limit in LIMITS else "GB/s"  # limits of devices are measured separately


def _cell(text: str) -> str:
    return text.replace("|", "/")
