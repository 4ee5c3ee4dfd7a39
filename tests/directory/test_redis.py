"""Tests of the directory on a real Redis server, which is started, killed and stopped."""

import contextlib
import pathlib
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from telegrad._core.stores.directory import (
    ABSENT,
    Compacted,
    DirectoryLost,
    DirectoryRefused,
    DirectoryReset,
    Event,
    LeaseLost,
    Swap,
)
from telegrad.directories import on_redis
from telegrad.directories.on_redis import RedisDirectory, RedisSession
from telegrad.errors import StoreUntrusted
from tests.cluster import takes_less_than, wait_until
from tests.directory.harness import LONG, SOON, is_gone, read, wait_for, written
from tests.directory.programs import Replica
from tests.directory.redis_server import NEEDED, Server, running

pytestmark = NEEDED


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Yield a server for tests that leave it as it was; each has a group of its own."""
    with running(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def server(tmp_path: pathlib.Path) -> Iterator[Server]:
    with running(tmp_path) as server:
        yield server


def clients_of(server: Server, group: str, number: int) -> list[RedisDirectory]:
    return [RedisDirectory(server.url, group) for _ in range(number)]


# Groups


def test_groups_see_nothing_of_each_other(shared: Server) -> None:
    one, other = RedisDirectory(shared.url, "a"), RedisDirectory(shared.url, "a:history")
    lease = one.grant(LONG)
    entry = written(one.swap("key", b"1", lease=lease))
    assert (other.list(""), other.watch("", ABSENT, 0.0)) == ((ABSENT, ()), (ABSENT, []))
    with pytest.raises(LeaseLost):
        other.renew(lease)
    other.revoke(lease)
    assert (written(other.swap("key", b"2")).revision, one.list("").entries) == (1, (entry,))


def test_groups_in_two_databases_see_nothing_of_each_other(shared: Server) -> None:
    one, other = RedisDirectory(f"{shared.url}/0", "bases"), RedisDirectory(f"{shared.url}/3", "bases")
    one.swap("key", b"1")
    assert other.list("").entries == ()


# Changes and leases


def test_all_watches_see_each_deletion_once_and_in_one_order(shared: Server) -> None:
    """All watches wait when the leases end."""
    clients = clients_of(shared, "many", 6)
    replicas = [Replica(client, "") for client in clients]
    leases = [clients[0].grant(0.5) for _ in range(5)]
    for n in range(30):
        clients[0].swap(f"{n}", b"", lease=leases[n % 5])
    with ThreadPoolExecutor(len(clients)) as pool:
        seen = list(pool.map(lambda each: wait_for_all(each.client, each.since, 60), replicas))
    assert all(events == seen[0] for events in seen)
    assert [event.revision for event in seen[0]] == list(range(1, 61))
    assert sorted(event.key for event in seen[0] if is_gone(event)) == sorted(map(str, range(30)))


def wait_for_all(client: RedisDirectory, since: int, number: int) -> list[Event]:
    return wait_for(client, "", since, lambda event: event.revision == since + number, 20)


def test_a_new_entry_of_a_short_lease_wakes_a_watch_that_sleeps_longer(shared: Server) -> None:
    watcher, writer = clients_of(shared, "short", 2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait_for, watcher, "mine/", ABSENT, is_gone, 10.0)
        watcher.watch("", ABSENT, 0.1)
        lease = writer.grant(0.1)
        writer.swap("mine/a", b"", lease=lease)
        waiting.result(10)
    assert time.monotonic() - lease.ends < 0.5  # less than the second after which each watch asks anyway


def test_revoking_a_lease_leaves_leases_whose_number_begins_alike(shared: Server) -> None:
    (client,) = clients_of(shared, "alike", 1)
    leases = [client.grant(LONG) for _ in range(12)]
    entries = [written(client.swap(f"{lease.id:02}", b"", lease=lease)) for lease in leases]
    client.revoke(leases[0])
    assert client.list("") == (13, tuple(entries[1:]))


def test_a_watch_reads_more_changes_than_one_reply_has(shared: Server) -> None:
    (client,) = clients_of(shared, "pages", 1)
    for n in range(250):
        client.swap(f"{'seldom' if n == 240 else 'often'}/{n}", b"")
    assert [event.key for event in wait_for_all(client, 0, 250)][::240] == ["often/0", "seldom/240"]
    for timeout in (0.0, SOON):
        since, events = client.watch("seldom/", ABSENT, timeout)
        assert (since, [event.revision for event in events]) == (250, [241])


def test_the_newest_changes_are_kept(shared: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_redis, "HISTORY", 5)
    (client,) = clients_of(shared, "newest", 1)
    for n in range(8):
        client.swap(str(n), b"")
    assert [event.key for event in client.watch("", 3, SOON)[1]] == list("34567")
    with pytest.raises(Compacted, match="is at revision 8: list again"):
        client.watch("", 2, SOON)


def test_no_key_of_a_group_has_an_expiry(shared: Server) -> None:
    """Keys without expiry are not evicted by the `volatile-*` policies."""
    (client,) = clients_of(shared, "expiry", 1)
    client.swap("a", b"", lease=client.grant(LONG))
    keys = {f"telegrad:expiry:{name}" for name in on_redis._KEYS}
    assert set(shared.admin().keys("telegrad:expiry:*")) == keys
    assert {shared.admin().ttl(key) for key in keys} == {-1}


def test_a_server_that_forgot_the_script_gets_it_again(shared: Server) -> None:
    (client,) = clients_of(shared, "flush", 1)
    shared.admin().script_flush()
    assert written(client.swap("a", b"1")).value == b"1"


# Failures


def test_leases_have_their_whole_ttl_after_a_restart(server: Server) -> None:
    client = server.client()
    lease = client.grant(0.5)
    entry = written(client.swap("a", b"1", lease=lease))
    server.kill()
    wait_until(lambda: time.monotonic() > lease.ends + 0.1)
    server.start()
    assert client.list("").entries == (entry,)
    lease = client.renew(lease)
    wait_for(client, "", entry.revision, is_gone, 5)
    assert time.monotonic() >= lease.ends
    assert client.list("").entries == ()


@pytest.mark.parametrize("how", ["restored", "flushed", "state deleted"])
def test_a_server_that_has_lost_writes_is_noticed(server: Server, how: str, tmp_path: pathlib.Path) -> None:
    client = server.client()
    client.swap("a", b"1")
    server.kill()
    shutil.copytree(tmp_path, tmp_path / "backup")
    server.start()
    client.swap("b", b"1")
    if how == "restored":
        server.kill()
        for saved in (tmp_path / "backup").glob("appendonly*"):  # a folder; a file before Redis 7
            subprocess.run(["rm", "-r", tmp_path / saved.name], check=True)
            subprocess.run(["cp", "-r", saved, tmp_path], check=True)
        server.start()
    elif how == "flushed":
        server.admin().flushall()
    else:
        server.admin().delete(f"telegrad:{server.group}:state")
    later = server.client()
    for n in range(how != "restored" and 5):
        assert written(later.swap(f"new{n}", b"")).revision == n + 1
    for _ in range(2):
        with pytest.raises(DirectoryReset, match="start it in another database"):
            client.swap("c", b"1")
        with pytest.raises(DirectoryReset):
            client.watch("", 2, SOON)
    with pytest.raises(DirectoryReset):
        later.watch("", 10, SOON)
    assert later.list("c").entries == ()


def test_a_master_that_becomes_a_replica_is_refused(server: Server) -> None:
    client = server.client()
    server.admin().replicaof("127.0.0.1", "1")
    with pytest.raises(DirectoryLost, match="read only replica"):
        client.list("")  # a replica's list may be old
    with pytest.raises(DirectoryRefused, match=r"it is a replica: use the address of its master at 127\.0\.0\.1:1"):
        client.list("")


def test_a_server_without_memory_does_nothing_by_halves(server: Server) -> None:
    client = server.client()
    lease, short = client.grant(LONG), client.grant(0.2)
    kept = written(client.swap("kept", b"1", lease=lease))
    client.swap("short", b"1", lease=short)
    server.admin().config_set("maxmemory", "1kb")
    wait_until(lambda: time.monotonic() > short.ends + 0.1)
    for act in (
        lambda: client.grant(1),
        lambda: client.swap("a", b""),
        lambda: client.revoke(lease),
        lambda: client.list(""),
        server.client,
    ):
        with pytest.raises(DirectoryLost, match=r"when used memory > 'maxmemory'.*memory and disk left"):
            act()
    server.admin().config_set("maxmemory", "0")
    assert client.list("") == (3, (kept,))
    assert [event.key for event in client.watch("", ABSENT, SOON)[1]] == ["kept", "short", "short"]
    client.revoke(lease)
    assert client.list("") == (4, ())


def test_all_but_a_compare_and_set_is_sent_again(shared: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection breaks after the server has the command, and before the reply has come."""
    (client,) = clients_of(shared, "again", 1)
    lease = client.grant(LONG)
    ask, cut = RedisSession.ask, threading.Event()

    def ask_and_break(session: RedisSession, *command: bytes | str | int) -> object:
        reply = ask(session, *command)
        if cut.is_set():
            cut.clear()
            raise ConnectionError("cut")
        return reply

    monkeypatch.setattr(RedisSession, "ask", ask_and_break)
    for act in (lambda: client.renew(lease), lambda: client.list(""), lambda: client.watch("", ABSENT, 0.0)):
        cut.set()
        act()
    cut.set()
    with pytest.raises(DirectoryLost, match="outcome is unknown"):
        client.swap("a", b"1")
    assert read(client, "a") == ("a", b"1", 1, 1, 0)


