"""In which order the stages of a pipeline work; knows no worker and no tensor.

A station is where one or several stages live, and does one thing at a time. `plan` gives the actions of each, in an
order that it keeps whatever takes how long; `simulate` tells how that comes out. Both play a batch through: `plan` by
the rules of a schedule, `simulate` by the plan.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

FORWARD, BACKWARD, INPUT, WEIGHTS = "forward", "backward", "input", "weights"  # the last two make up a backward
COSTS = {FORWARD: 1.0, BACKWARD: 2.0, INPUT: 1.0, WEIGHTS: 1.0}  # as is usual


class Action(NamedTuple):
    """What a stage does with one micro-batch."""

    kind: str
    stage: int
    batch: int


class Span(NamedTuple):
    """When a station did something."""

    action: Action
    start: float
    end: float


class Timeline(NamedTuple):
    """What all stations did when, for one batch."""

    spans: list[list[Span]]  # of each station
    kept: list[int]  # of how many micro-batches each kept the activations at most, of all its stages together

    @property
    def length(self) -> float:
        return max(span.end for own in self.spans for span in own)

    @property
    def idle(self) -> float:
        """Which share of their time the stations waited."""
        busy = sum(span.end - span.start for own in self.spans for span in own)
        return 1 - busy / (self.length * len(self.spans))


class Progress:
    """With how many micro-batches each stage is through, and so what can begin."""

    def __init__(self, stations: Sequence[int], batches: int, trains: bool, splits: bool) -> None:
        """`stations` of the stages; `splits`: the backward of weights is an action of its own."""
        self.stations = stations
        self.batches = batches
        self.forward = [0] * len(stations)
        self.backward = [0] * len(stations)
        self.weights = [0] * len(stations) if splits else self.backward
        self._trains = trains
        self._splits = splits

    def ready(self, station: int) -> list[Action]:
        """What a station can begin; of each stage no more than the next of each kind."""
        found = []
        for stage, at in enumerate(self.stations):
            if at != station:
                continue
            forward, backward = self.forward[stage], self.backward[stage]
            if forward < self.batches and (stage == 0 or forward < self.forward[stage - 1]):
                found.append(Action(FORWARD, stage, forward))
            last = stage == len(self.stations) - 1
            if self._trains and backward < (forward if last else self.backward[stage + 1]):
                found.append(Action(INPUT if self._splits else BACKWARD, stage, backward))
            if self._splits and self.weights[stage] < backward:
                found.append(Action(WEIGHTS, stage, self.weights[stage]))
        return found

    def end(self, action: Action) -> None:
        {FORWARD: self.forward, WEIGHTS: self.weights}.get(action.kind, self.backward)[action.stage] += 1

    def kept(self, stage: int) -> int:
        """Of how many micro-batches a stage keeps the activations."""
        return self.forward[stage] - self.weights[stage]

    def kept_at(self, station: int) -> int:
        """All stages of a station together."""
        return sum(self.kept(stage) for stage, at in enumerate(self.stations) if at == station)

    @property
    def done(self) -> bool:
        return min(self.weights if self._trains else self.forward) == self.batches


Choose = Callable[[int, list[Action]], "Action | None"]
Costs = Callable[[Action], float]


def _play(progress: Progress, choose: Choose, costs: Costs) -> Timeline:
    """Let each station begin what `choose(station, ready)` says, as soon as it is free."""
    spans: list[list[Span]] = [[] for _ in range(max(progress.stations) + 1)]
    kept = [0] * len(spans)
    free = [0.0] * len(spans)
    running: list[tuple[float, Action]] = []
    now = 0.0
    while not progress.done:
        for station, own in enumerate(spans):
            if free[station] > now:
                continue
            action = choose(station, progress.ready(station))
            if action is not None:
                free[station] = now + costs(action)
                own.append(Span(action, now, free[station]))
                heapq.heappush(running, (free[station], action))
        if not running:
            raise RuntimeError("the stages of a pipeline wait for each other")
        now = running[0][0]
        while running and running[0][0] <= now:
            _, action = heapq.heappop(running)
            progress.end(action)
            at = progress.stations[action.stage]
            kept[at] = max(kept[at], progress.kept_at(at))
    return Timeline(spans, kept)


# The rules: the rank of what a station can do, lowest first, or None where it shall wait

Rank = tuple[int, ...]
Rule = Callable[[Progress, Action], "Rank | None"]


def _gpipe(progress: Progress, action: Action) -> Rank | None:
    """All forward, then all backward."""
    if action.kind != FORWARD and progress.forward[action.stage] < progress.batches:
        return None
    return action.kind != FORWARD, -action.stage


def _one_by_one(progress: Progress, action: Action) -> Rank | None:
    """Backward as soon as it can be, and no more micro-batches begun than it takes until then."""
    if action.kind == FORWARD and progress.kept(action.stage) >= len(progress.stations) - action.stage:
        return None
    return action.kind == FORWARD, -action.stage


def _zero_bubble(progress: Progress, action: Action) -> Rank | None:
    """As 1f1b, but the backward of weights, for which nobody waits, fills what would be idle.

    So late stages keep what they need for it, up to as many micro-batches as the first stage.
    """
    count, stage = len(progress.stations), action.stage
    awaited = progress.forward[stage] - progress.backward[stage]
    if action.kind == FORWARD and (awaited >= count - stage or progress.kept(stage) >= count):
        return None
    return (FORWARD, INPUT, WEIGHTS).index(action.kind), -stage


_RULES: dict[str, Rule] = {"gpipe": _gpipe, "1f1b": _one_by_one, "zero-bubble": _zero_bubble}
INTERLEAVED = "interleaved"
SCHEDULES = ("gpipe", "1f1b", INTERLEAVED, "zero-bubble")


def _interleaved(stations: Sequence[int], batches: int) -> list[list[Action]]:
    """As 1f1b, where each station has several stages: micro-batches go around in groups, one for each station.

    Where the last group is not full, what it lacks is left out of the plan of a full one.
    """
    group = max(stations) + 1
    rounds = len(stations) // group
    full = -(-batches // group) * group
    order = [
        (first + batch, turn) for first in range(0, full, group) for turn in range(rounds) for batch in range(group)
    ]
    plans = []
    for station in range(group):
        forward = [Action(FORWARD, turn * group + station, batch) for batch, turn in order]
        backward = [Action(BACKWARD, (rounds - 1 - turn) * group + station, batch) for batch, turn in order]
        ahead = min(2 * (group - station - 1) + (rounds - 1) * group, len(forward))
        own = forward[:ahead]
        for at, action in enumerate(backward):
            own += [*forward[ahead + at : ahead + at + 1], action]
        plans.append([action for action in own if action.batch < batches])
    return plans


def takes_turns(stations: Sequence[int]) -> bool:
    """Whether the stages go around all stations in the same order, as an interleaved schedule wants."""
    group = max(stations) + 1
    return len(stations) % group == 0 and all(at == stage % group for stage, at in enumerate(stations))


@lru_cache(maxsize=64)
def plan(schedule: str, stations: tuple[int, ...], batches: int, trains: bool = True) -> list[list[Action]]:
    """What each station does, in order; `stations` are those of the stages, counted from 0."""
    if schedule == INTERLEAVED and trains:
        return _interleaved(stations, batches)
    rule = _RULES[schedule] if trains else _gpipe
    progress = Progress(stations, batches, trains, splits=trains and schedule == "zero-bubble")

    def choose(_: int, ready: list[Action]) -> Action | None:
        ranked = [(rank, action) for action in ready if (rank := rule(progress, action)) is not None]
        return min(ranked)[1] if ranked else None

    return [[span.action for span in own] for own in _play(progress, choose, _usual).spans]


def simulate(
    plans: Sequence[Sequence[Action]], stations: Sequence[int], batches: int, costs: Costs | None = None
) -> Timeline:
    """How it comes out that each station keeps to its plan, where actions take as long as `costs` says."""
    kinds = {action.kind for own in plans for action in own}
    progress = Progress(stations, batches, trains=kinds != {FORWARD}, splits=WEIGHTS in kinds)
    upcoming = [iter(own) for own in plans]
    following = [next(own, None) for own in upcoming]

    def choose(station: int, ready: list[Action]) -> Action | None:
        action = following[station]
        if action not in ready:
            return None
        following[station] = next(upcoming[station], None)
        return action

    return _play(progress, choose, costs or _usual)


def _usual(action: Action) -> float:
    return COSTS[action.kind]
