"""Convert the recorded events of all workers to one file in Chrome's trace format, for Perfetto (ui.perfetto.dev).

Each worker is a process in the file. It has tracks of outgoing and served calls, backward passes, pipeline stages,
optimizer steps, connections and references. Events at the same time on one track go into separate lanes, because slices
of one lane may not overlap. Arrows connect related events. The events of torch's profiler are below, as torch wrote
them, on the common clock.

Times are integers of nanoseconds since the earliest event until the end, because rounding could move an arrow out of
its slice.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from types import MappingProxyType
from typing import Any, NamedTuple

from telegrad.ext import events as kinds
from telegrad.ext.events import Event
from telegrad.ext.feedback import plural
from telegrad.pipeline.pipeline_schedule import FORWARD, WEIGHTS

MOST_LANES = 64  # lanes of one track; further simultaneous events become instants without arrows
VALUES = ("Concrete Inputs",)  # values of the program that torch's profiler records if asked to; they are removed

# By kind of event: its track, its title, and the names of its values.
KINDS = {
    kinds.CALLED: ("calls made", "{function} → {to}", "to number function bytes failure"),
    kinds.RAN: ("calls run", "{function}", "caller number function failure"),
    kinds.BACKWARD_PASS: ("passes", "backward", "context number failure"),
    kinds.BACKWARD_TASKS: ("passes", "part in the pass of {driver}", "context driver number"),
    kinds.STAGED: ("pipeline stages", "{kind} {stage}, micro-batch {microbatch}", "batch kind stage microbatch"),
    kinds.STEPPED: ("optimizer steps", "{optimizer}", "context optimizer"),
    kinds.CONNECTED: ("connections", "connected to {to}", "to how"),
    kinds.LOST: ("connections", "lost {to}", "to why"),
    kinds.JOINED: ("connections", "joined as {name}", "name rank size"),
    kinds.LEFT: ("connections", "left", "how"),
    kinds.MADE: ("references", "made", "owner number"),
    kinds.FREED: ("references", "freed", "number"),
    kinds.NOTED: ("extensions", "{title}", "title text"),
}
OTHERS = ("others", "", "")  # for kinds that a newer worker may record
# Always slices, however short; the others may be instants.
LASTING = (kinds.CALLED, kinds.RAN, kinds.BACKWARD_PASS, kinds.BACKWARD_TASKS, kinds.STAGED, kinds.STEPPED)
FROM_END = ("answer", "step", "activation", "gradient", "its gradient")  # arrows that start at the end of a slice
TO_END = ("answer",)

Written = dict[str, Any]  # an event of the file, with times in nanoseconds
Placed = tuple[Mapping[str, Any], float, float]  # an event of torch's profiler, and its times on the reference clock


class WorkerTrace(NamedTuple):
    events: Sequence[Event]
    clock: ClockOffset
    profile: Mapping[str, Any] | None = None  # the output of `torch.profiler.profile.export_chrome_trace`


def merge(workers: Mapping[str, WorkerTrace], hidden: Collection[str] = ()) -> dict[str, Any]:
    """Return the content of the file, for JSON, without the calls of the functions `hidden`."""
    profiles = {name: _place(one.profile, one.clock) for name, one in workers.items() if one.profile is not None}
    begins = [one.clock.to_reference(event[1]) for one in workers.values() for event in one.events]
    begins += [begun for profile in profiles.values() for event, begun, _ in profile if event.get("ph") == "X"]
    writer = _Writer(min(begins, default=0.0))
    events = {}
    for pid, (name, one) in enumerate(workers.items(), 1):
        writer.metadata(pid, 0, "process_name", name=name)
        writer.metadata(pid, 0, "process_labels", labels=f"clock: {one.clock}")
        writer.metadata(pid, 0, "process_sort_index", sort_index=pid)
        events[name] = writer.events(pid, one, hidden)
        writer.profile(pid, profiles.get(name, ()))
    for arrow in itertools.chain(_of_calls(events), _of_passes(events), _of_stages(events)):
        writer.arrow(*arrow)
    for event in writer.written:
        event |= {key: event[key] / 1000 for key in ("ts", "dur") if key in event}
    about = {
        name: {
            "clock": str(one.clock),
            "offset_us": one.clock.offset * 1e6,
            "uncertainty_us": None if one.clock.how == UNKNOWN else one.clock.uncertainty * 1e6,
            "drift_us_per_s": one.clock.drift * 1e6,
            "events": len(events[name]),
            "profiled": len(profiles.get(name, ())),
            "profile_left_out": name in profiles and not profiles[name],
        }
        for name, one in workers.items()
    }
    other = {"written by": "telegrad", "workers": about}
    return {"traceEvents": writer.written, "displayTimeUnit": "ns", "otherData": other}


def summary(file: Mapping[str, Any]) -> str:
    workers = file["otherData"]["workers"]
    arrows = sum(event["ph"] == "s" and event.get("cat") == "telegrad" for event in file["traceEvents"])
    width = max(map(len, workers), default=0)
    counts = len(workers), sum(one["events"] for one in workers.values()), arrows
    lines = [", ".join(map(plural, counts, ("worker", "event", "arrow")))]
    for name, one in workers.items():
        profiled = f", {one['profiled']:,} of torch's profiler" if one["profiled"] else ""
        if one["profile_left_out"]:
            profiled = ", none of torch's profiler, which dropped the marks that place them"
        lines.append(f"  {name:{width}}  {one['events']:6,} events{profiled}; clock: {one['clock']}")
    return "\n".join(lines)


def clocks_of(
    events: Mapping[str, Sequence[Event]], reference: str, hosts: Mapping[str, str] = MappingProxyType({})
) -> dict[str, ClockOffset]:
    """Return the clock offsets of workers that cannot be queried, from recorded calls. Workers of one host share a
    clock; `hosts` has the known hosts of workers."""
    clocks = {name: hosts.get(name, f"worker {name}") for name in {**hosts, **events}}
    ran = {(event[3], name, event[4]): event for name, own in events.items() for event in own if event[0] == kinds.RAN}
    exchanges: dict[tuple[str, str], list[Exchange]] = {}
    for name, own in events.items():
        for event in own:
            run = ran.get((name, event[3], event[4])) if event[0] == kinds.CALLED else None
            if run is not None and run[2] - run[1] <= event[2] - event[1]:  # else the caller timed out first
                pair = clocks[name], clocks[event[3]]
                exchanges.setdefault(pair, []).append(Exchange(event[1], run[1], run[2], event[2]))
    found = offsets_from(clocks[reference], exchanges)
    unknown = ClockOffset(0.0, 0.0, how=UNKNOWN)
    known = {name: found.get(clock, unknown) for name, clock in clocks.items()}
    return known | {reference: ClockOffset(0.0, 0.0, how=REFERENCE)}


def _place(profile: Mapping[str, Any], clock: ClockOffset) -> list[Placed]:
    """Return the events of a profile on the reference clock, without its marks; none if the marks are missing, since
    torch's profiler drops events once its buffers are full."""
    events = profile["traceEvents"]
    spans = [(each.get("ts", 0.0) * 1e-6, (each.get("ts", 0.0) + each.get("dur", 0.0)) * 1e-6) for each in events]
    names = [str(each.get("name")) if each.get("ph") == "X" else "" for each in events]
    offset = offset_of_profile((name, *span) for name, span in zip(names, spans, strict=True))
    if offset is None:
        return []
    placed = [tuple(clock.to_reference(offset.to_reference(time)) for time in span) for span in spans]
    rows = zip(events, names, placed, strict=True)
    return [(event, begun, ended) for event, name, (begun, ended) in rows if not name.startswith(MARK)]


