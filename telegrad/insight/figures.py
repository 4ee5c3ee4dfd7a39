"""Figures of a group, from what its workers told. Pure: times come with the events.

Where events of several workers are put side by side, their times are on one clock; `history.py` sees to that. For
`functions` alone, each worker's own will do.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import isfinite
from typing import NamedTuple

from telegrad.insight.source import Sight
from telegrad.instruments import CALLED, PASSED, RAN, STAGED, STEPPED, TOOK_PART, Event
from telegrad.witness.account import Account, counts

Events = Mapping[str, Sequence[Event]]  # by worker

# Seconds, of a histogram's buckets.
BOUNDS = tuple(digit * 10.0**power for power in range(-5, 2) for digit in (1, 2, 5))

FORWARD, BACKWARD, OPTIMIZER, WAITS, CALLS = "forward", "backward", "optimizer", "waits", "calls"
SHARES = (OPTIMIZER, BACKWARD, FORWARD, WAITS, CALLS)  # what a moment counts as: the first that holds
_SHARE = {STEPPED: OPTIMIZER, PASSED: BACKWARD, TOOK_PART: BACKWARD, CALLED: WAITS, RAN: CALLS}
_ACTION = {"forward": FORWARD, "backward": BACKWARD, "input": BACKWARD, "weights": BACKWARD}  # of pipelines


class Flow(NamedTuple):
    """What goes from a worker to another."""

    source: str
    target: str
    calls: int  # in flight
    total: int  # bytes since the start
    rate: float  # bytes per second, since the sight before


class Rate(NamedTuple):
    """Of a worker, per second."""

    calls: float  # of others, done
    sent: float  # bytes
    received: float


class Function(NamedTuple):
    """Calls of one function."""

    name: str
    calls: int
    failures: int
    p50: float  # seconds, from the call to its answer
    p99: float
    running: float | None  # the median of the time that it ran, where that was told
    histogram: tuple[int, ...]  # how many were at most each of BOUNDS, above the one before; last, how many took longer


class Span(NamedTuple):
    """A call in a worker's lane, or several side by side that are too short to be told apart."""

    row: int
    begun: float
    ended: float
    calls: int
    function: str  # of the longest of them
    peer: str
    failure: str  # of any of them


class Lane(NamedTuple):
    """Calls of a worker to others, or of others that it ran."""

    worker: str
    kind: str
    spans: list[Span]


class Bar(NamedTuple):
    """What a worker did for a batch."""

    worker: str
    kind: str  # as in nn/schedule.py
    stage: int
    number: int  # of the micro-batch, or of the tied weight
    begun: float
    ended: float


class Gantt(NamedTuple):
    """How a pipeline's batch really ran."""

    batch: str
    begun: float
    ended: float
    idle: float  # which share of that time its workers waited
    bars: list[Bar]


class Training(NamedTuple):
    """Steps and passes, and where the time went."""

    steps: int
    passes: int
    pass_p50: float | None  # seconds
    series: list[int]  # steps in each of equal parts of the time
    spent: dict[str, dict[str, float]]  # by worker, seconds of each of SHARES


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value that this share of them does not exceed; of at least one."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def rates(before: Sight | None, now: Sight) -> dict[str, Rate]:
    """Of each worker that answered, since the sight before; 0 where there was none."""
    found = {}
    for old, new, seconds in _pairs(before, now):
        found[new["worker"]] = Rate(
            _grown(old["calls_done"], new["calls_done"]) / seconds,
            _grown(sum(old["bytes_out"].values()), sum(new["bytes_out"].values())) / seconds,
            _grown(sum(old["bytes_in"].values()), sum(new["bytes_in"].values())) / seconds,
        )
    return {account["worker"]: found.get(account["worker"], Rate(0, 0, 0)) for account in now.accounts}


