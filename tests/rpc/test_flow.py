"""Tests of the flow control of streams alone: limits hold and neither side waits for ever, in any order of events."""

import random

import pytest

from telegrad._core.streams import ITEM, Answer, ReceiveWindow, SendWindow
from telegrad.errors import ProtocolViolation
from tests.seeds import run_each


def fed(window: int = 4, most: int = 100) -> SendWindow[str]:
    return SendWindow(window, most)


# The callee's side


def test_a_reader_cannot_acknowledge_items_that_were_not_sent() -> None:
    supply = fed(window=2)
    supply.put(1, 30)
    supply.put(2, 30)
    supply.take(10**9)
    assert not supply.may_go_on
    assert supply.pull(0, 10**9, "a") == [Answer("a", [1, 2], False)]
    assert not supply.may_go_on
    supply.take(10**9)
    assert supply.may_go_on


def test_items_that_were_not_sent_count_as_kept() -> None:
    supply = fed()
    supply.pull(0, 0, "a")
    awaited = supply.awaited
    supply.put(1, 10)
    assert (supply.kept, awaited, supply.awaited) == (0, "a", None)
    supply.put(2, 10)
    supply.put(3, 0)
    assert supply.kept == 10 + 2 * ITEM
    supply.pull(1, 0, "b")
    assert supply.kept == 0
    supply.put(4, 10)
    supply.close()
    assert supply.kept == 0


def test_a_closed_stream_answers_pulls_without_the_earlier_ones() -> None:
    """Earlier pulls may be lost with their connection; if later ones waited for them, their calls would never end."""
    supply = fed()
    supply.pull(1, 0, "b")
    supply.pull(3, 0, "d")
    assert supply.close() == [Answer("b", [], True), Answer("d", [], True)]
    assert supply.pull(5, 0, "f") == [Answer("f", [], True)]


def test_a_worker_that_leaves_does_not_tell_the_reader_that_the_stream_is_over() -> None:
    supply = fed()
    supply.pull(0, 0, "a")
    assert supply.leave() == supply.pull(1, 0, "b") == supply.put(1, 10) == []
    assert not supply.is_drained


# The reader's side


def test_a_reader_reports_half_a_window_at_once() -> None:
    intake = ReceiveWindow(4, 100)
    intake.came([1, 2, 3], [0, 0, 0], False)
    intake.take()
    assert not intake.must_tell
    intake.take()
    assert (intake.must_tell, intake.tell(), intake.must_tell) == (True, 2, False)
    intake.came([4], [50], False)
    intake.take()
    assert not intake.must_tell
    intake.take()
    assert intake.must_tell  # half of the bytes
    assert (intake.pull(), intake.must_tell) == ((0, 4), False)


def test_more_items_than_may_be_unread_are_refused() -> None:
    intake = ReceiveWindow(3, 100)
    intake.came([1, 2], [0, 0], False)
    with pytest.raises(ProtocolViolation, match="2 items arrived, but at most 3 may be unread"):
        intake.came([3, 4], [0, 0], False)


# Both sides, over a network that keeps no order


class World:
    """A function of `total` items, a reader that takes them, and messages under way."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.window, self.most = rng.randint(1, 6), rng.randint(1, 40)
        self.weights = [rng.randint(0, 25) for _ in range(rng.randint(0, 30))]
        self.ahead = rng.randint(1, 3)  # pulls in flight
        self.eager = rng.random() < 0.5  # True if it pulls while it has items left
        self.closes_at = rng.randint(0, 30) if rng.random() < 0.2 else None
        self.supply: SendWindow[int] = SendWindow(self.window, self.most)
        self.intake = ReceiveWindow(self.window, self.most)
        self.yielded, self.ended = 0, False
        self.taken: list[int] = []
        self.to_callee: list[tuple[str, int, int]] = []
        self.to_reader: dict[int, tuple[list[int], bool]] = {}
        self.next_answer = self.pulled = self.answered = 0

    def steps(self) -> list[str]:
        """Return the events that may happen next."""
        found = []
        if not self.ended and self.supply.may_go_on:
            found.append("yield")
        if self.to_callee:
            found.append("arrive")
        if self.next_answer in self.to_reader:
            found.append("answer")
        if not self.intake.empty:
            found.append("take")
        in_flight = self.pulled - self.next_answer
        if not self.intake.over and in_flight < self.ahead and (self.eager or self.intake.empty):
            found.append("pull")
        return found

    def do(self, step: str) -> None:
        if step == "yield":
            self.resume()
        elif step == "arrive":
            kind, first, second = self.to_callee.pop(self.rng.randrange(len(self.to_callee)))
            if kind == "pull":
                self.answer(self.supply.pull(first, second, first))
            elif kind == "taken":
                self.answer(self.supply.take(first))
            else:
                self.answer(self.supply.close())
        elif step == "answer":
            items, over = self.to_reader.pop(self.next_answer)
            self.next_answer += 1
            self.intake.came(items, [self.weights[item] for item in items], over)
        elif step == "take":
            self.taken.append(self.intake.take())
            if self.intake.must_tell:
                self.to_callee.append(("taken", self.intake.tell(), 0))
            if len(self.taken) == self.closes_at:
                self.intake.close()
                self.to_callee.append(("close", 0, 0))
        else:
            self.pulled += 1
            self.to_callee.append(("pull", *self.intake.pull()))

    def resume(self) -> None:
        """Run the function to its next yield, or to its end."""
        if self.supply.closed or self.yielded == len(self.weights):
            self.ended = True
            self.answer(self.supply.end())
            return
        self.yielded += 1
        self.answer(self.supply.put(self.yielded - 1, self.weights[self.yielded - 1]))

    def answer(self, answers: list[Answer]) -> None:
        for to, items, over in answers:
            assert not items or self.supply.closed or to == self.answered  # in the order of the pulls' numbers
            self.answered += 1
            self.to_reader[to] = items, over

    def check(self) -> None:
        ahead = self.weights[len(self.taken) : self.yielded]
        assert len(ahead) <= self.window
        assert sum(ahead[:-1]) < self.most
        assert self.taken == [*range(len(self.taken))]

    def run(self) -> None:
        while steps := self.steps():
            self.do(self.rng.choice(steps))
            self.check()
        assert self.ended  # neither side waits for ever
        assert self.intake.over
        assert not self.supply.kept
        if self.closes_at is None or self.closes_at > len(self.weights) or self.closes_at == 0:
            assert len(self.taken) == len(self.weights)


def test_all_items_arrive_within_the_window_in_any_order_of_events() -> None:
    run_each(range(2000), lambda seed: World(random.Random(seed)).run())
