"""Why a group waits: the findings, and a line about each worker, as text for a terminal and as JSON. No I/O.

Ages are those that the workers report; no clock is read here, so saved states can be explained, too.
"""

import os.path
import re
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from telegrad.ext.feedback import plural
from telegrad.insight.causes import Causes
from telegrad.insight.history import GroupSnapshot
from telegrad.insight.phrases import INDENT, NOTE, WEIGHTS, Finding, doing, lasting, lines_of, seconds, several, stacks
from telegrad.insight.wait_graph import Node, WaitGraph
from telegrad.reporting import JOINING, JOINS, LEAVING, NEXT, QUEUED, RUNNING, SPARE, WaitState, WorkerState, counts

LONG = 1.0  # seconds from which a wait counts as long
STARTING = 10.0  # seconds in which a worker may still import torch
COLUMNS = 100


class Report:
    """The report on the waits of a group.

    Attributes:
        findings: the causes of waits, the most important first; empty if nothing waits for `long` seconds.
        status: the exit code: 0 if nothing waits for long, 1 if something does, 2 if workers do not answer.
    """

    def __init__(self, sight: GroupSnapshot, long: float = LONG) -> None:
        self._sight, self._graph = sight, WaitGraph(sight, long)
        # The last two rules depend on what the others have found: they name only workers that no finding names, and a
        # difference of generations is a note unless something waits.
        found = [*Causes(self._graph).find(), *joining(self._graph)]
        found += list(unanswered(self._graph, found))
        found += list(generations(self._graph, found))
        self.findings = sorted(found, key=lambda each: (-each.weight, -len(each.waiting), -each.age))
        self.status = status(self.findings)

    def text(self, stacks: bool = False) -> str:
        """Return the causes, then a line about each worker, in at most 100 columns."""
        sight, hangs = self._sight, [finding for finding in self.findings if finding.weight > NOTE]
        under = _common_folder(sight)
        lines = []
        for index, finding in enumerate(self.findings, 1):
            mark = "Note: " if finding.weight <= NOTE else f"{index}. " if len(hangs) > 1 else ""
            lines += ["", *_told(finding, mark, stacks)]
        if sight.accounts or sight.silent:
            head = [self._head(hangs), *([f"Files are under {under}"] if under else [])]
            lines = [*head, *lines, "", "What each worker does:", *self._each_worker()]
        short = [line.replace(under, "") if under and not line.startswith("Files are") else line for line in lines]
        return "\n".join(each for line in short for each in _wrapped(line)) + "\n"

    def as_json(self) -> dict[str, Any]:
        return {
            "status": self.status,
            "findings": [finding._asdict() for finding in self.findings],
            "workers": {account["worker"]: self._doing(account)[1] for account in self._sight.accounts},
            "silent": dict(self._sight.silent),
        }

    def _head(self, hangs: list[Finding]) -> str:
        sight = self._sight
        answers = f"{len(sight.silent)} did not answer" if sight.silent else "all answered"
        asked = f"{plural(len(sight.accounts) + len(sight.silent), 'worker')} asked, {answers}"
        if hangs:
            causes = (
                f"{len(hangs)} causes of waits, the most important first" if len(hangs) > 1 else "one cause of waits"
            )
            return f"{asked}; {causes}:"
        flying = [out for account in sight.accounts for out in account["calls_out"]]
        many = counts(flying, lambda call: call["to"]).total()
        ages = f"the oldest for {seconds(max(out['age'] for out in flying))}; " if flying else ""
        left = sum(bool(came.get("cancelled")) for account in sight.accounts for came in account["calls_in"])
        still = f"{plural(left, 'cancelled call')} still run{'s' if left == 1 else ''}; " if left else ""
        lines = Counter(
            f"{at['function']} ({os.path.basename(at['file'])}:{at['line']})"
            for thread in map(self._graph.threads.__getitem__, self._graph.own)
            if (at := thread["at"]) is not None and thread["asleep"] is False and thread["wait"] is None
        )
        busiest = several(f"{place} on {plural(count, 'thread')}" for place, count in lines.most_common(3))
        at_work = f"busiest: {busiest}" if lines else "no thread is busy"
        mains = [self._graph.threads[main] for main in self._graph.mains.values() if not self._graph.awaits[main]]
        unknown = any(main["asleep"] and main["at"] is not None and main["wait"] is None for main in mains)
        nothing = "Nothing waits for long" + (", except perhaps main threads that sleep" if unknown else "")
        return f"{nothing}. {asked}; {plural(many, 'call')} in flight, {ages}{still}{at_work}."

    def _each_worker(self) -> list[str]:
        """Return one line for all workers that do the same."""
        alike: dict[str, list[tuple[str, str]]] = defaultdict(list)
        for account in sorted(
            self._sight.accounts, key=lambda each: (not each["members"], each["rank"], each["worker"])
        ):
            key, said = self._doing(account)
            alike[key].append((account["worker"], said))
        lines = []
        for lot in alike.values():
            names, said = several(name for name, _ in lot), lot[0][1]
            differ = any(other != said for _, other in lot)
            lines.append(f"  {names}: {said}" + (" (the first of them)" if differ else ""))
        return lines + ([f"  {several(self._sight.silent)}: no answer"] if self._sight.silent else [])

    def _doing(self, account: WorkerState) -> tuple[str, str]:
        """Return what a worker does, without times and with them."""
        main = self._graph.mains.get(account["worker"])
        parts = [self._thread(main)] if main is not None else []
        states = counts(account["calls_in"], lambda call: call["state"])
        if running := [came for came in account["calls_in"] if came["state"] == RUNNING]:
            oldest = max(running, key=lambda came: came["age"])
            longest = f"{', the longest' if len(running) > 1 else ':'} {oldest['function']}"
            what = f"runs {plural(len(running), 'call')}{longest}"
            goes_on = " (cancelled)" if oldest.get("cancelled") else ""
            parts.append((what, f"{what} of {oldest['caller']}{goes_on}{lasting(oldest['age'])}"))
        others = states.total() - len(running) - states[QUEUED]
        for count, what in ((states[QUEUED], "queued"), (others, "in progress")):
            if count:
                parts.append((what, f"{plural(count, 'call')} {what}"))
        if not parts:
            phases = {JOINING: "is joining", LEAVING: "is leaving"}
            parts.append(("idle", phases.get(account["phase"], "has nothing to do")))
        return "; ".join(key for key, _ in parts), "; ".join(said for _, said in parts)

    def _thread(self, main: Node) -> tuple[str, str]:
        graph, thread, at = self._graph, self._graph.threads[main], self._graph.threads[main]["at"]
        calls = graph.awaits[main]
        if at is None and thread["wait"] is None and not calls:
            return "idle", "its main thread runs no line of the program"
        does, age = doing(thread), graph.age(main)
        if calls:
            first = max(calls, key=graph.age)
            others = f" and {plural(len(calls) - 1, 'other call')}" if len(calls) > 1 else ""
            does, age = f"waits for {graph.function(first)} on {first.to}{others}", graph.age(first)
        place = f", at {at['file']}:{at['line']} in {at['function']}" if at is not None else ""
        return f"{does}{place}", f"main thread {does}{lasting(age)}{place}"


