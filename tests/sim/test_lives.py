"""Calls to workers that come back under their names: a call for one life reaches no other, and runs once.

A failing seed is printed as SEED=...; `TELEGRAD_SEED=... pytest tests/sim/test_lives.py` replays it alone.
"""

from math import inf
from typing import Any

import pytest

from telegrad._core.rpc.idempotency import LATE, LONGEST, CallEntry, IdempotencyTable
from telegrad._core.rpc.retry_queue import (
    FIRST_BACKOFF,
    FIRST_PAUSE,
    LONGEST_BACKOFF,
    LONGEST_PAUSE,
    Failure,
    RetryPolicy,
    RetryQueue,
    backoff,
    classify,
    should_retry,
)
from telegrad.errors import DirectoryLost, HandshakeError, PeerError, PeerUnreachable, UnknownWorker
from tests.seeds import by_day_and_night, run_each
from tests.sim.lives_world import Asked, Life, World

SEEDS = range(1000)


def run(seeds: range, world: type[World] = World, **kinds: Any) -> None:
    run_each(seeds, lambda seed: world(seed, **kinds).run())


@by_day_and_night(range(400), range(400, 101_000))
def test_no_life_gets_a_call_that_was_meant_for_another(seeds: range) -> None:
    run(seeds)


class OpensToAnybody(World):
    """The caller does not check which life listens at the address of an earlier one."""

    def door(self, wanted: Life) -> Life | None:
        return self.doors.get(wanted.place)


class KeepsNames(World):
    """A life that was removed from the store is called by its name as long as it lives."""

    def forget_names(self) -> None:
        pass


class RepeatsAnything(World):
    """A call that may have run is made again though it is not idempotent."""

    def goes_on(self, asked: Asked, failure: Failure) -> bool:
        return super().goes_on(asked, failure) or (failure is Failure.MAY_HAVE_RUN and asked.policy.waits)


class AppliesToAnyLife(World):
    """A call for one life goes to any life of its name."""

    def attempt(self, asked: Asked) -> Any:
        bound, asked.bound = asked.bound, None
        yield from super().attempt(asked)
        asked.bound = bound


class AttemptsOnce(RetryQueue[Asked]):
    """After a first attempt in vain, waiting calls are never made again."""

    def due(self, now: float) -> list[str | int]:
        found = super().due(now)
        for to in found:
            self._targets[to].due = inf
        return found


class ForgetsThoseThatPause(RetryQueue[Asked]):
    """Calls that pause are dropped when others are made."""

    def ready(self, to: str | int, now: float) -> list[Asked]:
        ready = super().ready(to, now)
        for call in [call for call, at in self._targets[to].calls.items() if now < at < inf] if ready else []:
            self._targets[to].calls[call] = inf
        return ready


class MakesOneTwice(RetryQueue[Asked]):
    """A call that is being made counts as one that waits."""

    def begin(self, call: Asked) -> bool:
        return call in getattr(self._targets.get(call.to), "calls", ())

    def ready(self, to: str | int, now: float) -> list[Asked]:
        return list(getattr(self._targets.get(to), "calls", ()))


class ForgetsAtOnce(IdempotencyTable):
    """Answers are not kept."""

    def ended(self, name: str, number: int, weight: int = 0) -> list[CallEntry]:
        return super().ended(name, number, weight) or [self._take_out(self._callers[name], number)]


class ForgetsCallsThatRun(IdempotencyTable):
    """A call that runs is not known."""

    def enter(self, name: str, number: int, left: float, now: float) -> CallEntry | None:
        entry = super().enter(name, number, left, now)
        if entry is not None and not entry.ended:
            entry.outcome = None
        return entry


class ForgetsTooEarly(IdempotencyTable):
    """Answers are dropped while their calls may still be repeated."""

    def expire(self, now: float) -> list[CallEntry]:
        return super().expire(inf)


WRONG: dict[str, list[Any]] = {
    "world": [OpensToAnybody, KeepsNames, RepeatsAnything, AppliesToAnyLife],
    "queue": [AttemptsOnce, ForgetsThoseThatPause, MakesOneTwice],
    "table": [ForgetsAtOnce, ForgetsCallsThatRun, ForgetsTooEarly],
}


@pytest.mark.parametrize(("part", "wrong"), [(part, wrong) for part, all_ in WRONG.items() for wrong in all_])
def test_wrong_code_is_found(part: str, wrong: Any) -> None:
    with pytest.raises(AssertionError, match="SEED"):
        run(SEEDS, **{part: wrong})


# Single cases


def asked(to: str = "x", until: float = inf) -> Asked:
    return Asked(to, RetryPolicy(True, True), None, 1, until)