def flows(before: Sight | None, now: Sight) -> list[Flow]:
    """Between each two workers where there was something, by what either of them tells."""
    total: dict[tuple[str, str], int] = defaultdict(int)
    calls: dict[tuple[str, str], int] = defaultdict(int)
    rate: dict[tuple[str, str], float] = defaultdict(float)
    for account in now.accounts:
        name = account["worker"]
        for edge, count in _edges(account).items():
            total[edge] = max(total[edge], count)
        out = counts(account["calls_out"], lambda call: call["to"])
        come = counts(account["calls_in"], lambda call: call["caller"])
        both = [((name, to), count) for to, count in out.items()]
        both += [((caller, name), count) for caller, count in come.items()]
        for edge, count in both:
            calls[edge] = max(calls[edge], count)
    for old, new, seconds in _pairs(before, now):
        known = _edges(old)
        for edge, count in _edges(new).items():
            rate[edge] = max(rate[edge], _grown(known.get(edge, 0), count) / seconds)
    edges = sorted({*total, *calls})
    return [Flow(*edge, calls[edge], total[edge], rate[edge]) for edge in edges if edge[0] != edge[1]]


def functions(events: Events) -> list[Function]:
    """What was called, the most time-consuming first; of what was only run, its runs."""
    called: dict[str, list[float]] = defaultdict(list)
    ran: dict[str, list[float]] = defaultdict(list)
    failed: dict[str, Counter[str]] = defaultdict(Counter)
    for event in (event for own in events.values() for event in own):
        kind = event[0]
        if kind in (CALLED, RAN):
            name = event[5]
            (called if kind == CALLED else ran)[name].append(event[2] - event[1])
            if event[-1]:
                failed[name][kind] += 1
    found = []
    for name in {*called, *ran}:
        ordered = sorted(called.get(name) or ran[name])
        runs = sorted(ran.get(name, ()))
        failures = failed[name][CALLED if name in called else RAN] if name in failed else 0
        p50, p99 = percentile(ordered, 0.5), percentile(ordered, 0.99)
        running = percentile(runs, 0.5) if runs else None
        found.append((-sum(ordered), Function(name, len(ordered), failures, p50, p99, running, _histogram(ordered))))
    return [function for _, function in sorted(found)]


def lanes(events: Events, begun: float, ended: float, parts: int = 800, rows: int = 4) -> list[Lane]:
    """The calls between two times, side by side in rows; what is shorter than one of `parts` may be put together.

    A call that has not ended may be among the events, as one that ends infinitely late; it gets a row below the others.
    """
    least = (ended - begun) / parts
    found = []
    for worker, told in events.items():
        for kind in (CALLED, RAN):
            own = [each for each in told if each[0] == kind and each[2] >= begun and each[1] <= ended]
            if own:
                own.sort(key=lambda each: each[1])
                found.append(Lane(worker, kind, _with_going(own, least, rows)))
    return found


def gantt(events: Events) -> Gantt | None:
    """The latest batch of a pipeline that seems whole: that has as many actions as any other of the latest."""
    batches: dict[str, list[Bar]] = defaultdict(list)
    for worker, own in events.items():
        for event in own:
            if event[0] == STAGED:
                _, begun, ended, batch, kind, stage, number = event
                batches[_text(batch)].append(Bar(worker, kind, stage, number, begun, ended))
    if not batches:
        return None
    latest = sorted(batches.items(), key=lambda item: -max(bar.ended for bar in item[1]))[:3]
    batch, bars = max(latest, key=lambda item: len(item[1]))
    bars.sort(key=lambda bar: (bar.begun, bar.worker))
    begun, ended = bars[0].begun, max(bar.ended for bar in bars)
    busy = sum(bar.ended - bar.begun for bar in bars)
    whole = (ended - begun) * len({bar.worker for bar in bars})
    return Gantt(batch, begun, ended, max(0.0, 1 - busy / whole) if whole else 0.0, bars)


def training(events: Events, begun: float, ended: float, parts: int = 30) -> Training:
    """Of the time between two moments. A step is a context in which optimizers stepped."""
    steps: dict[object, float] = {}
    passes = []
    spent = {}
    for worker, own in events.items():
        spans = []
        for event in own:
            kind, start, end = event[:3]
            if end < begun or start > ended:
                continue
            spans.append((start, end, _share(event)))
            if kind == STEPPED:
                steps[event[3]] = max(end, steps.get(event[3], end))
            elif kind == PASSED:
                passes.append(end - start)
        if spans:
            spent[worker] = spend([span for span in spans if span[2]], begun, ended)
    series = [0] * parts
    for time in steps.values():
        series[min(parts - 1, max(0, int((time - begun) / (ended - begun) * parts)))] += 1
    return Training(len(steps), len(passes), percentile(sorted(passes), 0.5) if passes else None, series, spent)


