"""The commands that inspect groups of this host.

python -m telegrad why                what keeps groups of this host waiting; exit code 0: nothing, 1: something,
                                      2: a worker does not answer, there is none,
                                      or the output cannot be written
python -m telegrad top                a live view in the terminal
python -m telegrad dashboard          a live view in the browser
python -m telegrad trace FILE         the latest events of all workers, for ui.perfetto.dev
python -m telegrad dump               have each worker write its state and latest events to a file
"""

import argparse
import contextlib
import json
import math
import sys
import time
from collections.abc import Callable, Mapping

from telegrad.errors import UsageError
from telegrad.ext.host import HAS_UNIX, loopback
from telegrad.insight.history import Source
from telegrad.insight.seen_groups import DumpFiles, HostGroup, groups_here

LONGEST = 20.0  # seconds, after which no further group is queried
NONE_HERE = 2  # the exit code if there is no worker


class _NoWorker(Exception):
    """No worker of this user was found on this host."""


def main(arguments: list[str]) -> int:
    parser = _parser()
    given = parser.parse_args(arguments)
    if given.group and vars(given).get("files"):
        parser.error("--group selects a group of this host: leave it out when files are given")
    run: Callable[[argparse.Namespace], int] = given.run
    try:
        return run(given)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        raise
    except _NoWorker as error:
        print(error, file=sys.stderr)
        return NONE_HERE
    except (UsageError, OSError) as error:
        print(end="", flush=True)  # may raise the error of the output again: `telegrad.__main__` reports it then
        print(f"telegrad: {error}", file=sys.stderr)
        return NONE_HERE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m telegrad")
    commands = parser.add_subparsers(required=True)

    def add(name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        which = "which group, if there are several: the start of its id, its program, or one of its workers"
        command.add_argument("--group", default="", help=which)
        command.set_defaults(run=run)
        return command

    why = add("why", _why, "Show what the groups of this host wait for.")
    why.add_argument("--json", action="store_true", help="print JSON, for programs")
    why.add_argument("--stacks", action="store_true", help="also print the stacks of the named threads")
    why.add_argument("files", nargs="*", help="read these files instead, which workers wrote (see dump)")
    top = add("top", _top, "A live view in the terminal.")
    top.add_argument("--once", action="store_true", help="print the tables once and exit")
    top.add_argument("--interval", type=_seconds, default=1.0, help="seconds between two queries")
    top.add_argument("--sort", default="", metavar="COLUMN", help="sort by this column: the highest numbers first")
    top.add_argument("--filter", default="", metavar="WORDS", help="only rows that contain all of these words")
    top.add_argument(
        "--worker", default="", metavar="NAME", help="show the calls, threads, references and log of this worker"
    )
    top.add_argument("--stacks", action="store_true", help="with --worker: also the stacks of its threads")
    dashboard = add("dashboard", _dashboard, "A live view in the browser.")
    dashboard.add_argument("--host", default=loopback(), help="the address to listen on (default: for this host only)")
    dashboard.add_argument("--port", type=int, default=0, help="the port to listen on (default: a free one)")
    trace = add("trace", _trace, "Write the latest events of all workers to a file for ui.perfetto.dev.")
    trace.add_argument("file", help="the file to write; compressed if its name ends with .gz")
    trace.add_argument("--seconds", type=float, help="record for this long (default: write what is already recorded)")
    trace.add_argument(
        "--from", dest="files", nargs="+", default=[], help="read these files, which workers wrote (see dump)"
    )
    add("dump", _dump, "Have each worker write its state and its latest events to a file.")
    return parser


def _seconds(text: str) -> float:
    if not math.isfinite(seconds := float(text)):
        raise ValueError
    return seconds


_seconds.__name__ = "number of seconds"  # the name in argparse's error messages


def _why(given: argparse.Namespace) -> int:
    from telegrad.insight.report import Report

    groups: dict[str, Source] = {"": DumpFiles(given.files)} if given.files else dict(_groups(given.group))
    told, worst, until = {}, 0, time.monotonic() + LONGEST
    for name, group in groups.items():
        if time.monotonic() > until:
            print(f"not all of {len(groups)} groups were queried: choose one with --group", file=sys.stderr)
            worst = 2
            break
        report = Report(group.look())
        worst = max(worst, report.status)
        if given.json:
            told[name] = report.as_json()
        else:
            if len(groups) > 1 or not (name or given.files):
                print(f"{'group ' * bool(name)}{name or 'unknown group'} ({group}):")
            print(report.text(stacks=given.stacks))
    if given.json:
        print(json.dumps(told, indent=1))
    return worst


def _top(given: argparse.Namespace) -> int:
    from telegrad.insight import top

    group = _one_group(given.group)
    view = top.TopView(given.sort, given.filter, given.worker, given.stacks)
    if given.once:
        print(top.once(group, view=view))
    else:
        top.run(group, given.interval, view)
    return 0


def _dashboard(given: argparse.Namespace) -> int:
    from telegrad.insight import report
    from telegrad.insight.web import Dashboard

    group = _one_group(given.group)
    with contextlib.closing(Dashboard(group, report.told, given.host, given.port)) as dashboard:
        print(f"{dashboard.url}\nCtrl-C ends it.", flush=True)
        while True:
            time.sleep(3600)


def _trace(given: argparse.Namespace) -> int:
    from telegrad.insight import collect

    source: Source = DumpFiles(given.files) if given.files else _one_group(given.group)
    print(collect.trace_from_outside(given.file, source, given.seconds))
    return 0


def _dump(given: argparse.Namespace) -> int:
    for group in _groups(given.group).values():
        for worker, path in group.dump().items():
            print(f"{worker}: {path}")
    return 0


def _groups(wanted: str) -> dict[str, HostGroup]:
    there = groups_here()
    if not there:
        where = "run the command on a worker's host, as the same user and in the same container"
        if not HAS_UNIX:
            where = "workers can be queried from outside on Linux only; "
            where += "in a program, telegrad.insight queries its own group"
        raise _NoWorker(f"no worker of this user was found on this host: {where}")
    found = {name: group for name, group in there.items() if name.startswith(wanted) or group.is_called(wanted)}
    if not found:
        raise UsageError(f"no group {wanted!r} was found here; the groups are: {_listed(there)}")
    return found


def _one_group(wanted: str) -> HostGroup:
    groups = _groups(wanted)
    if len(groups) > 1:
        raise UsageError(f"there are several groups: {_listed(groups)}. Choose one with --group")
    return next(iter(groups.values()))


def _listed(groups: Mapping[str, HostGroup]) -> str:
    return "; ".join(f"{name or 'unknown group'} ({group})" for name, group in groups.items())