def test_connections_are_kept(shared: Server) -> None:
    (client,) = clients_of(shared, "kept", 1)
    before = shared.admin().info("stats")["total_connections_received"]
    for n in range(20):
        client.swap(str(n), b"")
    client.watch("", ABSENT, 1.0)
    assert shared.admin().info("stats")["total_connections_received"] == before + 1  # for the second request


def test_a_connection_that_the_server_has_closed_long_after_a_reply_is_not_used(shared: Server) -> None:
    (client,) = clients_of(shared, "idle", 1)
    (session,) = client._sessions._idle[0]
    session.deadline = 0.0
    shared.admin().client_kill_filter(_type="normal")
    assert client.swap("a", b"").done


def test_a_close_closes_all_connections(shared: Server) -> None:
    """One of these connections is in use."""
    admin = shared.admin()

    def connected() -> set[str]:
        return {each["id"] for each in admin.client_list()}

    before = connected()
    (client,) = clients_of(shared, "closed", 1)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.watch, "", ABSENT, 20.0)
        client.watch("", ABSENT, 0.1)
        its = connected() - before
        assert len(its) == 2
        client.close()
        assert isinstance(waiting.exception(2 * SOON), DirectoryLost)
    wait_until(lambda: not connected() & its)


def test_a_host_that_does_not_answer_is_lost_in_time() -> None:
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        waiting = [socket.socket() for _ in range(3)]  # more than its queue has room for
        for each in waiting:
            each.setblocking(False)
            each.connect_ex(full.getsockname())
        with takes_less_than(0.5 + SOON), pytest.raises(DirectoryLost, match=r"did not answer within 0\.5 s"):
            RedisDirectory(f"redis://127.0.0.1:{full.getsockname()[1]}", "group", patience=0.5)
        for each in waiting:
            each.close()


