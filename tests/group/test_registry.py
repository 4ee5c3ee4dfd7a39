"""Tests of the registry of a dynamic group in a directory: names, departures, claims to values, and watches."""

import random
import secrets
from collections.abc import Iterator
from unittest.mock import Mock

import pytest

from telegrad._core.membership.dynamic import DynamicGroup
from telegrad._core.membership.members import Member
from telegrad._core.membership.registry import (
    EXPIRED,
    LEFT,
    LOST,
    Claimed,
    Ended,
    IsAlive,
    MemberGone,
    MemberJoined,
    Registered,
    Registry,
)
from telegrad._core.stores.directory import Directory, DirectoryLost, Lease, LeaseLost
from telegrad.errors import InvalidArgument
from tests.cluster import wait_until
from tests.directory.naive import NaiveEngine
from tests.group.members import alive, member

LONG = 60.0


@pytest.fixture
def engine() -> NaiveEngine:
    return NaiveEngine()


@pytest.fixture
def directory(engine: NaiveEngine) -> Iterator[Directory]:
    client = engine.client()
    yield client
    client.close()


@pytest.fixture
def registry(directory: Directory) -> Registry:
    return Registry(directory)


def worker(name: str = "", role: str = "") -> Member:
    return member(name, life=secrets.token_hex(4), role=role)


def publish(registry: Registry, me: Member, lease: Lease, is_alive: IsAlive) -> Registered:
    return registry.publish(registry.reserve(me, lease, is_alive), lease)


class Joined:
    """A worker that has joined, with its lease."""

    def __init__(self, registry: Registry, directory: Directory, me: Member) -> None:
        self.lease: Lease = directory.grant(LONG)
        self.registered: Registered = publish(registry, me, self.lease, alive)
        self.member = self.registered.member


def test_a_role_gives_its_workers_their_names(registry: Registry, directory: Directory) -> None:
    actors = [Joined(registry, directory, worker(role="actor")) for _ in range(3)]
    assert [each.member.name for each in actors] == ["actor0", "actor1", "actor2"]
    registry.leave(actors[1].member, actors[1].lease)
    assert Joined(registry, directory, worker(role="actor")).member.name == "actor1"


def test_the_seeded_generator_of_the_program_stays_as_it_is(registry: Registry, directory: Directory) -> None:
    before = random.getstate()
    for _ in range(3):
        Joined(registry, directory, worker(role="actor"))
    assert random.getstate() == before


def test_a_worker_out_of_reach_is_waited_for_if_changes_are_forgotten() -> None:
    engine = NaiveEngine()
    directory = engine.client()
    registry = Registry(directory)
    publish(registry, worker("a"), directory.grant(0.3), alive)
    engine.forget()
    assert publish(registry, worker("a"), directory.grant(LONG), lambda _: None).member.name == "a"


def test_watchers_see_joins_and_how_each_member_has_gone(registry: Registry, directory: Directory) -> None:
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


def test_a_lookup_finds_exact_names_only(registry: Registry, directory: Directory) -> None:
    longer = Joined(registry, directory, worker("ab"))
    assert registry.find("a") is None
    assert registry.find("ab") == registry.find(1) == longer.registered
    assert registry.find(2) is None


def test_all_workers_find_the_same_identity(registry: Registry, directory: Directory) -> None:
    identity, founded = registry.identify()
    assert founded
    assert Registry(directory).identify() == (identity, False)


def test_members_that_have_gone_leave_no_entries(registry: Registry, directory: Directory) -> None:
    registry.identify()
    kept = directory.list("").entries
    for number in range(20):
        joined = Joined(registry, directory, worker(f"w{number}"))
        if number % 2:
            registry.leave(joined.member, joined.lease)
        else:
            registry.declare_lost(joined.member.incarnation, "it is dead")
        registry.end("told once")
    end = directory.list("live/").entries
    assert [each.key for each in end] == ["live/ended"]
    assert directory.list("").entries == kept + end


# Claims to published values


def test_a_worker_has_the_claim_alone_until_its_lease_ends(registry: Registry, directory: Directory) -> None:
    first, second = directory.grant(LONG), directory.grant(LONG)
    claim = registry.claim("x", "a", first)
    assert claim.life == "a"
    assert registry.claim("x", "b", second) == claim
    assert registry.claim("x", "a", first) == claim  # a retry after an unknown outcome
    assert registry.owner("x") == registry.roster().claims["x"] == claim
    directory.revoke(first)
    assert registry.owner("x") is None
    later = registry.claim("x", "b", second)
    assert later.life == "b"
    assert later.token > claim.token


def test_a_claim_of_an_earlier_lease_does_not_hold_for_the_next(registry: Registry, directory: Directory) -> None:
    first, second = directory.grant(LONG), directory.grant(LONG)
    registry.claim("x", "a", first)
    with pytest.raises(LeaseLost, match="earlier lease"):
        registry.claim("x", "a", second)


def test_watchers_see_claims_and_their_ends(registry: Registry, directory: Directory) -> None:
    lease = directory.grant(LONG)
    since = registry.roster().revision
    claim = registry.claim("a/b", "me", lease)
    directory.revoke(lease)
    made, ended = (change for _, change in registry.watch(since, 0)[1])
    assert made == Claimed("a/b", claim)
    assert isinstance(ended, Claimed)
    assert ended.name == "a/b"
    assert ended.claim.life == ""
    assert ended.claim.token > claim.token


def test_a_name_that_is_no_key_is_refused(registry: Registry, directory: Directory) -> None:
    with pytest.raises(InvalidArgument, match="Use shorter names"):
        registry.claim(2000 * "x", "me", directory.grant(LONG))


# Claims as one member knows them


def join(engine: NaiveEngine, name: str, ttl: float = LONG) -> DynamicGroup:
    group = DynamicGroup(engine.client(), ttl)
    group.join(member(name), alive)
    return group


def test_a_new_member_knows_the_claims_and_hears_of_their_ends(engine: NaiveEngine) -> None:
    owner = join(engine, "a")
    claim = owner.claim("x")
    assert owner.owns("x", claim)
    other = join(engine, "b")
    other.begin(lambda _: None)
    assert other.claims["x"] == claim
    assert other.claim("x") == claim
    owner.leave()
    assert not owner.owns("x", claim)
    wait_until(lambda: not other.claims["x"].life)
    assert other.claim("x").token > claim.token
    other.leave()


def test_a_refresh_reports_the_end_of_a_claim_once(engine: NaiveEngine) -> None:
    owner, other = join(engine, "a"), join(engine, "b")
    claim = owner.claim("x")
    other.look_for_owner("x")
    assert other.claims["x"] == claim
    owner.leave()
    told: list[str] = []
    other.on_claim = told.append
    other.refresh()
    other.refresh()
    assert not other.claims["x"].life
    assert told == ["x"]
    other.leave()


def test_a_claim_without_an_answer_of_the_directory_fails(engine: NaiveEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    group = join(engine, "a")

    monkeypatch.setattr(group.directory, "swap", Mock(side_effect=DirectoryLost("not now")))
    with pytest.raises(DirectoryLost, match="not now"):
        group.claim("x")
    assert group.claims == {}
    monkeypatch.undo()
    group.leave()


def test_a_worker_that_has_left_can_claim_nothing(engine: NaiveEngine) -> None:
    group = join(engine, "a")
    group.leave()
    with pytest.raises(LeaseLost, match="has left"):
        group.claim("x")
