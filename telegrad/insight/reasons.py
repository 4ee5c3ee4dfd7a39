"""Why a group waits: from what its workers tell of themselves to findings, in the order of their weight. Pure.

Ages are those that the workers tell; nothing here looks at a clock, and all of it can be asked of accounts that were
kept. What is concluded from how a line of a program looks, and not from what Telegrad knows, is said to seem so.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from telegrad.insight.causes import Causes
from telegrad.insight.finding import NOTE, Finding, made, status
from telegrad.insight.joins import joins
from telegrad.insight.phrases import several
from telegrad.insight.source import Sight
from telegrad.insight.telling import as_json, text
from telegrad.insight.waits import Waits
from telegrad.witness.account import JOINING, Account

__all__ = ["LONG", "NOTE", "Finding", "as_json", "explain", "status", "text", "told"]

LONG = 1.0  # seconds from which on a wait counts as long


def explain(sight: Sight, long: float = LONG) -> list[Finding]:
    """What keeps a group from going on, the most important first; empty where nothing waits for `long` seconds."""
    if not sight.accounts and not sight.silent:
        return [made("nobody", [], "No worker could be asked: none was found.", [])]
    waits = Waits(sight, long / 2)
    causes = Causes(waits, long)
    found = causes.find()
    found += joins(waits, long)
    known = {name for finding in found if finding.kind in ("silent", "gone") for name in finding.workers}
    found += [
        made("silent", [name], f"{name} does not answer: {why}.", [])
        for name, why in sight.silent.items()
        if name not in known
    ]
    known |= {name for finding in found for name in finding.workers}
    found += _departed(waits.gone, known)
    found += _generations(sight.accounts, NOTE if not found else None)
    return sorted(found, key=lambda finding: (-finding.weight, -len(finding.waiting), -finding.age))


def told(sight: Sight) -> str:
    """In words."""
    return text(explain(sight), sight)


def _departed(gone: Mapping[str, str], known: set[str]) -> list[Finding]:
    """Workers that are gone, and that nobody is seen to wait for."""
    left = ((name, why) for name, why in sorted(gone.items()) if name not in known)
    return [made("gone", [name], f"{name} is gone: {why}.", [], weight=NOTE) for name, why in left]


def _generations(accounts: Sequence[Account], weight: int | None) -> list[Finding]:
    lots: dict[tuple[str, int], list[str]] = defaultdict(list)
    for account in (each for each in accounts if each["phase"] != JOINING):
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
    return [made("generations", fewest, f"The workers are not of one group: {said}.", details, weight=weight)]
