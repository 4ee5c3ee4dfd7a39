"""Tests of restarts and of the end of a group: the state machine alone, and thousands of random lives."""

import random
from math import inf
from typing import Any

import pytest

from telegrad.launch.policy import (
    END,
    ENDED,
    ENDING,
    LONG,
    NOT_FOUND,
    PAUSES,
    POLICIES,
    RESTART_ROLE,
    RUNS,
    SIGINT,
    SIGKILL,
    SIGTERM,
    WAITS,
    Action,
    EndServing,
    Log,
    Policy,
    Role,
    RunConfig,
    SendSignal,
    StartProcess,
)
from tests.seeds import MOST, ONLY, run_each

GRACE = 10.0


def policy(*roles: Role) -> Policy:
    made = Policy(RunConfig(roles).slots(0), GRACE)
    made.begin(0.0)
    return made


def role(name: str, serves: bool = False, **options: Any) -> Role:
    return Role(name, serves=serves, **options)


def started(of: Policy, now: float) -> list[StartProcess]:
    """Return all processes that start now, which they do one by one."""
    found: list[StartProcess] = []
    while of.due <= now:
        actions = of.look(now)
        starts = [action for action in actions if isinstance(action, StartProcess)]
        assert len(starts) <= 1
        found += starts
    return found


def running(*roles: Role) -> Policy:
    """Return the policy of a group whose workers have started."""
    made = policy(*roles)
    started(made, 0)
    return made


def done(actions: list[Action]) -> list[Action]:
    """Return the actions without the log messages."""
    return [action for action in actions if not isinstance(action, Log)]


def said(actions: list[Action]) -> str:
    return "\n".join(action.text for action in actions if isinstance(action, Log))


def states(of: Policy) -> list[str]:
    return [one.state for one in of.slots.values()]


def test_a_group_ends_when_its_workers_have_ended() -> None:
    group = policy(role("a", count=2))
    assert started(group, 0) == [StartProcess("a0", 0), StartProcess("a1", 0)]
    assert said(group.ended("a0", 0, 1)) == "a0 ended with exit code 0"
    assert group.code is None
    assert done(group.ended("a1", 0, 2)) == [EndServing()]
    assert group.code == 0


def test_the_end_of_a_role_tells_which_others_the_group_waits_for() -> None:
    group = running(role("a", count=2), role("b"), role("c", serves=True))
    assert said(group.ended("a0", 0, 1)) == "a0 ended with exit code 0"
    told = "a1 ended with exit code 0; the group still waits for b (no `serves = true`)"
    assert said(group.ended("a1", 0, 1)) == told


def test_restarts_come_with_growing_pauses_until_they_are_used_up() -> None:
    group = policy(role("a", restarts=4))
    now, times = 0.0, []
    for restarts in range(4):
        assert started(group, now) == [StartProcess("a0", restarts)]
        times.append(now)
        later = f" in {PAUSES[restarts] - 0.5:.1f} s" if restarts else ""
        text = f"it is restarted{later} ({restarts + 1} of 4 within 300 s)"
        assert text in said(group.ended("a0", 1, now + 0.5))
        assert states(group) == [WAITS]
        now = group.due
    assert times == [0.0, 0.5, 1.5, 3.5]
    started(group, now)
    actions = group.ended("a0", -SIGKILL, now + 0.5)
    assert said(actions) == (
        "a0 ended with signal SIGKILL after 0.5 s, and 4 restarts within 300 s are used up: the group ends"
    )
    assert (group.code, group.failed) == (128 + SIGKILL, "a0")


def test_a_worker_that_has_run_for_long_is_restarted_at_once() -> None:
    group = policy(role("a", restarts=5, within=1000))
    now = 0.0
    for _ in range(3):
        started(group, now)
        group.ended("a0", 1, now)
        now = group.due
    assert now == PAUSES[1] + PAUSES[2]
    started(group, now)
    now += LONG
    group.ended("a0", 1, now)
    assert group.due == now
    assert started(group, now) == [StartProcess("a0", 4)]


def test_restarts_that_are_long_ago_do_not_count() -> None:
    group = policy(role("a", restarts=1, within=50))
    for now in (0.0, 100.0, 200.0):
        started(group, now)
        assert "restarted (1 of 1 within 50 s)" in said(group.ended("a0", 1, now + 60))
    started(group, 260.0)
    group.ended("a0", 1, 270.0)
    assert group.code == 1


def test_a_worker_without_restarts_is_not_restarted() -> None:
    group = running(role("a", restarts=0))
    assert "is not restarted" in said(group.ended("a0", 7, 1))
    assert group.code == 7


