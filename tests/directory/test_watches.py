"""Tests of watches of the embedded directory: no change is left out, in any order of collecting and new watches."""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telegrad._core.stores import directory_requests as requests
from telegrad._core.stores.directory import ABSENT, Compacted, Events, LeaseLost
from telegrad._core.stores.directory_requests import EACH, LONGEST_GATHERING, Reply, Request, Watches, do, read_reply
from telegrad._core.stores.lease_table import LeaseTable, Limits
from telegrad.errors import InvalidArgument, LimitReached

PREFIXES = ["", "a", "a/", "b"]
KEYS = ["a", "a/1", "b", "c"]


def write(table: LeaseTable, key: str) -> None:
    found = table.list(key).entries
    table.swap(key, b"", found[0].revision if found and found[0].key == key else ABSENT)


class Watcher:
    """A client that watches a prefix all the time."""

    def __init__(self, connection: int, prefix: str, since: int) -> None:
        self.connection, self.prefix, self.since = connection, prefix, since
        self.seen: Events = []
        self.waits, self.is_compacted = False, False

    def begin(self, watches: Watches[int], seconds: float, now: float) -> None:
        if self.is_compacted or self.waits:
            return
        try:
            reply = watches.add(self.connection, self.prefix, self.since, seconds, now)
        except Compacted:
            self.is_compacted = True
            return
        self.waits = reply is None
        if reply is not None:
            self.take(reply)

    def take(self, data: bytes) -> None:
        reply = read_reply(data)
        self.waits = False
        self.is_compacted = reply.outcome == requests.COMPACTED
        if not self.is_compacted:
            assert reply.outcome == requests.DONE
            assert reply.revision >= self.since
            self.since = reply.revision
            self.seen += reply.changes


class Life:
    """Watchers and writers at random."""

    def __init__(self, seed: int, kept: int) -> None:
        self.chance = random.Random(seed)
        self.table, self.now = LeaseTable(limits=Limits(changes=kept)), 0.0
        self.watches = Watches[int](self.table)
        self.log: Events = []  # all changes
        self.watchers = [Watcher(n, self.chance.choice(PREFIXES), 0) for n in range(8)]

    def step(self) -> None:
        chance = self.chance
        self.now += chance.choice([0.0, 1e-4, 0.01, 0.3])
        for _ in range(chance.choice([0, 1, 3])):
            write(self.table, chance.choice(KEYS))
            self.log += self.table.changes("", self.table.revision - 1)[1]
        for watcher in chance.sample(self.watchers, 3):
            watcher.begin(self.watches, chance.choice([0.0, 0.05, 1.0, 100.0]), self.now)
        if chance.random() < 0.05:
            left = chance.choice(self.watchers)
            self.watches.leave(left.connection)
            left.waits = False
        if chance.random() < 0.6:
            self.collect()

    def collect(self) -> None:
        for connection, reply in self.watches.collect(self.now):
            self.watchers[connection].take(reply)

    def settle(self) -> None:
        """Let all watchers see all changes."""
        for _ in range(30):
            self.now += 200.0
            self.collect()
            for watcher in self.watchers:
                watcher.begin(self.watches, 100.0, self.now)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 60), st.sampled_from([6, 40, 10_000]))
def test_watchers_miss_nothing(seed: int, steps: int, kept: int) -> None:
    life = Life(seed, kept)
    for _ in range(steps):
        life.step()
    life.settle()
    for watcher in life.watchers:
        if watcher.is_compacted:
            assert life.table.compacted > 0
            continue
        assert watcher.waits
        assert watcher.seen == [event for event in life.log if event.key.startswith(watcher.prefix)]


def test_a_waiting_watch_needs_no_changes_of_other_prefixes() -> None:
    table = LeaseTable(limits=Limits(changes=6))
    watches = Watches[int](table)
    watches.add(1, "a", 0, 10.0, 0.0)
    for _ in range(50):
        write(table, "b")
        assert watches.collect(0.0) == []
    assert table.compacted > 0
    write(table, "a")
    [(_, reply)] = watches.collect(0.0)
    assert [event.revision for event in read_reply(reply).changes] == [51]


def test_a_change_is_reported_at_once() -> None:
    table = LeaseTable()
    watches = Watches[int](table)
    assert (watches.add(1, "a", 0, 10.0, 0.0), watches.collect(0.0), watches.next_at()) == (None, [], 10.0)
    write(table, "b")
    assert watches.collect(0.0) == []
    write(table, "a")
    [(connection, reply)] = watches.collect(0.0)
    assert (connection, [event.key for event in read_reply(reply).changes]) == (1, ["a"])


