"""Claims to published values: in the directory, and as one member of a dynamic group knows them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from telegrad._core.directory.directory import Directory, DirectoryLost, LeaseLost
from telegrad._core.membership.dynamic import DynamicGroup
from telegrad._core.membership.members import Member
from telegrad._core.membership.registry import Claimed, Registry
from telegrad.errors import InvalidArgument
from tests.cluster import wait_until
from tests.directory.naive import NaiveEngine

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


def claims_in(registry: Registry, since: int) -> list[Claimed]:
    return [change for _, change in registry.watch(since, 0)[1] if isinstance(change, Claimed)]


def test_one_of_two_has_the_claim_until_its_lease_ends(registry: Registry, directory: Directory) -> None:
    first, second = directory.grant(LONG), directory.grant(LONG)
    claim = registry.claim("x", "a", first)
    assert claim.life == "a"
    assert registry.claim("x", "b", second) == claim
    assert registry.claim("x", "a", first) == claim  # where the outcome was not known before
    assert registry.owner("x") == registry.roster().claims["x"] == claim
    directory.revoke(first)
    assert registry.owner("x") is None
    later = registry.claim("x", "b", second)
    assert later.life == "b"
    assert later.token > claim.token


def test_a_claim_of_an_earlier_lease_is_not_that_of_the_next(registry: Registry, directory: Directory) -> None:
    first, second = directory.grant(LONG), directory.grant(LONG)
    registry.claim("x", "a", first)
    with pytest.raises(LeaseLost, match="earlier lease"):
        registry.claim("x", "a", second)


def test_watchers_see_claims_and_their_ends(registry: Registry, directory: Directory) -> None:
    lease = directory.grant(LONG)
    since = registry.roster().revision
    claim = registry.claim("a/b", "me", lease)
    directory.revoke(lease)
    made, ended = claims_in(registry, since)
    assert made == Claimed("a/b", claim)
    assert ended.name == "a/b"
    assert ended.claim.life == ""
    assert ended.claim.token > claim.token


def test_a_name_that_is_no_key_is_refused(registry: Registry, directory: Directory) -> None:
    with pytest.raises(InvalidArgument, match="Use shorter names"):
        registry.claim(2000 * "x", "me", directory.grant(LONG))


# As one member knows them


def join(engine: NaiveEngine, name: str, ttl: float = LONG) -> DynamicGroup:
    group = DynamicGroup(engine.client(), ttl)
    group.join(Member(name, -1, f"life of {name}", "", "host", "", ("127.0.0.1", 1)), lambda _: True)
    return group


def test_a_member_that_joins_knows_the_claims_and_hears_of_their_ends(engine: NaiveEngine) -> None:
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


def test_a_look_that_is_later_than_the_watch_tells_of_ends_too(engine: NaiveEngine) -> None:
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


def test_a_directory_that_does_not_answer_makes_no_owner(engine: NaiveEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    group = join(engine, "a")

    def lose(*_: object) -> None:
        raise DirectoryLost("not now")

    monkeypatch.setattr(group.directory, "swap", lose)
    with pytest.raises(DirectoryLost, match="not now"):
        group.claim("x")
    assert group.claims == {}
    monkeypatch.undo()
    group.leave()


def test_a_worker_that_has_left_claims_nothing(engine: NaiveEngine) -> None:
    group = join(engine, "a")
    group.leave()
    with pytest.raises(LeaseLost, match="has left"):
        group.claim("x")
