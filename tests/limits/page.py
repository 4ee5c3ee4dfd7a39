"""The page of what is refused, made from the table of programs that show it."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Iterable
from typing import NamedTuple

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "limits.md"
ANY = "..."  # in the words of an error: what differs each time, or is left out

HEAD = """# What is refused

A program does on several workers what it would do in one process, or it gets an error at once. This page lists those
errors: what is refused, how the error begins (`...` stands for what differs), and what to do instead. It is made from
programs that the tests run, by `python -m tests.limits`.
"""


class Limit(NamedTuple):
    area: str
    what: str  # is refused
    program: str  # that shows it
    error: str  # the name of its type
    says: str  # the beginning of its text
    instead: str  # what to do


def pattern_of(says: str) -> str:
    """Return what matches the beginning of the error's text."""
    return ".*".join(re.escape(part) for part in says.split(ANY))


def page(limits: Iterable[Limit]) -> str:
    lines = [HEAD]
    area = ""
    for limit in limits:
        if limit.area != area:
            area = limit.area
            lines += [f"## {area}\n", "| refused | error | begins | instead |", "| --- | --- | --- | --- |"]
        says = limit.says.replace("``", "`").replace("`", "'")
        lines.append(f"| {limit.what} | `{limit.error}` | `{says}` | {limit.instead} |")
    text = "\n".join(lines) + "\n"
    return text.replace("|\n## ", "|\n\n## ")
