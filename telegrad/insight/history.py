"""Snapshots of a group; its history: the two latest ones, a minute of events of all workers on one clock, and ten
minutes of figures; and the data that the dashboard draws.

No I/O: a `Source` queries the group, and times are part of its results.
"""

import math
from bisect import bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, pairwise, takewhile
from typing import Any, NamedTuple, Protocol

from telegrad.ext.events import BACKWARD_PASS, BACKWARD_TASKS, CALLED, RAN, STAGED, STEPPED, Event
from telegrad.reporting import FAILED, KEPT_TIME, QUEUED, Point, Rate, Series, WorkerState, counts, oldest_call, trouble

Events = Mapping[str, Sequence[Event]]  # by worker

SECONDS = 60.0  # the longest span that can be shown
KEPT = 6000  # events of a kind per worker; the limit is per kind, because many calls must not evict few steps
MOST = 16_000  # events of a kind that `recent` returns for all workers together; it is called every second
LATE = 0.1  # seconds after its end within which an event is recorded; the thread may lose the interpreter in between
OWN = "telegrad.insight."  # calls of the observers, which are left out

# Upper bounds of the histogram's buckets, in seconds.
BOUNDS = tuple(digit * 10.0**power for power in range(-5, 2) for digit in (1, 2, 5))
PARTS = 300  # calls shorter than one such part of the span may be merged
FUNCTIONS = 60  # maximum number of functions
ROWS = 3  # rows of simultaneous calls in a worker's lane
LANES = 20  # workers with the longest calls, and with failed calls, whose lanes are sent

SHARES = ("optimizer", "backward", "forward", "waits", "calls")  # categories of time, in order of precedence
_SHARE = {STEPPED: "optimizer", BACKWARD_PASS: "backward", BACKWARD_TASKS: "backward", CALLED: "waits", RAN: "calls"}
# Categories of pipeline actions.
_ACTION = {"forward": "forward", "backward": "backward", "input": "backward", "weights": "backward"}
_SAME = (
    "worker", "rank", "host", "pid", "phase", "phase_age", "missing", "generation", "slots", "busy", "contexts",
    "references", "memory", "shared",
)  # fmt: skip


class GroupSnapshot(NamedTuple):
    accounts: Sequence[WorkerState]
    silent: Mapping[str, str]  # workers that did not answer, and the known reasons


class Source(Protocol):
    """Queries one group, from inside or outside of it. Its methods may be called from any thread."""

    def look(self) -> GroupSnapshot:
        """Query all workers. Block until all have answered, for a few seconds at most."""

    def events(self, after: Mapping[str, float]) -> dict[str, list[Event]]:
        """Return the events of each worker after its time in `after`, on the worker's own clock; oldest first."""


class Recent(NamedTuple):
    events: dict[str, list[Event]]
    window: float  # seconds without a gap; fewer than requested if events were dropped or left out


class Flow(NamedTuple):
    """The traffic from one worker to another."""

    source: str
    target: str
    calls: int  # in flight
    total: int  # bytes since the start
    rate: float  # bytes per second, since the previous snapshot


class Function(NamedTuple):
    name: str
    calls: int
    failures: int
    p50: float  # seconds, from the call to its response
    p99: float
    running: float | None  # the median run time at the callee; None if unknown
    histogram: tuple[int, ...]  # number of calls per bucket of BOUNDS; the last bucket has the longer ones


