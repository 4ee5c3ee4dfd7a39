"""Plot the figures of `benchmarks.scale`."""

from __future__ import annotations

import pathlib
from typing import Any

import matplotlib

matplotlib.use("agg")  # works without a display

from matplotlib import pyplot
from matplotlib.ticker import FuncFormatter, NullFormatter

PICTURE = pathlib.Path(__file__).parent.parent / "docs" / "scale.png"
PANELS = (
    ("start", "until all have joined", "s", 1.0),
    ("first", "first call from one worker to all", "ms", 1e3),
    ("later", "later calls from one worker to all", "ms", 1e3),
    ("barrier", "a barrier of all", "ms", 1e3),
    ("memory", "memory of a worker (PSS)", "MB", 1e-6),
    ("directory", "processor time of the directory", "s", 1.0),
    ("bytes", "bytes to and from the directory", "MB", 1e-6),
    ("detection", "from a kill until on_lost", "s", 1.0),
    ("shutdown", "until all have ended", "s", 1.0),
)
KINDS = {
    "dynamic": ("dynamic group", "#2a78b5"),
    "fixed": ("group of fixed size", "#3b9b5f"),
    "torch": ("torch.distributed.rpc", "#d9822b"),
}


def draw(rows: list[dict[str, Any]], path: pathlib.Path = PICTURE) -> None:
    """Draw a panel for each figure, with a line for each kind of group."""
    figure, panels = pyplot.subplots(3, 3, figsize=(11, 8.5), layout="constrained")
    for axes, (name, title, unit, factor) in zip(panels.flat, PANELS, strict=True):
        for kind, (label, colour) in KINDS.items():
            points = [(row["workers"], factor * row[name]) for row in rows if row["kind"] == kind and row.get(name)]
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", markersize=4, color=colour, label=label)
        counts = sorted({row["workers"] for row in rows})
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xticks(counts, [str(count) for count in counts])
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_title(f"{title}, {unit}", fontsize=10)
        axes.grid(which="major", color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
    handles, labels = panels.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3, fontsize=9, frameon=False)
    figure.supxlabel("workers", fontsize=10)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
