"""Write results as Markdown and as JSON."""

import json
import pathlib
from collections import Counter, defaultdict
from textwrap import shorten
from typing import Any, NamedTuple

from tests.conformance import applicable
from tests.conformance.results import FAILED, NOT_APPLICABLE, PASSED, Result

COMMAND = "make conformance"
MARKER = f"<!-- generated below by {COMMAND} -->"
HEAD = "# Conformance\n\n"


class Run(NamedTuple):
    """A run of all tests against one version of torch."""

    torch: str
    seconds: float
    results: list[Result]


def write(run: Run, path: pathlib.Path) -> None:
    """Write the generated part of the file, and keep the text above it."""
    head = path.read_text().partition(MARKER)[0] if path.exists() else HEAD
    parts = [_summary(run), *_not_applicable(run.results), *_failures(run.results)]
    path.write_text("\n".join([f"{head}{MARKER}\n", *parts]))


def to_json(run: Run) -> str:
    tests: dict[str, Any] = {result.test: result._asdict() for result in run.results}
    return json.dumps({**run._asdict(), "results": tests}, indent=1) + "\n"


def _summary(run: Run) -> str:
    rows = [
        f"{len(run.results)} tests of torch {run.torch}, by `{COMMAND}`, in {run.seconds:.0f} s.",
        "",
        "| suite | passed | failed | not applicable | total |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    suites = defaultdict(list)
    for result in run.results:
        suites[result.suite].append(result)
    rows += [_row(f"`{name}`", results) for name, results in suites.items()]
    return "\n".join([*rows, _row("**all**", run.results), ""])


def _row(name: str, results: list[Result]) -> str:
    count = Counter(result.outcome for result in results)
    return f"| {name} | {count[PASSED]} | {count[FAILED]} | {count[NOT_APPLICABLE]} | {len(results)} |"


def _not_applicable(results: list[Result]) -> list[str]:
    reasons: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for result in results:
        if result.outcome == NOT_APPLICABLE:
            why = result.why if result.why in applicable.NOT_APPLICABLE else f"torch skips it: {result.why}"
            reasons[why][result.suite].append(result.test.split(".")[1])
    lines = ["## Not applicable", ""] if reasons else []
    for why, suites in reasons.items():
        lines += [f"### {why} ({sum(map(len, suites.values()))})", ""]
        lines += [f"- `{suite}`: {', '.join(f'`{name}`' for name in names)}" for suite, names in suites.items()]
        lines += [""]
    return lines


def _failures(results: list[Result]) -> list[str]:
    failed = [result for result in results if result.outcome == FAILED]
    lines = [f"- `{result.test}`: `{shorten(result.why, 200).replace('`', chr(39))}`" for result in failed]
    return ["## Failed", "", *lines, ""] if failed else []
