"""The members as one worker sees them, where the directory and the connections tell of one another's workers."""

from __future__ import annotations

import pytest

from telegrad.errors import PeerError, PeerLost, PeerSilent
from telegrad.group.registry import Came, Registered
from tests.cluster import agents


@pytest.mark.parametrize(("reason", "is_doubted"), [(PeerSilent("stopped"), False), (PeerLost("died"), True)])
def test_a_worker_that_was_silent_before_it_was_seen_is_not_taken_for_dead(
    reason: PeerError, is_doubted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with agents(1, dynamic=True) as (worker,):
        membership = worker.membership
        monkeypatch.setattr(membership, "_settle_doubts", lambda: None)
        other = worker.me._replace(name="other", id=7, incarnation="life of other")
        membership._on_lost(other.identity, reason)
        membership._apply(Came(Registered(other, 1)))
        assert [doubt.who for doubt in membership._doubts] == [other] * is_doubted


def test_the_members_are_told_at_once_while_the_directory_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    with agents(1, dynamic=True) as (worker,):
        group = worker.directory
        asked: list[str] = []
        monkeypatch.setattr(group, "refresh", lambda: asked.append("roster"))
        for answers in (False, True):
            monkeypatch.setattr(group, "is_lost", not answers)
            assert [each.name for each in worker.membership.workers()] == ["w0"]
            assert asked == ["roster"] * answers