def test_changes_with_many_watchers_are_collected_for_a_while() -> None:
    table, count = LeaseTable(), 100
    watches = Watches[int](table)

    def watch(since: int, now: float) -> None:
        for n in range(count):
            assert watches.add(n, "a", since, 10.0, now) is None

    watch(0, 0.0)
    write(table, "a")
    assert len(watches.collect(0.0)) == count
    watch(1, 0.0)
    write(table, "a")
    assert watches.collect(0.0) == []
    assert watches.next_at() == pytest.approx(count * EACH)
    write(table, "a")
    replies = watches.collect(count * EACH)
    assert ([event.revision for event in read_reply(replies[0][1]).changes], len(replies)) == ([2, 3], count)
    watch(3, 1.0)
    write(table, "a")
    assert len(watches.collect(1.0)) == count  # the last change is long enough ago


def test_a_prefix_with_many_watchers_does_not_delay_another_prefix() -> None:
    table = LeaseTable()
    watches = Watches[int](table)
    for n in range(1000):
        watches.add(n, "a", 0, 10.0, 0.0)
    write(table, "a")
    assert len(watches.collect(0.0)) == 1000
    watches.add(1, "b", 1, 10.0, 0.0)
    watches.add(2, "a", 1, 10.0, 0.0)
    write(table, "a")
    write(table, "b")
    assert [connection for connection, _ in watches.collect(0.0)] == [1]
    assert [connection for connection, _ in watches.collect(LONGEST_GATHERING)] == [2]


def test_a_prefix_without_watchers_is_forgotten() -> None:
    table = LeaseTable()
    watches = Watches[int](table)
    for n in range(50):
        watches.add(n, f"{n}", 0, 0.1, 0.0)
    assert len(watches.collect(0.2)) == 50
    assert not watches._prefixes
    watches.add(1, "a", 0, 0.1, 1.0)
    write(table, "a")
    assert len(watches.collect(1.0)) == 1
    assert len(watches._prefixes) == 1  # this one holds back the next change
    write(table, "a")
    watches.collect(2.0)
    assert not watches._prefixes


def test_answered_watches_do_not_stay_in_memory() -> None:
    """The heap of deadlines does not grow with watches that ended before theirs."""
    table = LeaseTable()
    watches = Watches[int](table)
    for n in range(5000):
        watches.add(1, "a", table.revision, 3600.0, 0.0)
        write(table, "a")
        assert len(watches.collect(n * 1.0)) == 1
    assert len(watches._timeouts) < 1100


# Requests that do not wait


def ask(table: LeaseTable, *request: Any, now: float = 0.0, **fields: Any) -> Reply:
    return read_reply(do(table, "client", Request(*request, **fields), now))


@pytest.mark.parametrize(
    "request_",
    [
        Request(99),
        Request(requests.GRANT, seconds=0.0),
        Request(requests.GRANT, seconds=float("nan")),
        Request(requests.GRANT, seconds=float("inf")),
        Request(requests.SWAP, "", b""),
        Request(requests.SWAP, "a\0", b""),
        Request(requests.SWAP, "a", bytes((1 << 20) + 1)),
    ],
)
def test_invalid_requests_are_refused(request_: Request) -> None:
    """A client of this package never sends one of them."""
    table = LeaseTable()
    with pytest.raises(InvalidArgument, match="install the same version" if request_.operation == 99 else None):
        do(table, "client", request_, 0.0)
    assert table.revision == 0


def test_each_operation_reports_its_outcome() -> None:
    table = LeaseTable(limits=Limits(keys=1, changes=8))
    lease = ask(table, requests.GRANT, seconds=1.0).revision
    assert ask(table, requests.RENEW, lease=lease).outcome == requests.DONE
    assert ask(table, requests.SWAP, "a", b"", lease=lease).outcome == requests.DONE
    assert ask(table, requests.SWAP, "a", b"").outcome == requests.NOT_DONE
    with pytest.raises(LimitReached):
        ask(table, requests.SWAP, "b", b"")
    table.expire(1.0)
    with pytest.raises(LeaseLost):
        ask(table, requests.RENEW, lease=lease)
    assert ask(table, requests.REVOKE, lease=lease).outcome == requests.DONE
    assert ask(table, requests.LIST) == Reply(requests.DONE, 3)
    watches = Watches[int](table)
    with pytest.raises(Compacted, match="list the keys again"):
        watches.add(1, "a", 9, 1.0, 1.0)
    at_once = watches.add(1, "", 0, float("nan"), 1.0)
    assert at_once is not None
    assert (len(read_reply(at_once).changes), watches.add(1, "", 3, 1.0, 1.0)) == (2, None)
    watches.leave(1)
    assert (watches.collect(9.0), watches.next_at()) == ([], None)
