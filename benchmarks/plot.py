"""Plot the results relative to torch.distributed.rpc, and times by size, hops and workers."""

from __future__ import annotations

import pathlib
import re
import statistics

import matplotlib

matplotlib.use("agg")  # works without a display

from matplotlib import pyplot
from matplotlib.artist import Artist
from matplotlib.axes import Axes
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


def draw_times(run: Run, path: pathlib.Path) -> None:
    """Draw the times of transfers by size, of backward passes by hops, and of calls by workers."""
    figure, panels = pyplot.subplots(1, 3, figsize=(13, 4.2), layout="constrained")
    for way, style in (("host", "-"), ("tcp", "--"), ("hosts", ":")):
        _curves(panels[0], run, rf"{way}: (\d+) ([KM]B) to$", f", {way}", style)
    panels[0].set(title="a tensor to a worker", xlabel="size, MB", ylabel="ms", yscale="log")
    _curves(panels[1], run, r"host: backward through (\d+) hops$", "", "-")
    panels[1].set(title="forward and backward through nested calls", xlabel="hops", ylabel="µs")
    _curves(panels[2], run, r"host: all to all, (\d+) workers", "", "-")
    panels[2].set(title="empty calls among all workers, each", xlabel="workers", ylabel="µs")
    for panel in panels:
        panel.set_xscale("log", base=2)
        panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        panel.grid(color="#dddddd", linewidth=0.6)
        panel.legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _curves(panel: Axes, run: Run, rows: str, way: str, style: str) -> None:
    """Draw a curve for each library through the rows whose "way: name" matches; the first group is the place on x."""
    for library, colour_ in (("Telegrad", MET), ("torch.distributed.rpc", FREE)):
        points = []
        for result in run.results:
            found = re.match(rows, f"{result.way}: {result.name}")
            figures = result.ours if library == "Telegrad" else result.theirs
            if found and figures:
                at, median = float(found[1]), statistics.median(figures)
                if result.unit == "GB/s":
                    at = at / 1024 if found[2] == "KB" else at
                    median = at * 1.048576 / median  # ms
                points.append((at, median))
        if points:
            panel.plot(*zip(*sorted(points), strict=True), style, marker="o", color=colour_, label=library + way)


def told(result: Result) -> str:
    """Return a label with all medians."""
    ours = number(statistics.median(result.ours))
    theirs = f" beside {number(statistics.median(result.theirs))}" if result.theirs else ""
    if result.pipelining:
        also = f"; {number(statistics.median(result.pipelining))} by torch.distributed.pipelining"
    else:
        also = "" if theirs else "; the peer has no figure"
    return f"{ours}{theirs} {result.unit}{also}"
