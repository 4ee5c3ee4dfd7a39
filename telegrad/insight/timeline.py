"""What all workers have recorded, as one file for Perfetto (ui.perfetto.dev) and chrome://tracing.

Each worker is a process in the file, and has tracks: of the calls it made and of those it ran, of backward passes,
stages of pipelines, steps of optimizers, connections and references. What happens at the same time on one track goes
into lanes, since slices of one lane may not overlap. Arrows join what belongs together. What torch's profiler saw
stands below, as it wrote it, on the common clock.

Times are whole nanoseconds since the earliest event, so that no rounding moves an arrow out of its slice.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from telegrad.insight import clocks
from telegrad.insight.clocks import Exchange, Relation
from telegrad.instruments import (
    CALLED,
    CONNECTED,
    FREED,
    JOINED,
    LEFT,
    LOST,
    MADE,
    PASSED,
    RAN,
    STAGED,
    STEPPED,
    TOOK_PART,
    Event,
)
from telegrad.nn.schedule import FORWARD, WEIGHTS

MOST_LANES = 64  # of one track; what more there is at once is shown as moments, without arrows
VALUES = ("Concrete Inputs",)  # what torch's profiler tells of a program's values, where it was asked to


class Recorded(NamedTuple):
    """What is known of one worker."""

    events: Sequence[Event]
    clock: Relation
    profile: Mapping[str, Any] | None = None  # what `torch.profiler.profile.export_chrome_trace` wrote


class Kind(NamedTuple):
    """How events of one kind are shown."""

    track: str
    title: str
    fields: tuple[str, ...]


KINDS = {
    CALLED: Kind("calls made", "{function} → {to}", ("to", "number", "function", "bytes", "failure")),
    RAN: Kind("calls run", "{function}", ("caller", "number", "function", "failure")),
    PASSED: Kind("passes", "backward", ("context", "number", "failure")),
    TOOK_PART: Kind("passes", "part in the pass of {driver}", ("context", "driver", "number")),
    STAGED: Kind(
        "pipeline stages", "{kind} {stage}, micro-batch {microbatch}", ("batch", "kind", "stage", "microbatch")
    ),
    STEPPED: Kind("optimizer steps", "{optimizer}", ("context", "optimizer")),
    CONNECTED: Kind("connections", "connected to {to}", ("to", "how")),
    LOST: Kind("connections", "lost {to}", ("to", "why")),
    JOINED: Kind("connections", "joined as {name}", ("name", "rank", "size")),
    LEFT: Kind("connections", "left", ("how",)),
    MADE: Kind("references", "made", ("owner", "number")),
    FREED: Kind("references", "freed", ("owner", "number")),
}
TRACKS = list(dict.fromkeys(kind.track for kind in KINDS.values()))
LASTING = (CALLED, RAN, PASSED, TOOK_PART, STAGED, STEPPED)  # are slices, however short; the others may be moments


class Seen(NamedTuple):
    """What torch's profiler has seen, with its times in seconds of the reference."""

    event: Mapping[str, Any]
    begun: float
    ended: float


class Slice:
    """An event in the file."""

    __slots__ = ("begun", "ended", "fields", "kind", "lane", "pid")

    def __init__(self, kind: str, begun: int, ended: int, fields: dict[str, Any], pid: int) -> None:
        self.kind = kind
        self.begun = begun
        self.ended = ended
        self.fields = fields
        self.pid = pid
        self.lane: int | None = None  # its thread in the file; None: it is no slice, but a moment


def joined(workers: Mapping[str, Recorded], hidden: Collection[str] = ()) -> dict[str, Any]:
    """The content of the file, to be written as JSON. Calls of the functions that are `hidden` are left out."""
    found = {name: _on_common_clock(one) for name, one in workers.items()}
    profiles = {name: profile for name, profile in found.items() if profile is not None}
    begins = [one.clock.to_reference(event[1]) for one in workers.values() for event in one.events]
    begins += [seen.begun for profile in profiles.values() for seen in profile if seen.event.get("ph") == "X"]
    file = _File(min(begins, default=0.0))
    of_worker = {
        name: [each for each in _slices(file, pid, one) if each.fields.get("function") not in hidden]
        for pid, (name, one) in enumerate(workers.items(), 1)
    }
    for pid, (name, one) in enumerate(workers.items(), 1):
        file.process(pid, name, str(one.clock))
        file.events(pid, of_worker[name])
        if name in profiles:
            file.profile(pid, profiles[name])
    for name, arrow in _arrows(of_worker):
        file.arrow(name, *arrow)
    return {
        "traceEvents": file.written,
        "displayTimeUnit": "ns",
        "otherData": {
            "written by": "telegrad",
            "workers": {name: _about(one, of_worker[name], profiles.get(name)) for name, one in workers.items()},
        },
    }


