"""Why a group waits: from what its workers tell of themselves to findings, in the order of their weight. Pure.

Ages are those that the workers tell; nothing here looks at a clock, and all of it can be asked of accounts that were
kept. What is concluded from how a line of a program looks, and not from what Telegrad knows, is said to seem so.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from telegrad.insight.causes import Causes
from telegrad.insight.finding import NOTE, WEIGHTS, Finding, status
from telegrad.insight.phrases import Names, lines_of, seconds, several
from telegrad.insight.source import Sight
from telegrad.insight.telling import as_json, text
from telegrad.insight.waits import Waits
from telegrad.witness.account import JOINING, Account

__all__ = ["LONG", "Finding", "as_json", "explain", "status", "text"]

LONG = 1.0  # seconds from which on a wait counts as long


def explain(sight: Sight, long: float = LONG) -> list[Finding]:
    """What keeps a group from going on, the most important first; empty where nothing waits for `long` seconds."""
    if not sight.accounts and not sight.silent:
        return [_finding("nobody", [], "No worker could be asked: none was found.", [])]
    waits = Waits(sight, long / 2)
    causes = Causes(waits, long)
    found = causes.find()
    found += _joins([each for each in sight.accounts if each["phase"] == JOINING and each["phase_age"] >= long], waits)
    told = {name for finding in found if finding.kind in ("silent", "gone") for name in finding.workers}
    found += [
        _finding("silent", [name], f"{name} does not answer: {why}.", [])
        for name, why in sight.silent.items()
        if name not in told
    ]
    found += _departed(sight.accounts, told)
    found += _generations(sight.accounts, NOTE if not found else None)
    return sorted(found, key=lambda finding: (-finding.weight, -len(finding.waiting), -finding.age))


def _finding(
    kind: str,
    workers: list[str],
    title: str,
    details: list[str],
    waiting: Sequence[Account] = (),
    weight: int | None = None,
    stacks: dict[str, list[str]] | None = None,
) -> Finding:
    names = [account["worker"] for account in waiting]
    age = max((account["phase_age"] for account in waiting), default=0.0)
    return Finding(kind, WEIGHTS[kind] if weight is None else weight, workers, names, age, title, details, stacks or {})


def _joins(joining: list[Account], waits: Waits) -> list[Finding]:
    """Groups that do not form."""
    places: dict[str, list[Account]] = defaultdict(list)
    for account in joining:
        places[account["place"]].append(account)
    return [_join(place, accounts, waits) for place, accounts in places.items()]


def _join(place: str, accounts: list[Account], waits: Waits) -> Finding:
    names = [account["worker"] for account in accounts]
    sizes = {account["size"] for account in accounts}
    absent = sorted(
        {name for account in accounts for name in account["missing"]} - {f"rank {a['rank']}" for a in accounts}
    )
    waiting = f"{several(names)} {'wait' if len(names) > 1 else 'waits'}"
    oldest = max(accounts, key=lambda account: account["phase_age"])
    main = waits.main(oldest["worker"])
    details = [
        f"{waiting} for {seconds(oldest['phase_age'])} at {place}:",
        *lines_of(waits.threads[main] if main is not None else None),
    ]
    stacks = Names(waits).stacks([main] if main is not None else [])
    if len(sizes) > 1:
        said = several(f"{a['worker']} expects {_size(a['size'])}" for a in accounts)
        title = f"The workers at {place} do not agree on the size of the group: {said}."
        details.append("Give all the same world_size, or a place of its own to each group")
        return _finding("sizes", names, title, details, accounts, stacks=stacks)
    if not absent:
        title = f"No store answers at {place}: {several(names)} cannot join."
        if not any(account["rank"] == 0 for account in accounts):
            details.append("The worker of rank 0 serves it as a rule, and is not there: look whether it was started")
        details.append("Look whether host and port (MASTER_ADDR, MASTER_PORT or init_method) are right for all")
        return _finding("store", names, title, details, accounts, stacks=stacks)
    size = accounts[0]["size"]
    title = f"{several(absent)} {'have' if len(absent) > 1 else 'has'} not come: the group of {size} cannot form."
    if size is not None and set(absent) == {f"rank {rank}" for rank in range(size - len(absent), size)}:
        details.append(
            f"Look at the logs of who did not come. If no more were meant to come, world_size={size} is too large"
        )
    else:
        details.append("Look at the logs of who did not come, and whether they were given the same place")
    return _finding("missing", absent, title, details, accounts, stacks=stacks)


def _size(size: int | None) -> str:
    return f"{size} workers" if size is not None else "any number of workers"


def _departed(accounts: Sequence[Account], told: set[str]) -> list[Finding]:
    """Workers that are gone, and that nobody is seen to wait for."""
    gone = {name: why for account in accounts for name, why in account["gone"].items() if name not in told}
    return [_finding("gone", [name], f"{name} is gone: {why}.", [], weight=NOTE) for name, why in sorted(gone.items())]


def _generations(accounts: Sequence[Account], weight: int | None) -> list[Finding]:
    lots: dict[tuple[str, int], list[str]] = defaultdict(list)
    for account in accounts:
        lots[account["group"], account["generation"]].append(account["worker"])
    if len(lots) < 2:
        return []
    groups = {group for group, _ in lots}
    said = "; ".join(
        f"{several(names)} in {f'group {group}, ' if len(groups) > 1 else ''}generation {generation}"
        for (group, generation), names in sorted(lots.items(), key=lambda item: item[0][1])
    )
    fewest = min(lots.values(), key=len)
    details = [
        "Workers of different groups or generations do not meet: one was started anew, or missed that others were"
    ]
    return [_finding("generations", fewest, f"The workers are not of one group: {said}.", details, weight=weight)]