def told(sight: GroupSnapshot) -> str:
    return Report(sight).text()


def status(findings: list[Finding]) -> int:
    """Return the exit code: 0 if nothing waits for long, 1 if something does, 2 if workers do not answer."""
    if any(finding.kind in ("silent", "nobody") for finding in findings):
        return 2
    return int(any(finding.weight > NOTE for finding in findings))


def _told(finding: Finding, mark: str, stacks: bool) -> list[str]:
    indent = " " * (len(mark) if mark[:1].isdigit() else 2)
    lines = [mark + finding.title, *(indent + line for line in finding.details)]
    if stacks:
        for thread, frames in finding.stacks.items():
            lines += [f"{indent}Stack of {thread}, innermost last:", *(f"{indent}{INDENT}{frame}" for frame in frames)]
    return lines


def _common_folder(sight: GroupSnapshot) -> str:
    """Return the common folder of the user's files, with a slash; empty if it would not shorten much."""
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


# The rules about the group as a whole

_STORE = re.compile(r"the store at (\S+?),")


def joining(graph: WaitGraph) -> Iterator[Finding]:
    """Find workers that join at the same store and have waited for long."""
    places: dict[tuple[str, bool], list[WorkerState]] = defaultdict(list)
    for account in graph.accounts.values():
        if account["phase"] in (JOINING, SPARE):
            # Until the store is found, only the text of the wait has its address.
            found = _STORE.search((wait := _join_wait(account))["about"])
            places[account["place"] or (found[1] if found else ""), wait["what"] == NEXT].append(account)
    for (place, _), accounts in places.items():
        ages = [account["phase_age"] for account in accounts]
        # If all are there, the group forms as soon as the last one has joined.
        if (min(ages) if len(ages) == accounts[0]["size"] else max(ages)) >= graph.long:
            yield _join(graph, place, sorted(accounts, key=lambda each: (each["rank"], each["worker"])))


def _join_wait(account: WorkerState) -> WaitState:
    waits = (wait for thread in account["threads"] if (wait := thread["wait"]) and wait["what"] in JOINS)
    return next(waits, WaitState(what="", on=[], about=""))


