"""The members of a dynamic group in a directory: claims, departures, and what watchers see."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest

from telegrad._core.directory.directory import Directory, Lease
from telegrad._core.membership.members import Member
from telegrad._core.membership.registry import (
    EXPIRED,
    LEFT,
    LOST,
    Ended,
    IsAlive,
    MemberGone,
    MemberJoined,
    Registered,
    Registry,
)
from tests.directory.naive import NaiveEngine

LONG = 60.0


@pytest.fixture
def directory() -> Iterator[Directory]:
    client = NaiveEngine().client()
    yield client
    client.close()


@pytest.fixture
def registry(directory: Directory) -> Registry:
    return Registry(directory)


def worker(name: str = "", rank: int = -1, role: str = "") -> Member:
    return Member(name, rank, secrets.token_hex(4), "program", "host", "", ("127.0.0.1", 1), role=role)


def alive(_: Member) -> bool:
    return True


def join(registry: Registry, me: Member, lease: Lease, is_alive: IsAlive) -> Registered:
    return registry.publish(registry.reserve(me, lease, is_alive), lease)


class Joined:
    """A worker that has joined, with its lease."""

    def __init__(self, registry: Registry, directory: Directory, me: Member) -> None:
        self.lease: Lease = directory.grant(LONG)
        self.registered: Registered = join(registry, me, self.lease, alive)
        self.member = self.registered.member


def test_ranks_begin_at_one_and_the_lowest_free_one_is_given(registry: Registry, directory: Directory) -> None:
    first, second, third = (Joined(registry, directory, worker(name)) for name in "abc")
    assert [each.member.id for each in (first, second, third)] == [1, 2, 3]
    registry.leave(second.member, second.lease)
    assert Joined(registry, directory, worker("d")).member.id == 2
    assert Joined(registry, directory, worker("e", rank=0)).member.id == 0


def test_a_role_names_its_workers(registry: Registry, directory: Directory) -> None:
    actors = [Joined(registry, directory, worker(role="actor")) for _ in range(3)]
    assert [each.member.name for each in actors] == ["actor0", "actor1", "actor2"]
    registry.leave(actors[1].member, actors[1].lease)
    assert Joined(registry, directory, worker(role="actor")).member.name == "actor1"


def test_a_worker_out_of_reach_is_waited_for_where_changes_are_forgotten() -> None:
    engine = NaiveEngine()
    directory = engine.client()
    registry = Registry(directory)
    join(registry, worker("a"), directory.grant(0.3), alive)
    engine.forget()
    assert join(registry, worker("a"), directory.grant(LONG), lambda _: None).member.name == "a"


def test_watchers_see_who_came_and_how_each_has_gone(registry: Registry, directory: Directory) -> None:
    since = registry.roster().revision
    left, lost, expired = (Joined(registry, directory, worker(name)) for name in "abc")
    registry.leave(left.member, left.lease)
    assert registry.declare_lost(lost.member.incarnation, "it is dead")
    assert not registry.declare_lost(lost.member.incarnation, "once more")
    directory.revoke(expired.lease)
    registry.end("the first has left")
    changes = [change for _, change in registry.watch(since, 0.0)[1]]
    came = [each.registered for each in changes if isinstance(each, MemberJoined)]
    assert came == [left.registered, lost.registered, expired.registered]
    gone: dict[str, MemberGone] = {}
    for each in changes:
        if isinstance(each, MemberGone):
            gone.setdefault(each.life, each)
    assert [(each.how, each.why) for each in gone.values()] == [(LEFT, ""), (LOST, "it is dead"), (LOST, EXPIRED)]
    assert changes[-1] == Ended(LEFT, "the first has left")
    assert registry.roster().members == {}


def test_who_comes_after_an_end_is_not_concerned(registry: Registry, directory: Directory) -> None:
    registry.end("rank 0 has left")
    since = registry.roster().revision
    Joined(registry, directory, worker("a"))
    registry.end("rank 0 has left again")
    changes = [change for _, change in registry.watch(since, 0.0)[1]]
    assert [each for each in changes if isinstance(each, Ended)] == [Ended(LEFT, "rank 0 has left again")]


def test_a_member_that_was_declared_lost_learns_so_as_it_leaves(registry: Registry, directory: Directory) -> None:
    joined = Joined(registry, directory, worker("a"))
    registry.declare_lost(joined.member.incarnation, "it is dead")
    assert not registry.leave(joined.member, joined.lease)


def test_a_lookup_is_of_exactly_that_name(registry: Registry, directory: Directory) -> None:
    longer = Joined(registry, directory, worker("ab"))
    assert registry.find("a") is None
    assert registry.find("ab") == registry.find(1) == longer.registered
    assert registry.find(2) is None


def test_all_workers_find_one_identity(registry: Registry, directory: Directory) -> None:
    identity, founded = registry.identify()
    assert founded
    assert Registry(directory).identify() == (identity, False)


def test_nothing_is_left_of_members_that_have_gone(registry: Registry, directory: Directory) -> None:
    registry.identify()
    kept = directory.list("").entries
    for number in range(20):
        joined = Joined(registry, directory, worker(f"w{number}"))
        if number % 2:
            registry.leave(joined.member, joined.lease)
        else:
            registry.declare_lost(joined.member.incarnation, "it is dead")
        registry.end("told once")
    assert directory.list("").entries == kept
