"""Draw the schedules of pipelines: `python -m benchmarks.schedules docs/schedules.png`.

The schedules are simulated with a backward pass that takes as long as two forward passes. Also prints a table of costs.
"""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks.schedule_simulation import Timeline, simulate
from telegrad.pipeline.pipeline_schedule import BACKWARD, FORWARD, INPUT, SCHEDULES, WEIGHTS, plan

WORKERS, BATCHES = 4, 8
COLOURS = {FORWARD: "#9ecae1", BACKWARD: "#fdae6b", INPUT: "#fdae6b", WEIGHTS: "#a1d99b"}
LATER = {FORWARD: "#4292c6", BACKWARD: "#e6550d"}  # colours of a worker's second stage


def timeline(schedule: str) -> Timeline:
    runners = tuple(range(WORKERS)) * (2 if schedule == "interleaved" else 1)
    return simulate(plan(schedule, runners, BATCHES), runners, BATCHES, lambda action: cost(schedule, action.kind))


def cost(schedule: str, kind: str) -> float:
    """Return the cost of an action. If a worker has two stages, each is half as large."""
    return (2.0 if kind == BACKWARD else 1.0) / (2 if schedule == "interleaved" else 1)


def table() -> str:
    """Return the costs of the schedules as a Markdown table."""
    lines = ["| schedule | length | idle | micro-batches kept by each worker |", "| --- | --- | --- | --- |"]
    for schedule in SCHEDULES:
        found = timeline(schedule)
        kept = ", ".join(f"{each / (2 if schedule == 'interleaved' else 1):g}" for each in found.kept)
        lines.append(f"| `{schedule}` | {found.length:g} | {found.idle:.0%} | {kept} |")
    return "\n".join(lines)


def draw(path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, rows = pyplot.subplots(len(SCHEDULES), 1, figsize=(11, 7), sharex=True, layout="constrained")
    for schedule, axes in zip(SCHEDULES, rows, strict=True):
        found = timeline(schedule)
        for worker, own in enumerate(found.spans):
            for action, start, end in own:
                colours = LATER if action.stage >= WORKERS else COLOURS
                axes.barh(worker, end - start, left=start, height=0.9, color=colours[action.kind], edgecolor="white")
                axes.text((start + end) / 2, worker, str(action.batch), ha="center", va="center", fontsize=7)
        label(axes, f"{schedule}: {found.length:g}, idle {found.idle:.0%}")
    rows[-1].set_xlabel("time, in forwards of a micro-batch")
    figure.savefig(path, dpi=110)


def label(axes: Any, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=9)
    axes.set_yticks(range(WORKERS), [f"w{number + 1}" for number in range(WORKERS)])
    axes.invert_yaxis()
    axes.set_frame_on(False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", help="where to leave the picture")
    draw(parser.parse_args().path)
    print(table())


if __name__ == "__main__":
    main()
