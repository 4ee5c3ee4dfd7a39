"""Watches of the embedded directory: nothing is left out, however they are gathered, ended and begun anew."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telegrad._core.directory import requests
from telegrad._core.directory.directory import ABSENT, Compacted, Events
from telegrad._core.directory.directory_service import Service
from telegrad._core.directory.lease_table import Limits, Table
from telegrad._core.directory.requests import Request, read_reply, write_request
from telegrad._core.directory.watches import EACH, LONGEST_GATHERING, MOST_WATCHES, Watches
from telegrad.errors import LimitReached, ProtocolViolation

PREFIXES = ["", "a", "a/", "b"]
KEYS = ["a", "a/1", "b", "c"]


def write(table: Table, key: str) -> None:
    found = table.list(key).entries
    table.swap(key, b"", found[0].revision if found and found[0].key == key else ABSENT)


class Watcher:
    """A client that watches a prefix all the time."""

    def __init__(self, connection: int, prefix: str, since: int) -> None:
        self.connection, self.prefix, self.since = connection, prefix, since
        self.number = 0
        self.seen: Events = []
        self.waits = False
        self.is_compacted = False

    def begin(self, watches: Watches, seconds: float, now: float) -> None:
        if self.is_compacted or self.waits:
            return
        self.number += 1
        try:
            reply = watches.add(self.connection, self.number, self.prefix, self.since, seconds, now)
        except Compacted:
            self.is_compacted = True
            return
        self.waits = reply is None
        if reply is not None:
            self.take(reply)

    def take(self, data: bytes) -> None:
        number, reply = read_reply(data)
        assert number == self.number
        self.waits = False
        self.is_compacted = reply.outcome == requests.COMPACTED
        if not self.is_compacted:
            assert reply.outcome == requests.DONE
            assert reply.revision >= self.since
            self.since = reply.revision
            self.seen += reply.changes


class Life:
    """Watchers, and writers, at random."""

    def __init__(self, seed: int, kept: int) -> None:
        self.chance = random.Random(seed)
        self.table, self.now = Table(limits=Limits(changes=kept)), 0.0
        self.watches = Watches(self.table)
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
        """Let all watchers see all."""
        for _ in range(30):
            self.now += 200.0
            self.collect()
            for watcher in self.watchers:
                watcher.begin(self.watches, 100.0, self.now)


@settings(max_examples=300, deadline=None)
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


def test_a_watch_that_waits_needs_no_changes_of_other_prefixes() -> None:
    table = Table(limits=Limits(changes=6))
    watches = Watches(table)
    watches.add(1, 1, "a", 0, 10.0, 0.0)
    for _ in range(50):
        write(table, "b")
        assert watches.collect(0.0) == []
    assert table.compacted > 0
    write(table, "a")
    [(_, reply)] = watches.collect(0.0)
    assert [event.revision for event in read_reply(reply)[1].changes] == [51]


def test_a_change_is_told_at_once() -> None:
    table = Table()
    watches = Watches(table)
    assert watches.add(1, 1, "a", 0, 10.0, 0.0) is None
    assert watches.collect(0.0) == []
    assert watches.next_at() == 10.0
    write(table, "b")
    assert watches.collect(0.0) == []
    write(table, "a")
    [(connection, reply)] = watches.collect(0.0)
    assert connection == 1
    assert [event.key for event in read_reply(reply)[1].changes] == ["a"]


def test_changes_that_many_watch_are_gathered() -> None:
    table, count = Table(), 100
    watches = Watches(table)

    def watch(since: int, now: float) -> None:
        for n in range(count):
            assert watches.add(n, since, "a", since, 10.0, now) is None

    watch(0, 0.0)
    write(table, "a")
    assert len(watches.collect(0.0)) == count
    watch(1, 0.0)
    write(table, "a")
    assert watches.collect(0.0) == []
    assert watches.next_at() == pytest.approx(count * EACH)
    write(table, "a")
    replies = watches.collect(count * EACH)
    assert [event.revision for event in read_reply(replies[0][1])[1].changes] == [2, 3]
    assert len(replies) == count
    watch(3, 1.0)
    write(table, "a")
    assert len(watches.collect(1.0)) == count  # it was quiet for long enough


def test_what_many_watch_does_not_delay_what_one_watches() -> None:
    table = Table()
    watches = Watches(table)
    for n in range(1000):
        watches.add(n, 0, "a", 0, 10.0, 0.0)
    write(table, "a")
    assert len(watches.collect(0.0)) == 1000
    watches.add(1, 1, "b", 1, 10.0, 0.0)
    watches.add(2, 1, "a", 1, 10.0, 0.0)
    write(table, "a")
    write(table, "b")
    assert [connection for connection, _ in watches.collect(0.0)] == [1]
    assert [connection for connection, _ in watches.collect(LONGEST_GATHERING)] == [2]


def test_a_prefix_that_nobody_watches_is_forgotten() -> None:
    table = Table()
    watches = Watches(table)
    for n in range(50):
        watches.add(1, n, f"{n}", 0, 0.1, 0.0)
    assert len(watches.collect(0.2)) == 50
    assert not watches._prefixes
    watches.add(1, 50, "a", 0, 0.1, 1.0)
    write(table, "a")
    assert len(watches.collect(1.0)) == 1
    assert len(watches._prefixes) == 1  # which holds back the next change
    write(table, "a")
    watches.collect(2.0)
    assert not watches._prefixes


def test_what_was_answered_does_not_stay() -> None:
    """The heap of times does not grow with the watches that ended before theirs."""
    table = Table()
    watches = Watches(table)
    for n in range(5000):
        watches.add(1, n, "a", table.revision, 3600.0, 0.0)
        write(table, "a")
        assert len(watches.collect(n * 1.0)) == 1
    assert len(watches._timeouts) < 1100


def test_one_connection_has_a_limit_of_watches() -> None:
    watches = Watches(Table())
    for n in range(MOST_WATCHES):
        watches.add(1, n, "a", 0, 10.0, 0.0)
    with pytest.raises(LimitReached):
        watches.add(1, MOST_WATCHES, "a", 0, 10.0, 0.0)
    watches.add(2, 0, "a", 0, 10.0, 0.0)
    watches.leave(1)
    watches.add(1, 0, "a", 0, 10.0, 0.0)


def test_a_number_is_used_once() -> None:
    watches = Watches(Table())
    watches.add(1, 7, "a", 0, 10.0, 0.0)
    with pytest.raises(LimitReached):
        watches.add(1, 7, "b", 0, 10.0, 0.0)


# The service


def ask(service: Service, request: Request, now: float = 0.0) -> requests.Reply:
    reply = service.answer(1, "client", write_request(3, request), now)
    assert reply is not None
    number, found = read_reply(reply)
    assert number == 3
    return found


def test_requests_that_are_refused() -> None:
    """A client of this package asks for none of them."""
    service = Service(Table())
    for request in (
        Request(99),
        Request(requests.GRANT, seconds=0.0),
        Request(requests.GRANT, seconds=float("nan")),
        Request(requests.GRANT, seconds=float("inf")),
        Request(requests.SWAP, "", b""),
        Request(requests.SWAP, "a\0", b""),
        Request(requests.SWAP, "a", bytes((1 << 20) + 1)),
    ):
        assert ask(service, request).outcome == requests.REFUSED
    assert service.table.revision == 0
    with pytest.raises(ProtocolViolation):
        service.answer(1, "client", b"short", 0.0)


def test_an_operation_of_a_later_version() -> None:
    assert "install one version" in ask(Service(Table()), Request(99)).text


def test_outcomes() -> None:
    service = Service(Table(limits=Limits(keys=1, changes=8)))
    lease = ask(service, Request(requests.GRANT, seconds=1.0)).revision
    assert ask(service, Request(requests.RENEW, lease=lease)).outcome == requests.DONE
    assert ask(service, Request(requests.SWAP, "a", b"", lease=lease)).outcome == requests.DONE
    assert ask(service, Request(requests.SWAP, "a", b"")).outcome == requests.NOT_DONE
    assert ask(service, Request(requests.SWAP, "b", b"")).outcome == requests.FULL
    assert service.next_at() == 1.0
    service.collect(1.0)
    assert ask(service, Request(requests.RENEW, lease=lease)).outcome == requests.LEASE_LOST
    assert ask(service, Request(requests.REVOKE, lease=lease)).outcome == requests.DONE
    assert ask(service, Request(requests.LIST, "")) == requests.Reply(requests.DONE, 3)
    assert ask(service, Request(requests.WATCH, "a", revision=9, seconds=1.0)).outcome == requests.COMPACTED
    assert len(ask(service, Request(requests.WATCH, "", seconds=float("nan"))).changes) == 2
    assert (
        service.answer(1, "client", write_request(4, Request(requests.WATCH, "", revision=3, seconds=1.0)), 1.0) is None
    )
    service.leave(1)
    assert service.collect(9.0) == []
    assert service.next_at() is None
