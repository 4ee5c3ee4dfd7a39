"""Tests of a client of three members of etcd, of which some fail."""

import contextlib
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from telegrad._core.stores.directory import DirectoryLost, Event, LeaseLost
from telegrad.directories import etcd
from telegrad.directories.etcd import SILENCE, EtcdDirectory
from telegrad.directories.etcd_messages import ends_live_leases
from tests.cluster import takes_less_than, wait_until
from tests.directory.contract import Contract
from tests.directory.engines import Middleman
from tests.directory.etcd_servers import Cluster, Node, needs_etcd
from tests.directory.faults import Faults, count, until_answered
from tests.directory.harness import LONG, Fixtures, Make, check_acts, contend, is_gone, read, wait_for, written
from tests.directory.programs import Programs, Replica

ELECTION = 5.0  # seconds; etcd's own timeout is 1 to 2
PATIENCE = 12.0


class Three(Fixtures):
    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
        cluster = Cluster(tmp_path_factory.mktemp("etcd"), 3)
        cluster.settle()
        yield cluster
        cluster.close()


@needs_etcd
@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:etcd 3:telegrad.errors.TelegradWarning")
class TestThree(Contract, Programs, Faults, Three):
    """The tests of the contract with three members, which are killed and stopped together."""


@needs_etcd
@pytest.mark.filterwarnings("ignore:etcd 3:telegrad.errors.TelegradWarning")
class TestSomeFail(Three):
    @pytest.fixture(autouse=True)
    def _mended(self, engine: Cluster) -> Iterator[None]:
        yield
        for each in engine.nodes:
            if each.process:
                each.resume()
        engine.start()
        engine.settle()

    def pinned(self, engine: Cluster, first: Node, others: bool = True, patience: float = PATIENCE) -> EtcdDirectory:
        """Return a client that asks `first` until that fails, and then the others."""
        rest = [each for each in engine.nodes if each is not first] if others else []
        client = etcd.connect(f"{engine.address([first, *rest])}/tests/group", patience)
        client._client.sessions.current = 0
        return client

    @pytest.mark.parametrize("asked", ["leader", "follower"])
    def test_clients_go_on_after_the_leader_is_killed(self, engine: Cluster, place: str, asked: str) -> None:
        leader = engine.leader()
        first = leader if asked == "leader" else followers(engine, leader)[0]
        with contextlib.closing(self.pinned(engine, first)) as client, ThreadPoolExecutor(1) as pool:
            lease = client.grant(LONG)
            entry = written(client.swap(f"{place}a", b"1", lease=lease))
            watching = pool.submit(client.watch, place, entry.revision, LONG)
            assert client.watch(f"{place}b", entry.revision, 0.1)[1] == []
            leader.kill()
            with takes_less_than(ELECTION):
                assert client.list(place).entries == (entry,)
                client.renew(lease)
                entry = written(client.swap(f"{place}a", b"2", entry.revision, lease))
                assert watching.result(ELECTION)[1] == [Event(entry.revision, f"{place}a", entry)]

    @pytest.mark.nightly
    def test_a_renewed_lease_outlives_its_leader(self, engine: Cluster, make: Make, place: str) -> None:
        client = make()
        lease = client.grant(6)
        entry = written(client.swap(f"{place}a", b"", lease=lease))
        engine.leader().kill()
        ends = time.monotonic() + 10
        while time.monotonic() < ends:
            assert time.monotonic() < lease.ends, "the lease could not be renewed in time"
            lease = client.renew(lease)
            assert client.watch(place, entry.revision, 0.5)[1] == []
        assert read(client, f"{place}a") == entry

    @pytest.mark.nightly
    def test_a_lease_without_renewals_ends_without_its_leader(self, engine: Cluster, make: Make, place: str) -> None:
        client = make()
        lease = client.grant(2)
        entry = written(client.swap(f"{place}a", b"", lease=lease))
        engine.leader().kill()
        events = wait_for(client, place, entry.revision, is_gone, lease.ttl + 2 * ELECTION)
        assert events == [Event(events[0].revision, f"{place}a", None)]
        assert time.monotonic() >= lease.ends

    @pytest.mark.nightly
    def test_clients_leave_a_stopped_follower(self, engine: Cluster, place: str) -> None:
        """Reads go to the next endpoint. A write that was sent to it has an unknown outcome; the next write goes on."""
        first = followers(engine, engine.leader())[0]
        with contextlib.closing(self.pinned(engine, first)) as client:
            entry = written(client.swap(f"{place}a", b"1"))
            first.pause()
            assert client.list(place).entries == (entry,)
            assert client._client.sessions.current != 0
            second = written(client.swap(f"{place}a", b"2", entry.revision))
            client._client.sessions.current = 0
            with takes_less_than(PATIENCE), pytest.raises(DirectoryLost, match="read the key again"):
                client.swap(f"{place}a", b"3", second.revision)
            assert read(client, f"{place}a") == second
            third = written(client.swap(f"{place}a", b"4", second.revision))
            first.resume()
            assert read(client, f"{place}a") == third

    def test_a_watch_leaves_a_stopped_follower(
        self, engine: Cluster, place: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(etcd, "SILENCE", 0.5)
        leader = engine.leader()
        first = followers(engine, leader)[0]
        with (
            contextlib.closing(self.pinned(engine, first)) as client,
            contextlib.closing(self.pinned(engine, leader)) as writer,
            ThreadPoolExecutor(1) as pool,
        ):
            since = client.list(place).revision
            watching = pool.submit(client.watch, place, since, LONG)
            assert client.watch(f"{place}b", since, 0.1)[1] == []
            first.pause()
            entries = [written(writer.swap(f"{place}{n}", b"")) for n in range(3)]
            events = watching.result(SILENCE + 2 + ELECTION)[1]  # the silence, the time of an answer, and a new stream
            while len(events) < len(entries):
                events += client.watch(place, events[-1].revision, LONG)[1]
            assert [event.entry for event in events] == entries

    @pytest.mark.nightly
    def test_a_watch_leaves_a_member_without_a_majority(self, engine: Cluster, place: str) -> None:
        """The remaining member answers, and its streams are open and silent, but it has no majority."""
        leader = engine.leader()
        first, other = followers(engine, leader)
        with contextlib.closing(self.pinned(engine, first, others=False, patience=3.0)) as client:
            since = client.list(place).revision
            with ThreadPoolExecutor(1) as pool:
                watching = pool.submit(client.watch, place, since, LONG)
                assert client.watch(f"{place}b", since, 0.1)[1] == []
                for each in (leader, other):
                    each.pause()
                with takes_less_than(SILENCE + 3 * 3.0):
                    assert isinstance(watching.exception(LONG), DirectoryLost)

    @pytest.mark.nightly
    def test_a_watch_behind_a_load_balancer_leaves_a_stopped_member(self, engine: Cluster, place: str) -> None:
        """Each connection to the single address leads to another member."""
        leader = engine.leader()
        one, other = followers(engine, leader)
        with (
            contextlib.closing(Middleman(*(each.place for each in (one, other, leader)))) as balancer,
            contextlib.closing(self.pinned(engine, leader)) as writer,
            contextlib.closing(etcd.connect(f"etcd://127.0.0.1:{balancer.address[1]}/tests/group", PATIENCE)) as client,
            ThreadPoolExecutor(1) as pool,
        ):
            watching = pool.submit(client.watch, place, writer.list(place).revision, LONG)
            wait_until(lambda: one.watchers() == 1, LONG)
            one.pause()
            entry = written(writer.swap(f"{place}a", b""))
            assert [event.entry for event in watching.result(SILENCE + PATIENCE)[1]] == [entry]

    @pytest.mark.nightly
    @pytest.mark.parametrize("how", ["killed", "stopped"])
    def test_each_write_is_done_once_while_leaders_fail(self, engine: Cluster, place: str, how: str) -> None:
        clients, stop = [engine.client(4.0) for _ in range(3)], threading.Event()
        marker, replica = engine.client(PATIENCE), Replica(engine.client(PATIENCE), place)
        with ThreadPoolExecutor(4) as pool:
            try:
                counting = [pool.submit(count, client, f"{place}{n}", stop) for n, client in enumerate(clients)]
                for turn in range(4):
                    following = pool.submit(replica.follow, f"{place}turn{turn}")
                    leader = engine.leader()
                    leader.kill() if how == "killed" else leader.pause()
                    engine.leader(followers(engine, leader))
                    engine.start() if how == "killed" else leader.resume()
                    until_answered(lambda turn=turn: marker.swap(f"{place}turn{turn}", b""))  # type: ignore[misc]
                    following.result(LONG)
            finally:
                stop.set()
            numbers = [each.result(LONG) for each in counting]
        until_answered(lambda: marker.swap(f"{place}end", b""))
        replica.follow(f"{place}end")
        for n, number in enumerate(numbers):
            seen = [int(entry.value) for entry in replica.written if entry.key == f"{place}{n}"]
            assert seen == list(range(1, number + 1))
        for each in (*clients, marker, replica.client):
            each.close()

    @pytest.mark.nightly
    @pytest.mark.timeout(300)
    @pytest.mark.parametrize("how", ["killed", "stopped"])
    def test_owners_do_not_act_at_once_while_leaders_fail(self, engine: Cluster, place: str, how: str) -> None:
        version = str(engine.nodes[0].post("/v3/maintenance/status", {})["version"])
        if how == "stopped" and ends_live_leases(version):
            pytest.skip(f"etcd {version} ends live leases when a leader goes on: needs 3.4.31, 3.5.13 or newer")
        clients, until, chance = [engine.client(4.0) for _ in range(3)], threading.Event(), random.Random(1)
        with ThreadPoolExecutor(3) as pool:
            owning = [pool.submit(contend, each, f"{place}a", 2.0, n, until) for n, each in enumerate(clients)]
            try:
                for _ in range(5):
                    until.wait(6.0)  # time to work: each new leader counts all leases anew
                    leader = engine.leader()
                    leader.kill() if how == "killed" else leader.pause()
                    engine.leader(followers(engine, leader))
                    until.wait(chance.uniform(0.0, 4.0))  # time of an outage
                    engine.start() if how == "killed" else leader.resume()
                    engine.settle()
            finally:
                until.set()
            acts = [act for each in owning for act in each.result(LONG)]
        assert len(acts) > 3
        check_acts(acts)
        for each in clients:
            each.close()

    @pytest.mark.nightly
    @pytest.mark.parametrize("how", ["killed", "stopped"])
    def test_clients_wait_while_the_majority_is_lost(self, engine: Cluster, place: str, how: str) -> None:
        patient, client = engine.client(30.0), engine.client(2.0)
        lease = client.grant(LONG)
        entry = written(client.swap(f"{place}a", b"1", lease=lease))
        lost = engine.nodes[:2]
        for each in lost:
            each.kill() if how == "killed" else each.pause()
        acts = [
            lambda: client.list(place),
            lambda: client.grant(LONG),
            lambda: client.renew(lease),
            lambda: client.swap(f"{place}a", b"2", entry.revision),
            lambda: client.watch(place, entry.revision, 4.0),
        ]
        with ThreadPoolExecutor(len(acts) + 1) as pool:
            waiting = pool.submit(patient.list, place)
            with takes_less_than(6.0):
                errors = [each.exception(LONG) for each in [pool.submit(act) for act in acts]]
            assert [type(error) for error in errors] == [DirectoryLost] * len(acts)
            if how == "killed":
                engine.start()
            else:
                for each in lost:
                    each.resume()
            listing = waiting.result(LONG)
        assert listing.entries[0].created == entry.created
        assert listing.entries[0].value in (b"1", b"2")  # the outcome of the write is unknown
        assert patient.renew(lease).id == lease.id
        client.close()
        patient.close()

    def test_a_former_leader_that_goes_on_renews_no_ended_lease(self, engine: Cluster, place: str) -> None:
        leader = engine.leader()
        rest = followers(engine, leader)
        with (
            contextlib.closing(self.pinned(engine, leader, others=False)) as stale,
            contextlib.closing(self.pinned(engine, rest[0])) as client,
            ThreadPoolExecutor(1) as pool,
        ):
            lease = client.grant(LONG)
            stale.renew(lease)
            leader.pause()
            assert engine.leader(rest) is not leader
            client.revoke(lease)
            renewing = pool.submit(stale.renew, lease)
            with pytest.raises(TimeoutError):  # the request lies in the socket
                renewing.result(0.3)
            leader.resume()
            assert isinstance(renewing.exception(LONG), LeaseLost)


def followers(engine: Cluster, leader: Node) -> list[Node]:
    return [each for each in engine.nodes if each is not leader]
