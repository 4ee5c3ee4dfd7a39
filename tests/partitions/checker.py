"""The rules for records of workers while the network fails. They have no side effects: a record in, violations out.

Each rule returns one text for each violation. A pause of a process (no RAN for a while) is evidence that the machine
did not run it: delays are counted without the pauses of the workers that were concerned.
"""

from collections.abc import Iterator
from itertools import pairwise, permutations

from tests.partitions.record import (
    CALLED,
    DONE,
    LOST,
    OWNED,
    RAN,
    REFUSED,
    SAW,
    SERVED,
    TICK,
    TOLD,
    UNKNOWN,
    WROTE,
    Event,
    Fault,
    Final,
)

PAUSE = 3 * TICK  # seconds between two RAN, above which the process was paused
SETTLE = 10.0  # seconds after healing, within which each worker is back or has learned of its loss
DROP = 2.0  # seconds beyond the silence, within which the directory's side drops a worker
ON_THE_WAY = 0.5  # seconds that a packet may have been under way as a fault began, or a message as a worker was lost

Pairs = frozenset[tuple[str, str]]
Spans = list[tuple[float, float]]


class Record:
    """The events of one case, its faults and its end."""

    def __init__(
        self,
        events: list[Event],
        faults: list[Fault],
        final: Final,
        silence: float,
        slack: float = 0.0,
        directory_may_pause: bool = False,
    ) -> None:
        """Take the recorded events.

        Args:
            events: those of all workers.
            faults: one at least.
            final: the content of the directory at the end.
            silence: the option.
            slack: seconds by which leases may outlive the silence, and DROP.
            directory_may_pause: the directory's server goes on counting while the machine does not run it, as that of
                another project may: then no worker counts as one that has renewed its lease.
        """
        self.events, self.faults, self.final, self.silence = sorted(events), faults, final, silence
        self.dropped_after = silence + DROP + slack
        self.workers = sorted({event.worker for event in events})
        self.begins, self.ends = self.events[0].at, self.events[-1].at
        self.healed = max(fault.ends for fault in faults)
        self.told = {event.worker: event.at for event in reversed(self.of(TOLD))}
        self.away = frozenset(worker for fault in faults for worker in fault.away)
        self._directory_paused = directory_may_pause and self.longest_wait() > silence / 3
        self._pauses = {worker: self._find_pauses(worker) for worker in self.workers}

    def of(self, act: str, worker: str = "") -> list[Event]:
        return [event for event in self.events if event.act == act and worker in ("", event.worker)]

    def paused(self, worker: str, begins: float, ends: float) -> float:
        """Return for how many of these seconds a process did not run."""
        return sum(max(0.0, min(ends, end) - max(begins, begin)) for begin, end in self._pauses[worker])

    def longest_pause(self, worker: str) -> float:
        return max((end - begin for begin, end in self._pauses[worker]), default=0.0)

    def longest_wait(self) -> float:
        """Return the longest time in which no worker got an answer of the directory."""
        times = [event.at for event in self.of(WROTE) if event.outcome != UNKNOWN]
        return max((end - begin for begin, end in pairwise(times)), default=0.0)

    def lasting(self, worker: str) -> bool:
        """Return True if nothing keeps a worker from renewing its lease: no fault and no pause of its own."""
        if self._directory_paused:
            return False
        limit = self.silence / 3
        is_cut = any(worker in fault.away and fault.ends - fault.begins > limit for fault in self.faults)
        return not is_cut and self.longest_pause(worker) <= limit

    def _find_pauses(self, worker: str) -> Spans:
        times = [event.at for event in self.of(RAN, worker)]
        return [(begin + TICK, end) for begin, end in pairwise(times) if end - begin > PAUSE]


def check(record: Record, delay: float) -> list[str]:
    """Return all violations. `delay`: seconds between two answered calls of workers that reach one another."""
    return [
        *one_owner(record),
        *acknowledged_stays(record),
        *calls_go_on(record, delay),
        *told_or_back(record),
        *unreachable_are_dropped(record),
        *renewing_stay(record),
        *lost_are_refused(record),
        *faults_had_effect(record),
    ]


def one_owner(record: Record) -> Iterator[str]:
    """Check that two owners never act at the same time, and that tokens only rise."""
    owners: dict[int, str] = {}
    highest = 0
    for event in record.of(OWNED):
        if owners.setdefault(event.token, event.worker) != event.worker:
            yield f"{event.worker} and {owners[event.token]} both have token {event.token}"
        if event.token < highest:
            yield f"{event.worker} acted with token {event.token} after {owners[highest]} did with {highest}"
        highest = max(highest, event.token)


def acknowledged_stays(record: Record) -> Iterator[str]:
    """Check that an acknowledged compare-and-set stays until its only writer writes again."""
    for worker in record.workers:
        written = 0
        tried: set[int] = set()
        for event in record.of(WROTE, worker):
            if event.outcome == REFUSED:
                found = int(event.seen[0])
                if found < written or found not in {*tried, 0}:
                    yield f"{worker} found {found} where it had written {written}"
                written = max(written, found) if event.at < record.final.at else written
            elif event.outcome == DONE and event.at < record.final.at:
                written = event.token
            tried.add(event.token)
        if record.final.numbers.get(worker, 0) < written:
            yield f"{worker} was told that {written} is written, and {record.final.numbers.get(worker, 0)} is there"
    owned = record.of(OWNED)
    if owned and record.lasting(owned[-1].worker) and record.final.claim != owned[-1].token:
        yield f"{owned[-1].worker} owns the claim by {owned[-1].token}, and the directory has {record.final.claim}"