# Related events

Arrow = tuple[str, Written, Written]


def _by(events: Mapping[str, Sequence[Written]], kind: str, *keys: str) -> dict[tuple[Any, ...], list[Written]]:
    """Group the events of a kind by their worker and some of their values."""
    found: dict[tuple[Any, ...], list[Written]] = {}
    for name, own in events.items():
        for each in own:
            if each["cat"] == kind:
                found.setdefault((name, *(each["args"].get(key) for key in keys)), []).append(each)
    return found


def _of_calls(events: Mapping[str, Sequence[Written]]) -> Iterator[Arrow]:
    ran = _by(events, kinds.RAN, "caller", "number")
    for (caller, callee, number), calls in _by(events, kinds.CALLED, "to", "number").items():
        runs = ran.get((callee, caller, number))
        for call in calls if runs else ():
            # Calls are counted anew for each incarnation of a worker, so several runs may have the number.
            run = min(runs, key=lambda run: abs(run["ts"] - call["ts"]))  # type: ignore[arg-type]
            yield "call", call, run
            # Not if only the caller has a failure: it did not get this response.
            if not call["args"].get("failure") or run["args"].get("failure"):
                yield "answer", run, call


def _of_passes(events: Mapping[str, Sequence[Written]]) -> Iterator[Arrow]:
    """Yield arrows from a pass to the first part of each worker in it, and to the steps with its gradients."""
    passes = _by(events, kinds.BACKWARD_PASS, "context", "number")
    for (_, driver, context, number), parts in _by(events, kinds.BACKWARD_TASKS, "driver", "context", "number").items():
        for passed in passes.get((driver, context, number), ()):
            yield "pass", passed, parts[0]
    for (_, context), steps in _by(events, kinds.STEPPED, "context").items():
        of_context = [each for (_, passed_in, _), own in passes.items() if passed_in == context for each in own]
        for step in steps if of_context else ():
            before = [each for each in of_context if each["ts"] <= step["ts"]] or of_context
            yield "step", max(before, key=lambda each: each["ts"]), step


