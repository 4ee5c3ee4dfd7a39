"""Whether a worker has died whose connection broke: every order of answers and of times ends in an answer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from hypothesis import given
from hypothesis import strategies as st

from telegrad.errors import PeerLost
from telegrad.group import doubts, membership
from telegrad.group.doubts import KNOCKS, Doubt
from telegrad.group.membership import Membership

MOST = len(KNOCKS)


class Watch(Membership):
    """The part of a membership that settles doubts."""

    def __init__(self, count: int, is_dynamic: bool = False) -> None:
        self._changed: Any = threading.Condition()
        self.declared: list[int] = []
        declare_lost = lambda member, *_: self.declared.append(member.tcp)  # noqa: E731
        self._group: Any = SimpleNamespace(declare_lost=declare_lost) if is_dynamic else None
        self._me: Any = SimpleNamespace(name="me")
        self._next = ""
        self._parted, self._gone, self._closed = set(), {}, False
        self._post: Any = SimpleNamespace(warn_lost=lambda *_: None)
        self._teller: Any = SimpleNamespace(hears_of_ends=False)
        workers: list[Any] = [
            SimpleNamespace(name=f"w{number}", incarnation=str(number), identity=None, tcp=number)
            for number in range(count)
        ]
        self._doubts = [Doubt(worker, 0, 0.0, PeerLost("its connection broke")) for worker in workers]
        self.died: list[int] = []

    def _take_out(self, member: Any, lost: Any) -> None:
        self.died.append(member.tcp)


def clock(steps: Iterator[float]) -> Callable[[], float]:
    now = 0.0

    def read() -> float:
        nonlocal now
        now += next(steps, 1.0)
        return now

    return read


ANSWERS = st.lists(st.sampled_from([True, False, None]), min_size=MOST, max_size=MOST)


@given(st.lists(ANSWERS, min_size=1, max_size=3), st.lists(st.sampled_from([0.0, 0.1, 0.3, 1.0, 4.0])), st.booleans())
def test_doubts_end(answers: list[list[bool | None]], steps: list[float], is_dynamic: bool) -> None:
    """A worker of a dynamic group that is out of reach is no dead one. Its directory decides what is."""
    asked = [0] * len(answers)

    def knock(worker: Any, patience: float) -> bool | None:
        asked[worker] += 1
        return answers[worker][asked[worker] - 1]

    watch, now = Watch(len(answers), is_dynamic), clock(iter(steps))
    with (
        patch.object(doubts, "knock", knock),
        patch.object(membership, "monotonic", now),
        patch.object(doubts, "monotonic", now, create=True),
    ):
        for _ in range(50):
            watch._settle_doubts()
    assert watch._doubts == []
    for worker, given_ in enumerate(answers):
        refused = given_.index(False) + 1 if False in given_ else None
        assert asked[worker] == (refused or MOST)
        found = watch.declared if is_dynamic else watch.died
        is_silent = given_[-1] is None and not is_dynamic
        assert (worker in found) == (refused is not None or is_silent)
    assert (watch.died if is_dynamic else watch.declared) == []


def test_a_look_that_fails_keeps_the_doubts() -> None:
    watch = Watch(2)

    def fail(worker: Any, patience: float) -> bool:
        raise OverflowError

    with patch.object(doubts, "knock", fail):
        try:
            watch._settle_doubts()
        except OverflowError:
            pass
    assert len(watch._doubts) == 2
