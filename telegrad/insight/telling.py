"""Findings, and what each worker does, as text for a terminal and as JSON. Pure."""

from __future__ import annotations

import os.path
import textwrap
from collections import Counter, defaultdict
from typing import Any

from telegrad.insight.finding import NOTE, Finding, status
from telegrad.insight.phrases import INDENT, Names, lasting, plural, seconds, several
from telegrad.insight.source import Sight
from telegrad.insight.waits import Task, Waits
from telegrad.witness.account import JOINING, LEAVING, QUEUED, RUNNING, Account, counts

COLUMNS = 100
_YOUNG = 0.5  # seconds: which waits are taken for granted where only names are asked for


def text(findings: list[Finding], sight: Sight, stacks: bool = False) -> str:
    """At most 100 columns: the causes, then what each worker does in a line; with `stacks`, those of the threads."""
    hangs = [finding for finding in findings if finding.weight > NOTE]
    notes = [finding for finding in findings if finding.weight <= NOTE]
    under = _common_folder(sight)
    lines = [_head(hangs, sight)] if sight.accounts or sight.silent else []
    if under:
        lines.append(f"Files are under {under}")
    for index, finding in enumerate(hangs, 1):
        lines += ["", *_told(finding, f"{index}. " if len(hangs) > 1 else "", stacks)]
    for finding in notes:
        lines += ["", *_told(finding, "Note: ", stacks)]
    if sight.accounts or sight.silent:
        lines += ["", "What each worker does:", *_each_worker(sight)]
    short = [line.replace(under, "") if under and not line.startswith("Files are") else line for line in lines]
    return "\n".join(each for line in short for each in _wrapped(line)) + "\n"


def as_json(findings: list[Finding], sight: Sight) -> dict[str, Any]:
    waits = Waits(sight, _YOUNG)
    return {
        "status": status(findings),
        "findings": [finding._asdict() for finding in findings],
        "workers": {account["worker"]: _doing(account, waits)[1] for account in sight.accounts},
        "silent": dict(sight.silent),
    }


def _head(hangs: list[Finding], sight: Sight) -> str:
    count = len(sight.accounts) + len(sight.silent)
    answers = f"{len(sight.silent)} did not answer" if sight.silent else "all answered"
    asked = f"{plural(count, 'worker')} asked, {answers}"
    if hangs:
        found = f"{len(hangs)} causes of waits, the most important first" if len(hangs) > 1 else "one cause of waits"
        return f"{asked}; {found}:"
    flying = [out for account in sight.accounts for out in account["calls_out"]]
    many = counts(flying, lambda call: call["to"]).total()
    oldest = max((out["age"] for out in flying), default=0.0)
    ages = f"the oldest for {seconds(oldest)}; " if flying else ""
    return f"Nothing waits for long. {asked}; {plural(many, 'call')} in flight, {ages}{_busiest(sight)}."


def _busiest(sight: Sight) -> str:
    """Where the group is at work, as far as threads that run at this moment show it."""
    lines = Counter(
        f"{at['function']} ({os.path.basename(at['file'])}:{at['line']})"
        for account in sight.accounts
        for thread in account["threads"]
        if (at := thread["at"]) is not None and thread["asleep"] is False and thread["wait"] is None
    )
    busiest = (f"{place} on {plural(count, 'thread')}" for place, count in lines.most_common(3))
    return f"busiest: {several(busiest)}" if lines else "no thread is at work"


def _told(finding: Finding, mark: str, stacks: bool) -> list[str]:
    indent = " " * (len(mark) if mark[:1].isdigit() else 2)
    lines = [mark + finding.title, *(indent + line for line in finding.details)]
    if stacks:
        for thread, frames in finding.stacks.items():
            lines += [f"{indent}Stack of {thread}, innermost last:", *(f"{indent}{INDENT}{frame}" for frame in frames)]
    return lines


def _each_worker(sight: Sight) -> list[str]:
    """Workers that do the same share a line."""
    waits = Waits(sight, _YOUNG)
    alike: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for account in sorted(sight.accounts, key=lambda each: (each["rank"], each["worker"])):
        key, said = _doing(account, waits)
        alike[key].append((account["worker"], said))
    lines = []
    for lot in alike.values():
        names, said = several(name for name, _ in lot), lot[0][1]
        differ = any(other != said for _, other in lot)
        lines.append(f"  {names}: {said}" + (" (the first of them)" if differ else ""))
    return lines + ([f"  {several(sight.silent)}: no answer"] if sight.silent else [])


def _doing(account: Account, waits: Waits) -> tuple[str, str]:
    """What a worker does, without its times and with them."""
    name, names = account["worker"], Names(waits)
    main = waits.main(name)
    parts = [_thread(main, waits, names)] if main is not None else []
    states = counts(account["calls_in"], lambda call: call["state"])
    running = [came for came in account["calls_in"] if came["state"] == RUNNING]
    if running:
        oldest = max(running, key=lambda came: came["age"])
        what = f"runs {plural(len(running), 'call')}" + (", the longest" if len(running) > 1 else ":")
        age = lasting(oldest["age"])
        parts.append((f"{what} {oldest['function']}", f"{what} {oldest['function']} of {oldest['caller']}{age}"))
    others = states.total() - len(running) - states[QUEUED]
    for count, what in ((states[QUEUED], "queued"), (others, "going on")):
        if count:
            parts.append((what, f"{plural(count, 'call')} {what}"))
    if not parts:
        parts.append(
            ("idle", {JOINING: "is joining", LEAVING: "is leaving"}.get(account["phase"], "has nothing to do"))
        )
    return "; ".join(key for key, _ in parts), "; ".join(said for _, said in parts)


def _thread(task: Task, waits: Waits, names: Names) -> tuple[str, str]:
    thread = waits.threads[task]
    at = thread["at"]
    calls = sorted(waits.awaits[task], key=names.age)
    if calls:
        first = calls[-1]
        does, age = f"waits for {names.function(first)} on {first.to}", names.age(first)
        does += f" and {plural(len(calls) - 1, 'other call')}" if len(calls) > 1 else ""
    else:
        does, age = names.doing(thread), names.age(task)
    place = f", at {at['file']}:{at['line']} in {at['function']}" if at is not None else ""
    if at is None and thread["wait"] is None and not calls:
        return "idle", "its main thread is in no line of the program"
    return f"{does}{place}", f"main thread {does}{lasting(age)}{place}"


def _common_folder(sight: Sight) -> str:
    """Of the user's files, with a slash behind it; empty where it would not shorten much."""
    files = {
        thread["at"]["file"] for account in sight.accounts for thread in account["threads"] if thread["at"] is not None
    }
    folders = [os.path.dirname(file) for file in files if file.startswith("/")]
    common = os.path.commonpath(folders) if folders else ""
    return f"{common}/" if len(common) > 1 else ""


def _wrapped(line: str) -> list[str]:
    if len(line) <= COLUMNS:
        return [line]
    indent = line[: len(line) - len(line.lstrip())]
    hanging = indent + ("   " if line[:1].isdigit() else "  ")
    return textwrap.wrap(line, COLUMNS, subsequent_indent=hanging, break_on_hyphens=False)