def _join(graph: WaitGraph, place: str, accounts: list[WorkerState]) -> Finding:
    workers = names = [account["worker"] for account in accounts]
    oldest = max(accounts, key=lambda account: account["phase_age"])
    main, wait = graph.mains.get(oldest["worker"]), _join_wait(oldest)
    known = stacks(graph, [main] if main is not None else [])
    at, verb = f" at {place}" if place else "", "wait" if len(names) > 1 else "waits"
    age = oldest["phase_age"]
    details = [
        f"{several(names)} {verb}{at}, for {seconds(age)}:",
        *lines_of(graph.threads[main] if main is not None else None),
    ]
    if wait["what"] == NEXT:
        title = f"{several(names)} {verb} for the next generation: {wait['about']}."
        return Finding("wait", NOTE, names, names, age, title, details, known)
    if age < STARTING:
        details.append("Perhaps others are starting still: importing torch takes seconds")
    size, ranks = accounts[0]["size"], {f"rank {account['rank']}" for account in accounts}
    told = [account["missing"] for account in accounts if account["missing"]]
    # A worker that started the others knows their names. The others know ranks, and the names of workers that came and
    # then stopped answering.
    by_name = [each for each in told if not any(name.startswith("rank ") for name in each)]
    missing = sorted({name for each in by_name or told for name in each} - ranks - set(names))
    missing = missing or [rank for number in range(size or 0) if (rank := f"rank {number}") not in ranks]
    has_no_store = any(_join_wait(each)["what"] == "store" for each in accounts)
    if len({account["size"] for account in accounts if account["place"]}) > 1:
        sizes = {
            each["worker"]: "any number of workers" if each["size"] is None else plural(each["size"], "worker")
            for each in accounts
        }
        expected = several(f"{name} expects {wanted}" for name, wanted in sizes.items())
        kind, title = "sizes", f"The workers{at} do not agree on the size of the group: {expected}."
        details.append("Give all workers the same world_size, or each group an address of its own")
    elif wait["what"] == "init_rpc" and wait["about"] and (size is None or not told):
        kind, title = "missing", f"{several(names)} cannot join yet: {wait['about']}."
        if size is None and not told:  # else the text names the workers
            details.append("Check whether enough workers were started, and were given the same address")
    elif has_no_store or not missing or size is None:
        title = f"No store answers{at}{'' if has_no_store else ', it seems'}: {several(names)} cannot join."
        kind = "store"
        details += [
            "The worker of rank 0 usually serves it: check whether it was started, and its log",
            "Check that host and port (MASTER_ADDR, MASTER_PORT or init_method) are right for all workers",
        ]
    else:
        kind, workers, are = "missing", missing, "are" if len(missing) > 1 else "is"
        title = f"{several(missing)} {are} missing{'' if told else ', it seems'}: the group of {size} cannot form."
        details.append("Check the logs of the missing workers, and whether they were given the same address")
        if missing == [f"rank {rank}" for rank in range(size - len(missing), size)]:
            details.append(f"If no more workers should join, world_size={size} is too large")
    return Finding(kind, WEIGHTS[kind], workers, names, age, title, details, known)


def unanswered(graph: WaitGraph, found: Sequence[Finding]) -> Iterator[Finding]:
    """Find silent and lost workers that no other finding names."""
    known = {name for finding in found if finding.kind in ("silent", "gone") for name in finding.workers}
    if not graph.accounts and not graph.sight.silent:
        yield _noted("nobody", [], "No worker could be asked: none was found.")
    for name, why in graph.sight.silent.items():
        if name not in known:
            yield _noted("silent", [name], f"{name} does not answer: {why}.")
    known = {*graph.sight.silent, *(name for finding in found for name in finding.workers)}
    for name, why in sorted(graph.gone.items()):
        if name not in known:
            yield _noted("gone", [name], f"{name} is no longer in the group: {why}.", NOTE)


def generations(graph: WaitGraph, found: Sequence[Finding]) -> Iterator[Finding]:
    """Find workers of different groups or generations; a note if no other finding exists."""
    lots: dict[tuple[str, int], list[str]] = defaultdict(list)
    for account in graph.accounts.values():
        if account["phase"] not in (JOINING, SPARE):
            lots[account["group"], account["generation"]].append(account["worker"])
    if len(lots) > 1:
        several_groups = len({group for group, _ in lots}) > 1
        said = "; ".join(
            f"{several(names)} in {f'group {group}, ' if several_groups else ''}generation {generation}"
            for (group, generation), names in sorted(lots.items(), key=lambda item: item[0][1])
        )
        why = "Workers of different groups or generations cannot meet: one was restarted, or missed that others were"
        title, weight = f"The workers are not in one group: {said}.", WEIGHTS["generations"] if found else NOTE
        yield _noted("generations", min(lots.values(), key=len), title, weight, why)


def _noted(kind: str, workers: list[str], title: str, weight: int | None = None, *details: str) -> Finding:
    """Return a finding that has no waits."""
    return Finding(kind, WEIGHTS[kind] if weight is None else weight, workers, [], 0.0, title, list(details), {})