def _of_stages(events: Mapping[str, Sequence[Written]]) -> Iterator[Arrow]:
    """Yield arrows from stage to stage, and from a forward to its backward."""
    found = {}
    for own in events.values():
        for each in own:
            if each["cat"] == kinds.STAGED and (args := each["args"])["kind"] != WEIGHTS:
                found[args["kind"] == FORWARD, args["batch"], args["microbatch"], args["stage"]] = each
    for (is_forward, batch, microbatch, stage), each in found.items():
        before = found.get((is_forward, batch, microbatch, stage - 1 if is_forward else stage + 1))
        if before is not None:
            yield "activation" if is_forward else "gradient", before, each
        forward = None if is_forward else found.get((True, batch, microbatch, stage))
        if forward is not None:
            yield "its gradient", forward, each


class _Writer:
    def __init__(self, zero: float) -> None:
        self.written: list[Written] = []
        self._zero = zero
        self._tids = itertools.count(1)
        self._flows = itertools.count(1)

    def metadata(self, pid: int, tid: int, name: str, /, **args: Any) -> None:
        self.written.append({"ph": "M", "name": name, "pid": pid, "tid": tid, "args": args})

    def events(self, pid: int, one: WorkerTrace, hidden: Collection[str]) -> list[Written]:
        """Write the events of a worker, track by track, each in order of time."""
        tracks: dict[str, list[Written]] = {track: [] for track, *_ in [*KINDS.values(), OTHERS]}
        for kind, begun, ended, *values in one.events:
            track, title, names = KINDS.get(kind, OTHERS)
            args = dict(zip(names.split(), values, strict=False))
            if args.get("function") in hidden:
                continue
            begin, end = (self._nanoseconds(one.clock.to_reference(time)) for time in (begun, ended))
            name = (title.format_map(args) or kind) + (f" ({args['failure']})" if args.get("failure") else "")
            event = {"ph": "X", "name": name, "cat": kind, "pid": pid, "tid": 0, "ts": begin}
            # At least one nanosecond, since an event without a duration becomes an instant, to which no arrow can lead.
            tracks[track].append(event | {"dur": max(end - begin, int(kind in LASTING)), "args": args})
        for track, own in tracks.items():
            own.sort(key=lambda event: (event["ts"], -event["dur"]))
            self._into_lanes(pid, track, own)
        return [event for own in tracks.values() for event in own]

    def _into_lanes(self, pid: int, track: str, own: Sequence[Written]) -> None:
        free: list[int] = []  # the time from which each lane is free
        tids: list[int] = []
        for event in own:
            begun, length = event["ts"], event["dur"]
            lane = next((lane for lane, since in enumerate(free) if since <= begun or not length), len(free))
            if lane == len(free) < MOST_LANES:
                free.append(begun)
                tids.append(self._thread(pid, track if lane == 0 else f"{track} ({lane + 1})"))
            event["tid"] = tids[min(lane, MOST_LANES - 1)]
            if lane < MOST_LANES and length:
                free[lane] = begun + length
            else:
                event |= {"ph": "i", "s": "t", "args": event["args"] | ({"took_us": length / 1000} if length else {})}
                del event["dur"]
            self.written.append(event)

    def arrow(self, name: str, start: Written, end: Written) -> None:
        """Write an arrow that does not go back in time: if the clocks disagree, move it within its slices."""
        if start["ph"] != "X" or end["ph"] != "X":
            return
        # An arrow belongs to the slice in which its time is. The end of a slice is no longer in it, so an arrow from
        # there is a nanosecond earlier.
        at = start["ts"] + (start["dur"] - 1 if name in FROM_END else 0)
        to = end["ts"] + (end["dur"] - 1 if name in TO_END else 0)
        if to < at:
            if start["ts"] <= to:
                at = to
            elif at < end["ts"] + end["dur"]:
                to = at
            else:
                return
        flow = {"name": name, "cat": "telegrad", "id": next(self._flows)}
        self.written.append({**flow, "ph": "s", "pid": start["pid"], "tid": start["tid"], "ts": at})
        self.written.append({**flow, "ph": "f", "bp": "e", "pid": end["pid"], "tid": end["tid"], "ts": to})

    def profile(self, pid: int, events: Sequence[Placed]) -> None:
        """Write the events of torch's profiler, with their own threads and arrows."""
        metadata = [event for event, *_ in events if event.get("ph") == "M" and event.get("name") == "thread_name"]
        names = {(event.get("pid"), event.get("tid")): event["args"]["name"] for event in metadata}
        tids: dict[Any, int] = {}
        flows: dict[Any, int] = defaultdict(lambda: next(self._flows))
        for event, begun, ended in sorted(events, key=lambda placed: placed[1]):
            if event.get("ph") == "M":
                continue
            thread = event.get("pid"), event.get("tid")
            if thread not in tids:
                tids[thread] = self._thread(pid, f"torch: {names.get(thread) or ' '.join(map(str, thread))}")
            at = self._nanoseconds(begun)
            # The numbers of threads and arrows are unique within one profile only, and the file has those of all
            # workers.
            moved = {**event, "pid": pid, "tid": tids[thread], "ts": at}
            if "dur" in event:
                moved["dur"] = self._nanoseconds(ended) - at
            if "id" in event:
                moved["id"] = flows[event.get("cat"), event["id"]]
            if "args" in event:
                moved["args"] = {key: value for key, value in event["args"].items() if key not in VALUES}
            self.written.append(moved)

    def _thread(self, pid: int, name: str) -> int:
        tid = next(self._tids)
        self.metadata(pid, tid, "thread_name", name=name)
        self.metadata(pid, tid, "thread_sort_index", sort_index=tid)
        return tid

    def _nanoseconds(self, time: float) -> int:
        return round((time - self._zero) * 1e9)


