"""What the dashboard's pages draw, as plain values that become JSON. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from telegrad.insight import figures
from telegrad.insight.history import History
from telegrad.witness.account import RUNNING, Account

PARTS = 300  # a call that is shorter than such a part of the time may be shown together with others
ROWS = 3  # for calls at once, in a worker's lane


def snapshot(history: History, seconds: float) -> dict[str, Any]:
    """All that is shown, of the last `seconds` where it is about a time."""
    sight, now = history.sight, history.now
    accounts = sorted(sight.accounts, key=lambda account: (account["rank"], account["worker"]))
    recent, whole = history.recent(seconds)
    ranked = [account["worker"] for account in accounts]
    events = {worker: recent[worker] for worker in [*ranked, *sorted(recent.keys() - set(ranked))] if worker in recent}
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
        "lanes": [_lane(lane) for lane in figures.lanes(events, now - seconds, now, PARTS, ROWS)],
        "functions": [function._asdict() for function in figures.functions(events)],
        "bounds": figures.BOUNDS,
        "memory": {worker: _rounded(own) for worker, own in history.memory.items()},
        "gantt": gantt and gantt._asdict() | {"bars": [bar._asdict() for bar in gantt.bars]},
        "training": figures.training(events, now - seconds, now)._asdict(),
    }


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
        "calls_out": len(account["calls_out"]),
        "queued": sum(call["state"] != RUNNING for call in account["calls_in"]),
        "oldest": max((call["age"] for call in account["calls_out"]), default=0.0),
        "threads": len(account["threads"]),
        "rate": rate._asdict(),
    }


def _lane(lane: figures.Lane) -> dict[str, Any]:
    return {"worker": lane.worker, "kind": lane.kind, "spans": _rounded(lane.spans)}


def _rounded(rows: Sequence[tuple[Any, ...]] | Any) -> list[list[Any]]:
    """With times to the microsecond: they make up most of what is sent."""
    return [[round(value, 6) if isinstance(value, float) else value for value in row] for row in rows]
