"""Tables of what a group does, for terminals: their columns, and how rows are made, sorted, narrowed and shown."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from telegrad.safe_text import safe
from telegrad.witness.account import Account, CallIn, Line, Thread

SILENT, GONE = "silent", "gone"  # phases of workers that give no account
UNKNOWN = "-"


class Column(NamedTuple):
    name: str
    about: str
    show: Callable[[Any], str]
    width: int = 0  # 0: as wide as what stands in it, from the left; else that of its numbers, from the right


class Row(NamedTuple):
    key: str
    values: tuple[Any, ...]  # one for each column; None: not known
    trouble: bool = False


class Table(NamedTuple):
    name: str
    columns: tuple[Column, ...]
    by: int = 0  # the column that it is sorted by at first
    descending: bool = False


class Used(NamedTuple):
    used: int
    of: int

    def __str__(self) -> str:
        return f"{self.used}/{self.of}"


def count(number: float) -> str:
    """In at most 5 characters."""
    if number < 10_000:
        return f"{number:.1f}" if number < 10 and number != int(number) else f"{number:.0f}"
    return _scaled(number, 1000, "kMGT")


def amount(size: float) -> str:
    """Bytes, in at most 5 characters."""
    return f"{size:.0f}" if size < 1000 else _scaled(size, 1024, "KMGTP")


def _scaled(number: float, step: int, letters: str) -> str:
    for letter in letters:
        number /= step
        if number < 999.5 or letter == letters[-1]:
            break
    return f"{number:.1f}{letter}" if number < 9.95 else f"{number:.0f}{letter}"


def duration(seconds: float) -> str:
    """In at most 6 characters."""
    if seconds < 0.9995:
        value, unit = (seconds * 1e3, "ms") if seconds >= 0.9995e-3 else (seconds * 1e6, "us")
        return f"{value:.1f}{unit}" if value < 9.95 else f"{value:.0f}{unit}"
    if seconds < 99.5:
        return f"{seconds:.1f}s" if seconds < 9.95 else f"{seconds:.0f}s"
    minutes = int(seconds) // 60
    if minutes < 100:
        return f"{minutes}:{int(seconds) % 60:02}"
    return f"{minutes // 60}h{minutes % 60:02}" if minutes < 6000 else f"{minutes // 1440}d"


def place(line: Line) -> str:
    """A line of the user's program, short."""
    return f"{os.path.basename(line['file'])}:{line['line']} {line['function']}: {line['text'].strip()}"


WORKERS = Table(
    "Workers",
    (
        Column("worker", "its name; `!` before it: it does not answer, or has gone", str),
        Column("rank", "its rank", count, 4),
        Column("phase", "joining, member or leaving; silent or gone where it gives no account", str),
        Column("in/s", "calls of others that it answered, per second", count, 5),
        Column("out/s", "calls of its own that were answered, per second", count, 5),
        Column("flight", "calls of its own that are not answered yet", count, 6),
        Column("run", "calls of others that it runs", count, 4),
        Column("queue", "calls of others that wait for a slot", count, 5),
        Column("slots", "slots in use, of those there are: calls that may run at once", str, 7),
        Column("sent/s", "bytes that it sent per second", amount, 6),
        Column("got/s", "bytes that it was sent per second", amount, 5),
        Column("shared", "bytes of shared memory that it has lent", amount, 6),
        Column("owned", "references to values that live there", count, 5),
        Column("held", "references that it holds to values of others", count, 5),
        Column("ctx", "autograd contexts", count, 4),
        Column("thr", "threads that have something to do", count, 4),
        Column("mem", "resident memory", amount, 5),
        Column("gen", "generation of the group", count, 4),
        Column("host", "where it runs", str),
    ),
)
CALLS_OUT = Table(
    "Calls out",
    (
        Column("age", "since when it waits for the answer", duration, 6),
        Column("limit", "its timeout", duration, 6),
        Column("to", "the worker that was called", str),
        Column("function", "what was called", str),
        Column("line", "where in the user's program the thread stands that waits for it", str),
        Column("thread", "that thread", str),
        Column("number", "of the call", str),
    ),
    descending=True,
)
CALLS_IN = Table(
    "Calls in",
    (
        Column("age", "since when it runs", duration, 6),
        Column("from", "the worker that calls", str),
        Column("state", "running, queued, or going on: a future or coroutine of its is awaited", str),
        Column("function", "what was called", str),
        Column("line", "where in the user's program the thread stands that runs it", str),
        Column("thread", "that thread", str),
        Column("number", "of the call", str),
    ),
    descending=True,
)
THREADS = Table(
    "Threads",
    (
        Column("thread", "its name", str),
        Column("does", "which call it runs, and what it waits for", str),
        Column("line", "where in the user's program it stands", str),
        Column("asleep", "whether the kernel has it asleep", str),
    ),
)
PEERS = Table(
    "Bytes",
    (
        Column("worker", "the other worker", str),
        Column("sent/s", "bytes sent to it per second", amount, 6),
        Column("got/s", "bytes that came from it per second", amount, 6),
        Column("sent", "bytes sent to it since the start", amount, 6),
        Column("got", "bytes that came from it since the start", amount, 6),
        Column("flight", "calls to it that are not answered yet", count, 6),
        Column("host", "where it runs", str),
    ),
)
PASSES = Table(
    "Passes",
    (
        Column("age", "since when the backward pass runs", duration, 6),
        Column("context", "of autograd", str),
        Column("number", "of the pass in its context", count, 6),
        Column("owing", "workers that have something to do for it", str),
    ),
    descending=True,
)


