"""Plot the results relative to torch.distributed.rpc."""

from __future__ import annotations

import pathlib
import statistics

import matplotlib

matplotlib.use("agg")  # works without a display

from matplotlib import pyplot
from matplotlib.artist import Artist
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from benchmarks.report import number
from benchmarks.results import Result, Run

MET, MISSED, FREE = "#2a78b5", "#d9822b", "#9aa4ad"


def needed(run: Run, result: Result) -> float | None:
    """Return the strictest target, as a factor relative to the peer."""
    factors = [result.factor(each.threshold) for each in run.checked(result) if each.threshold is not None]
    return max((factor for factor in factors if factor is not None), default=None)


def colour(run: Run, result: Result) -> str:
    met = [each.met for each in run.checked(result)]
    return FREE if not met or None in met else MET if all(met) else MISSED


def draw(run: Run, path: pathlib.Path) -> None:
    """Draw one bar per row, or only the text if torch.distributed.rpc has no figure."""
    shown = [result for result in run.results if result.ours]
    figure, axes = pyplot.subplots(figsize=(11, 1.6 + 0.24 * len(shown)), layout="constrained")
    for place, result in enumerate(shown):
        factor = result.factor(statistics.median(result.ours)) or 1.0
        axes.barh(place, factor - 1, left=1, height=0.7, color=colour(run, result))
        target = needed(run, result)
        if target is not None:
            axes.plot([target, target], [place - 0.45, place + 0.45], color="black", linewidth=1.6)
        axes.text(max(factor, target or 0, 1) * 1.06, place, told(result), va="center", fontsize=7, color="#444444")
    axes.set_yticks(range(len(shown)), [f"{result.name}  [{result.way}]" for result in shown], fontsize=8)
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    low, high = axes.get_xlim()
    axes.set_xlim(low, high * 2)  # room for the labels
    axes.axvline(1, color="black", linewidth=0.8)
    axes.grid(axis="x", which="major", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_xlabel("times better than torch.distributed.rpc (of medians; log scale; right of 1× is better)")
    axes.set_title(f"Telegrad beside torch.distributed.rpc\n{run.machine}", fontsize=11)
    names = {MET: "targets met", MISSED: "a target missed", FREE: "no target, or unknown"}
    handles: list[Artist] = [Patch(color=each, label=name) for each, name in names.items()]
    handles.append(Line2D([], [], color="black", linewidth=1.6, label="target (the strictest)"))
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def told(result: Result) -> str:
    """Return a label with all medians."""
    ours = number(statistics.median(result.ours))
    theirs = f" beside {number(statistics.median(result.theirs))}" if result.theirs else ""
    if result.pipelining:
        also = f"; {number(statistics.median(result.pipelining))} by torch.distributed.pipelining"
    else:
        also = "" if theirs else "; the peer has no figure"
    return f"{ours}{theirs} {result.unit}{also}"
