"""Run PyTorch's own tests of its RPC against Telegrad, with a process tree for each test.

The exit status is 1 if an applicable test fails, or if the list of tests that are not applicable is wrong.
"""

import argparse
import contextlib
import pathlib
import re
import signal
import sys
from collections import Counter
from time import monotonic

import torch

from tests.conformance import applicable, runner, suites
from tests.conformance.parent import WAYS
from tests.conformance.report import Run, to_json, write
from tests.conformance.results import FAILED, NOT_APPLICABLE, PASSED, Result, worse


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # ends the parent processes
    chosen = _arguments()
    tests = [test for test in suites.tests(chosen.group) if re.search(chosen.only, test)]
    declared = {} if chosen.reference else {test: why for test in tests if (why := applicable.reason(test))}
    to_run = tests if chosen.check_declared else [test for test in tests if test not in declared]
    start = monotonic()
    ran = _run(to_run * chosen.repeat, chosen)
    wrong = [f"{test} passes, though declared not applicable" for test in declared if _passed(ran.get(test))]
    if _is_whole(chosen):
        wrong += [f"the declared {pattern} matches no test" for pattern in applicable.stale(tests)]
    results = [Result(test, NOT_APPLICABLE, 0.0, declared[test]) if test in declared else ran[test] for test in tests]
    run = Run(torch.__version__, monotonic() - start, results)
    if chosen.report:
        write(run, chosen.report)
    if chosen.json:
        chosen.json.write_text(to_json(run))
    count = Counter(result.outcome for result in results)
    print(f"{len(results)} tests: " + ", ".join(f"{count[kind]} {kind}" for kind in (PASSED, FAILED, NOT_APPLICABLE)))
    print("\n".join(wrong), end="\n" if wrong else "")
    return 1 if count[FAILED] or wrong else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.add_argument("--only", default="", metavar="REGEX", help="tests whose name this matches")
    parser.add_argument(
        "--group", type=_groups, default=suites.GROUPS, help=f"some of {','.join(suites.GROUPS)}; or all"
    )
    parser.add_argument("--reference", action="store_true", help="against torch itself")
    parser.add_argument("--way", choices=WAYS, default="fork", help="how ranks start; spawned ones take seconds each")
    parser.add_argument("--jobs", type=int, default=2, help="tests at once")
    parser.add_argument("--limit", type=float, default=runner.LIMIT, help="seconds for one test")
    parser.add_argument("--repeat", type=int, default=1, help="run each test so often; the worst outcome counts")
    parser.add_argument("--check-declared", action="store_true", help="those declared not applicable must not pass")
    parser.add_argument("--logs", type=pathlib.Path, default=runner.LOGS, help="folder for logs of failed tests")
    parser.add_argument("--report", type=pathlib.Path, help="Markdown file to renew")
    parser.add_argument("--json", type=pathlib.Path, help="file for the results")
    chosen = parser.parse_args()
    if chosen.report and not _is_whole(chosen):
        parser.error("a report is of all tests, against Telegrad")
    return chosen


def _is_whole(chosen: argparse.Namespace) -> bool:
    return not chosen.only and chosen.group == suites.GROUPS and not chosen.reference


def _groups(words: str) -> tuple[str, ...]:
    groups = suites.GROUPS if words == "all" else tuple(words.split(","))
    if unknown := set(groups) - set(suites.GROUPS):
        raise argparse.ArgumentTypeError(f"no such group: {', '.join(unknown)}")
    return groups


def _run(tests: list[str], chosen: argparse.Namespace) -> dict[str, Result]:
    """Return the worst result of each test, and print results as they arrive."""
    ran: dict[str, Result] = {}
    results = runner.run(
        tests,
        reference=chosen.reference,
        way=chosen.way,
        jobs=chosen.jobs,
        limit=chosen.limit,
        logs=chosen.logs.absolute(),
    )
    with contextlib.closing(results):
        for number, result in enumerate(results, 1):
            print(f"[{number}/{len(tests)}] {result.outcome:6.6} {result.seconds:5.1f} s  {result.test}  {result.why}")
            ran[result.test] = worse(result, ran.get(result.test, result))
    return ran


def _passed(result: Result | None) -> bool:
    return result is not None and result.outcome == PASSED


if __name__ == "__main__":
    sys.exit(main())
