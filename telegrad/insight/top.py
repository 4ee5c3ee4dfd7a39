"""`telegrad top`: the current state of a group's workers in a terminal; and the tables of the dashboard."""

import os
import re
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from telegrad.errors import UsageError
from telegrad.ext.events import CALLED
from telegrad.ext.feedback import plural, safe
from telegrad.insight.history import GroupHistory, Source, functions
from telegrad.reporting import (
    MEMBER,
    QUEUED,
    RUNNING,
    UNFINISHED,
    Rate,
    SourceLine,
    ThreadState,
    WorkerState,
    counts,
    oldest_call,
    trouble,
)

LEAST = 0.2  # minimum seconds between two queries
NOTES = 3  # maximum number of lines with problems
HOME, END_OF_LINE, END = "\x1b[H", "\x1b[K\n", "\x1b[J"  # control sequences: to the top; clear the rest of line, screen
SILENT, GONE = "silent", "gone"  # phases of workers without a state report
OF_SILENT, OF_GONE = 1e12, 1.0  # their troubles: many may be gone in an elastic group
SHORTEST = 12  # characters to which a text is cut
WINDOW = 10.0  # seconds over which the statistics of functions are taken

# Formatters of the values; `str` marks left-aligned text columns, the others are right-aligned.
Columns = dict[str, Callable[[Any], str]]


class TopView(NamedTuple):
    sort: str = ""  # the column by which tables are sorted, if they have it
    words: str = ""  # show only rows with all of these
    worker: str = ""  # show this worker instead of the whole group
    stacks: bool = False  # also show that worker's stacks

    def text(self, history: GroupHistory, height: int = 0, width: int = 0) -> str:
        """Return text within `height` and `width`, if given; raise UsageError for an unknown column or worker."""
        columns = list(dict.fromkeys(column for table in ALL for column in table))
        if self.sort and self.sort not in columns:
            raise UsageError(f"no table has a column {self.sort!r}; the columns are: {', '.join(columns)}")
        sight = history.sight
        places = sorted({account["place"] for account in sight.accounts})
        notes = [f"no new data: {history.trouble}; trying again"] if history.trouble else []
        notes += [f"{name} is silent: {why}" for name, why in sight.silent.items()]
        notes += [f"{name} is no longer in the group: {why}" for name, why in history.lost().items()]
        if height and len(notes) > NOTES:
            notes[NOTES - 1 :] = [f"and {len(notes) - NOTES + 1} more"]
        about = [plural(len(sight.accounts), "worker"), f"{len(sight.silent)} silent", f"store {', '.join(places)}"]
        found = [" | ".join(about), *(f"! {safe(note)}" for note in notes), ""]
        if self.worker and (history.last or sight.silent):
            told, shown = of_worker(history, self.worker, self.stacks)
            found += [*told.splitlines(), ""]
        else:
            shown = of_group(history)
        shown = [table for table in shown if table.rows]
        for left, table in zip(range(len(shown), 0, -1), shown, strict=True):
            rows, title = texts(table, self.sort, self.words), f"{table.name}:"
            part = (height - len(found)) // left  # an equal part of the remaining lines, and what the others leave
            rest = sum(min(part, len(other.rows) + 3) for other in shown[len(shown) - left + 1 :])
            room = max(4, height - len(found) - rest - 2)
            shown_rows, beyond = lines(table.columns, rows, width)
            if height and len(shown_rows) > room:
                sick = sum(row[0].startswith("! ") for row in rows[room - 2 :])
                more = f"... and {len(shown_rows) - room + 1} more" + (f", of which {sick} in trouble" if sick else "")
                shown_rows[room - 1 :] = [more]
            if beyond:
                title = f"{table.name}, without {len(beyond)} columns: {', '.join(beyond)}"[:width]
            found += [title, *shown_rows, ""]
        return "\n".join(found)


GROUP = TopView()


def run(source: Source, interval: float = 1.0, view: TopView = GROUP) -> None:
    """Show a group, queried every `interval` seconds, until Ctrl-C; raise UsageError as `TopView.text` does."""
    history = GroupHistory()
    while True:
        begun = time.monotonic()
        history.update(source)
        if sys.stdout.isatty():
            width, height = shutil.get_terminal_size()
            lines = view.text(history, height - 1, width).splitlines()[: height - 1]
            print(HOME + "".join(line[:width] + END_OF_LINE for line in lines), end=END, flush=True)
        else:
            print(view.text(history), flush=True)
        time.sleep(max(0.0, begun + max(interval, LEAST) - time.monotonic()))


