"""Tests of the costs of a join in a group of thousands: operations of the directory, and entries that are read."""

import random
from collections import Counter
from functools import partial

import pytest

from telegrad._core.membership.dynamic import DynamicGroup
from telegrad._core.membership.members import Member
from telegrad._core.membership.registry import NEAR, Registry
from telegrad._core.stores.directory import ABSENT, Events, Lease, Listing, Swap
from telegrad._core.stores.lease_table import LeaseTable
from tests.sim.fibers import Fiber, Fibers

TTL = 10.0
MANY = 10_000
CROWD = 200  # workers that join at the same moment


class Directory:
    """A table that answers at once, and counts operations."""

    def __init__(self, table: LeaseTable, client: str) -> None:
        self.table, self.client = table, client
        self.asked: Counter[str] = Counter()
        self.read = 0  # entries

    def grant(self, ttl: float) -> Lease:
        self.note("grant")
        return Lease(self.table.grant(ttl, 0.0), ttl, 1e9)

    def renew(self, lease: Lease) -> Lease:
        self.note("renew")
        self.table.renew(lease.id, 0.0)
        return lease

    def revoke(self, lease: Lease) -> None:
        self.note("revoke")
        self.table.revoke(lease.id)

    def swap(self, key: str, value: bytes | None, expected: int = ABSENT, lease: Lease | None = None) -> Swap:
        self.note("swap")
        return self.table.swap(key, value, expected, lease.id if lease and value is not None else 0, self.client)

    def list(self, prefix: str) -> Listing:
        self.note("list")
        listing = self.table.list(prefix)
        self.read += len(listing.entries)
        return listing

    def watch(self, prefix: str, since: int, timeout: float) -> tuple[int, Events]:
        self.note("watch")
        return self.table.changes(prefix, since)

    def close(self) -> None:
        pass

    def note(self, operation: str) -> None:
        self.asked[operation] += 1


class Crowded(Directory):
    """A directory in which other workers ask between any two operations."""

    def __init__(self, table: LeaseTable, client: str, fibers: Fibers, waiting: list[Fiber]) -> None:
        super().__init__(table, client)
        self._fibers, self._waiting = fibers, waiting

    def note(self, operation: str) -> None:
        self._waiting.append(self._fibers.check())
        self._fibers.suspend()
        super().note(operation)


def member(name: str = "", rank: int = -1) -> Member:
    return Member(name, rank, f"life of {name}", "program", "host", "", ("127.0.0.1", 1), role="" if name else "actor")


def alive(_: Member) -> bool:
    return True


@pytest.fixture
def table() -> LeaseTable:
    return LeaseTable()


def fill(table: LeaseTable, present: range) -> None:
    """Let the workers of these numbers join."""
    for number in present:
        directory = Directory(table, f"client {number}")
        registry, lease = Registry(directory), directory.grant(TTL)
        registry.publish(registry.reserve(member(f"w{number}", number), lease, alive), lease)
        assert directory.asked == {"grant": 1, "swap": 3}


def join(table: LeaseTable, name: str) -> tuple[DynamicGroup, Directory]:
    directory = Directory(table, name)
    group = DynamicGroup(directory, TTL)
    group.join(member(name)._replace(incarnation=name), alive)
    return group, directory


@pytest.mark.nightly
def test_a_join_needs_as_many_operations_with_ten_thousand_workers(table: LeaseTable) -> None:
    """All members are read once, and nothing else that grows."""
    asked = {"swap": 4, "grant": 1, "list": 2}
    present = 0
    for name, more in (("a", 1), ("b", 1000), ("c", MANY)):
        fill(table, range(present + 1, more))
        group, directory = join(table, name)
        assert directory.asked == asked
        assert directory.read == len(group.members()) - 1
        assert len(group.members()) == more
        assert group._me is not None
        assert group._me.id == more
        present = more
    assert present == MANY


@pytest.mark.nightly
def test_a_join_costs_the_same_after_ten_thousand_joins(table: LeaseTable) -> None:
    asked = set()
    for number in range(MANY):
        group, directory = join(table, f"w{number}")
        asked.add((*sorted(directory.asked.items()), directory.read))
        assert group._me is not None
        group.registry.leave(group._me, group._lease)
    assert len(asked) == 1
    assert len(table.list("").entries) == 1  # the group's identity


@pytest.mark.parametrize("name", ["w", ""], ids=["named", "by role"])
def test_many_workers_that_join_at_once_soon_find_free_numbers(table: LeaseTable, name: str) -> None:
    """Otherwise each one would try the ranks of all others in turn."""
    chance, fibers, waiting = random.Random(1), Fibers(), list[Fiber]()
    joined: list[tuple[DynamicGroup, Directory]] = []

    def join(number: int) -> None:
        directory = Crowded(table, f"client {number}", fibers, waiting)
        group = DynamicGroup(directory, TTL)
        group.join(member(name and f"{name}{number}")._replace(incarnation=f"life {number}"), alive)
        joined.append((group, directory))

    for number in range(CROWD):
        fibers.start(partial(join, number))
    while waiting:
        fibers.resume(waiting.pop(chance.randrange(len(waiting))))
    members = [group._me for group, _ in joined]
    assert len({each.id for each in members if each}) == len({each.name for each in members if each}) == CROWD
    assert max(directory.asked["swap"] for _, directory in joined) <= 3 + 3 * NEAR * (1 if name else 2)
    assert sum(directory.read for _, directory in joined) < CROWD * CROWD