# Clock offsets
#
# In one exchange, a worker reads its clock and asks another worker. The other worker reads its clock when the question
# arrives and when the answer leaves. Then the first worker reads its clock again. The split of the transfer time
# between the two directions is unknown, so the other clock is ahead by a value between (left - received) and
# (came - sent). The offset is their middle, and the uncertainty is half their difference. The exchange with the least
# uncertainty counts most. A call that both workers recorded is such an exchange, and so is a mark in a profile.

FAR = 1.0  # minimum seconds between exchanges to estimate drift
REFERENCE, SAME, UNKNOWN = "the reference", "the same clock as the reference", "unknown"
MEASURED, CALLS = "measured by exchanges", "from recorded calls"


class Exchange(NamedTuple):
    """A question and its answer."""

    sent: float  # on the asking worker's clock
    came: float  # on the other clock
    left: float
    received: float  # on the asking worker's clock

    @property
    def offset(self) -> float:
        return ((self.came - self.sent) + (self.left - self.received)) / 2

    @property
    def uncertainty(self) -> float:
        return abs((self.received - self.sent) - (self.left - self.came)) / 2


class ClockOffset(NamedTuple):
    """The other clock's reading minus the reference's."""

    offset: float  # at the time `at` of the reference
    uncertainty: float
    drift: float = 0.0  # seconds gained per second of the reference
    at: float = 0.0
    how: str = MEASURED

    def to_reference(self, there: float) -> float:
        """Return the reference's reading when the other clock reads `there`."""
        return self.at + (there - self.at - self.offset) / (1 + self.drift)

    def __str__(self) -> str:
        if self.how in (REFERENCE, SAME, UNKNOWN):
            return self.how
        drift = f", drifts by {self.drift * 1e6:+.1f} µs per second" if self.drift else ""
        return f"{self.how}: {self.offset * 1e6:+,.1f} µs, ± {self.uncertainty * 1e6:,.1f} µs{drift}"


