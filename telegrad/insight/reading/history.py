"""Snapshots of a group, and its history: the two latest ones, and a minute of events of all workers on one clock.

No I/O: a `Source` queries the group, and times are part of its results.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, pairwise, takewhile
from typing import NamedTuple, Protocol

from telegrad.ext.events import CALLED, RAN, Event
from telegrad.reporting.worker_state import WorkerState, counts

Events = Mapping[str, Sequence[Event]]  # by worker

SECONDS = 60.0  # the longest span that can be shown
KEPT = 6000  # events of a kind per worker; the limit is per kind, because many calls must not evict few steps
MOST = 16_000  # events of a kind that `recent` returns for all workers together; it is called every second
LOOKS = 600  # snapshots whose memory figures are kept

# Upper bounds of the histogram's buckets, in seconds.
BOUNDS = tuple(digit * 10.0**power for power in range(-5, 2) for digit in (1, 2, 5))


class GroupSnapshot(NamedTuple):
    accounts: Sequence[WorkerState]
    silent: Mapping[str, str]  # workers that did not answer, and the known reasons


class Source(Protocol):
    """Queries one group, from inside or outside of it. Its methods may be called from any thread."""

    def look(self) -> GroupSnapshot:
        """Query all workers. Block until all have answered, for a few seconds at most."""

    def events(self, after: Mapping[str, float]) -> dict[str, list[Event]]:
        """Return the events of each worker after its time in `after`, on the worker's own clock; oldest first."""


class Memory(NamedTuple):
    """The memory of a worker at one moment, in bytes."""

    time: float
    resident: int
    shared: int


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


class Rate(NamedTuple):
    """The rates of a worker, per second."""

    calls: float  # calls served for other workers
    sent: float  # bytes
    received: float


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
        self.memory: dict[str, deque[Memory]] = defaultdict(lambda: deque(maxlen=LOOKS))
        self.trouble = ""  # why the latest query failed; "" if it did not
        self._events: dict[str, dict[str, deque[Event]]] = defaultdict(lambda: defaultdict(lambda: deque(maxlen=KEPT)))
        self._shifts: dict[str, tuple[object, float]] = {}  # by worker: its process, and its clock's zero on our clock
        self._after: dict[str, float] = {}  # the end of the latest event, on the workers' clocks

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
            self.now = times[len(times) // 2] - self.epoch  # the median: one wrong clock has no effect
            self.before = self.sight
        self.sight = sight
        accounts = {account["worker"]: account for account in sight.accounts}
        for name, account in accounts.items():
            process = account["host"], account["pid"]
            if self._shifts.get(name, ("",))[0] != process:  # a new process has a new clock
                self._shifts[name] = process, account["time"] - account["clock"] - self.epoch
                self._after[name] = account["clock"] - SECONDS
            self.memory[name].append(Memory(self.now, account["memory"], account["shared"]))
        self.last = {name: account for name, account in self.last.items() if name in sight.silent} | accounts
        return dict(self._after)

    def add_events(self, events: Events) -> None:
        """Add new events, oldest first; ignore those of unknown workers."""
        for worker, own in events.items():
            if own and worker in self._shifts:
                _, shift = self._shifts[worker]
                kept = self._events[worker]
                for kind, begun, ended, *rest in own:
                    kept[kind].append((kind, begun + shift, ended + shift, *rest))
                self._after[worker] = max(event[2] for event in own)

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
                if len(found) == most:
                    window = min(window, max(now - found[-1][2], 1e-3))
        return Recent(events, window)

    def rates(self) -> dict[str, Rate]:
        """Return the rates since the previous snapshot, of each worker that is in both."""
        return {
            new["worker"]: Rate(
                _grown(old["calls_done"], new["calls_done"]) / seconds,
                _grown(sum(old["bytes_out"].values()), sum(new["bytes_out"].values())) / seconds,
                _grown(sum(old["bytes_in"].values()), sum(new["bytes_in"].values())) / seconds,
            )
            for old, new, seconds in self._pairs()
        }

    def flows(self) -> list[Flow]:
        """Return the traffic between each two workers, as reported by either of them."""
        total: dict[tuple[str, str], int] = defaultdict(int)
        calls: dict[tuple[str, str], int] = defaultdict(int)
        rate: dict[tuple[str, str], float] = defaultdict(float)
        for account in self.sight.accounts:
            name = account["worker"]
            for edge, count in _edges(account).items():
                total[edge] = max(total[edge], count)
            out = counts(account["calls_out"], lambda call: call["to"])
            come = counts(account["calls_in"], lambda call: call["caller"])
            both = [((name, to), count) for to, count in out.items()]
            both += [((caller, name), count) for caller, count in come.items()]
            for edge, count in both:
                calls[edge] = max(calls[edge], count)
        for old, new, seconds in self._pairs():
            known = _edges(old)
            for edge, count in _edges(new).items():
                rate[edge] = max(rate[edge], _grown(known.get(edge, 0), count) / seconds)
        edges = sorted({*total, *calls})
        return [Flow(*edge, calls[edge], total[edge], rate[edge]) for edge in edges if edge[0] != edge[1]]

    def lost(self) -> dict[str, str]:
        """Return the workers that died or left early, and why, except names that are in use again."""
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
    """Return statistics of functions, the most time-consuming first; only the runs of a function that was not called
    here."""
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


def _grown(old: int, new: int) -> int:
    return max(0, new - old)


def _edges(account: WorkerState) -> dict[tuple[str, str], int]:
    """Return the bytes that a worker counted, by sender and receiver."""
    name = account["worker"]
    out = {(name, other): count for other, count in account["bytes_out"].items()}
    return out | {(other, name): count for other, count in account["bytes_in"].items()}