class GroupHistory:
    """The history of a group. Times are seconds since `epoch`, the wall-clock time of the first state."""

    def __init__(self) -> None:
        self.epoch = 0.0
        self.now = 0.0  # the time of the latest query
        self.before: GroupSnapshot | None = None
        self.sight = GroupSnapshot((), {})
        self.last: dict[str, WorkerState] = {}  # the latest state of each worker, including silent ones
        self._series: dict[str, Series] = defaultdict(Series)
        self._pause = 0.0  # seconds since the query before
        self.trouble = ""  # why the latest query failed; "" if it did not
        self._events: dict[str, dict[str, deque[Event]]] = defaultdict(lambda: defaultdict(lambda: deque(maxlen=KEPT)))
        self._shifts: dict[str, tuple[object, float]] = {}  # by worker: its process, and its clock's zero on our clock
        # LATE before the end of the latest event, on the workers' clocks, and the events since then, which the next
        # query returns again. Without that an event would be missed if one with a later end is recorded before it.
        self._after: dict[str, float] = {}
        self._seen: dict[str, set[Event]] = {}

    def update(self, source: Source) -> None:
        """Query a group and store the result, or the error."""
        try:
            self.add_events(source.events(self.add(source.look())))
            self.trouble = ""
        except Exception as error:
            self.trouble = f"{type(error).__name__}: {error}"

    def add(self, sight: GroupSnapshot) -> dict[str, float]:
        """Add a snapshot; return the times after which events are wanted, by worker, on the worker's clock."""
        if sight.accounts:
            self.epoch = self.epoch or sight.accounts[0]["time"]
            times = sorted(account["time"] for account in sight.accounts)
            now = times[len(times) // 2] - self.epoch  # the median: one wrong clock has no effect
            self._pause, self.now, self.before = now - self.now, now, self.sight
        self.sight = sight
        rates = self.rates()
        accounts = {account["worker"]: account for account in sight.accounts}
        for name, account in accounts.items():
            process = account["host"], account["pid"]
            # Measured once for each process: the difference of its two clocks, so that times of events do not jump when
            # the wall clock is set. A new process may have another `perf_counter`.
            if self._shifts.get(name, ("",))[0] != process:
                self._shifts[name] = process, account["time"] - account["clock"] - self.epoch
                self._after[name] = account["clock"] - SECONDS
            rate = rates.get(name, Rate(0, 0, 0))
            traffic = rate.sent + rate.received
            self._series[name].add([self.now, rate.calls, 0.0, traffic, account["memory"], rate.processor or 0.0])
        for name in [name for name, own in self._series.items() if not own.after(self.now - KEPT_TIME)]:
            for known in (self._series, self._events, self._shifts, self._after, self._seen):
                known.pop(name, None)
        self.last = {name: account for name, account in self.last.items() if name in sight.silent} | accounts
        return dict(self._after)

    def add_events(self, events: Events) -> None:
        """Add new events, oldest first; ignore those of unknown workers."""
        for worker, found in events.items():
            seen = self._seen.get(worker, ())
            own = [event for event in found if event not in seen]
            if own and worker in self._shifts:
                _, shift = self._shifts[worker]
                kept, failed = self._events[worker], 0
                for kind, begun, ended, *rest in own:
                    if kind in (CALLED, RAN) and rest[2].startswith(OWN):
                        continue
                    kept[kind].append((kind, begun + shift, ended + shift, *rest))
                    # The first query of a worker returns the events of a minute. Only those since the previous query
                    # count here, as the sum is divided by the time between the two queries.
                    failed += kind == CALLED and bool(rest[-1]) and ended + shift > self.now - self._pause
                if self._pause > 0 and worker in self._series:
                    self._series[worker].newest[FAILED] += failed / self._pause
                self._after[worker] = max(event[2] for event in found) - LATE
                self._seen[worker] = {event for event in found if event[2] > self._after[worker]}

    def recent(self, seconds: float) -> Recent:
        """Return the events that ended in the last `seconds`, the latest of each kind first."""
        most = min(KEPT, MOST // max(1, len(self._events)))
        answering = {account["worker"]: account["clock"] for account in self.sight.accounts}
        events: dict[str, list[Event]] = {}
        window = seconds
        for worker, kinds in self._events.items():
            # Use the worker's own clock if it answers: its wall clock may be wrong.
            now = answering[worker] + self._shifts[worker][1] if worker in answering else self.now
            events[worker] = []
            for own in kinds.values():
                latest = takewhile(lambda event, since=now - seconds: event[2] >= since, reversed(own))  # type: ignore[misc]
                found = list(islice(latest, most))
                events[worker] += found
                # Older events of this kind were left out. Rates must be taken over the span that is complete for all
                # workers and kinds.
                if len(found) == most:
                    window = min(window, max(now - found[-1][2], 1e-3))
        return Recent(events, window)

    def rates(self) -> dict[str, Rate]:
        """Return the rates since the previous snapshot, of each worker that is in both."""
        return {new["worker"]: Rate.between(old, new, seconds) for old, new, seconds in self._pairs()}

    def flows(self) -> list[Flow]:
        """Return the traffic between each two workers, as reported by either of them."""
        total: dict[tuple[str, str], int] = defaultdict(int)
        calls: Counter[tuple[str, str]] = Counter()
        rate: dict[tuple[str, str], float] = defaultdict(float)
        for account in self.sight.accounts:
            name = account["worker"]
            for edge, count in _edges(account).items():
                total[edge] = max(total[edge], count)
            out = counts(account["calls_out"], lambda call: call["to"])
            come = counts(account["calls_in"], lambda call: call["caller"])
            calls |= Counter({(name, to): count for to, count in out.items()})  # `|` takes the larger number
            calls |= Counter({(caller, name): count for caller, count in come.items()})
        # Sender and receiver count the same bytes, at different moments, and one of them may not answer. So the larger
        # number is taken, as above.
        for old, new, seconds in self._pairs():
            known = _edges(old)
            for edge, count in _edges(new).items():
                rate[edge] = max(rate[edge], (count - known.get(edge, 0)) / seconds)
        edges = sorted({*total, *calls})
        return [Flow(*edge, calls[edge], total[edge], rate[edge]) for edge in edges if edge[0] != edge[1]]

    def series_after(self, time: float) -> dict[str, list[Point]]:
        """Return the points of each worker's series after a time of day."""
        since = time - self.epoch + 1e-3
        new = ((name, own.after(since)) for name, own in self._series.items())
        return {name: _rounded(own) for name, own in new if own}

    def lost(self) -> dict[str, str]:
        """Return the workers that were lost or left early, and why, except names that are in use again."""
        known = {account["worker"] for account in self.sight.accounts} | self.sight.silent.keys()
        gone = {name: why for account in self.sight.accounts for name, why in account["gone"].items()}
        return {name: why for name, why in gone.items() if name not in known}

    def _pairs(self) -> Iterator[tuple[WorkerState, WorkerState, float]]:
        """Yield the previous and the current state of each process, and the seconds between them."""
        told = self.before.accounts if self.before else ()
        known = {(account["worker"], account["host"], account["pid"]): account for account in told}
        for new in self.sight.accounts:
            old = known.get((new["worker"], new["host"], new["pid"]))
            if old is not None and new["clock"] > old["clock"]:
                yield old, new, new["clock"] - old["clock"]


def functions(events: Events) -> list[Function]:
    """Return statistics of calls by function, longest total first; of runs if the function was not called here."""
    called: dict[str, list[float]] = defaultdict(list)
    ran: dict[str, list[float]] = defaultdict(list)
    failed: Counter[tuple[str, str]] = Counter()
    for event in (event for own in events.values() for event in own if event[0] in (CALLED, RAN)):
        kind, name = event[0], event[5]
        (called if kind == CALLED else ran)[name].append(event[2] - event[1])
        failed[kind, name] += bool(event[-1])
    found = []
    for name in {*called, *ran}:
        ordered, runs = sorted(called.get(name) or ran[name]), sorted(ran.get(name, ()))
        failures = failed[CALLED if name in called else RAN, name]
        p50, p99 = percentile(ordered, 0.5), percentile(ordered, 0.99)
        running = percentile(runs, 0.5) if runs else None
        ends = [0, *(bisect_right(ordered, bound) for bound in BOUNDS), len(ordered)]
        histogram = tuple(end - begin for begin, end in pairwise(ends))
        found.append((-sum(ordered), Function(name, len(ordered), failures, p50, p99, running, histogram)))
    return [function for _, function in sorted(found)]


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return the value that this share of them does not exceed. `ordered` must not be empty."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _edges(account: WorkerState) -> dict[tuple[str, str], int]:
    """Return the bytes that a worker counted, by sender and receiver."""
    name = account["worker"]
    out = {(name, other): count for other, count in account["bytes_out"].items()}
    return out | {(other, name): count for other, count in account["bytes_in"].items()}


# The data that the dashboard's pages draw, as plain values for JSON


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
        "gone": history.lost(),
        "hosts": {name: first["members"].get(name, "") if first else "" for name in sight.silent},
        "programs": sorted({account["program"] for account in accounts}),
        "silent": dict(sight.silent),
        "place": first["place"] if first else "",
        "size": first["size"] if first else None,
        "trouble": history.trouble,
        "workers": [_worker(account, rates.get(account["worker"], Rate(0, 0, 0))) for account in accounts],
        "flows": [flow._asdict() for flow in history.flows()],
        "lanes": [lane | {"spans": _rounded(lane["spans"])} for lane in found],
        "functions": [function._asdict() for function in functions(events)[:FUNCTIONS]],
        "bounds": BOUNDS,
        "gantt": gantt(events),
        "training": training(events, *span, parts=max(4, min(30, int(seconds * 2)))),
    }


def lanes(events: Events, begun: float, ended: float, parts: int = 800, rows: int = 4) -> list[dict[str, Any]]:
    """Return the calls between two times in rows; those shorter than one of `parts` may be merged into one span. An
    unfinished call is an event with an infinite end; it gets a row below the others."""
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


def notable(data: Mapping[str, Any], worker: str) -> list[dict[str, Any]]:
    """Return the lanes of `worker`, of the workers with the longest calls, and of some that have failed calls."""
    longest: Counter[str] = Counter()
    for lane in data["lanes"]:
        lengths = ((ended or data["now"]) - begun for _, begun, ended, *_ in lane["spans"])
        longest[lane["worker"]] = max(longest[lane["worker"]], *lengths)
    failed = dict.fromkeys(lane["worker"] for lane in data["lanes"] if any(span[-1] for span in lane["spans"]))
    chosen = {worker, *islice(failed, LANES), *dict(longest.most_common(LANES))}
    return [lane for lane in data["lanes"] if lane["worker"] in chosen]


def gantt(events: Events) -> dict[str, Any] | None:
    """Return the latest pipeline batch that seems complete: of the latest three, the one with the most actions."""
    batches: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for worker, own in events.items():
        for event in own:
            if event[0] == STAGED:
                _, begun, ended, batch, kind, stage, number = event  # the kinds of pipeline_schedule.py
                bar = {"worker": worker, "kind": kind, "stage": stage, "number": number, "begun": begun, "ended": ended}
                batches[batch].append(bar)
    if not batches:
        return None
    # A batch that is still under way has fewer actions than those before it.
    latest = sorted(batches.items(), key=lambda item: -max(bar["ended"] for bar in item[1]))[:3]
    batch, bars = max(latest, key=lambda item: len(item[1]))
    bars.sort(key=lambda bar: (bar["begun"], bar["worker"]))
    begun, ended = bars[0]["begun"], max(bar["ended"] for bar in bars)
    busy = sum(bar["ended"] - bar["begun"] for bar in bars)
    whole = (ended - begun) * len({bar["worker"] for bar in bars})
    idle = max(0.0, 1 - busy / whole) if whole else 0.0  # the share of that time in which the batch's workers waited
    return {"batch": batch, "begun": begun, "ended": ended, "idle": idle, "bars": bars}


def training(events: Events, begun: float, ended: float, parts: int = 30) -> dict[str, Any]:
    """Return the training steps between two times (contexts in which optimizers stepped), also in each of `parts` equal
    intervals (`series`), and the seconds that each worker spent on each of SHARES."""
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
    # At each moment the first share in the order of SHARES counts that has a span there. So a forward pass that is part
    # of a served call counts as forward, and a call that waits while this worker computes does not count.
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
        # If each row has a call at that time, the call goes into the last row although it overlaps, and is merged
        # there. The merged span takes the name of its longest call.
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
        "oldest": oldest_call(account),
        "trouble": trouble(account),
        "threads": len(account["threads"]),
        "rate": rate._asdict(),
    }


def _rounded(rows: Iterable[Iterable[Any]]) -> list[list[Any]]:
    """Return rows with times rounded to microseconds, since times are most of the data; infinite times become None."""
    return [
        [(round(each, 6) if math.isfinite(each) else None) if isinstance(each, float) else each for each in row]
        for row in rows
    ]
