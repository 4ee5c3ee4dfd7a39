"""Groups that do not form. Pure."""

from __future__ import annotations

import re
from collections import defaultdict

from telegrad.insight.finding import Finding, made
from telegrad.insight.phrases import Names, lines_of, seconds, several
from telegrad.insight.waits import Waits
from telegrad.witness.account import JOINING, Account, Wait

_STORE = re.compile(r"the store at (\S+?),")


def joins(waits: Waits, long: float) -> list[Finding]:
    """By the place where workers want to meet."""
    places: dict[str, list[Account]] = defaultdict(list)
    for account in waits.accounts.values():
        if account["phase"] == JOINING:
            places[_place(account, waits)].append(account)
    return [
        _join(place, accounts, waits)
        for place, accounts in places.items()
        if any(account["phase_age"] >= long for account in accounts)
    ]


def _place(account: Account, waits: Waits) -> str:
    """Before the store was found, the wait for it tells where."""
    wait = _wait(account, waits)
    found = _STORE.search(wait["about"]) if wait is not None else None
    return account["place"] or (found[1] if found else "")


def _wait(account: Account, waits: Waits) -> Wait | None:
    own = (waits.threads[task]["wait"] for task in waits.tasks(account["worker"]))
    return next((wait for wait in own if wait is not None and wait["what"] in ("init_rpc", "store")), None)


def _join(place: str, accounts: list[Account], waits: Waits) -> Finding:
    accounts = sorted(accounts, key=lambda account: (account["rank"], account["worker"]))
    names = [account["worker"] for account in accounts]
    sizes = {account["size"] for account in accounts if account["place"]}
    oldest = max(accounts, key=lambda account: account["phase_age"])
    main = waits.main(oldest["worker"])
    verb = "wait" if len(names) > 1 else "waits"
    details = [
        f"{several(names)} {verb}{' at ' + place if place else ''}, for {seconds(oldest['phase_age'])}:",
        *lines_of(waits.threads[main] if main is not None else None),
    ]
    stacks = Names(waits).stacks([main] if main is not None else [])
    absent = _absent(accounts)
    if len(sizes) > 1:
        said = several(f"{each['worker']} expects {_size(each['size'])}" for each in accounts)
        title = f"The workers{' at ' + place if place else ''} do not agree on the size of the group: {said}."
        details.append("Give all the same world_size, or a place of its own to each group")
        return made("sizes", names, title, details, accounts, stacks=stacks)
    if not absent or any((_wait(each, waits) or {"what": ""})["what"] == "store" for each in accounts):
        title = f"No store answers{' at ' + place if place else ''}: {several(names)} cannot join."
        details.append("The worker of rank 0 serves it, as a rule: look whether it was started, and its log")
        details.append("Look whether host and port (MASTER_ADDR, MASTER_PORT or init_method) are right for all")
        return made("store", names, title, details, accounts, stacks=stacks)
    size = accounts[0]["size"]
    seems = "" if any(account["missing"] for account in accounts) else ", it seems"
    title = (
        f"{several(absent)} {'have' if len(absent) > 1 else 'has'} not come{seems}: the group of {size} cannot form."
    )
    details.append("Look at the logs of who did not come, and whether they were given the same place")
    if size is not None and absent == [f"rank {rank}" for rank in range(size - len(absent), size)]:
        details.append(f"If no more were meant to come, world_size={size} is too large")
    return made("missing", absent, title, details, accounts, stacks=stacks)


def _absent(accounts: list[Account]) -> list[str]:
    """Who has not come; where the workers do not know it, the ranks that are not among them."""
    here = {f"rank {account['rank']}" for account in accounts}
    known = {name for account in accounts for name in account["missing"]} - here
    size = accounts[0]["size"]
    return sorted(known) or [f"rank {rank}" for rank in range(size or 0) if f"rank {rank}" not in here]


def _size(size: int | None) -> str:
    return f"{size} workers" if size is not None else "any number of workers"
