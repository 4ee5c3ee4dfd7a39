"""The data that the dashboard's pages draw, as plain values for JSON. No I/O."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from telegrad.errors import UsageError
from telegrad.ext.events import BACKWARD_PASS, BACKWARD_TASKS, CALLED, RAN, STAGED, STEPPED, Event
from telegrad.insight.reading import tables
from telegrad.insight.reading.history import BOUNDS, Events, GroupHistory, Rate, functions, percentile
from telegrad.reporting.worker_state import QUEUED, WorkerState, counts

PARTS = 300  # calls shorter than one such part of the span may be merged
FUNCTIONS = 60  # maximum number of functions
ROWS = 3  # rows of simultaneous calls in a worker's lane

SHARES = ("optimizer", "backward", "forward", "waits", "calls")  # categories of time, in order of precedence
_SHARE = {STEPPED: "optimizer", BACKWARD_PASS: "backward", BACKWARD_TASKS: "backward", CALLED: "waits", RAN: "calls"}
# Categories of pipeline actions.
_ACTION = {"forward": "forward", "backward": "backward", "input": "backward", "weights": "backward"}
_SAME = (
    "worker", "rank", "host", "pid", "phase", "phase_age", "missing", "generation", "slots", "busy", "contexts",
    "references", "memory", "shared",
)  # fmt: skip


class Span(NamedTuple):
    """A call in a worker's lane, or several merged calls that are too short to show separately."""

    row: int
    begun: float
    ended: float
    calls: int
    function: str  # of the longest call
    peer: str
    failure: str  # of any of the calls


def snapshot(history: GroupHistory, seconds: float) -> dict[str, Any]:
    """Return all data of the dashboard; time-dependent parts cover the last `seconds`."""
    sight, now = history.sight, history.now
    accounts = sorted(sight.accounts, key=lambda account: (account["rank"], account["worker"]))
    recent, window = history.recent(seconds)
    ranked = [account["worker"] for account in accounts]
    events = {worker: recent[worker] for worker in [*ranked, *sorted(recent.keys() - set(ranked))] if worker in recent}
    span = now - seconds, now
    rates = history.rates()
    found = lanes(_with_going(events, accounts, history.epoch), *span, PARTS, ROWS)
    first = accounts[0] if accounts else None
    return {
        "epoch": history.epoch,
        "now": now,
        "seconds": seconds,
        "whole": window == seconds,
        "trouble": history.trouble,
        "programs": sorted({account["program"] for account in accounts}),
        "place": first["place"] if first else "",
        "size": first["size"] if first else None,
        "gone": history.lost(),
        "silent": dict(sight.silent),
        "workers": [_worker(account, rates.get(account["worker"], Rate(0, 0, 0))) for account in accounts],
        "flows": [flow._asdict() for flow in history.flows()],
        "lanes": [lane | {"spans": _rounded(lane["spans"])} for lane in found],
        "functions": [function._asdict() for function in functions(events)[:FUNCTIONS]],
        "bounds": BOUNDS,
        "memory": {worker: _rounded(own) for worker, own in history.memory.items()},
        "gantt": gantt(events),
        "training": training(events, *span, parts=max(4, min(30, int(seconds * 2)))),
    }


def detail(history: GroupHistory, worker: str) -> dict[str, Any]:
    """Return the tables of one worker: for each its name, its columns (name, and True if numeric) and its texts."""
    try:
        about, found = tables.of_worker(history, worker)
    except UsageError as error:
        return {"about": str(error), "tables": []}
    columns = [[(name, show is not str) for name, show in table.columns.items()] for table in found]
    return {
        "about": about,
        "tables": [(table.name, own, tables.texts(table)) for table, own in zip(found, columns, strict=True)],
    }


def lanes(events: Events, begun: float, ended: float, parts: int = 800, rows: int = 4) -> list[dict[str, Any]]:
    """Return the calls between two times, arranged in rows. Calls shorter than one of `parts` may be merged into one
    span.

    An unfinished call is an event with an infinite end; it gets a row below the others.
    """
    least = (ended - begun) / parts
    found = []
    for worker, told in events.items():
        for kind in (CALLED, RAN):
            own = [each for each in told if each[0] == kind and each[2] >= begun and each[1] <= ended]
            own.sort(key=lambda each: each[1])
            spans = _packed([event for event in own if math.isfinite(event[2])], least, rows)
            used = 1 + spans[-1].row if spans else 0
            going = _packed([event for event in own if not math.isfinite(event[2])], least, rows)
            spans += [span._replace(row=span.row + used) for span in going]
            if spans:
                found.append({"worker": worker, "kind": kind, "spans": spans})
    return found


