"""A worker that joins a dynamic group while answers are lost, and while others join: it is a member once, or never."""

from __future__ import annotations

import pytest

from telegrad._core.directory.directory import ABSENT, DirectoryLost, Lease, LeaseLost, Swap
from telegrad._core.membership.dynamic import DynamicGroup
from telegrad._core.membership.members import Member
from telegrad._core.membership.registry import LOST, Change, Ended, LifeOver, MemberGone, Registry
from telegrad.errors import WorkerTaken
from tests.cluster import wait_until
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


@pytest.fixture
def registry(engine: NaiveEngine) -> Registry:
    return Registry(engine.client(), "")


def worker(name: str, life: str = "", rank: int = -1) -> Member:
    return Member(name, rank, life or f"life of {name}", "", "host", "", ("127.0.0.1", 1))


def alive(_: Member) -> bool:
    return True


def grant(engine: NaiveEngine, ttl: float = LONG) -> Lease:
    return engine.client().grant(ttl)


def join(engine: NaiveEngine, name: str, directory: NaiveClient | None = None, ttl: float = LONG) -> DynamicGroup:
    group = DynamicGroup(directory or engine.client(), "", ttl)
    group.join(worker(name), alive)
    return group


# Two that want one name


def test_a_worker_whose_name_was_claimed_as_it_joined_is_not_published(engine: NaiveEngine, registry: Registry) -> None:
    early, late = grant(engine), grant(engine)
    slow = registry.reserve(worker("a", "slow"), early, alive)
    quick = registry.publish(registry.reserve(worker("a", "quick"), late, alive), late)
    with pytest.raises(LeaseLost):
        registry.publish(slow, early)
    assert list(registry.roster().members.values()) == [quick]


def test_a_worker_that_is_published_meanwhile_keeps_its_name(
    engine: NaiveEngine, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    early, late = grant(engine), grant(engine)
    slow = registry.reserve(worker("a", "slow"), early, alive)
    look = registry._member

    def publish_then(life: str) -> None:
        """Say what was seen before."""
        monkeypatch.setattr(registry, "_member", look)
        registry.publish(slow, early)

    monkeypatch.setattr(registry, "_member", publish_then)
    with pytest.raises(WorkerTaken):
        registry.reserve(worker("a", "quick"), late, alive)
    assert list(registry.roster().members) == ["slow"]


# Lost answers


def test_a_worker_is_published_once_where_the_answers_are_lost(engine: NaiveEngine) -> None:
    group = join(engine, "a", Forgetful(engine, 2))
    (registered,) = group.registry.roster().members.values()
    assert registered.epoch == group._epoch
    assert [event.key for event in engine.state.events].count("live/member/life of a") == 1
    group.leave()


def test_a_worker_that_may_have_come_and_gone_does_not_join(engine: NaiveEngine) -> None:
    with pytest.raises(LifeOver, match=r"may have seen worker 'a' join, and go.*Start it anew"):
        join(engine, "a", Forgetful(engine, 1000), SHORT)


def test_a_worker_whose_lease_has_ended_before_it_was_published_may_try_again(engine: NaiveEngine) -> None:
    group = DynamicGroup(engine.client(), "", LONG)
    group._lease = Lease(99, LONG, 0.0)
    with pytest.raises(LeaseLost):
        group._publish(worker("a", rank=1))
    group.leave()


# What has happened as it joined


def test_a_worker_hears_that_it_was_declared_lost_as_it_joined(
    engine: NaiveEngine, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = DynamicGroup(engine.client(), "", LONG)
    publish = group.registry.publish

    def publish_and_declare_lost(me: Member, lease: Lease) -> object:
        published = publish(me, lease)
        assert registry.declare_lost(me.incarnation, "nobody answers")
        return published

    monkeypatch.setattr(group.registry, "publish", publish_and_declare_lost)
    group.join(worker("a"), alive)
    told: list[Change] = []
    group.begin(told.append)
    wait_until(lambda: told)
    assert told == [MemberGone("life of a", LOST, "nobody answers")]
    assert not group.holds
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


def test_an_end_from_before_a_worker_has_joined_does_not_concern_it(
    engine: NaiveEngine, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = DynamicGroup(engine.client(), "", LONG)
    reserve = group.registry.reserve

    def end_and_reserve(*args: object) -> Member:
        registry.end("early")
        return reserve(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(group.registry, "reserve", end_and_reserve)
    group.join(worker("a"), alive)
    registry.end("late")
    told: list[Change] = []
    group.begin(told.append)
    wait_until(lambda: told)
    assert told == [Ended("late")]
    group.leave()


def test_the_end_of_an_earlier_try_is_not_that_of_a_member(engine: NaiveEngine, registry: Registry) -> None:
    watcher = join(engine, "watcher")
    for number in range(2):
        lease = grant(engine)
        registered = registry.publish(worker("a", "life", 5 + number), lease)
        if not number:
            registry.declare_lost("life", "it tries again")
    watcher.refresh()  # later than the changes that come now
    told: list[Change] = []
    watcher.begin(told.append)
    join(engine, "last")
    wait_until(lambda: len(watcher.members()) == 3)
    assert watcher._known["life"] == registered
    assert [each for each in told if isinstance(each, MemberGone)] == []
    watcher.leave()