def once(source: Source, between: float = 1.0, view: TopView = GROUP) -> str:
    """Return one view as text with all lines; rates are over `between` seconds."""
    history = GroupHistory()
    history.update(source)
    time.sleep(between)
    history.update(source)
    return view.text(history)


# Tables


class Row(NamedTuple):
    values: tuple[Any, ...]  # one for each column; None: unknown
    trouble: float = 0.0  # those with the most come first


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


def percent(share: float) -> str:
    return f"{share * 100:.0f}%"


_used = "{0[0]}/{0[1]}".format  # of slots, busy and all
WORKERS: Columns = {  # the most important first, since a narrow terminal has no room for all
    "worker": str, "phase": str, "oldest": duration, "run": count, "queue": count, "slots": _used, "cpu": percent,
    "mem": amount, "in/s": count, "out/s": count, "flight": count, "sent/s": amount, "got/s": amount, "shared": amount,
    "owned": count, "held": count, "ctx": count, "thr": count, "gen": count, "rank": count, "host": str,
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
KINDS: Columns = {"number": count, "oldest": duration, "type": str, "made at": str}
LOG: Columns = {"number": count, "age": duration, "level": str, "logger": str, "text": str}
ALL = (WORKERS, FUNCTIONS, CALLS_OUT, CALLS_IN, THREADS, PEERS, PASSES, KINDS, LOG)


def of_group(history: GroupHistory) -> list[Table]:
    """Return the tables of workers and of their recently called functions."""
    # If events were left out, the first query tells which span is complete. The second one has the events of that span
    # for all workers, so that rates are comparable.
    _, window = history.recent(WINDOW)
    recent, _ = history.recent(window)
    accounts, rates = history.sight.accounts, history.rates()
    rows = []
    for account in accounts:
        name = account["worker"]
        states = counts(account["calls_in"], lambda call: call["state"])
        rate = rates.get(name)
        called = sum(event[0] == CALLED for event in recent.get(name, ())) / window
        flight = counts(account["calls_out"], lambda call: call["to"])
        values = (
            name, account["phase"], oldest_call(account) if account["calls_out"] else None,
            states[RUNNING] + states[UNFINISHED], states[QUEUED], (account["busy"], account["slots"]),
            rate and rate.processor, account["memory"], rate and rate.calls, called, flight.total(),
            rate and rate.sent, rate and rate.received, account["shared"], account["references"].get("owners"),
            account["references"].get("users"), account["contexts"], len(account["threads"]), account["generation"],
            account["rank"], account["host"],
        )  # fmt: skip
        rows.append(Row(values, trouble(account)))
    for phase, names, urgent in ((SILENT, history.sight.silent, OF_SILENT), (GONE, history.lost(), OF_GONE)):
        for name in names:
            last = history.last.get(name)
            hosts = (account["members"][name] for account in accounts if name in account["members"])
            host = last["host"] if last else next(hosts, None)
            rows.append(Row((name, phase, *(None,) * 17, last and last["rank"], host), urgent))
    lately = {account["worker"]: recent.get(account["worker"], []) for account in accounts}
    found = [
        Row((each.calls / window, each.p50, each.p99, each.running, each.failures, each.name))
        for each in functions(lately)
    ]
    return [Table("Workers", WORKERS, rows), Table("Functions", FUNCTIONS, found)]


def of_worker(history: GroupHistory, name: str, stacks: bool = False) -> tuple[str, list[Table]]:
    """Return a text about a worker and the tables of its latest state; raise UsageError if there is no such worker."""
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
    processor = history.rates().get(name, Rate(0, 0, 0)).processor
    used = [] if processor is None else [f"processor {percent(processor)} of a core"]
    used += [f"memory {amount(account['memory'])}", f"lent {amount(account['shared'])}"]
    used += [f"{device} {amount(size)}" for device, size in account.get("devices", {}).items()]
    told += [
        f"{name} rank {account['rank']} on {account['host']}, pid {account['pid']}: {safe(account['program'])}",
        f"{phase}; slots {account['busy']}/{account['slots']}; {', '.join(used)}; contexts {account['contexts']}",
        "references: " + ", ".join(f"{kind} {number}" for kind, number in account["references"].items()),
    ]
    if stacks:
        for thread in account["threads"]:
            told += ["", f"Thread {safe(thread['name'])}, innermost first:", *map(safe, reversed(thread["stack"]))]
    tables = [*_calls(account), _threads(account), _peers(history, account), *_others(account)]
    return "\n".join(told), tables


def detail(history: GroupHistory, worker: str) -> dict[str, Any]:
    """Return the stacks and tables of one worker, each with its name, columns (name, True if numeric) and texts."""
    try:
        about, found = of_worker(history, worker, stacks=True)
    except UsageError as error:
        return {"about": str(error), "tables": []}
    columns = [[(name, show is not str) for name, show in table.columns.items()] for table in found]
    return {"about": about, "tables": [(each.name, own, texts(each)) for each, own in zip(found, columns, strict=True)]}


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
        if not thread.get("foreign")
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
    hosts = {**members, **{each["worker"]: each["host"] for each in history.sight.accounts}}
    rows = []
    for name in {*members, *sent, *got, *flight} - {me}:
        values = (name, *rates[name], sent.get(name, 0), got.get(name, 0), flight[name], hosts.get(name))
        rows.append(Row(values, OF_SILENT * (name in history.sight.silent) + OF_GONE * (name in lost)))
    return Table("Bytes", PEERS, rows)


def _others(account: WorkerState) -> list[Table]:
    """Return the tables of backward passes, of references and of log lines."""
    passes = [
        Row((each["age"], str(each["context"]), each["number"], ", ".join(each["owing"]) or None))
        for each in account["passes"]
    ]
    kinds = [
        Row((each["number"], each["age"], each["kind"], each["line"] or None)) for each in account.get("kinds", ())
    ]
    log = [
        Row((each["number"], each["age"], each["level"], each["logger"], each["text"]))
        for each in account.get("log", ())
    ]
    return [Table("Passes", PASSES, passes), Table("References", KINDS, kinds), Table("Log", LOG, log)]


def _place(line: SourceLine | None) -> str | None:
    """Return a short form of a line of the user's program."""
    if line is None:
        return None
    return f"{os.path.basename(line['file'])}:{line['line']} {line['function']}: {line['text'].strip()}"


def texts(table: Table, by: str = "", words: str = "") -> list[list[str]]:
    """Return the texts of the rows that contain all `words`, sorted by a column, or by trouble and the first column:
    the highest numbers first, texts naturally ("w2" before "w10"), unknown values last."""
    column = by if by in table.columns else next(iter(table.columns))
    index = list(table.columns).index(column)
    known = [row for row in table.rows if row.values[index] is not None]
    known.sort(key=lambda row: _natural(row.values[index]), reverse=table.columns[column] is not str)
    if column != by:
        known.sort(key=lambda row: -row.trouble)
    found = []
    for values, urgent in known + [row for row in table.rows if row.values[index] is None]:
        shown = [
            "-" if value is None else safe(show(value))
            for show, value in zip(table.columns.values(), values, strict=True)
        ]
        if all(word in " ".join(shown).casefold() for word in words.casefold().split()):
            found.append([f"! {shown[0]}", *shown[1:]] if urgent else shown)
    return found


def lines(columns: Columns, rows: Sequence[Sequence[str]], width: int = 0) -> tuple[list[str], list[str]]:
    """Return a table as lines, with columns as wide as needed, and the columns that do not fit into `width`, if given.
    If not all fit, long texts are cut in the middle."""
    found = [list(columns), *rows]
    widths = [max(map(len, column)) for column in zip(*found, strict=True)]
    if width and sum(widths) + 2 * len(widths) - 2 > width:
        left, fitting = width, list[int]()
        for show, wide in zip(columns.values(), widths, strict=True):
            is_last = len(fitting) == len(widths) - 1
            need = min(wide, max(SHORTEST, left if is_last else width // 4)) if show is str else wide
            if need > left:
                break
            fitting.append(need)
            left -= need + 2
        widths = fitting
    shown = [
        "  ".join(
            _cut(text, wide).ljust(wide) if show is str else text.rjust(wide)
            for show, text, wide in zip(columns.values(), row, widths, strict=False)
        ).rstrip()
        for row in found
    ]
    return shown, list(columns)[len(widths) :]


def _cut(text: str, width: int) -> str:
    """Return a text of at most `width` characters, without its middle, since names often differ at their ends."""
    begin = (width - 3) * 2 // 5
    return text if len(text) <= width else f"{text[:begin]}...{text[len(text) - (width - 3 - begin) :]}"


def _natural(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    return [int(part) if part.isdecimal() else part.casefold() for part in re.split(r"([0-9]+)", value)]
