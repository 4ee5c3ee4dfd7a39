"""The rules about the group as a whole. No I/O."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence

from telegrad.insight.phrases import NOTE, WEIGHTS, Finding, lines_of, seconds, several, stacks
from telegrad.insight.wait_graph import WaitGraph
from telegrad.reporting.worker_state import JOINING, WaitState, WorkerState

_STORE = re.compile(r"the store at (\S+?),")


def joining(graph: WaitGraph) -> Iterator[Finding]:
    """Find workers that join at the same store and have waited for long."""
    places: dict[str, list[WorkerState]] = defaultdict(list)
    for account in graph.accounts.values():
        if account["phase"] == JOINING:
            # Until the store is found, only the text of the wait has its address.
            found = _STORE.search((_join_wait(account) or {"about": ""})["about"])
            places[account["place"] or (found[1] if found else "")].append(account)
    for place, accounts in places.items():
        if any(account["phase_age"] >= graph.long for account in accounts):
            yield _join(graph, place, sorted(accounts, key=lambda each: (each["rank"], each["worker"])))


def _join_wait(account: WorkerState) -> WaitState | None:
    waits = (thread["wait"] for thread in account["threads"])
    return next((wait for wait in waits if wait is not None and wait["what"] in ("init_rpc", "store")), None)


def _join(graph: WaitGraph, place: str, accounts: list[WorkerState]) -> Finding:
    workers = names = [account["worker"] for account in accounts]
    oldest = max(accounts, key=lambda account: account["phase_age"])
    main = graph.mains.get(oldest["worker"])
    at, verb = f" at {place}" if place else "", "wait" if len(names) > 1 else "waits"
    details = [
        f"{several(names)} {verb}{at}, for {seconds(oldest['phase_age'])}:",
        *lines_of(graph.threads[main] if main is not None else None),
    ]
    size, ranks = accounts[0]["size"], {f"rank {account['rank']}" for account in accounts}
    told = sorted({name for account in accounts for name in account["missing"]} - ranks)
    missing = told or [rank for rank in (f"rank {number}" for number in range(size or 0)) if rank not in ranks]
    if len({account["size"] for account in accounts if account["place"]}) > 1:
        sizes = {each["worker"]: "any number of" if each["size"] is None else each["size"] for each in accounts}
        expected = several(f"{name} expects {wanted} workers" for name, wanted in sizes.items())
        kind, title = "sizes", f"The workers{at} do not agree on the size of the group: {expected}."
        details.append("Give all workers the same world_size, or each group an address of its own")
    elif not missing or any((_join_wait(each) or {"what": ""})["what"] == "store" for each in accounts):
        kind, title = "store", f"No store answers{at}: {several(names)} cannot join."
        details += [
            "The worker of rank 0 usually serves it: check whether it was started, and its log",
            "Check that host and port (MASTER_ADDR, MASTER_PORT or init_method) are right for all workers",
        ]
    else:
        kind, workers, have = "missing", missing, "have" if len(missing) > 1 else "has"
        seems = "" if any(account["missing"] for account in accounts) else ", it seems"
        title = f"{several(missing)} {have} not joined{seems}: the group of {size} cannot form."
        details.append("Check the logs of the missing workers, and whether they were given the same address")
        if size is not None and missing == [f"rank {rank}" for rank in range(size - len(missing), size)]:
            details.append(f"If no more workers should join, world_size={size} is too large")
    known = stacks(graph, [main] if main is not None else [])
    return Finding(kind, WEIGHTS[kind], workers, names, oldest["phase_age"], title, details, known)


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
        if account["phase"] != JOINING:
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