def gantt(events: Events) -> dict[str, Any] | None:
    """Return the latest pipeline batch that seems complete: of the latest three, the one with the most actions."""
    batches: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for worker, own in events.items():
        for event in own:
            if event[0] == STAGED:
                _, begun, ended, batch, kind, stage, number = event  # the kinds of pipeline_schedule.py
                name = " ".join(map(str, batch)) if isinstance(batch, tuple | list) else str(batch)
                bar = {"worker": worker, "kind": kind, "stage": stage, "number": number, "begun": begun, "ended": ended}
                batches[name].append(bar)
    if not batches:
        return None
    latest = sorted(batches.items(), key=lambda item: -max(bar["ended"] for bar in item[1]))[:3]
    batch, bars = max(latest, key=lambda item: len(item[1]))
    bars.sort(key=lambda bar: (bar["begun"], bar["worker"]))
    begun, ended = bars[0]["begun"], max(bar["ended"] for bar in bars)
    busy = sum(bar["ended"] - bar["begun"] for bar in bars)
    whole = (ended - begun) * len({bar["worker"] for bar in bars})
    idle = max(0.0, 1 - busy / whole) if whole else 0.0  # the share of that time in which the batch's workers waited
    return {"batch": batch, "begun": begun, "ended": ended, "idle": idle, "bars": bars}


def training(events: Events, begun: float, ended: float, parts: int = 30) -> dict[str, Any]:
    """Return the training steps between two times, and the seconds that each worker spent on each of SHARES.

    A step is a context in which optimizers stepped; `series` has the number of steps in each of `parts` equal
    intervals.
    """
    steps: dict[object, float] = {}
    passes = []
    spent = {}
    for worker, own in events.items():
        spans = []
        for event in own:
            kind, start, end = event[:3]
            if end < begun or start > ended:
                continue
            spans.append((start, end, _ACTION.get(event[4], "") if kind == STAGED else _SHARE.get(kind, "")))
            if kind == STEPPED:
                steps[event[3]] = max(end, steps.get(event[3], end))
            elif kind == BACKWARD_PASS:
                passes.append(end - start)
        if spans:
            spent[worker] = spend([span for span in spans if span[2]], begun, ended)
    series = [0] * parts
    for time in steps.values():
        series[min(parts - 1, max(0, int((time - begun) / (ended - begun) * parts)))] += 1
    median = percentile(sorted(passes), 0.5) if passes else None
    return {"steps": len(steps), "passes": len(passes), "pass_p50": median, "series": series, "spent": spent}


def spend(spans: Iterable[tuple[float, float, str]], begun: float, ended: float) -> dict[str, float]:
    """Return how long each of SHARES lasted between two times. Each moment counts for one share only."""
    changes = []
    for start, end, share in spans:
        if end > begun and start < ended:
            rank = SHARES.index(share)
            changes += [(max(start, begun), 1, rank), (min(end, ended), -1, rank)]
    changes.sort()
    going = [0] * len(SHARES)
    spent = [0.0] * len(SHARES)
    last = begun
    for time, change, rank in changes:
        first = next((first for first, count in enumerate(going) if count), None)
        if first is not None:
            spent[first] += time - last
        last = time
        going[rank] += change
    return dict(zip(SHARES, spent, strict=True))


def _with_going(events: Events, accounts: Sequence[WorkerState], epoch: float) -> Events:
    """Return the events and the unfinished calls, which get an infinite end."""
    found = {account["worker"]: list[Event]() for account in accounts}
    found |= {name: list(own) for name, own in events.items()}
    for account in accounts:
        now = account["time"] - epoch
        own = found[account["worker"]]
        for out in account["calls_out"]:
            own.append((CALLED, now - out["age"], math.inf, out["to"], out["number"], out["function"], 0, ""))
        for come in account["calls_in"]:
            if come["state"] != QUEUED:
                own.append((RAN, now - come["age"], math.inf, come["caller"], come["number"], come["function"], ""))
    return found


def _packed(own: Sequence[Event], least: float, rows: int) -> list[Span]:
    """Put each call into the first free row, or else the last; merge short calls with the previous one in the row."""
    last: list[Span | None] = [None] * rows  # the last span of each row
    spans: list[Span] = []
    for event in own:
        begun, ended = event[1], event[2]
        row = next((row for row, span in enumerate(last) if span is None or begun >= span.ended), rows - 1)
        fresh, before = Span(row, begun, ended, 1, event[5], event[3], event[-1]), last[row]
        if before is not None:
            is_short = before.calls > 1 or before.ended - before.begun < least
            if begun < before.ended or (is_short and max(ended - begun, begun - before.ended) < least):
                longer = max(before, fresh, key=lambda span: span.ended - span.begun)
                failure, calls = before.failure or fresh.failure, before.calls + 1
                ended = max(before.ended, ended)
                fresh = Span(row, before.begun, ended, calls, longer.function, longer.peer, failure)
            else:
                spans.append(before)
        last[row] = fresh
    return sorted([*spans, *filter(None, last)], key=lambda span: (span.row, span.begun))


def _worker(account: WorkerState, rate: Rate) -> dict[str, Any]:
    return {
        **{key: account[key] for key in _SAME},  # type: ignore[literal-required]
        "calls_out": counts(account["calls_out"], lambda call: call["to"]).total(),
        "queued": counts(account["calls_in"], lambda call: call["state"])[QUEUED],
        "oldest": max((call["age"] for call in account["calls_out"]), default=0.0),
        "threads": len(account["threads"]),
        "rate": rate._asdict(),
    }


def _rounded(rows: Iterable[tuple[Any, ...]]) -> list[list[Any]]:
    """Return rows with times rounded to microseconds, since times are most of the data; infinite times become None."""
    return [[_short(value) for value in row] for row in rows]


def _short(value: Any) -> Any:
    if not isinstance(value, float):
        return value
    return round(value, 6) if math.isfinite(value) else None
