"""The order in which the stages of a pipeline work. This module uses no workers and no tensors.

A runner has one or several stages, and runs one action at a time. `plan` returns the actions of each runner, in a
fixed order that does not depend on their durations. A weight that several stages use is synchronized by actions, too:
one stage owns the weight. The others get its value before they begin, and return its gradient when they have finished.
"""

import heapq
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

from telegrad.errors import UsageError
from telegrad.ext.feedback import short_repr

FORWARD, BACKWARD, INPUT, WEIGHTS = "forward", "backward", "input", "weights"  # a backward is INPUT and WEIGHTS
SEND_WEIGHT, LOAD_WEIGHT, SEND_GRADIENT, ADD_GRADIENT = "send weight", "load weight", "send gradient", "add gradient"
_COSTS = {FORWARD: 1.0, BACKWARD: 2.0, INPUT: 1.0, WEIGHTS: 1.0}  # typical values


class Action(NamedTuple):
    """An action of one stage for one micro-batch, or for one tied weight."""

    kind: str
    stage: int
    batch: int  # or index of the tied weight


class TiedWeight(NamedTuple):
    """One weight in two stages, with its name in each."""

    owner: int
    name: str
    replica: int
    name_there: str


InputKey = tuple[str, int, int]  # of an action that needs an input: kind, stage, and micro-batch or tied weight


def input_of(action: Action, last: int) -> InputKey | None:
    """Return the input that an action needs to begin, in a pipeline whose last stage has index `last`. The first stage
    has all inputs of the batch, and the last stage needs no input for its backward."""
    kind = BACKWARD if action.kind == INPUT else action.kind
    if kind in (WEIGHTS, SEND_WEIGHT, SEND_GRADIENT) or (kind, action.stage) in ((FORWARD, 0), (BACKWARD, last)):
        return None
    return kind, action.stage, action.batch


class Progress:
    """The micro-batches that each stage has done, which determine the actions that can begin."""

    def __init__(self, runners: Sequence[int], batches: int, trains: bool, splits: bool) -> None:
        """`runners` of the stages; `splits`: the backward of weights is a separate action."""
        self.runners = runners
        self.batches = batches
        self.forward = [0] * len(runners)
        self.backward = [0] * len(runners)
        self.weights = [0] * len(runners) if splits else self.backward
        self._trains = trains
        self._splits = splits

    def ready(self, runner: int) -> list[Action]:
        """Return the actions that a runner can begin: the next of each kind for each of its stages."""
        found = []
        for stage, at in enumerate(self.runners):
            if at != runner:
                continue
            forward, backward = self.forward[stage], self.backward[stage]
            if forward < self.batches and (stage == 0 or forward < self.forward[stage - 1]):
                found.append(Action(FORWARD, stage, forward))
            last = stage == len(self.runners) - 1
            if self._trains and backward < (forward if last else self.backward[stage + 1]):
                found.append(Action(INPUT if self._splits else BACKWARD, stage, backward))
            if self._splits and self.weights[stage] < backward:
                found.append(Action(WEIGHTS, stage, self.weights[stage]))
        return found

    def end(self, action: Action) -> None:
        {FORWARD: self.forward, WEIGHTS: self.weights}.get(action.kind, self.backward)[action.stage] += 1

    def kept(self, stage: int) -> int:
        """Return the number of micro-batches whose activations a stage keeps."""
        return self.forward[stage] - self.weights[stage]

    @property
    def done(self) -> bool:
        return min(self.weights if self._trains else self.forward) == self.batches


def play(
    progress: Progress, choose: Callable[[int, list[Action]], Action | None], cost: Callable[[Action], float]
) -> list[list[tuple[Action, float, float]]]:
    """Return the timed actions of a simulated run: a runner begins `choose(runner, ready)` once it is free."""
    spans: list[list[tuple[Action, float, float]]] = [[] for _ in range(max(progress.runners) + 1)]
    running: list[tuple[float, Action]] = []
    now = 0.0
    while not progress.done:
        for runner, own in enumerate(spans):
            if own and own[-1][2] > now:
                continue
            if (action := choose(runner, progress.ready(runner))) is not None:
                own.append((action, now, now + cost(action)))
                heapq.heappush(running, (own[-1][2], action))
        if not running:
            raise RuntimeError("the stages of a pipeline wait for each other")
        now = running[0][0]
        while running and running[0][0] <= now:
            progress.end(heapq.heappop(running)[1])
    return spans


# Rules: the priority of an action that a runner can begin, lowest first, or None if the action must wait

Priority = tuple[int, ...]


def _gpipe(progress: Progress, action: Action) -> Priority | None:
    """All forward, then all backward."""
    if action.kind != FORWARD and progress.forward[action.stage] < progress.batches:
        return None
    return action.kind != FORWARD, -action.stage


