"""A worker that answers nobody any more does not keep its place in the group."""

from __future__ import annotations

import threading
import time

import pytest

from telegrad._core.membership.dynamic import DynamicGroup
from telegrad._core.membership.members import Member
from telegrad._core.membership.registry import LOST, Change, MemberGone
from tests.cluster import PATIENCE, agents
from tests.directory.naive import NaiveEngine

TTL = 0.6


@pytest.mark.parametrize("stands", [False, True])
def test_a_worker_that_stands_is_declared_lost_and_learns_of_it(stands: bool) -> None:
    group = DynamicGroup(NaiveEngine().client(), TTL)
    me = group.join(Member("w0", 0, "life", "program", "host", "", ("127.0.0.1", 1000)), lambda _: True)
    told: list[Change] = []
    over = threading.Event()

    def note(change: Change) -> None:
        told.append(change)
        over.set()

    group.begin(note, lambda: 2 * TTL if stands else 0.0)
    if stands:
        assert over.wait(PATIENCE)
        assert not group.holds
        assert isinstance(told[0], MemberGone)
        assert told[0][:2] == (me.incarnation, LOST)
        assert "was declared lost" in group.over
    else:
        assert not over.wait(3 * TTL)
        assert group.holds
    group.leave()


def test_a_worker_whose_threads_wait_for_calls_does_not_stand() -> None:
    with agents(2) as workers:
        time.sleep(0.2)
        assert workers[0].agent.stands_for == 0.0
