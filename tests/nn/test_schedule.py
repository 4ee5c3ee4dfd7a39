"""Schedules of pipelines are complete, free of deadlocks, and as short and small as in the literature; tied weights."""

import random

import pytest

from benchmarks.schedule_simulation import Timeline, simulate
from telegrad.pipeline import pipeline_schedule as schedules
from telegrad.pipeline.pipeline_schedule import SCHEDULES, Action, TiedWeight, input_of, parse_tied, plan, with_tied
from tests.seeds import run_each

WORLDS = [250, pytest.param(2_500, marks=pytest.mark.nightly)]  # random cases of each schedule


def around(runners: int, rounds: int = 1) -> tuple[int, ...]:
    return tuple(range(runners)) * rounds


def played(schedule: str, runners: tuple[int, ...], batches: int) -> Timeline:
    return simulate(plan(schedule, runners, batches), runners, batches)


@pytest.mark.parametrize("runners", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("batches", [1, 2, 5, 8, 16])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_the_idle_time_is_that_of_the_literature(schedule: str, runners: int, batches: int) -> None:
    assert played(schedule, around(runners), batches).idle == pytest.approx((runners - 1) / (batches + runners - 1))


@pytest.mark.parametrize(("runners", "rounds", "batches"), [(2, 2, 4), (4, 2, 8), (4, 3, 8), (3, 3, 6), (4, 1, 8)])
def test_the_idle_time_of_interleaved_stages(runners: int, rounds: int, batches: int) -> None:
    found = played("interleaved", around(runners, rounds), batches)
    assert found.idle == pytest.approx((runners - 1) / (rounds * batches + runners - 1))


@pytest.mark.parametrize(("runners", "batches"), [(2, 2), (2, 9), (3, 8), (4, 4), (4, 8), (8, 20)])
def test_the_idle_time_of_zero_bubble(runners: int, batches: int) -> None:
    found = played("zero-bubble", around(runners), batches)
    assert found.idle == pytest.approx((runners - 1) / (3 * batches + runners - 1))
    assert found.length < played("1f1b", around(runners), batches).length


def test_the_number_of_kept_activations() -> None:
    assert played("gpipe", around(4), 8).kept == [8, 8, 8, 8]
    assert played("1f1b", around(4), 8).kept == [4, 3, 2, 1]
    assert played("1f1b", around(4), 2).kept == [2, 2, 2, 1]
    assert played("zero-bubble", around(4), 8).kept == [4, 4, 4, 4]
    assert played("interleaved", around(4, 2), 8).kept == [11, 9, 7, 5]


def random_world(chance: random.Random, schedule: str) -> tuple[tuple[int, ...], int]:
    """Draw runners for the stages, in any order that the schedule allows, and a number of micro-batches."""
    batches = chance.randint(1, 16)
    if schedule == "interleaved":
        return around(chance.randint(1, 6), chance.randint(1, 4)), batches
    count = chance.randint(1, 8)
    drawn = [chance.randrange(count) for _ in range(count)]
    numbers = {runner: number for number, runner in enumerate(dict.fromkeys(drawn))}
    return tuple(numbers[runner] for runner in drawn), batches


def check_complete(schedule: str, plans: list[list[Action]], runners: tuple[int, ...], batches: int) -> None:
    kinds = (
        [schedules.FORWARD, schedules.INPUT, schedules.WEIGHTS]
        if schedule == "zero-bubble"
        else [schedules.FORWARD, schedules.BACKWARD]
    )
    wanted = {Action(kind, stage, batch) for kind in kinds for stage in range(len(runners)) for batch in range(batches)}
    planned = [action for own in plans for action in own]
    assert len(planned) == len(wanted)
    assert set(planned) == wanted
    assert all(runners[action.stage] == runner for runner, own in enumerate(plans) for action in own)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("worlds", WORLDS)
def test_random_pipelines_end_for_random_durations(schedule: str, worlds: int) -> None:
    def check(seed: int) -> None:
        chance = random.Random(seed)
        runners, batches = random_world(chance, schedule)
        plans = plan(schedule, runners, batches)
        check_complete(schedule, plans, runners, batches)
        found = simulate(plans, runners, batches, lambda _: chance.expovariate(1))
        ends = {action: end for own in found.spans for action, _, end in own}
        for own in found.spans:
            for action, start, _ in own:
                assert all(ends[needed] <= start for needed in needs(action, len(runners), schedule))

    run_each(range(worlds), check)


def needs(action: Action, stages: int, schedule: str) -> list[Action]:
    kind, stage, batch = action
    back = schedules.INPUT if schedule == "zero-bubble" else schedules.BACKWARD
    if kind == schedules.FORWARD:
        return [Action(schedules.FORWARD, stage - 1, batch)] if stage else []
    if kind == schedules.WEIGHTS:
        return [Action(schedules.INPUT, stage, batch)]
    behind = [Action(back, stage + 1, batch)] if stage < stages - 1 else []
    return [Action(schedules.FORWARD, stage, batch), *behind]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_inference_goes_forward_only(schedule: str) -> None:
    plans = plan(schedule, around(3), 4, trains=False)
    assert [len(own) for own in plans] == [4, 4, 4]
    assert simulate(plans, around(3), 4).length == 6
    assert with_tied(plans, around(3), [TiedWeight(2, "head", 0, "table")], trains=False) == [
        [Action(schedules.LOAD_WEIGHT, 0, 0), *plans[0]],
        plans[1],
        [Action(schedules.SEND_WEIGHT, 2, 0), *plans[2]],
    ]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_tied_values_arrive_first_and_gradients_leave_last(schedule: str) -> None:
    runners = around(2, 2)
    plans = plan(schedule, runners, 4)
    first, second = with_tied(plans, runners, [TiedWeight(0, "table", 3, "head")], trains=True)
    assert first == [Action(schedules.SEND_WEIGHT, 0, 0), *plans[0], Action(schedules.ADD_GRADIENT, 0, 0)]
    own = [action.kind for action in second if action.stage == 3]
    assert (own[0], own[-1]) == (schedules.LOAD_WEIGHT, schedules.SEND_GRADIENT)
    assert second.index(Action(schedules.LOAD_WEIGHT, 3, 0)) > 0  # the other stage does not wait
    assert [each for each in second if each.kind not in (schedules.LOAD_WEIGHT, schedules.SEND_GRADIENT)] == plans[1]


def test_names_of_tied_weights() -> None:
    found = parse_tied(["0.a.weight", "2.b", "1.c"], 3)
    assert found == [TiedWeight(0, "a.weight", 2, "b"), TiedWeight(0, "a.weight", 1, "c")]


def test_which_actions_need_an_input() -> None:
    def needed(kind: str, stage: int) -> tuple[str, int, int] | None:
        return input_of(Action(kind, stage, 5), 2)

    assert [needed(schedules.FORWARD, stage) for stage in range(3)] == [None, ("forward", 1, 5), ("forward", 2, 5)]
    for kind in (schedules.BACKWARD, schedules.INPUT):
        assert [needed(kind, stage) for stage in range(3)] == [("backward", 0, 5), ("backward", 1, 5), None]
    for kind in (schedules.LOAD_WEIGHT, schedules.ADD_GRADIENT):
        assert needed(kind, 0) is not None
    for kind in (schedules.WEIGHTS, schedules.SEND_WEIGHT, schedules.SEND_GRADIENT):
        assert needed(kind, 1) is None