def test_a_failure_can_end_the_group() -> None:
    group = running(role("a", count=2, on_failure=END), role("b"))
    actions = group.ended("a0", 3, 1)
    assert done(actions) == [EndServing(), SendSignal("a1", SIGTERM), SendSignal("b0", SIGTERM)]
    group.ended("b0", 0, 2)
    assert group.due == 1 + GRACE
    actions = group.look(1 + GRACE)
    assert done(actions) == [SendSignal("a1", SIGKILL)]
    assert "a1 did not end within 10 s and is killed" in said(actions)
    assert (group.due, group.code) == (inf, None)
    assert group.ended("a1", -SIGKILL, 12) == []
    assert group.code == 3


def test_a_role_is_restarted_as_a_whole() -> None:
    group = running(role("a", count=3, on_failure=RESTART_ROLE, restarts=1), role("b"))
    group.ended("a2", 0, 1)
    actions = group.ended("a0", 1, 5)
    assert done(actions) == [SendSignal("a1", SIGTERM)]
    assert "all workers of role 'a' are restarted (1 of 1 within 300 s)" in said(actions)
    assert states(group) == [ENDED, ENDING, ENDED, RUNS]
    assert group.ended("a1", -SIGTERM, 6) == []
    assert started(group, 6) == [StartProcess("a0", 1), StartProcess("a1", 1), StartProcess("a2", 1)]
    group.ended("a1", 1, 7)
    assert group.failed == "a1"


def test_serving_workers_end_after_the_others() -> None:
    group = running(role("a"), role("s", serves=True, count=3))
    group.ended("s2", 1, 0.1)
    group.look(0.1)
    group.ended("s2", 1, 0.2)
    actions = group.ended("a0", 0, 0.5)
    assert done(actions) == [EndServing()]
    assert "all work is done: s0, s1, s2 end" in said(actions)
    assert states(group)[-1] == ENDED
    assert group.ended("s0", 0, 1) == []
    assert group.due == 0.5 + GRACE
    assert done(group.look(group.due)) == [SendSignal("s1", SIGTERM)]
    assert done(group.look(group.due)) == [SendSignal("s1", SIGKILL)]
    assert group.ended("s1", -SIGKILL, 30) == []
    assert group.code == 0


def test_a_group_of_serving_workers_ends_when_all_have_ended() -> None:
    group = running(role("s", serves=True, count=2))
    group.ended("s0", 0, 1)
    assert group.code is None
    group.ended("s1", 0, 2)
    assert group.code == 0


def test_the_first_signal_is_passed_on_and_the_second_kills() -> None:
    group = running(role("a", count=2), role("b"), role("s", serves=True))
    group.ended("b0", 1, 0.1)
    assert states(group) == [RUNS, RUNS, WAITS, RUNS]
    assert done(group.signalled(SIGINT, 1)) == [SendSignal("a0", SIGINT), SendSignal("a1", SIGINT)]
    assert states(group) == [ENDING, ENDING, ENDED, RUNS]
    assert group.ended("a1", 130, 1) == []
    actions = group.signalled(SIGINT, 2)
    assert said(actions) == "signal SIGINT: all workers are killed"
    assert done(actions) == [SendSignal("a0", SIGKILL), SendSignal("s0", SIGKILL)]
    assert group.due == inf
    assert group.ended("a0", -SIGKILL, 2) == [EndServing()]
    assert group.ended("s0", -SIGKILL, 2) == []
    assert group.code == 128 + SIGINT


def test_serving_workers_end_after_the_others_also_after_a_signal() -> None:
    group = running(role("a"), role("s", serves=True, count=2))
    assert done(group.signalled(SIGTERM, 1)) == [SendSignal("a0", SIGTERM)]
    assert group.ended("s1", 1, 2) == []
    assert states(group) == [ENDING, RUNS, ENDED]
    assert group.ended("a0", 0, 3) == [EndServing()]
    assert group.due == 3 + GRACE
    group.ended("s0", 0, 4)
    assert group.code == 128 + SIGTERM


def test_a_signal_goes_to_serving_workers_if_all_serve() -> None:
    group = running(role("s", serves=True, count=2))
    assert done(group.signalled(SIGTERM, 1)) == [EndServing(), SendSignal("s0", SIGTERM), SendSignal("s1", SIGTERM)]
    group.ended("s0", 0, 1)
    assert group.ended("s1", 0, 1) == []
    assert group.code == 128 + SIGTERM


