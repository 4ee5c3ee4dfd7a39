"""A worker that joins a dynamic group while answers are lost. `sim/test_dynamic.py` draws all orders of events."""

from __future__ import annotations

import pytest

from telegrad._core.directory.directory import ABSENT, DirectoryLost, Lease, LeaseLost, Swap
from telegrad._core.membership.dynamic import DynamicGroup
from telegrad._core.membership.members import Member
from telegrad._core.membership.registry import LifeOver
from tests.directory.naive import NaiveClient, NaiveEngine

LONG, SHORT = 60.0, 0.5  # seconds of a lease


class Forgetful(NaiveClient):
    """A client of which some answers to the publication of a member are lost."""

    def __init__(self, engine: NaiveEngine, lost: int) -> None:
        super().__init__(engine, 0.2)
        self.lost = lost

    def swap(self, key: str, value: bytes | None, expected: int = ABSENT, lease: Lease | None = None) -> Swap:
        swap = super().swap(key, value, expected, lease)
        if key.startswith("live/member/") and self.lost > 0:
            self.lost -= 1
            raise DirectoryLost("the connection broke")
        return swap


@pytest.fixture
def engine() -> NaiveEngine:
    return NaiveEngine()


def worker(name: str, life: str = "", rank: int = -1) -> Member:
    return Member(name, rank, life or f"life of {name}", "", "host", "", ("127.0.0.1", 1))


def alive(_: Member) -> bool:
    return True


def join(engine: NaiveEngine, name: str, directory: NaiveClient | None = None, ttl: float = LONG) -> DynamicGroup:
    group = DynamicGroup(directory or engine.client(), ttl)
    group.join(worker(name), alive)
    return group


def test_a_worker_is_published_once_where_the_answers_are_lost(engine: NaiveEngine) -> None:
    group = join(engine, "a", Forgetful(engine, 2))
    (registered,) = group.registry.roster().members.values()
    assert registered.epoch == group._epoch
    assert [event.key for event in engine.state.events].count("live/member/life of a") == 1
    group.leave()


def test_a_worker_that_may_have_come_and_gone_does_not_join(engine: NaiveEngine) -> None:
    with pytest.raises(LifeOver, match=r"worker 'a' may have joined and then lost its lease.*Start it again"):
        join(engine, "a", Forgetful(engine, 1000), SHORT)


def test_a_worker_whose_lease_has_ended_before_it_was_published_may_try_again(engine: NaiveEngine) -> None:
    group = DynamicGroup(engine.client(), LONG)
    group._lease = Lease(99, LONG, 0.0)
    with pytest.raises(LeaseLost):
        group._publish(worker("a", rank=1))
    group.leave()


def test_a_slow_look_at_all_members_drops_none_that_came_meanwhile(
    engine: NaiveEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    watcher = join(engine, "watcher")
    before = watcher.registry.roster()
    late = join(engine, "late")
    watcher.refresh()
    monkeypatch.setattr(watcher.registry, "roster", lambda: before)
    watcher._read_anew()
    assert [each.name for each in watcher.members()] == ["late", "watcher"]
    late.leave()
    monkeypatch.undo()
    watcher._read_anew()
    assert [each.name for each in watcher.members()] == ["watcher"]
    watcher.leave()
