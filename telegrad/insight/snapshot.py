"""What the dashboard's pages draw, as plain values that become JSON. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from telegrad.insight import figures
from telegrad.insight.history import History
from telegrad.instruments import CALLED, RAN, Event
from telegrad.witness.account import QUEUED, Account, counts

PARTS = 300  # a call that is shorter than such a part of the time may be shown together with others
FUNCTIONS = 60  # at most
ROWS = 3  # for calls at once, in a worker's lane


def snapshot(history: History, seconds: float) -> dict[str, Any]:
    """All that is shown, of the last `seconds` where it is about a time."""
    sight, now = history.sight, history.now
    accounts = sorted(sight.accounts, key=lambda account: (account["rank"], account["worker"]))
    recent, whole = history.recent(seconds)
    ranked = [account["worker"] for account in accounts]
    events = {worker: recent[worker] for worker in [*ranked, *sorted(recent.keys() - set(ranked))] if worker in recent}
    span = now - seconds, now
    rates = figures.rates(history.before, sight)
    gantt = figures.gantt(events)
    return {
        "epoch": history.epoch,
        "now": now,
        "seconds": seconds,
        "whole": whole,
        "group": _group(accounts),
        "silent": dict(sight.silent),
        "workers": [_worker(account, rates[account["worker"]]) for account in accounts],
        "flows": [flow._asdict() for flow in figures.flows(history.before, sight)],
        "lanes": [
            _lane(lane) for lane in figures.lanes(_with_going(events, accounts, history.epoch), *span, PARTS, ROWS)
        ],
        "functions": [function._asdict() for function in figures.functions(events)[:FUNCTIONS]],
        "bounds": figures.BOUNDS,
        "memory": {worker: _rounded(own) for worker, own in history.memory.items()},
        "gantt": gantt and gantt._asdict() | {"bars": [bar._asdict() for bar in gantt.bars]},
        "training": figures.training(events, *span, parts=max(4, min(30, int(seconds * 2))))._asdict(),
    }


def _with_going(events: figures.Events, accounts: Sequence[Account], epoch: float) -> figures.Events:
    """Also the calls that have not ended, whose end is infinitely far."""
    found = {account["worker"]: list[Event]() for account in accounts} | {
        name: list(own) for name, own in events.items()
    }
    for account in accounts:
        now = account["time"] - epoch
        own = found[account["worker"]]
        for out in account["calls_out"]:
            own.append((CALLED, now - out["age"], math.inf, out["to"], out["number"], out["function"], 0, ""))
        for come in account["calls_in"]:
            if come["state"] != QUEUED:
                own.append((RAN, now - come["age"], math.inf, come["caller"], come["number"], come["function"], ""))
    return found


def _group(accounts: Sequence[Account]) -> dict[str, Any]:
    """What all members say alike."""
    if not accounts:
        return {}
    first = accounts[0]
    return {
        "programs": sorted({account["program"] for account in accounts}),
        "place": first["place"],
        "size": first["size"],
        "gone": {name: why for account in accounts for name, why in account["gone"].items()},
    }


def _worker(account: Account, rate: figures.Rate) -> dict[str, Any]:
    same = ("worker", "rank", "host", "pid", "phase", "phase_age", "missing", "generation", "slots", "busy", "contexts")
    return {
        **{key: account[key] for key in (*same, "references", "memory", "shared")},  # type: ignore[literal-required]
        "calls_out": counts(account["calls_out"], lambda call: call["to"]).total(),
        "queued": counts(account["calls_in"], lambda call: call["state"])[QUEUED],
        "oldest": max((call["age"] for call in account["calls_out"]), default=0.0),
        "threads": len(account["threads"]),
        "rate": rate._asdict(),
    }


def _lane(lane: figures.Lane) -> dict[str, Any]:
    return {"worker": lane.worker, "kind": lane.kind, "spans": _rounded(lane.spans)}


def _rounded(rows: Sequence[tuple[Any, ...]] | Any) -> list[list[Any]]:
    """With times to the microsecond, as they make up most of what is sent; None: never."""
    return [[_short(value) if isinstance(value, float) else value for value in row] for row in rows]


def _short(value: float) -> float | None:
    return round(value, 6) if math.isfinite(value) else None