def test_a_second_owner_must_wait_for_the_end_of_the_first(shared: Server) -> None:
    """No client watches, and the server notices the end only when the second owner asks."""
    first, second = clients_of(shared, "owners", 2)
    lease = first.grant(0.3)
    entry = written(first.swap("owner", b"first", lease=lease))
    assert second.swap("owner", b"second") == Swap(False, entry)
    while (swap := second.swap("owner", b"second")).entry == entry:
        assert time.monotonic() < lease.ends + SOON
    assert time.monotonic() >= lease.ends
    assert swap.done
    assert written(swap).created == entry.created + 2  # the deletion has the revision between them
    with pytest.raises(LeaseLost, match="begin a new one"):
        first.swap("owner", b"first", entry.revision, lease)
    assert read(first, "owner") == swap.entry


# Keys that other programs have written to


def test_a_damaged_entry_is_named(shared: Server) -> None:
    (client,) = clients_of(shared, "spoilt", 1)
    client.swap("good", b"")
    shared.admin().hset("telegrad:spoilt:entries", "good", "999 x y z w")
    says = rf"'telegrad:spoilt:entries' of the Redis server at redis://127.0.0.1:{shared.port}/0, field 'good'"
    for ask in (lambda: client.list(""), lambda: client.swap("good", b""), lambda: client.swap("good", None)):
        with pytest.raises(StoreUntrusted, match=says):
            ask()
    client.swap("other", b"")
    shared.admin().hdel("telegrad:spoilt:entries", "good")
    shared.admin().zrem("telegrad:spoilt:order", "good")
    assert [entry.key for entry in client.list("").entries] == ["other"]


@pytest.mark.parametrize("junk", ["junk", "-1", "9" * 30, "another type"])
@pytest.mark.parametrize("key", on_redis._KEYS)
def test_damaged_keys_raise_only_errors_that_name_them(shared: Server, key: str, junk: str) -> None:
    group = f"{key}-{junk}"
    client, admin, name = RedisDirectory(shared.url, group), shared.admin(), f"telegrad:{group}:{key}"
    lease = client.grant(LONG)
    client.swap("held", b"", lease=lease)
    if junk == "another type" or key not in ("state", "entries", "ttls"):
        admin.delete(name)
        admin.set(name, junk)
    else:
        for field in admin.hkeys(name):
            admin.hset(name, field, junk)
    asked: list[Callable[[], object]] = [
        lambda: client.list(""),
        lambda: client.watch("", ABSENT, 0.0),
        lambda: client.renew(lease),
        lambda: client.swap("held", None, 1),
        lambda: client.swap("new", b"", lease=lease),
        lambda: client.grant(LONG),
        lambda: client.revoke(lease),
        lambda: RedisDirectory(shared.url, group),
    ]
    raised = []
    for ask in asked:
        with contextlib.suppress(LeaseLost, Compacted):
            try:
                ask()
            except (StoreUntrusted, DirectoryReset) as error:
                raised.append(str(error))
    assert raised or key == "ttls"  # a damaged ttl may still be a number
    assert all(f"telegrad:{group}:" in each or "has lost writes" in each for each in raised)