def estimate(exchanges: Sequence[Exchange], how: str = MEASURED) -> ClockOffset:
    """Return the offset of the other clock from the asking worker's clock. At least one exchange is needed."""
    # The best exchange of the first half of the time, and of the second. Each says within which bounds the offset was
    # then.
    sent = [each.sent for each in exchanges]
    middle = (min(sent) + max(sent)) / 2
    uncertainty = attrgetter("uncertainty")
    early = min((each for each in exchanges if each.sent <= middle), key=uncertainty)
    late = min((each for each in exchanges if each.sent >= middle), key=uncertainty)
    best, apart, gained = min(early, late, key=uncertainty), late.sent - early.sent, late.offset - early.offset
    if apart >= FAR and abs(gained) > early.uncertainty + late.uncertainty:  # a smaller difference may not be drift
        worse = max(early.uncertainty, late.uncertainty)
        return ClockOffset(early.offset, worse, gained / apart, (early.sent + early.received) / 2, how)
    return ClockOffset(best.offset, best.uncertainty, 0.0, (best.sent + best.received) / 2, how)


def offsets_from(reference: str, exchanges: Mapping[tuple[str, str], Sequence[Exchange]]) -> dict[str, ClockOffset]:
    """Return the offsets of all clocks that are connected by exchanges, each through as few others as possible, whose
    uncertainties add up. `exchanges` is keyed by pairs of clocks, the asking worker's first."""
    known: dict[str, dict[str, list[Exchange]]] = defaultdict(lambda: defaultdict(list))
    for (asking, asked), own in exchanges.items():
        known[asking][asked] += own
        known[asked][asking] += [Exchange(each.came, each.sent, each.received, each.left) for each in own]
    found = {reference: ClockOffset(0.0, 0.0, how=SAME)}
    ahead = [reference]
    for here in ahead:
        clock = found[here]
        for there, own in known[here].items():
            if there in found:
                continue
            moved = [
                Exchange(clock.to_reference(sent), came, left, clock.to_reference(received))
                for sent, came, left, received in own
            ]
            offset = estimate(moved, CALLS)
            found[there] = offset._replace(uncertainty=offset.uncertainty + clock.uncertainty)
            ahead.append(there)
    return found


# Marks in a profile: regions whose names have the worker's clock reading from right before they began

MARK = "telegrad clock "


def mark(time: float) -> str:
    """Return the name of a mark that begins now, at `time`."""
    return f"{MARK}{time!r}"


def offset_of_profile(regions: Iterable[tuple[str, float, float]]) -> ClockOffset | None:
    """Return the offset of a profile's clock from its worker's, from the marks among its regions (name, begin, end);
    None if there are fewer than two. A mark lies between its own time and that of the next mark."""
    marks = sorted((float(name[len(MARK) :]), begun, ended) for name, begun, ended in regions if name.startswith(MARK))
    pairs = itertools.pairwise(marks)
    exchanges = [Exchange(sent, begun, ended, received) for (sent, begun, ended), (received, *_) in pairs]
    return estimate(exchanges) if exchanges else None
