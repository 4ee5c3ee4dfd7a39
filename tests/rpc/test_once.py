"""Tests of the answers of idempotent calls that a worker keeps until the callers confirm them."""

import random
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch

import telegrad.rpc as rpc
from telegrad import errors
from telegrad._core.rpc import idempotency
from telegrad._core.rpc.idempotency import ENTRY, LATE, LONGEST, IdempotencyTable, IdempotentCalls, run_once, size_of
from telegrad._core.worker import current
from tests.cluster import wait_until
from tests.rpc.test_returns import Stage, stage
from tests.seeds import run_each

__all__ = ["stage"]

MOST_OF_CALLER, MOST = 10 * ENTRY, 25 * ENTRY
made: list[int] = []


@pytest.fixture(autouse=True)
def little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idempotency, "MOST_OF_CALLER", MOST_OF_CALLER)
    monkeypatch.setattr(idempotency, "MOST", MOST)
    made.clear()


class Calls:
    """Calls of several callers in a random order, some of them repeated, and the expected state of each."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.table = rng, IdempotencyTable()
        self.now = 0.0
        self.numbers = dict.fromkeys("abcd", 0)
        self.running: list[tuple[str, int]] = []
        self.until: dict[tuple[str, int], float] = {}  # calls that have begun, and how long they may be repeated
        self.settled: set[tuple[str, int]] = set()

    def come(self) -> None:
        name = self.rng.choice([*self.numbers])
        self.numbers[name] += 1
        key, left = (name, self.numbers[name]), self.rng.choice([0.0, 1.0, 100.0])
        entry = self.table.enter(*key, left, self.now)
        assert entry is not None
        assert entry.outcome is None
        entry.outcome = key
        self.running.append(key)
        self.until[key] = self.now + (left or LONGEST) + LATE

    def end(self) -> None:
        if self.running:
            key = self.running.pop(self.rng.randrange(len(self.running)))
            self.table.ended(*key, self.rng.choice([0, 0, ENTRY, 3 * ENTRY, 40 * ENTRY]))

    def repeat(self) -> None:
        """Repeat calls that have begun: while they may be repeated, they are known or refused, and never run again."""
        for key in self.rng.sample([*self.until], min(5, len(self.until))):
            if key not in self.settled and self.until[key] > self.now:
                entry = self.table.enter(*key, 1e-9, self.now)
                assert entry is None or entry.outcome == key
                assert entry is not None or key not in self.running

    def settle(self) -> None:
        for key in self.rng.sample([*self.until], min(3, len(self.until))):
            self.settled.add(key)
            self.table.settled(*key)

    def wait(self) -> None:
        self.now += self.rng.choice([0.1, 1.0, 50.0])
        self.table.expire(self.now)

    def die(self) -> None:
        if self.rng.random() < 0.05 and len(self.numbers) > 1:
            name = self.rng.choice([*self.numbers])
            del self.numbers[name]
            self.table.died(name)
            assert not self.kept_for(name)
            assert self.table.enter(name, 1 << 40, 1.0, self.now) is None
            if self.rng.random() < 0.5:  # it lives: calls that came before are refused, and others run
                self.table.returned(name)
                came = [key[1] for key in self.until if key[0] == name and key not in self.running]
                assert all(self.table.enter(name, number, 1.0, self.now) is None for number in came[-1:])
                assert self.table.enter(name, 1 << 41, 1.0, self.now) is not None
                self.table.ended(name, 1 << 41)
                self.table.died(name)

    def kept_for(self, name: str) -> list[int]:
        caller = self.table._callers.get(name)
        return [entry.weight for entry in caller.entries.values() if entry.ended] if caller is not None else []

    def check(self) -> None:
        weights = [self.kept_for(name) for name in "abcd"]
        assert self.table.kept == sum(map(sum, weights))
        assert self.table.kept <= MOST or len(max(weights, key=sum)) == 1
        assert all(sum(each) <= MOST_OF_CALLER or len(each) == 1 for each in weights)
        assert len(self.table) - sum(map(len, weights)) == len(self.running)


def test_calls_in_any_order_run_once_and_stay_within_the_limits() -> None:
    def run(seed: int) -> None:
        calls = Calls(random.Random(seed))
        events = [calls.come] * 4 + [calls.end] * 4 + [calls.repeat, calls.settle, calls.wait, calls.die]
        for _ in range(150):
            calls.rng.choice(events)()
            calls.check()
        for key in calls.running:
            calls.table.ended(*key)
        for key in calls.until:
            calls.table.settled(*key)
        calls.table.expire(calls.now + 2 * LONGEST)
        assert not len(calls.table)
        assert not calls.table.kept

    run_each(range(150), run)


@dataclass
class Holder:
    value: Any


@dataclass(slots=True)
class Slots:
    value: Any


@pytest.mark.parametrize(
    "value",
    [
        bytes(1 << 20),
        torch.zeros(1 << 18),
        numpy.zeros(1 << 18, numpy.float32),
        memoryview(bytearray(1 << 20)),
        [bytes(1 << 19), {"a": bytes(1 << 19)}],
        {number: bytes(1 << 10) for number in range(1 << 10)},
        tuple(bytes(1 << 10) for _ in range(1 << 10)),
        deque([bytes(1 << 20)]),
        Holder(Slots(torch.zeros(1 << 18))),
        (KeyError(bytes(1 << 20)),),
    ],
)
def test_the_size_of_a_value_is_estimated(value: Any) -> None:
    assert 0.9 * (1 << 20) < size_of(value) < 1.3 * (1 << 20)


def test_a_value_that_contains_itself_has_a_size() -> None:
    value: list[Any] = []
    value.append(value)
    assert size_of(value) < ENTRY


def test_modules_classes_and_functions_count_as_small() -> None:
    assert size_of([torch, Holder, size_of, None, 1]) < ENTRY


def make(number: int) -> bytes:
    made.append(number)
    return bytes(3 * ENTRY)


def call(number: int) -> bytes:
    """Make an idempotent call, and never confirm its answer."""
    return rpc.rpc_sync("x", run_once, (number, 30.0, make, number))


def test_a_call_whose_answer_was_dropped_is_not_run_again(stage: Stage) -> None:
    x = stage.come("x")
    for number in range(1, 7):
        call(number)
    assert x.attached(IdempotentCalls)._table.kept <= MOST_OF_CALLER
    assert len(call(6)) == 3 * ENTRY
    with pytest.raises(errors.AnswerLost, match=r"worker 'x' no longer has .* may have run.* call it again if it"):
        call(1)
    assert made == [1, 2, 3, 4, 5, 6]


def test_nothing_is_kept_for_a_caller_that_has_died(stage: Stage) -> None:
    x, caller = stage.come("x"), stage.come("caller")
    current.enter(caller)
    for number in range(1, 7):
        call(number)
    x.membership.refresh()  # else it knows no members, and notices no death
    stage.crash(caller)
    current.enter(stage.all[0])
    wait_until(lambda: not len(x.attached(IdempotentCalls)) and not x.attached(IdempotentCalls)._table.kept)
    with pytest.raises(errors.AnswerLost):
        x.attached(IdempotentCalls).enter(caller.agent.incarnation, 7, 30.0)  # a call that was in flight
    assert made == [1, 2, 3, 4, 5, 6]


def test_calls_of_two_workers_with_the_same_number_both_run(stage: Stage) -> None:
    stage.come("x")
    for worker in (stage.all[0], stage.come("other")):
        current.enter(worker)
        call(1)
    assert made == [1, 1]
