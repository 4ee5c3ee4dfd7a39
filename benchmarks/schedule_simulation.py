"""Simulation of pipeline schedules: their length, the idle time of workers, and the activations they keep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

from telegrad.pipeline.pipeline_schedule import BACKWARD, FORWARD, WEIGHTS, Action, Progress, play

COSTS = {BACKWARD: 2.0}  # all other kinds cost 1


class Timeline(NamedTuple):
    """The simulated actions of each worker for one batch."""

    spans: list[list[tuple[Action, float, float]]]  # per worker: actions with their start and end

    @property
    def length(self) -> float:
        return max(end for own in self.spans for _, _, end in own)

    @property
    def idle(self) -> float:
        """Return the fraction of time in which workers waited."""
        busy = sum(end - start for own in self.spans for _, start, end in own)
        return 1 - busy / (self.length * len(self.spans))

    @property
    def kept(self) -> list[int]:
        """Return for each worker the maximum number of kept activations, over all its stages."""
        changes = {FORWARD: 1, BACKWARD: -1, WEIGHTS: -1}
        return [max(accumulate(changes.get(action.kind, 0) for action, *_ in own)) for own in self.spans]


def simulate(
    plans: Sequence[Sequence[Action]],
    runners: Sequence[int],
    batches: int,
    cost: Callable[[Action], float] = lambda action: COSTS.get(action.kind, 1.0),
) -> Timeline:
    """Return the timeline of workers that follow their plans. `cost` gives the duration of an action."""
    kinds = {action.kind for own in plans for action in own}
    progress = Progress(runners, batches, trains=kinds != {FORWARD}, splits=WEIGHTS in kinds)
    done = [0] * len(plans)

    def choose(runner: int, ready: list[Action]) -> Action | None:
        following = plans[runner][done[runner] : done[runner] + 1]
        if not following or following[0] not in ready:
            return None
        done[runner] += 1
        return following[0]

    return Timeline(play(progress, choose, cost))
