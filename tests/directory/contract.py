"""The tests of each engine: `class TestEtcd(Contract, Programs, Faults)` with a fixture `engine`.

The fixture may have the scope of a class: each test writes under a prefix of its own. Nothing in here knows an engine.
"""

import itertools
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from telegrad._core.stores.directory import (
    ABSENT,
    KEY_BYTES,
    LONGEST_TTL,
    SHORTEST_TTL,
    VALUE_BYTES,
    Compacted,
    Directory,
    DirectoryLost,
    Event,
    LeaseLost,
    Listing,
    Swap,
)
from telegrad.errors import InvalidArgument
from tests.cluster import takes_less_than
from tests.directory.harness import LONG, PATIENCE, SOON, Engine, Fixtures, Make, is_gone, read, wait_for, written


class Contract(Fixtures):
    """Tests of a server that runs."""

    # Compare-and-set

    def test_revisions_grow_over_all_keys_and_clients(self, make: Make, place: str) -> None:
        clients = [make(), make()]
        found = [written(clients[n % 2].swap(f"{place}{n % 7}/{n}", b"")).revision for n in range(20)]
        assert sorted(set(found)) == found
        assert clients[0].list("nowhere").revision >= found[-1]

    # Leases

    def test_a_lease_that_is_not_renewed_ends(self, client: Directory, make: Make, place: str, engine: Engine) -> None:
        since, lease = client.list(place).revision, client.grant(engine.ttl)
        assert lease.ttl >= engine.ttl
        assert lease.ends <= time.monotonic() + lease.ttl
        entry = written(client.swap(f"{place}a", b"1", lease=lease))
        assert entry.lease == lease.id
        events = wait_for(make(), place, since, is_gone, lease.ttl + engine.slack + SOON)
        assert lease.ends <= time.monotonic() <= lease.ends + engine.slack + SOON
        assert [event.entry for event in events] == [entry, None]
        with pytest.raises(LeaseLost):
            client.renew(lease)
        with pytest.raises(LeaseLost):
            client.swap(f"{place}a", b"1", lease=lease)
        client.revoke(lease)
        assert written(client.swap(f"{place}a", b"1")).created > entry.created

    def test_renewals_keep_a_lease(self, client: Directory, place: str, engine: Engine) -> None:
        lease = client.grant(max(2.0, engine.ttl))  # a busy machine may pause
        entry = written(client.swap(f"{place}a", b"1", lease=lease))
        ends = time.monotonic() + 2 * lease.ttl + engine.slack
        while time.monotonic() < ends:
            assert client.watch(place, entry.revision, lease.ttl / 4)[1] == []
            renewed = client.renew(lease)
            assert renewed.ends > lease.ends
            assert (renewed.id, renewed.ttl) == (lease.id, lease.ttl)
            lease = renewed
        assert read(client, f"{place}a") == entry

    def test_a_lease_that_is_revoked_takes_its_keys_with_it(self, client: Directory, make: Make, place: str) -> None:
        since = client.list(place).revision
        lease, other = client.grant(LONG), client.grant(LONG)
        assert lease.id != other.id
        for name in "abc":
            client.swap(place + name, b"", lease=lease)
        kept = written(client.swap(f"{place}d", b"", lease=other))
        make().revoke(lease)
        assert client.list(place).entries == (kept,)
        events = wait_for(client, place, since, is_gone, SOON)
        if len(events) < 7:  # an engine may delete at several revisions
            events += wait_for(client, place, events[-1].revision, lambda event: event.key == f"{place}c", SOON)
        assert {event.key for event in events if event.entry is None} == {f"{place}a", f"{place}b", f"{place}c"}
        with pytest.raises(LeaseLost):
            client.renew(lease)
        client.revoke(lease)
        client.renew(other)

    def test_a_lease_outlives_its_client(self, client: Directory, make: Make, place: str) -> None:
        leaving = make()
        lease = leaving.grant(LONG)
        entry = written(leaving.swap(f"{place}a", b"1", lease=lease))
        leaving.close()
        assert (read(client, f"{place}a"), client.renew(lease).id) == (entry, lease.id)

    def test_a_closed_client_is_lost(self, make: Make, place: str) -> None:
        closed = make()
        closed.close()
        closed.close()
        for act in (
            lambda: closed.grant(LONG),
            lambda: closed.swap(place, b""),
            lambda: closed.list(place),
            lambda: closed.watch(place, 0, LONG),
        ):
            with takes_less_than(SOON), pytest.raises(DirectoryLost):
                act()

    def test_the_limits_of_a_ttl(self, client: Directory) -> None:
        for ttl in (SHORTEST_TTL, LONGEST_TTL):
            client.revoke(client.grant(ttl))
        for ttl in (0.0, -1.0, SHORTEST_TTL / 2, LONGEST_TTL + 1, float("inf"), float("nan")):
            with pytest.raises(InvalidArgument, match="ttl"):
                client.grant(ttl)

    # Keys and values

    def test_keys_may_have_odd_characters(self, client: Directory, place: str) -> None:
        longest = "x" * (KEY_BYTES - len(place))
        names = sorted([*'*?[]{}\\"%~ \n\r\t\x7f', "ä", "🙂", "a b", "a/../b", "%s", "[a-z]", ".", "::", longest])
        entries = [written(client.swap(place + name, name.encode())) for name in names]
        assert client.list(place).entries == tuple(entries)
        for name, entry in zip(names, entries, strict=True):
            assert client.list(place + name).entries[0] == entry
            assert all(each.key.startswith(place + name) for each in client.list(place + name).entries)

    def test_invalid_keys_and_long_values_are_refused(self, client: Directory, place: str) -> None:
        for key in ("", f"{place}\0", f"{place}\ud800", "x" * (KEY_BYTES + 1), place + "ä" * (KEY_BYTES // 2)):
            with pytest.raises(InvalidArgument):
                client.swap(key, b"1")
        with pytest.raises(InvalidArgument, match="store its address"):
            client.swap(f"{place}a", bytes(VALUE_BYTES + 1))
        assert client.list(place).entries == ()

    @pytest.mark.parametrize("value", [b"", b"\0", bytes(range(256)), b"\r\n\0\xff" * 1000], ids=len)
    def test_values_are_any_bytes(self, client: Directory, place: str, value: bytes) -> None:
        entry = written(client.swap(f"{place}a", value))
        assert entry.value == value
        assert read(client, f"{place}a") == entry
        assert client.swap(f"{place}a", b"other") == Swap(False, entry)

    def test_the_largest_value_is_kept(self, client: Directory, place: str) -> None:
        value = random.Random(1).randbytes(VALUE_BYTES)
        since = client.list(place).revision
        entry = written(client.swap(f"{place}a", value))
        assert client.list(place).entries == (entry,)
        assert client.watch(place, since, SOON)[1] == [Event(entry.revision, f"{place}a", entry)]

    # Lists

    def test_a_list_may_have_512_entries(self, client: Directory, place: str) -> None:
        entries = [written(client.swap(f"{place}{n:03}", b"x" * 200)) for n in range(512)]
        assert client.list(place) == Listing(entries[-1].revision, tuple(entries))

    def test_a_client_sees_what_other_clients_have_written(self, make: Make, place: str) -> None:
        writer, reader = make(), make()
        for n in range(30):
            entry = written(writer.swap(f"{place}{n}", b""))
            listing = reader.list(f"{place}{n}")
            assert listing.entries == (entry,)
            assert listing.revision >= entry.revision

    def test_a_list_shows_the_state_of_one_revision(self, make: Make, place: str) -> None:
        """The writer counts in `a` first, then in `b`."""
        writer, reader = make(), make()
        stop = threading.Event()

        def count() -> None:
            revisions = {"a": ABSENT, "b": ABSENT}
            for n in itertools.count():
                for name in revisions:
                    if stop.is_set():
                        return
                    revisions[name] = written(writer.swap(place + name, b"%d" % n, revisions[name])).revision

        with ThreadPoolExecutor(1) as pool:
            counting = pool.submit(count)
            try:
                for _ in range(100):
                    listing = reader.list(place)
                    values = [int(entry.value) for entry in listing.entries]
                    assert len(values) < 2 or values[0] - values[1] in (0, 1)
                    assert all(entry.revision <= listing.revision for entry in listing.entries)
            finally:
                stop.set()
            counting.result(PATIENCE)

    # Watches

    def test_a_watch_returns_the_changes_since_a_revision(self, client: Directory, place: str) -> None:
        client.swap(f"{place}a", b"0")
        since = client.list(place).revision
        other = written(client.swap("elsewhere" + place, b""))
        first = written(client.swap(f"{place}b", b"1"))
        second = written(client.swap(f"{place}b", b"2", first.revision))
        client.swap(f"{place}b", None, second.revision)
        events = wait_for(client, place, since, is_gone, SOON)
        assert events[:2] == [Event(first.revision, f"{place}b", first), Event(second.revision, f"{place}b", second)]
        assert events[2:] == [Event(events[2].revision, f"{place}b", None)]
        assert events[2].revision > second.revision
        assert wait_for(client, "", other.revision - 1, lambda event: True, SOON)[0].entry == other
        assert [event.entry for event in wait_for(client, place, first.revision, is_gone, SOON)] == [second, None]

    def test_a_watch_waits_for_a_change(self, make: Make, place: str) -> None:
        watcher, writer = make(), make()
        since = watcher.list(place).revision
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(watcher.watch, place, since, PATIENCE)
            assert watcher.watch(place, since, 0.2)[1] == []
            assert not waiting.done()
            entry = written(writer.swap(f"{place}a", b""))
            next_, events = waiting.result(SOON)
        assert (next_ >= entry.revision, events) == (True, [Event(entry.revision, f"{place}a", entry)])
        assert watcher.watch(place, next_, 0.1)[1] == []

    @pytest.mark.parametrize("timeout", [0.0, 0.3])
    def test_a_watch_ends_at_its_timeout(self, client: Directory, place: str, timeout: float) -> None:
        since = client.list(place).revision
        started = time.monotonic()
        next_, events = client.watch(place, since, timeout)
        assert timeout - 0.02 <= time.monotonic() - started < timeout + SOON
        assert (events, next_ >= since) == ([], True)

    def test_other_calls_of_a_client_go_on_while_it_watches(self, client: Directory, place: str) -> None:
        since = client.list(place).revision
        with ThreadPoolExecutor(3) as pool:
            waiting = [pool.submit(client.watch, f"{place}{n}", since, PATIENCE) for n in range(3)]
            with takes_less_than(3 * SOON):
                for n in range(3):
                    assert written(client.swap(f"{place}{n}", b"")).key == waiting[n].result(SOON)[1][0].key

    def test_a_watch_without_a_limit_returns_a_change(self, client: Directory, make: Make, place: str) -> None:
        since = client.list(place).revision
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(client.watch, place, since, float("inf"))
            entry = written(make().swap(f"{place}a", b""))
            assert waiting.result(PATIENCE)[1] == [Event(entry.revision, entry.key, entry)]

    def test_a_close_ends_a_watch(self, make: Make, place: str) -> None:
        closed = make()
        since = closed.list(place).revision
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(closed.watch, place, since, PATIENCE)
            assert closed.watch(place, since, 0.1)[1] == []
            closed.close()
            with pytest.raises(DirectoryLost):
                waiting.result(2 * SOON)

    def test_a_watch_from_a_forgotten_revision_is_an_error(self, client: Directory, place: str, engine: Engine) -> None:
        since = client.list(place).revision
        for n in range(3):
            client.swap(f"{place}{n}", b"")
        engine.forget()
        with pytest.raises(Compacted):
            client.watch(place, since, PATIENCE)
        listing = client.list(place)
        assert len(listing.entries) == 3
        entry = written(client.swap(f"{place}a", b""))
        assert client.watch(place, listing.revision, SOON)[1] == [Event(entry.revision, entry.key, entry)]

    # Several at once

    def test_simultaneous_claims_have_a_single_winner(self, make: Make, place: str) -> None:
        clients = [make() for _ in range(6)]
        barrier = threading.Barrier(len(clients))

        def claim(n: int) -> list[Swap]:
            found = []
            for turn in range(10):
                barrier.wait(PATIENCE)
                found.append(clients[n].swap(f"{place}{turn}", b"%d" % n))
            return found

        with ThreadPoolExecutor(len(clients)) as pool:
            claims = list(pool.map(claim, range(len(clients))))
        for swaps in zip(*claims, strict=True):
            winners = [n for n, swap in enumerate(swaps) if swap.done]
            assert len(winners) == 1
            assert {swap.entry for swap in swaps} == {swaps[winners[0]].entry}
            assert swaps[winners[0]].entry.value == b"%d" % winners[0]

    def test_the_next_owner_comes_after_the_end_of_the_lease(self, make: Make, place: str, engine: Engine) -> None:
        """Owners do not renew here: the client that waits gets the claim when they have stopped, and a higher token."""
        here, there = make(), make()
        lease = here.grant(engine.ttl)
        token = written(here.swap(f"{place}a", b"", lease=lease)).created
        for _ in range(2):
            here, there, former = there, here, lease
            swap = here.swap(f"{place}a", b"")
            assert not swap.done
            wait_for(here, place, swap.entry.revision, is_gone, former.ttl + engine.slack + SOON)
            lease = here.grant(engine.ttl)
            entry = written(here.swap(f"{place}a", b"", lease=lease))
            assert time.monotonic() >= former.ends
            assert entry.created > token
            token = entry.created

    def test_threads_share_a_client(self, client: Directory, place: str) -> None:
        def count(_: int) -> None:
            for _ in range(10):
                swap = Swap(False, read(client, f"{place}a"))
                while not swap.done:
                    value, expected = (int(swap.entry.value), swap.entry.revision) if swap.entry else (0, ABSENT)
                    swap = client.swap(f"{place}a", b"%d" % (value + 1), expected)

        with ThreadPoolExecutor(6) as pool:
            list(pool.map(count, range(6)))
        assert read(client, f"{place}a").value == b"60"