def calls_go_on(record: Record, delay: float) -> Iterator[str]:
    """Check that workers that reach one another can call each other, with and without the directory."""
    for caller, callee, gap, at in gaps_of_calls(record):
        if gap > delay:
            yield f"{caller} got no answer of {callee} for {gap:.1f} s from {at - record.begins:.1f} s on"


def gaps_of_calls(record: Record) -> Iterator[tuple[str, str, float, float]]:
    """Yield caller and callee with the longest gap of each time in which they could call, and when that began."""
    for caller, callee in permutations(record.workers, 2):
        for begins, ends in connected(record, caller, callee):
            yield caller, callee, *longest_gap(record, caller, callee, begins, ends)


def longest_gap(record: Record, caller: str, callee: str, begins: float, ends: float) -> tuple[float, float]:
    """Return the longest time without an answered call, and when it began."""
    answered = [
        event.at
        for event in record.of(CALLED, caller)
        if event.other == callee and not event.outcome and begins < event.at < ends
    ]
    gaps = [
        (end - begin - record.paused(caller, begin, end) - record.paused(callee, begin, end), begin)
        for begin, end in pairwise([begins, *answered, ends])
    ]
    return max(gaps)


def connected(record: Record, caller: str, callee: str) -> Spans:
    """Return when two workers could call each other, with time to connect again after each fault between them."""
    until = _parted(record, {caller, callee})
    since = record.begins
    spans = []
    for fault in sorted(record.faults):
        if {(caller, callee), (callee, caller)} & fault.cut:
            spans.append((since, min(until, fault.begins)))
            since = fault.ends + SETTLE
    spans.append((since, until))
    return [(begins, ends) for begins, ends in spans if begins < ends]


def _parted(record: Record, pair: set[str]) -> float:
    """Return until when two workers must be able to call each other, as far as the directory is concerned.

    If one is declared lost, that is when it loses the directory; if both lose it, they go on until healing.
    """
    told = pair & record.told.keys()
    if not told:
        return record.ends
    both = [fault.ends for fault in record.faults if pair <= fault.away]
    one = [fault.begins for fault in record.faults if len(pair & fault.away) == 1]
    return min([record.ends, *both, *one, *(record.told[each] for each in told)])


def told_or_back(record: Record) -> Iterator[str]:
    """Check that each worker calls all members soon after healing, or has learned that it was declared lost."""
    members = record.final.members
    for worker in record.workers:
        if (told := record.told.get(worker)) is not None:
            if worker in members:
                yield f"{worker} was told that it was declared lost, and is in the directory"
            if told > record.healed + SETTLE + record.paused(worker, record.healed, told):
                yield f"{worker} was told {told - record.healed:.1f} s after healing that it was declared lost"
        elif worker not in members:
            yield f"{worker} is out of the directory and was not told"
        else:
            for other in sorted(members - {worker}):
                ends = record.healed + SETTLE
                ends += sum(record.paused(each, record.healed, record.ends) for each in (worker, other))
                if not any(event.at <= ends for event in calls_after(record, worker, other)):
                    yield f"{worker} does not call {other} within {SETTLE:g} s of healing"


def calls_after(record: Record, caller: str, callee: str) -> list[Event]:
    """Return the calls that were begun after healing and answered."""
    return [
        event
        for event in record.of(CALLED, caller)
        if event.other == callee and not event.outcome and event.began > record.healed
    ]


def unreachable_are_dropped(record: Record) -> Iterator[str]:
    """Check that workers() on the directory's side soon leaves out the workers that cannot reach it."""
    for fault in record.faults:
        for event in record.of(SAW):
            if event.worker not in record.away and fault.begins < event.began < fault.ends:
                late = event.began - fault.begins - record.paused(event.worker, fault.begins, event.began)
                if late > record.dropped_after:
                    for other in sorted(fault.away & set(event.seen)):
                        yield f"{event.worker} still saw {other} {late:.1f} s after it was cut off"


def renewing_stay(record: Record) -> Iterator[str]:
    """Check that a worker that renews its lease is never dropped, nor declared lost."""
    for worker in filter(record.lasting, record.workers):
        if worker in record.told:
            yield f"{worker} renewed its lease, and was declared lost"
        missing = {event.worker for event in record.of(SAW) if worker not in event.seen}
        missing |= {event.worker for event in record.of(LOST) if event.other == worker}
        for other in sorted(missing - record.away):
            yield f"{worker} renewed its lease, and {other} dropped it"


def lost_are_refused(record: Record) -> Iterator[str]:
    """Check that a worker serves no calls of one that it knows to be lost."""
    for lost in record.of(LOST):
        for event in record.of(SERVED, lost.worker):
            if event.other == lost.other and event.at > lost.at + ON_THE_WAY:
                yield f"{event.worker} served {lost.other} {event.at - lost.at:.1f} s after it was lost"
                break


def faults_had_effect(record: Record) -> Iterator[str]:
    """Check that each fault dropped, stopped or killed something, and that no call crossed a cut."""
    for fault in record.faults:
        if fault.evidence <= 0:
            yield f"the fault at {fault.begins - record.begins:.1f} s had no effect"
        for event in record.of(CALLED):
            inside = fault.begins + ON_THE_WAY < event.began and event.at < fault.ends
            if inside and not event.outcome and {(event.worker, event.other), (event.other, event.worker)} & fault.cut:
                yield f"a call of {event.worker} reached {event.other} across the cut"
                break