def _about(one: Recorded, slices: Sequence[Slice], profile: Sequence[Seen] | None) -> dict[str, Any]:
    return {
        "clock": str(one.clock),
        "offset_us": one.clock.offset * 1e6,
        "uncertainty_us": None if one.clock.how == clocks.UNKNOWN else one.clock.uncertainty * 1e6,
        "drift_us_per_s": one.clock.drift * 1e6,
        "events": len(slices),
        "profiled": len(profile or ()),
        "profile_left_out": one.profile is not None and profile is None,
    }


def summary(file: Mapping[str, Any]) -> str:
    """What is in the file, for people."""
    workers = file["otherData"]["workers"]
    arrows = sum(event["ph"] == "s" and event.get("cat") == "telegrad" for event in file["traceEvents"])
    width = max(map(len, workers), default=0)
    lines = [f"{len(workers)} workers, {sum(one['events'] for one in workers.values()):,} events, {arrows:,} arrows"]
    for name, one in workers.items():
        profiled = f", {one['profiled']:,} of torch's profiler" if one["profiled"] else ""
        if one["profile_left_out"]:
            profiled = ", none of torch's profiler, which has dropped the marks that place them"
        lines.append(f"  {name:{width}}  {one['events']:6,} events{profiled}; clock: {one['clock']}")
    return "\n".join(lines)


def clocks_of(
    events: Mapping[str, Sequence[Event]], reference: str, hosts: Mapping[str, str] = MappingProxyType({})
) -> dict[str, Relation]:
    """How all clocks relate where nobody can be asked: those of one host are one, of others the recorded calls tell.

    `hosts` are those of workers, as far as they are known.
    """
    compared = {pair: clocks.relate(found, clocks.CALLS) for pair, found in _exchanges(events).items()}
    first: dict[str, str] = {}  # of each host
    for name, host in hosts.items():
        if first.setdefault(host, name) != name:
            compared[first[host], name] = Relation(0.0, 0.0, how=clocks.SAME)
    known = clocks.spread(reference, compared)
    return {name: known.get(name, Relation(0.0, 0.0, how=clocks.UNKNOWN)) for name in {**hosts, **events}}


def _exchanges(events: Mapping[str, Sequence[Event]]) -> dict[tuple[str, str], list[Exchange]]:
    """What recorded calls tell of the clocks of pairs: of who called and who ran them."""
    ran = {(event[3], name, event[4]): event for name, own in events.items() for event in own if event[0] == RAN}
    found: dict[tuple[str, str], list[Exchange]] = {}
    for name, own in events.items():
        for event in own:
            run = ran.get((name, event[3], event[4])) if event[0] == CALLED else None
            if run is not None and run[2] - run[1] <= event[2] - event[1]:  # else it outlived the caller's patience
                found.setdefault((name, event[3]), []).append(Exchange(event[1], run[1], run[2], event[2]))
    return found


def _slices(file: _File, pid: int, one: Recorded) -> list[Slice]:
    found = []
    for kind, begun, ended, *values in one.events:
        names = KINDS[kind].fields if kind in KINDS else ()  # a newer worker may know more
        fields = dict(zip(names, values, strict=False))
        begin, end = (file.nanoseconds(one.clock.to_reference(time)) for time in (begun, ended))
        found.append(Slice(kind, begin, max(end, begin + (kind in LASTING)), fields, pid))
    return sorted(found, key=lambda each: (each.begun, -each.ended))


