"""Make the page of limits from the tables of programs that show them.

Each area has a table as text. A row has a title, a program, for refused programs the error (`...` stands for varying
parts), and an alternative:

    ## an unknown worker
    rpc.rpc_sync("w9", abs, (3,))
    UnknownWorker: could not find destination: no worker is named 'w9'
    -> a name of `rpc.workers()`
"""

import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "limits.md"
ANY = "..."  # stands for varying or omitted parts of an error

HEAD = """# What is refused

A program does on several workers what it would do in one process, or it gets an error at once. This page lists those
errors: what is refused, how the error begins (`...` stands for what differs), and what to do instead. Below each table
is a list of what gives the same as in one process, and then what is left to each worker. The tests run a program for
each row; `python -m tests.limits` makes the page.
"""


class Limit(NamedTuple):
    area: str
    what: str  # the refused use
    program: str  # a program that shows it
    error: str  # the name of the error's type
    says: str  # the beginning of the error's text
    instead: str  # the alternative


class Left(NamedTuple):
    """A use that is neither refused nor as in one process: each worker handles it by itself."""

    area: str
    what: str
    program: str  # a program with other results than in one process
    instead: str  # the alternative


def limits(area: str, table: str) -> Iterator[Limit]:
    for what, (*program, error, instead) in _rows(table):
        kind, _, says = error.partition(": ")
        yield Limit(area, what, "\n".join(program), kind, says, instead.removeprefix("-> "))


def lefts(area: str, table: str) -> Iterator[Left]:
    for what, (*program, instead) in _rows(table):
        yield Left(area, what, "\n".join(program), instead.removeprefix("-> "))


def programs(table: str) -> dict[str, str]:
    return {what: "\n".join(program) for what, program in _rows(table)}


def _rows(table: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the title and the other lines of each row."""
    for row in table.removesuffix("\n").split("\n## ")[1:]:
        what, *lines = row.split("\n")
        yield what, lines


def pattern_of(says: str) -> str:
    """Return a pattern for the beginning of the error's text."""
    return ".*".join(re.escape(part) for part in says.split(ANY))


def page(limits: Iterable[Limit], right: Mapping[str, Iterable[str]], left: Iterable[Left]) -> str:
    """Return the text of the page. `right` has, by area, the uses that are as in one process."""
    by_area: dict[str, list[Limit]] = {}
    for limit in limits:
        by_area.setdefault(limit.area, []).append(limit)
    parts = [HEAD]
    for area, rows in by_area.items():
        lines = [f"## {area}\n", "| refused | error | begins | instead |", "| --- | --- | --- | --- |"]
        for row in rows:
            says = row.says.replace("``", "`").replace("`", "'")
            lines.append(f"| {row.what} | `{row.error}` | `{says}` | {row.instead} |")
        if area in right:
            lines += ["\nAs in one process:\n", *(f"- {what}" for what in right[area])]
        own = [each for each in left if each.area == area]
        if own:
            lines += ["\n| left to each worker | instead |", "| --- | --- |"]
            lines += [f"| {each.what} | {each.instead} |" for each in own]
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)