def spend(spans: Iterable[tuple[float, float, str]], begun: float, ended: float) -> dict[str, float]:
    """How long each of SHARES lasted between two times, where each moment counts once."""
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
        for first, count in enumerate(going):
            if count:
                spent[first] += time - last
                break
        last = time
        going[rank] += change
    return dict(zip(SHARES, spent, strict=True))


def _share(event: Event) -> str:
    kind = event[0]
    return _ACTION.get(event[4], "") if kind == STAGED else _SHARE.get(kind, "")


def _pairs(before: Sight | None, now: Sight) -> Iterator[tuple[Account, Account, float]]:
    """What each worker told before and tells now, and how many seconds lie between."""
    known = {account["worker"]: account for account in before.accounts} if before else {}
    for account in now.accounts:
        old = known.get(account["worker"])
        if old is not None and _same(old, account) and account["clock"] > old["clock"]:
            yield old, account, account["clock"] - old["clock"]


def _same(old: Account, new: Account) -> bool:
    """Whether it is still the same process."""
    return (old["host"], old["pid"]) == (new["host"], new["pid"])


def _grown(old: int, new: int) -> int:
    return max(0, new - old)


def _edges(account: Account) -> dict[tuple[str, str], int]:
    """Bytes that a worker knows of, by who sent them to whom."""
    name = account["worker"]
    out = {(name, other): count for other, count in account["bytes_out"].items()}
    return out | {(other, name): count for other, count in account["bytes_in"].items()}


def _histogram(ordered: Sequence[float]) -> tuple[int, ...]:
    counts = [0] * (len(BOUNDS) + 1)
    bucket = 0
    for value in ordered:
        while bucket < len(BOUNDS) and value > BOUNDS[bucket]:
            bucket += 1
        counts[bucket] += 1
    return tuple(counts)


def _with_going(own: Sequence[Event], least: float, rows: int) -> list[Span]:
    ended = _packed([event for event in own if isfinite(event[2])], least, rows)
    used = 1 + ended[-1].row if ended else 0
    going = _packed([event for event in own if not isfinite(event[2])], least, rows)
    return ended + [span._replace(row=span.row + used) for span in going]


def _packed(own: Sequence[Event], least: float, rows: int) -> list[Span]:
    """Each in the first row that is free; what is short joins the one before it there."""
    last: list[Span | None] = [None] * rows  # of each row
    spans: list[Span] = []
    for event in own:
        row, before = _place(event[1], event[2], last, least)
        fresh = Span(row, event[1], event[2], 1, event[5], event[3], event[-1])
        if before is not None:
            last[row] = _joined(before, fresh)
            continue
        if (ended := last[row]) is not None:
            spans.append(ended)
        last[row] = fresh
    return sorted([*spans, *filter(None, last)], key=lambda span: (span.row, span.begun))


def _place(begun: float, ended: float, last: Sequence[Span | None], least: float) -> tuple[int, Span | None]:
    """Which row, and what is there if it becomes one with that."""
    span = None
    for row, span in enumerate(last):
        if span is None:
            return row, None
        if begun >= span.ended:
            short = ended - begun < least and (span.calls > 1 or span.ended - span.begun < least)
            return row, span if short and begun - span.ended < least else None
    return len(last) - 1, span


def _joined(one: Span, other: Span) -> Span:
    longer = one if one.ended - one.begun >= other.ended - other.begun else other
    return Span(
        one.row,
        min(one.begun, other.begun),
        max(one.ended, other.ended),
        one.calls + other.calls,
        longer.function,
        longer.peer,
        one.failure or other.failure,
    )


def _text(batch: object) -> str:
    """A batch's name for people."""
    return " ".join(map(str, batch)) if isinstance(batch, tuple | list) else str(batch)