def _on_common_clock(one: Recorded) -> list[Seen] | None:
    """Return the events of a profile, without its marks; None where there is none, or it has no marks to place it by.

    torch's profiler drops events, and so perhaps the marks, once its buffers are full.
    """
    if one.profile is None:
        return None
    events = one.profile["traceEvents"]
    regions = ((event["name"], event["ts"] * 1e-6, (event["ts"] + event["dur"]) * 1e-6) for event in _marks(events))
    relation = clocks.of_profile(regions)
    if relation is None:
        return None
    found = []
    for event in events:
        if not str(event.get("name")).startswith(clocks.MARK):
            begun = event.get("ts", 0.0)
            times = (relation.to_reference(time * 1e-6) for time in (begun, begun + event.get("dur", 0.0)))
            found.append(Seen(event, *map(one.clock.to_reference, times)))
    return found


def _marks(events: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    return (event for event in events if event.get("ph") == "X" and str(event.get("name")).startswith(clocks.MARK))


# What belongs together

Arrow = tuple[Slice, int, Slice, int]  # from one at a time to another at a time


def _arrows(of_worker: Mapping[str, Sequence[Slice]]) -> Iterator[tuple[str, Arrow]]:
    yield from _of_calls(of_worker)
    yield from _of_passes(of_worker)
    yield from _of_stages(of_worker)


def _by(of_worker: Mapping[str, Sequence[Slice]], kind: str, *keys: str) -> dict[tuple[Any, ...], list[Slice]]:
    """Slices of a kind, by their worker and some of their fields."""
    found: dict[tuple[Any, ...], list[Slice]] = {}
    for name, own in of_worker.items():
        for each in own:
            if each.kind == kind:
                found.setdefault((name, *(each.fields.get(key) for key in keys)), []).append(each)
    return found


def _of_calls(of_worker: Mapping[str, Sequence[Slice]]) -> Iterator[tuple[str, Arrow]]:
    ran = _by(of_worker, RAN, "caller", "number")
    for (caller, callee, number), calls in _by(of_worker, CALLED, "to", "number").items():
        runs = ran.get((callee, caller, number))
        for call in calls if runs else ():
            run = min(runs, key=lambda run: abs(run.begun - call.begun))  # type: ignore[arg-type]
            yield "call", (call, call.begun, run, run.begun)
            if not call.fields.get("failure") or run.fields.get("failure"):  # else no answer of it was taken
                yield "answer", (run, run.ended - 1, call, call.ended - 1)


def _of_passes(of_worker: Mapping[str, Sequence[Slice]]) -> Iterator[tuple[str, Arrow]]:
    """From a pass to the first part of each worker in it, and to the steps with its gradients."""
    parts = _by(of_worker, TOOK_PART, "driver", "context", "number")
    passes = _by(of_worker, PASSED, "context", "number")
    for (_, driver, context, number), own in parts.items():
        for passed in passes.get((driver, context, number), ()):
            yield "pass", (passed, passed.begun, own[0], own[0].begun)
    for (_, context), steps in _by(of_worker, STEPPED, "context").items():
        of_context = [each for (_, passed_in, _), own in passes.items() if passed_in == context for each in own]
        for step in steps if of_context else ():
            before = [each for each in of_context if each.begun <= step.begun] or of_context
            last = max(before, key=lambda each: each.begun)
            yield "step", (last, last.ended - 1, step, step.begun)


def _of_stages(of_worker: Mapping[str, Sequence[Slice]]) -> Iterator[tuple[str, Arrow]]:
    """From stage to stage, and from a forward to its backward."""
    found: dict[tuple[Any, ...], Slice] = {}
    for own in of_worker.values():
        for each in own:
            if each.kind == STAGED and each.fields["kind"] != WEIGHTS:
                fields = each.fields
                is_forward = fields["kind"] == FORWARD
                found[is_forward, fields["batch"], fields["microbatch"], fields["stage"]] = each
    for (is_forward, batch, microbatch, stage), each in found.items():
        before = found.get((is_forward, batch, microbatch, stage - 1 if is_forward else stage + 1))
        if before is not None:
            yield "activation" if is_forward else "gradient", (before, before.ended - 1, each, each.begun)
        forward = None if is_forward else found.get((True, batch, microbatch, stage))
        if forward is not None:
            yield "its gradient", (forward, forward.ended - 1, each, each.begun)


# Writing


class _File:
    """The events of the file, as they are written."""

    def __init__(self, zero: float) -> None:
        self.written: list[dict[str, Any]] = []
        self._zero = zero
        self._tids = itertools.count(1)
        self._flows = itertools.count(1)

    def nanoseconds(self, time: float) -> int:
        return round((time - self._zero) * 1e9)

    def process(self, pid: int, name: str, clock: str) -> None:
        for key, args in {
            "process_name": {"name": name},
            "process_labels": {"labels": f"clock: {clock}"},
            "process_sort_index": {"sort_index": pid},
        }.items():
            self.written.append({"ph": "M", "name": key, "pid": pid, "tid": 0, "args": args})

    def events(self, pid: int, slices: Sequence[Slice]) -> None:
        for track in [*TRACKS, "others"]:
            own = [each for each in slices if (KINDS[each.kind].track if each.kind in KINDS else "others") == track]
            lanes: list[int] = []  # when each is free
            tids: list[int] = []
            for each in own:
                lasts = each.ended > each.begun
                lane = next((lane for lane, free in enumerate(lanes) if free <= each.begun or not lasts), len(lanes))
                if lane == len(lanes) < MOST_LANES:
                    lanes.append(each.begun)
                    tids.append(self._thread(pid, track if lane == 0 else f"{track} ({lane + 1})"))
                if lane < MOST_LANES and lasts:
                    lanes[lane], each.lane = each.ended, tids[lane]
                self._event(each, tids[min(lane, MOST_LANES - 1)])

    def _thread(self, pid: int, name: str) -> int:
        tid = next(self._tids)
        self.written.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}})
        self.written.append(
            {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}
        )
        return tid

    def _event(self, each: Slice, tid: int) -> None:
        kind = KINDS.get(each.kind)
        title = kind.title.format_map(each.fields) if kind is not None else each.kind
        if each.fields.get("failure"):
            title += f" ({each.fields['failure']})"
        event = {
            "name": title,
            "cat": each.kind,
            "pid": each.pid,
            "tid": tid,
            "ts": each.begun / 1000,
            "args": each.fields,
        }
        length = (each.ended - each.begun) / 1000
        if each.lane is not None:
            event |= {"ph": "X", "dur": length}
        else:
            event |= {"ph": "i", "s": "t"}
            if length:
                event["args"] = {**each.fields, "took_us": length}
        self.written.append(event)

    def arrow(self, name: str, start: Slice, at: int, end: Slice, to: int) -> None:
        """An arrow never points back in time: where clocks are not that exact, it moves within its slices."""
        if start.lane is None or end.lane is None:
            return
        if to < at:
            if start.begun <= to:
                at = to
            elif at < end.ended:
                to = at
            else:
                return
        flow = {"name": name, "cat": "telegrad", "id": next(self._flows)}
        self.written.append({**flow, "ph": "s", "pid": start.pid, "tid": start.lane, "ts": at / 1000})
        self.written.append({**flow, "ph": "f", "bp": "e", "pid": end.pid, "tid": end.lane, "ts": to / 1000})

    def profile(self, pid: int, events: Sequence[Seen]) -> None:
        """What torch's profiler saw, with threads and arrows of its own."""
        names = {_thread_of(seen.event): seen.event["args"]["name"] for seen in events if _names_a_thread(seen.event)}
        tids: dict[Any, int] = {}
        flows: dict[Any, int] = {}
        for event, begun, ended in sorted(events, key=lambda seen: seen.begun):
            if event.get("ph") == "M":
                continue
            thread = _thread_of(event)
            if thread not in tids:
                tids[thread] = self._thread(pid, f"torch: {names.get(thread) or ' '.join(map(str, thread))}")
            at = self.nanoseconds(begun)
            moved = {**event, "pid": pid, "tid": tids[thread], "ts": at / 1000}
            if "dur" in event:
                moved["dur"] = (self.nanoseconds(ended) - at) / 1000
            if "id" in event:
                key = event.get("cat"), event["id"]
                if key not in flows:
                    flows[key] = next(self._flows)
                moved["id"] = flows[key]
            if "args" in event:
                moved["args"] = {key: value for key, value in event["args"].items() if key not in VALUES}
            self.written.append(moved)


def _thread_of(event: Mapping[str, Any]) -> tuple[Any, Any]:
    return event.get("pid"), event.get("tid")


def _names_a_thread(event: Mapping[str, Any]) -> bool:
    return event.get("ph") == "M" and event.get("name") == "thread_name"
