"""Tables of a group's state, for `telegrad top` and the dashboard: their columns, rows and texts."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from telegrad.errors import UsageError
from telegrad.ext.events import CALLED
from telegrad.ext.texts import safe
from telegrad.insight.reading.history import GroupHistory, functions
from telegrad.reporting.worker_state import MEMBER, QUEUED, RUNNING, SourceLine, ThreadState, WorkerState, counts

SILENT, GONE = "silent", "gone"  # phases of workers without a state report
WINDOW = 10.0  # seconds over which the statistics of functions are taken


# Formatters of the values; `str` marks left-aligned text columns, the others are right-aligned.
Columns = dict[str, Callable[[Any], str]]


class Row(NamedTuple):
    values: tuple[Any, ...]  # one for each column; None: unknown
    trouble: bool = False


class Table(NamedTuple):
    name: str
    columns: Columns
    rows: Sequence[Row]


def count(number: float) -> str:
    """Format a number in at most 5 characters."""
    if number < 10_000:
        return f"{number:.1f}" if number < 10 and number != int(number) else f"{number:.0f}"
    return _scaled(number, 1000, "kMGT")


def amount(size: float) -> str:
    """Format bytes in at most 5 characters."""
    return f"{size:.0f}" if size < 1000 else _scaled(size, 1024, "KMGTP")


def _scaled(number: float, step: int, letters: str) -> str:
    for letter in letters:
        number /= step
        if number < 999.5 or letter == letters[-1]:
            break
    return f"{number:.1f}{letter}" if number < 9.95 else f"{number:.0f}{letter}"


def duration(seconds: float) -> str:
    """Format seconds in at most 6 characters."""
    if seconds < 0.9995:
        value, unit = (seconds * 1e3, "ms") if seconds >= 0.9995e-3 else (seconds * 1e6, "us")
        return f"{value:.1f}{unit}" if value < 9.95 else f"{value:.0f}{unit}"
    if seconds < 99.5:
        return f"{seconds:.1f}s" if seconds < 9.95 else f"{seconds:.0f}s"
    minutes = int(seconds) // 60
    if minutes < 100:
        return f"{minutes}:{int(seconds) % 60:02}"
    return f"{minutes // 60}h{minutes % 60:02}" if minutes < 6000 else f"{minutes // 1440}d"


def _used(slots: tuple[int, int]) -> str:
    return f"{slots[0]}/{slots[1]}"


WORKERS: Columns = {
    "worker": str, "rank": count, "phase": str, "in/s": count, "out/s": count, "flight": count, "run": count,
    "queue": count, "slots": _used, "sent/s": amount, "got/s": amount, "shared": amount, "owned": count,
    "held": count, "ctx": count, "thr": count, "mem": amount, "gen": count, "host": str,
}  # fmt: skip
FUNCTIONS: Columns = {
    "calls/s": count, "p50": duration, "p99": duration, "ran": duration, "failed": count, "function": str
}  # fmt: skip
CALLS_OUT: Columns = {
    "age": duration, "limit": duration, "to": str, "function": str, "line": str, "thread": str, "number": str
}  # fmt: skip
CALLS_IN: Columns = {
    "age": duration, "from": str, "state": str, "function": str, "line": str, "thread": str, "number": str
}  # fmt: skip
THREADS: Columns = {"thread": str, "does": str, "line": str, "asleep": str}
PEERS: Columns = {
    "worker": str, "sent/s": amount, "got/s": amount, "sent": amount, "got": amount, "flight": count, "host": str
}  # fmt: skip
PASSES: Columns = {"age": duration, "context": str, "number": count, "owing": str}
ALL = (WORKERS, FUNCTIONS, CALLS_OUT, CALLS_IN, THREADS, PEERS, PASSES)


def of_group(history: GroupHistory) -> list[Table]:
    """Return the tables of workers and of their recently called functions."""
    _, window = history.recent(WINDOW)
    recent, _ = history.recent(window)  # the same span for all workers, if events were left out
    accounts, rates = history.sight.accounts, history.rates()
    rows = []
    for account in accounts:
        name = account["worker"]
        states = counts(account["calls_in"], lambda call: call["state"])
        rate = rates.get(name)
        called = sum(event[0] == CALLED for event in recent.get(name, ())) / window
        values = (
            name, account["rank"], account["phase"], rate and rate.calls, called,
            counts(account["calls_out"], lambda call: call["to"]).total(), states[RUNNING], states[QUEUED],
            (account["busy"], account["slots"]), rate and rate.sent, rate and rate.received, account["shared"],
            account["references"].get("owners"), account["references"].get("users"), account["contexts"],
            len(account["threads"]), account["memory"], account["generation"], account["host"],
        )  # fmt: skip
        rows.append(Row(values))
    for phase, names in ((SILENT, history.sight.silent), (GONE, history.lost())):
        for name in names:
            last = history.last.get(name)
            hosts = (account["members"][name] for account in accounts if name in account["members"])
            host = last["host"] if last else next(hosts, None)
            rows.append(Row((name, last and last["rank"], phase, *(None,) * 15, host), trouble=True))
    lately = {account["worker"]: recent.get(account["worker"], []) for account in accounts}
    found = [
        Row((each.calls / window, each.p50, each.p99, each.running, each.failures, each.name))
        for each in functions(lately)
    ]
    return [Table("Workers", WORKERS, rows), Table("Functions", FUNCTIONS, found)]


def of_worker(history: GroupHistory, name: str, stacks: bool = False) -> tuple[str, list[Table]]:
    """Return a text about a worker, and the tables of its latest state, optionally with the threads' stacks.

    Raises:
        UsageError: there is no such worker.
    """
    why = history.sight.silent.get(name) or history.lost().get(name)
    account = history.last.get(name)
    if why is None and account is None:
        raise UsageError(f"no worker {name!r} was found here; the workers are: {', '.join(sorted(history.last))}")
    told = [f"! {name} does not report its state: {safe(why)}"] if why else []
    if account is None:
        return "\n".join([*told, "It has reported nothing before"]), []
    if why:
        latest = max((each["time"] for each in history.sight.accounts), default=account["time"])
        told.append(f"Its last report, {duration(max(0.0, latest - account['time']))} before those of the others:")
    phase = f"{account['phase']} for {duration(account['phase_age'])}"
    if account["phase"] == MEMBER:
        phase += f", generation {account['generation']}"
    elif account["missing"]:
        phase += f", waits for {', '.join(account['missing'])}"
    told += [
        f"{name} rank {account['rank']} on {account['host']}, pid {account['pid']}: {safe(account['program'])}",
        f"{phase}; slots {account['busy']}/{account['slots']}; memory {amount(account['memory'])}, "
        f"lent {amount(account['shared'])}; contexts {account['contexts']}",
        "references: " + ", ".join(f"{kind} {number}" for kind, number in account["references"].items()),
    ]
    if stacks:
        for thread in account["threads"]:
            told += ["", f"Thread {safe(thread['name'])}, innermost first:", *map(safe, reversed(thread["stack"]))]
    return "\n".join(told), [*_calls(account), _threads(account), _peers(history, account), _passes(account)]


def _calls(account: WorkerState) -> list[Table]:
    threads = {thread["number"]: thread for thread in account["threads"]}

    def standing(call: Any) -> tuple[str | None, str | None, str]:
        thread = threads.get(call["thread"])
        return _place(thread["at"]) if thread else None, thread["name"] if thread else None, str(call["number"])

    out = [
        Row((call["age"], call["timeout"] or None, call["to"], call["function"], *standing(call)))
        for call in account["calls_out"]
    ]
    come = [
        Row((call["age"], call["caller"], call["state"], call["function"] or None, *standing(call)))
        for call in account["calls_in"]
    ]
    return [Table("Calls out", CALLS_OUT, out), Table("Calls in", CALLS_IN, come)]


def _threads(account: WorkerState) -> Table:
    asleep = {True: "yes", False: "no", None: None}
    rows = [
        Row((thread["name"], doing(account, thread) or None, _place(thread["at"]), asleep[thread["asleep"]]))
        for thread in account["threads"]
    ]
    return Table("Threads", THREADS, rows)


def doing(account: WorkerState, thread: ThreadState) -> str:
    """Return the call that a thread runs, and what it waits for."""
    number = thread["number"]
    runs = [
        f"runs {call['function'] or 'call ' + str(call['number'])} for {call['caller']}"
        for call in account["calls_in"]
        if call["thread"] == number
    ]
    waits = [
        f"waits for {call['function']} at {call['to']}" for call in account["calls_out"] if call["thread"] == number
    ]
    if (wait := thread["wait"]) is not None and not waits:
        on = f" of {', '.join(wait['on'])}" if wait["on"] else ""
        about = f" ({wait['about']})" if wait["about"] else ""
        waits = [f"waits for {wait['what']}{on}{about}"]
    return ", ".join(runs + waits)


def _peers(history: GroupHistory, account: WorkerState) -> Table:
    me, lost = account["worker"], history.lost()
    rates: dict[str, list[float]] = defaultdict(lambda: [0, 0])
    for flow in history.flows():
        if me in (flow.source, flow.target):
            sends = flow.source == me
            rates[flow.target if sends else flow.source][not sends] = flow.rate
    sent, got, members = account["bytes_out"], account["bytes_in"], account["members"]
    flight = counts(account["calls_out"], lambda call: call["to"])
    rows = []
    for name in {*members, *sent, *got, *flight} - {me}:
        values = (name, *rates[name], sent.get(name, 0), got.get(name, 0), flight[name], members.get(name))
        rows.append(Row(values, trouble=name in history.sight.silent or name in lost))
    return Table("Bytes", PEERS, rows)


def _passes(account: WorkerState) -> Table:
    rows = [
        Row((each["age"], str(each["context"]), each["number"], ", ".join(each["owing"]) or None))
        for each in account["passes"]
    ]
    return Table("Passes", PASSES, rows)


def _place(line: SourceLine | None) -> str | None:
    """Return a short form of a line of the user's program."""
    if line is None:
        return None
    return f"{os.path.basename(line['file'])}:{line['line']} {line['function']}: {line['text'].strip()}"


