"""Tests of the state of the embedded directory, compared with the naive model."""

import pathlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from telegrad._core.stores.directory import ABSENT, Compacted, Event, LeaseLost, Swap
from telegrad._core.stores.lease_table import DEFAULT, OVERHEAD, LeaseTable, Limits
from telegrad.errors import LimitReached
from tests.directory.naive import Naive

KEYS = st.sampled_from(["a", "a/b", "b", "ba", "é", "z"])
KEPT = 12  # changes


class Beside(RuleBasedStateMachine):
    """The table, which is reopened now and then, and the model."""

    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.now, self.model = 0.0, Naive()
        self.table = LeaseTable(limits=Limits(changes=KEPT))

    @rule(target=leases, ttl=st.sampled_from([1.0, 2.0, 5.0]))
    def grant(self, ttl: float) -> int:
        lease = self.table.grant(ttl, self.now)
        assert lease == self.model.grant(ttl, self.now)
        return lease

    @rule(lease=leases)
    def renew(self, lease: int) -> None:
        if self.model.renew(lease, self.now):
            self.table.renew(lease, self.now)
        else:
            with pytest.raises(LeaseLost):
                self.table.renew(lease, self.now)

    @rule(lease=leases)
    def revoke(self, lease: int) -> None:
        self.table.revoke(lease)
        self.model.revoke(lease)

    @rule(seconds=st.sampled_from([0.5, 1.0, 4.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.table.expire(self.now)
        self.model.expire(self.now)

    @rule(seconds=st.sampled_from([1.0, 10.0]))
    def stop(self, seconds: float) -> None:
        """Stop the server for a while."""
        self.now += seconds
        self.table.extend_leases(seconds)
        self.model.postpone(seconds)

    @rule(
        key=KEYS,
        value=st.none() | st.binary(max_size=3),
        back=st.sampled_from([0, 0, 0, 0, 1]),
        lease=st.none() | leases,
    )
    def swap(self, key: str, value: bytes | None, back: int, lease: int | None) -> None:
        found = self.model.entries.get(key)
        expected = (found.revision if found else ABSENT) - back
        wanted = self.model.swap(key, value, expected, lease or 0)
        if wanted is None:
            with pytest.raises(LeaseLost):
                self.table.swap(key, value, expected, lease or 0)
        else:
            assert self.table.swap(key, value, expected, lease or 0) == wanted

    @rule()
    def start_again(self) -> None:
        """Reload the table; all leases get their whole ttl."""
        self.table.file.commit(self.table.revision)
        self.table.load(self.now)
        for lease in self.model.leases:
            self.model.renew(lease, self.now)

    @rule(
        back=st.integers(0, 2 * KEPT),
        prefix=st.sampled_from(["", "a", "b", "é"]),
        most=st.sampled_from([0, 500, 1 << 20]),
    )
    def look_back(self, back: int, prefix: str, most: int) -> None:
        """Compare all changes since a revision, in as many answers as needed."""
        since = max(0, self.model.revision - back)
        wanted = self.model.changes(prefix, since)
        if since < self.table.compacted:
            with pytest.raises(Compacted):
                self.table.changes(prefix, since, most)
            return
        found: list[Event] = []
        while since < self.table.revision:
            since, events = self.table.changes(prefix, since, most)
            assert len(found) == 0 or len(events) == 0 or events[0].revision > found[-1].revision
            found += events
        assert (found, self.table.changes(prefix, since, most)) == (wanted, (since, []))

    @invariant()
    def agrees(self) -> None:
        assert self.table.revision == self.model.revision
        for prefix in ("", "a", "b", "é", "nothing"):
            assert self.table.list(prefix) == self.model.list(prefix)

    @invariant()
    def keeps_little(self) -> None:
        assert len(self.table.changes("", self.table.compacted)[1]) <= KEPT + len(self.model.entries)
        if len(self.model.events) <= KEPT:
            assert self.table.compacted == 0

    @invariant()
    def knows_when_a_lease_ends(self) -> None:
        ends = [held.ends for held in self.model.leases.values()]
        next_ = self.table.next_end()
        assert not ends or (next_ is not None and next_ <= min(ends))

    @invariant()
    def counts_what_is_used(self) -> None:
        entries = self.model.entries.values()
        assert (len(self.table._sorted), len(self.table.leases)) == (len(entries), len(self.model.leases))
        assert sum(self.table._clients.values()) == len(entries)
        assert self.table._bytes == sum(OVERHEAD + len(entry.key.encode()) + len(entry.value) for entry in entries)


TestBeside = Beside.TestCase
TestBeside.settings = settings(max_examples=30, stateful_step_count=60, deadline=None)


def test_changed_keys_are_listed_since_each_revision() -> None:
    table = LeaseTable()
    for n, key in enumerate("abca", 1):
        table.swap(key, b"", 1 if n == 4 else ABSENT)
    assert [table.changed(since) for since in range(5)] == [{*"abc"}, {*"abc"}, {*"ac"}, {"a"}, set()]


def test_keys_with_unusual_characters_are_listed_under_their_prefix() -> None:
    table = LeaseTable()
    keys = sorted(["a", "a\U0010ffff", "a\U0010ffffb", "aé", "b"])
    for key in keys:
        table.swap(key, b"")
    assert [entry.key for entry in table.list("a").entries] == keys[:-1]
    assert [entry.key for entry in table.list("a\U0010ffff").entries] == keys[2:4]


def test_the_changes_of_one_revision_are_forgotten_together() -> None:
    table = LeaseTable(limits=Limits(changes=8))
    lease = table.grant(1.0, 0.0)
    for n in range(8):
        table.swap(f"{n}", b"", lease=lease)
    table.revoke(lease)
    ended = table.revision
    assert [event.revision for event in table.changes("", table.compacted)[1]] == [ended] * 8
    for n in range(8):
        table.swap(f"{n}", b"")
    assert table.compacted >= ended
    assert len(table.changes("", table.compacted)[1]) <= 8


def test_large_changes_are_forgotten_sooner() -> None:
    table = LeaseTable(limits=Limits(change_bytes=10_000))
    for _ in range(20):
        table.swap("a", bytes(1000), table.revision)
    assert 5 <= len(table.changes("", table.compacted)[1]) <= 10


def test_a_client_cannot_fill_the_table() -> None:
    table = LeaseTable(limits=Limits(keys=4, keys_of_one=2))
    for key in "ab":
        table.swap(key, b"", client="one")
    with pytest.raises(LimitReached, match="this client has 2 keys"):
        table.swap("c", b"", client="one")
    assert table.revision == 2
    assert table.swap("c", b"", client="two").done
    assert table.swap("a", b"", 1, client="one").done  # no more keys than before
    assert table.swap("b", b"", 2, client="two").done  # the key counts for the second client from now on
    assert table.swap("d", b"", client="one").done
    assert table.swap("d", None, table.revision, client="one") == Swap(True, None)
    assert table.swap("e", b"", client="one").done
    with pytest.raises(LimitReached, match="all clients together have 4 keys"):
        table.swap("r", b"", client="three")
    assert table.swap("a", b"", table.list("a").entries[0].revision, client="three").done  # no more keys than before


def test_values_and_leases_have_limits() -> None:
    table = LeaseTable(limits=Limits(bytes=2 * OVERHEAD + 10, leases=1))
    table.swap("a", bytes(9))
    with pytest.raises(LimitReached, match="bytes"):
        table.swap("b", b"")
    lease = table.grant(1.0, 0.0)
    with pytest.raises(LimitReached, match="leases"):
        table.grant(1.0, 0.0)
    table.revoke(lease)
    table.swap("a", b"", 1)
    table.swap("b", b"")
    table.grant(1.0, 0.0)


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0])))
def test_renewals_never_shorten_a_lease(times: list[float]) -> None:
    """The clock may go in any direction."""
    table = LeaseTable()
    lease, latest = table.grant(2.0, 0.0), 0.0
    for now in times:
        latest = max(latest, now)
        table.renew(lease, now)
        table.expire(latest + 1.9)
    table.expire(latest + 2.0)
    with pytest.raises(LeaseLost):
        table.renew(lease, latest)


def test_a_client_may_have_as_many_keys_as_the_page_says() -> None:
    page = (pathlib.Path(__file__).parents[2] / "docs/directory.md").read_text()
    assert f"may have {DEFAULT.keys_of_one:,} keys" in page