def _one_by_one(progress: Progress, action: Action) -> Priority | None:
    """Backward as soon as possible. Begin only as many micro-batches as are needed until then."""
    if action.kind == FORWARD and progress.kept(action.stage) >= len(progress.runners) - action.stage:
        return None
    return action.kind == FORWARD, -action.stage


def _zero_bubble(progress: Progress, action: Action) -> Priority | None:
    """Like 1f1b, but the backward of weights, for which no other stage waits, fills idle time. So late stages keep
    activations for it, of up to as many micro-batches as the first stage."""
    count, stage = len(progress.runners), action.stage
    awaited = progress.forward[stage] - progress.backward[stage]
    if action.kind == FORWARD and (awaited >= count - stage or progress.kept(stage) >= count):
        return None
    return (FORWARD, INPUT, WEIGHTS).index(action.kind), -stage


_RULES = {"gpipe": _gpipe, "1f1b": _one_by_one, "zero-bubble": _zero_bubble}
INTERLEAVED = "interleaved"
SCHEDULES = ("gpipe", "1f1b", INTERLEAVED, "zero-bubble")


def _interleaved(runners: Sequence[int], batches: int) -> list[list[Action]]:
    """Like 1f1b with several stages per runner: micro-batches pass in groups, with one micro-batch for each runner.
    If the last group is not full, its missing micro-batches are removed from the plan of a full one."""
    group = max(runners) + 1
    rounds = len(runners) // group
    full = -(-batches // group) * group
    order = [
        (first + batch, turn) for first in range(0, full, group) for turn in range(rounds) for batch in range(group)
    ]
    plans = []
    for runner in range(group):
        forward = [Action(FORWARD, turn * group + runner, batch) for batch, turn in order]
        backward = [Action(BACKWARD, (rounds - 1 - turn) * group + runner, batch) for batch, turn in order]
        # The number of forward actions before the first backward, as in Megatron-LM's interleaved 1F1B. The last
        # runner first passes one group through all of its stages but the last one. Each runner before it needs two
        # more, for the way of a value to the next runner and of its gradient back.
        ahead = min(2 * (group - runner - 1) + (rounds - 1) * group, len(forward))
        own = forward[:ahead]
        for at, action in enumerate(backward):
            own += [*forward[ahead + at : ahead + at + 1], action]
        plans.append([action for action in own if action.batch < batches])
    return plans


# A runner makes the same plan for each batch. The cached lists are shared, so callers must not change them:
# `with_tied` makes new ones.
@lru_cache(maxsize=64)
def plan(schedule: str, runners: tuple[int, ...], batches: int, trains: bool = True) -> list[list[Action]]:
    """Return the actions of each runner, in order; `runners` are those of the stages, counted from 0."""
    if schedule == INTERLEAVED and trains:
        return _interleaved(runners, batches)
    # Without training there is no backward to wait for, so all schedules are the same.
    rule = _RULES[schedule] if trains else _gpipe
    progress = Progress(runners, batches, trains, splits=trains and schedule == "zero-bubble")

    def choose(_: int, ready: list[Action]) -> Action | None:
        ranked = [(priority, action) for action in ready if (priority := rule(progress, action)) is not None]
        return min(ranked)[1] if ranked else None

    return [[action for action, *_ in own] for own in play(progress, choose, lambda action: _COSTS[action.kind])]


# Tied weights


def parse_tied(names: Sequence[str], count: int) -> list[TiedWeight]:
    """Return the ties of the first named parameter with the others, in a pipeline of `count` stages."""
    if len(names) < 2 or not all(isinstance(name, str) for name in names):
        raise UsageError(
            f"tied parameters must be named in one tuple, not as {short_repr(names)}: "
            "tied=[('0.embedding.weight', '2.head.weight')]"
        )
    found = [name.partition(".") for name in names]
    for name, (stage, _, rest) in zip(names, found, strict=True):
        if not stage.isdigit() or int(stage) >= count or not rest:
            raise UsageError(
                f"{name!r} is not the name of a parameter in one of {count} stages: write the number of the stage and "
                "the name in that stage, such as '0.embedding.weight'"
            )
    (owner, _, own), *others = found
    return [TiedWeight(int(owner), own, int(stage), name) for stage, _, name in others]


def with_tied(
    plans: Sequence[Sequence[Action]], runners: Sequence[int], tied: Sequence[TiedWeight], trains: bool
) -> list[list[Action]]:
    """Add actions that send the values of tied weights before their use, and their gradients afterwards."""
    found = list(map(list, plans))
    for number, tie in enumerate(tied):
        owner, replica = found[runners[tie.owner]], found[runners[tie.replica]]
        owner.insert(0, Action(SEND_WEIGHT, tie.owner, number))
        own = [at for at, action in enumerate(replica) if action.stage == tie.replica]
        if trains:
            replica.insert(own[-1] + 1, Action(SEND_GRADIENT, tie.replica, number))
            owner.append(Action(ADD_GRADIENT, tie.owner, number))
        replica.insert(own[0], Action(LOAD_WEIGHT, tie.replica, number))
    return found