def test_failures_are_retried_as_the_policy_says() -> None:
    patient, again, both, plain = (
        RetryPolicy(*each) for each in [(True, False), (False, True), (True, True), (False, False)]
    )
    absent, lost, over = Failure.NOT_RUN, Failure.MAY_HAVE_RUN, Failure.FINAL
    assert [should_retry(each, absent, False) for each in (patient, again, both, plain)] == [True, False, True, False]
    assert [should_retry(each, lost, True) for each in (patient, again, both, plain)] == [False, True, True, False]
    assert not any(should_retry(each, over, False) for each in (patient, again, both, plain))
    assert should_retry(both, absent, True)  # a repeated one waits, too


def test_the_pauses_of_a_call_that_may_have_run_grow() -> None:
    assert backoff(0) == 0.0
    pauses = [backoff(repeats) for repeats in range(1, 12)]
    assert pauses == sorted(pauses)
    assert pauses[:3] == [FIRST_BACKOFF, 2 * FIRST_BACKOFF, 4 * FIRST_BACKOFF]
    assert pauses[-1] == LONGEST_BACKOFF


def test_calls_to_one_worker_are_retried_together_with_growing_pauses() -> None:
    queue: RetryQueue[Asked] = RetryQueue()
    first, second, other = asked(), asked(), asked("y")
    for each in (first, second, other):
        assert queue.wait(each, 1.0, why="no")
    now, pauses = 1.0, []
    for _ in range(8):
        assert (queue.due(now), queue.due(now), queue.ready("x", now)) == (["x", "y"], [], [first, second])
        assert [queue.begin(first), queue.begin(first), queue.withdraw(first)] == [True, False, False]
        assert queue.wait(first, now)  # to the end of the queue
        first, second = second, first
        pauses.append(queue.next() - now)
        now = queue.next()
    assert pauses[:3] == pytest.approx([FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE])
    assert pauses[-1] == pytest.approx(LONGEST_PAUSE)
    assert queue.why("y") == "no"
    assert queue.end(other)
    assert queue.begin(first)
    assert queue.end(first, answered=True)
    assert queue.next() <= now  # the other call need not wait


def test_a_call_that_ends_without_an_answer_does_not_hurry_the_others() -> None:
    queue: RetryQueue[Asked] = RetryQueue()
    first, second = asked(), asked(until=5.0)
    for each in (first, second):
        queue.wait(each, 1.0)
    assert queue.due(1.0) == ["x"]
    assert [queue.end(first), queue.end(first), queue.withdraw(first)] == [True, False, False]
    assert queue.next() == pytest.approx(1.0 + FIRST_PAUSE)
    assert (queue.ready("y", 1.0), queue.why("y"), queue.why("x")) == ([], "", "")
    assert queue.begin(second)
    assert (queue.next(), queue.close()) == (inf, [])  # an attempt is in flight


def test_a_call_with_a_pause_is_made_later() -> None:
    queue: RetryQueue[Asked] = RetryQueue()
    call = asked()
    queue.wait(call, 0.0, 2.0)
    assert (queue.due(1.0), queue.next(), queue.due(2.0)) == ([], 2.0, ["x"])
    assert queue.begin(call)
    assert queue.next() == inf


def test_calls_leave_the_queue_by_deadline_withdrawal_or_close() -> None:
    queue: RetryQueue[Asked] = RetryQueue()
    late, gone, last = asked(until=3.0), asked(), asked("y")
    for each in (late, gone, last):
        queue.wait(each, 0.0, 9.0)
    assert (queue.next(), queue.expired(2.9), queue.expired(3.0)) == (3.0, [], [(late, "")])
    assert [queue.withdraw(gone) for _ in range(2)] == [True, False]
    assert queue.close() == [last]
    assert not queue.wait(asked(), 4.0)
    assert queue.next() == inf


def test_an_answer_is_kept_until_it_is_settled_or_expires() -> None:
    table = IdempotencyTable()
    entries = [table.enter("a", number, 5.0, 0.0) for number in range(1, 5)]
    for entry in entries:
        assert entry.outcome is None
        entry.outcome = "known"
    assert table.settled("a", 1) is None  # the call still runs
    assert [table.ended("a", number) for number in (1, 2)] == [[entries[0]], []]
    assert [table.settled("a", 2) for _ in range(2)] == [entries[1], None]
    assert table.ended("a", 3) == []
    assert table.enter("a", 3, 0.0, 1.0) is entries[2]  # now without a limit
    assert table.enter("a", 4, 1.0, 1.0) is entries[3]
    assert table.expire(LONGEST + LATE) == []  # a repetition may be under way
    assert table.expire(1.0 + LONGEST + LATE) == [entries[2]]
    assert len(table) == 1  # the call that runs stays


def test_only_failures_without_an_answer_are_retried() -> None:
    for absent in (UnknownWorker("a"), PeerUnreachable("a"), DirectoryLost("a")):
        assert classify(absent) is Failure.NOT_RUN
    assert classify(PeerError("a")) is Failure.MAY_HAVE_RUN
    for final in (HandshakeError("a"), TimeoutError(), ValueError()):
        assert classify(final) is Failure.FINAL
