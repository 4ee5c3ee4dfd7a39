"""Results of a run."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from benchmarks.targets import Measured, Target


class Result(NamedTuple):
    """The figures of one row over one transport, for all libraries."""

    name: str
    way: str
    unit: str
    higher_is_better: bool
    ours: list[float]
    theirs: list[float]
    targets: tuple[Target, ...] = ()
    ours_failed: str = ""  # the reason for missing figures
    theirs_failed: str = ""
    pipelining: Sequence[float] = ()  # figures of torch.distributed.pipelining
    pipelining_failed: str = ""

    def ratio_to(self, peer: Sequence[float]) -> float | None:
        """Return the ratio of our median to a peer's. Below 1 is better for times, above 1 for rates."""
        return statistics.median(self.ours) / statistics.median(peer) if self.ours and peer else None

    @property
    def ratio(self) -> float | None:
        return self.ratio_to(self.theirs)

    def factor(self, figure: float) -> float | None:
        """Return how many times better a figure is than the peer's median."""
        if not self.theirs or not figure:
            return None
        theirs = statistics.median(self.theirs)
        return figure / theirs if self.higher_is_better else theirs / figure

    def reaches(self, threshold: float) -> bool:
        ours = statistics.median(self.ours)
        return ours >= threshold if self.higher_is_better else ours <= threshold


class Checked(NamedTuple):
    """A target, its threshold in this run, and whether it is met. None if a figure is missing."""

    target: Target
    threshold: float | None
    met: bool | None


class Run(NamedTuple):
    """All results of one run."""

    machine: str
    results: list[Result]
    limits: dict[str, list[float]]

    def checked(self, result: Result) -> list[Checked]:
        elsewhere = {each.name: each.ours for each in self.results if each.way == result.way}
        measured = Measured(result.theirs, elsewhere, self.limits, result.pipelining)
        thresholds = [(target, target.threshold(measured)) for target in result.targets]
        return [
            Checked(target, threshold, None if threshold is None or not result.ours else result.reaches(threshold))
            for target, threshold in thresholds
        ]

    def as_json(self) -> dict[str, Any]:
        return {"machine": self.machine, "rows": [self._row(each) for each in self.results], "limits": self.limits}

    def _row(self, result: Result) -> dict[str, Any]:
        targets = [
            {"reason": target.reason, "threshold": threshold, "met": met}
            for target, threshold, met in self.checked(result)
        ]
        ratios = {"ratio": result.ratio, "ratio_to_pipelining": result.ratio_to(result.pipelining)}
        return {**result._asdict(), **ratios, "targets": targets}