def test_a_missing_command_ends_the_group() -> None:
    group = policy(role("a", count=3))
    assert done(group.look(0)) == [StartProcess("a0", 0)]
    assert done(group.look(0)) == [StartProcess("a1", 0)]
    actions = group.could_not_start("a1", "no such file", 0)
    assert done(actions) == [EndServing(), SendSignal("a0", SIGTERM)]
    assert "a1 could not be started: no such file: the group ends" in said(actions)
    assert group.due == GRACE
    assert started(group, GRACE - 1) == []
    group.ended("a0", 0, 1)
    assert group.code == NOT_FOUND


def test_an_aborted_group_ends() -> None:
    group = running(role("a"))
    actions = group.abort("no store", 1)
    assert (said(actions), done(actions)) == ("no store: the group ends", [EndServing(), SendSignal("a0", SIGTERM)])
    assert group.abort("no store", 1) == []
    group.ended("a0", -SIGTERM, 2)
    assert group.code == 1


class World:
    """Workers that live and die at random, and the invariants of the policy."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        roles = [self._role(f"r{number}") for number in range(self.random.randint(1, 3))]
        self.roles = {slot.name: slot.role for slot in RunConfig(tuple(roles)).slots(0)}
        self.group = Policy(RunConfig(tuple(roles)).slots(0), GRACE)
        self.now = 0.0
        self.running: dict[str, float] = {}  # begin of each running worker
        self.starts: dict[str, list[float]] = {name: [] for name in self.roles}
        self.ignores: set[str] = set()
        self.signalled = False
        self.over = False

    def _role(self, name: str) -> Role:
        pick = self.random
        options: dict[str, Any] = {
            "count": pick.randint(1, 3),
            "restarts": pick.randint(0, 4),
            "within": pick.choice([5.0, 100.0]),
        }
        return Role(name, on_failure=pick.choice(POLICIES), serves=pick.random() < 0.3, **options)

    def run(self) -> None:
        self.group.begin(self.now)
        for _ in range(2000):
            if self.group.code is not None:
                break
            self._step()
        assert self.group.code is not None, "it does not end"
        assert self.running == {}
        assert set(states(self.group)) == {ENDED}

    def _step(self) -> None:
        if self.running and (self.group.due == inf or self.random.random() < 0.3):
            self._let_one_end()
        elif self.random.random() < 0.01 and self.group.due > self.now:
            self.signalled = True
            self._do(self.group.signalled(SIGTERM, self.now))
        else:
            assert self.group.due < inf, "nothing runs and nothing is to come"
            self.now = max(self.now, self.group.due)
            self._do(self.group.look(self.now))

    def _let_one_end(self) -> None:
        name = self.random.choice(list(self.running))
        self.now += self.random.choice([0.0, 0.1, 1.0, 40.0])
        del self.running[name]
        code = self.random.choice([0, 0, 1, -9])
        self._do(self.group.ended(name, code, self.now))
        role = self.roles[name]
        if code and role.on_failure == RESTART_ROLE and not (self.over or self.signalled):
            of_role = {one.state for one in self.group.slots.values() if self.roles[one.name] is role}
            assert of_role in ({WAITS}, {ENDING}, {ENDED, ENDING}), "a role is started again as a whole"

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, StartProcess):
                self._start(action)
            elif isinstance(action, SendSignal) and action.name in self.running:
                if action.number == SIGKILL or self.random.random() < 0.5:
                    del self.running[action.name]
                    self._do(self.group.ended(action.name, -action.number, self.now))
            elif isinstance(action, EndServing):
                assert not self.over, "the group ends once"
                self.over = True

    def _start(self, action: StartProcess) -> None:
        assert action.name not in self.running, "it runs already"
        assert not self.over, "the group has ended"
        if self.random.random() < 0.01:
            self._do(self.group.could_not_start(action.name, "", self.now))
            return
        self.running[action.name] = self.now
        before = self.starts[action.name]
        assert action.restarts == len(before)
        before.append(self.now)
        role = self.roles[action.name]
        lately = sum(self.now - then < role.within for then in before)
        assert lately <= role.restarts + 1, "more often than it may"


def code_of(seed: int) -> int | None:
    world = World(seed)
    world.run()
    return world.group.code


@pytest.mark.parametrize("part", range(4))
def test_random_lives_end_and_keep_the_limits_of_restarts(part: int) -> None:
    codes = set(run_each(range(part * 500, (part + 1) * 500), code_of))
    assert ONLY or MOST or {0, 1, NOT_FOUND, 128 + SIGTERM, 128 + SIGKILL} <= codes