def calls_out(account: Account) -> list[Row]:
    threads = _by_number(account)
    return [
        Row(
            f"{call['to']}/{call['number']}",
            (
                call["age"],
                call["timeout"] or None,
                call["to"],
                call["function"],
                *_where_and_who(threads.get(call["thread"])),
                str(call["number"]),
            ),
        )
        for call in account["calls_out"]
    ]


def calls_in(account: Account) -> list[Row]:
    threads = _by_number(account)
    return [
        Row(
            f"{call['caller']}/{call['number']}",
            (
                call["age"],
                call["caller"],
                call["state"],
                call["function"] or None,
                *_where_and_who(threads.get(call["thread"])),
                str(call["number"]),
            ),
        )
        for call in account["calls_in"]
    ]


def threads(account: Account) -> list[Row]:
    asleep = {True: "yes", False: "no", None: None}
    return [
        Row(
            str(thread["number"]),
            (
                thread["name"],
                doing(account, thread) or None,
                place(thread["at"]) if thread["at"] else None,
                asleep[thread["asleep"]],
            ),
        )
        for thread in account["threads"]
    ]


def doing(account: Account, thread: Thread) -> str:
    """Which call a thread runs, and what it waits for."""
    runs = [f"runs {_named(call)} for {call['caller']}" for call in account["calls_in"] if _is_on(call, thread)]
    waits = [f"waits for {call['function']} at {call['to']}" for call in account["calls_out"] if _is_on(call, thread)]
    if (wait := thread["wait"]) is not None and not waits:
        on = f" of {', '.join(wait['on'])}" if wait["on"] else ""
        about = f" ({wait['about']})" if wait["about"] else ""
        waits = [f"waits for {wait['what']}{on}{about}"]
    return ", ".join(runs + waits)


def passes(account: Account) -> list[Row]:
    return [
        Row(
            f"{each['context']}/{each['number']}",
            (each["age"], str(each["context"]), each["number"], ", ".join(each["owing"]) or None),
        )
        for each in account["passes"]
    ]


def ordered(rows: Iterable[Row], column: int, descending: bool) -> list[Row]:
    """By the values of a column, `w2` before `w10`; what is not known comes last in either direction."""
    rows = list(rows)
    known = [row for row in rows if row.values[column] is not None]
    known.sort(key=lambda row: _natural(row.values[column]), reverse=descending)
    return known + [row for row in rows if row.values[column] is None]


def narrowed(table: Table, rows: Iterable[Row], words: str) -> list[Row]:
    """Those that show all of the words."""
    wanted = words.casefold().split()
    return [row for row in rows if all(word in " ".join(shown(table, row)).casefold() for word in wanted)]


def shown(table: Table, row: Row) -> list[str]:
    """A row's texts."""
    return [
        UNKNOWN if value is None else safe(column.show(value))
        for column, value in zip(table.columns, row.values, strict=True)
    ]


def as_text(table: Table, rows: Sequence[Row]) -> str:
    """The whole table, in lines that are as wide as they need."""
    lines = [[column.name for column in table.columns], *(shown(table, row) for row in rows)]
    for row, line in zip(rows, lines[1:], strict=True):
        line[0] = f"! {line[0]}" if row.trouble else line[0]
    widths = [max(map(len, texts)) for texts in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            text.rjust(width) if column.width else text.ljust(width)
            for column, text, width in zip(table.columns, line, widths, strict=True)
        ).rstrip()
        for line in lines
    )


def _by_number(account: Account) -> dict[int | None, Thread]:
    return {thread["number"]: thread for thread in account["threads"]}


def _where_and_who(thread: Thread | None) -> tuple[str | None, str | None]:
    if thread is None:
        return None, None
    return place(thread["at"]) if thread["at"] else None, thread["name"]


def _is_on(call: Any, thread: Thread) -> bool:
    return bool(call["thread"] == thread["number"])


def _named(call: CallIn) -> str:
    return call["function"] or f"call {call['number']}"


def _natural(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    return [int(part) if part.isdecimal() else part.casefold() for part in re.split(r"([0-9]+)", value)]