def texts(table: Table, by: str = "", words: str = "") -> list[list[str]]:
    """Return the texts of the rows that contain all `words`, sorted by a column, or by the first one.

    The highest numbers come first. Texts are sorted naturally: "w2" before "w10". Unknown values come last.
    """
    column = by if by in table.columns else next(iter(table.columns))
    index = list(table.columns).index(column)
    known = [row for row in table.rows if row.values[index] is not None]
    known.sort(key=lambda row: _natural(row.values[index]), reverse=table.columns[column] is not str)
    found = []
    for values, trouble in known + [row for row in table.rows if row.values[index] is None]:
        shown = [
            "-" if value is None else safe(show(value))
            for show, value in zip(table.columns.values(), values, strict=True)
        ]
        if all(word in " ".join(shown).casefold() for word in words.casefold().split()):
            found.append([f"! {shown[0]}", *shown[1:]] if trouble else shown)
    return found


def lines(columns: Columns, rows: Iterable[Sequence[str]]) -> list[str]:
    """Return a table as lines, with columns as wide as needed."""
    found = [list(columns), *rows]
    widths = [max(map(len, column)) for column in zip(*found, strict=True)]
    return [
        "  ".join(
            text.ljust(width) if show is str else text.rjust(width)
            for show, text, width in zip(columns.values(), row, widths, strict=True)
        ).rstrip()
        for row in found
    ]


def _natural(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    return [int(part) if part.isdecimal() else part.casefold() for part in re.split(r"([0-9]+)", value)]
