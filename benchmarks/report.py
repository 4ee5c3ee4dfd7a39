"""Figures into tables."""

from __future__ import annotations

import statistics
from typing import NamedTuple


class Result(NamedTuple):
    """All rounds of one row over one transport, of both libraries."""

    name: str
    way: str
    unit: str
    higher_is_better: bool
    ours: list[float]
    theirs: list[float]

    @property
    def ratio(self) -> float:
        """Of the medians, ours to theirs: of times below 1 is better, of rates above 1."""
        return statistics.median(self.ours) / statistics.median(self.theirs)


def spread(figures: list[float]) -> str:
    """Median, and the range from the least to the greatest."""
    return f"{number(statistics.median(figures))} ({number(min(figures))} to {number(max(figures))})"


def number(figure: float) -> str:
    return f"{figure:,.0f}" if figure >= 100 else f"{figure:.1f}" if figure >= 10 else f"{figure:.2f}"


def verdict(result: Result) -> str:
    """The ratio, said so that more is always better."""
    factor = result.ratio if result.higher_is_better else 1 / result.ratio
    return f"{result.ratio:.2f}" + (
        f" ({factor:.1f} times better)" if factor >= 1 else f" ({1 / factor:.1f} times worse)"
    )


def table(results: list[Result], limits: list[tuple[str, str, float]]) -> str:
    """Markdown of everything."""
    lines = [
        "| row | over | unit | Telegrad | torch.distributed.rpc | ratio |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {r.name} | {r.way} | {r.unit} | {spread(r.ours)} | {spread(r.theirs)} | {verdict(r)} |" for r in results
    ]
    lines += ["", "| limit of the machine | unit | figure |", "| --- | --- | --- |"]
    lines += [f"| {name} | {unit} | {number(figure)} |" for name, unit, figure in limits]
    return "\n".join(lines) + "\n"
