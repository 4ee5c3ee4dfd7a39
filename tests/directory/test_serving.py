"""The server of an embedded directory: clients that misbehave, strangers, keys, and its keeper's end."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from telegrad.directory import messages, server
from telegrad.directory.client import EmbeddedDirectory, _Link
from telegrad.directory.keeper import Keeper
from telegrad.directory.messages import Request, write_request
from telegrad.directory.protocol import Directory, DirectoryLost, DirectoryReset, LeaseLost
from telegrad.directory.server import QUEUED, Server
from telegrad.directory.store import remove
from telegrad.directory.table import DEFAULT, Limits
from telegrad.errors import AuthenticationFailed, NotInitialized
from telegrad.keyring import Keyring, open_ring
from tests.cluster import KEYS
from tests.directory.contract import Contract
from tests.directory.harness import PATIENCE, SOON, is_gone, wait_for, written
from tests.directory.programs import Programs

OTHER = b"tgk1-" + 43 * b"B"


class ThreadEngine:
    """An engine of the contract: a thread of this process."""

    ttl, slack, survives = 0.3, 0.3, False

    def __init__(self, keys: Keyring = KEYS, limits: Limits = DEFAULT) -> None:
        listener = socket.create_server(("127.0.0.1", 0), backlog=server.BACKLOG)
        self.address: tuple[str, int] = listener.getsockname()
        self.server = Server(listener, keys, limits=limits)
        self.limits = limits
        self._thread = threading.Thread(target=self.server.run, daemon=True)
        self._thread.start()
        self._clients: list[EmbeddedDirectory] = []

    def client(self, patience: float = PATIENCE, keys: Keyring = KEYS) -> EmbeddedDirectory:
        self._clients.append(EmbeddedDirectory(self.address, keys, patience))
        return self._clients[-1]

    def link(self) -> _Link:
        """Return a connection behind its handshake, of which no thread reads."""
        return self.client()._connect()

    def connections(self) -> int:
        return len(self.server._connections)

    def forget(self) -> None:
        client = self.client()
        revision = 0
        for _ in range(self.limits.changes + 1):
            revision = written(client.swap("filler", b"", revision)).revision
        client.swap("filler", None, revision)

    def close(self) -> None:
        for client in self._clients:
            client.close()
        self.server.stop()
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()

    def kill(self) -> None:
        raise NotImplementedError

    start = pause = resume = kill


class TestThread(Contract, Programs):
    @pytest.fixture(scope="class")
    @classmethod
    def engine(cls) -> Iterator[ThreadEngine]:
        thread = ThreadEngine(limits=Limits(changes=2000))
        yield thread
        thread.close()


@pytest.fixture
def thread() -> Iterator[ThreadEngine]:
    found = ThreadEngine()
    yield found
    found.close()


def until(is_so: Callable[[], bool], limit: float = PATIENCE) -> None:
    ends = time.monotonic() + limit
    while not is_so():
        assert time.monotonic() < ends
        time.sleep(0.01)


def slowest(client: Directory, count: int = 20) -> float:
    """Return the longest time that one of a few writes takes."""
    times, revision = [], client.list("measured").entries[0].revision if client.list("measured").entries else 0
    for _ in range(count):
        started = time.monotonic()
        revision = written(client.swap("measured", b"", revision)).revision
        times.append(time.monotonic() - started)
    return max(times)


# Clients


def test_a_client_has_one_connection(thread: ThreadEngine) -> None:
    client = thread.client()
    watching = [threading.Thread(target=client.watch, args=(f"{n}", 0, PATIENCE)) for n in range(4)]
    for each in watching:
        each.start()
    for n in range(4):
        client.swap(f"{n}", b"")
    assert thread.connections() == 1
    for each in watching:
        each.join(PATIENCE)
    client.close()
    until(lambda: thread.connections() == 0)


def test_a_client_that_does_not_read_waits_alone(thread: ThreadEngine) -> None:
    client, link = thread.client(), thread.link()
    for n in range(8):
        client.swap(f"large/{n}", bytes(100_000))
    for n in range(500):
        link.send(write_request(n, Request(messages.LIST, "large/")))
    until(lambda: any(len(each.unsent) > QUEUED for each in thread.server._connections.values()))
    assert slowest(client) < SOON
    assert max(len(each.unsent) for each in thread.server._connections.values()) < QUEUED + 2_000_000
    found = 0
    while found < 500:  # once it reads, it gets all
        found += len(link.receive(threading.Lock()))
    link.close()


def test_a_client_that_floods_is_answered_in_turn(thread: ThreadEngine) -> None:
    client, link = thread.client(), thread.link()
    slowest(client)
    flood = threading.Event()

    def send() -> None:
        lock, found = threading.Lock(), 0
        for n in range(20_000):
            link.send(write_request(n, Request(messages.LIST, "")))
        flood.set()
        while found < 20_000:
            found += len(link.receive(lock))

    flooding = threading.Thread(target=send, daemon=True)
    flooding.start()
    assert flood.wait(PATIENCE)
    assert slowest(client) < SOON
    flooding.join(2 * PATIENCE)
    assert not flooding.is_alive()
    link.close()


def test_a_request_that_is_none_ends_its_connection_alone(thread: ThreadEngine) -> None:
    client, link = thread.client(), thread.link()
    client.list("")
    link.send(b"no request")
    with pytest.raises(OSError, match="closed"):
        link.receive(threading.Lock())
    link.close()
    client.list("")
    assert thread.connections() == 1


def test_the_oldest_of_many_connections_of_one_client_ends(thread: ThreadEngine) -> None:
    client = thread.client()
    links = [client._connect() for _ in range(server.MOST_OF_ONE + 1)]
    with pytest.raises(OSError, match="closed"):
        links[0].receive(threading.Lock())
    assert thread.connections() == server.MOST_OF_ONE
    for link in links:
        link.close()


def test_limits_are_told(thread: ThreadEngine) -> None:
    link = thread.link()
    for n in range(100):
        link.send(write_request(n, Request(messages.WATCH, "nothing", seconds=100.0)))
    lock = threading.Lock()
    found: list[bytes] = []
    while len(found) < 36:
        found += link.receive(lock)
    assert {messages.read_reply(each)[1].outcome for each in found} == {messages.FULL}
    link.close()


def test_a_client_connects_again_with_longer_and_longer_delays() -> None:
    """A server that accepts and closes at once: as one behind a proxy does that has no server."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        count = 0

        def refuse() -> None:
            nonlocal count
            with contextlib.suppress(OSError):
                while True:
                    listener.accept()[0].close()
                    count += 1

        threading.Thread(target=refuse, daemon=True).start()
        client = EmbeddedDirectory(listener.getsockname(), KEYS, 2.0)
        with pytest.raises(DirectoryLost, match="no connection could be made"):
            client.list("")
        assert 2 <= count < 30
        client.close()
        listener.shutdown(socket.SHUT_RDWR)


def test_a_client_belongs_to_the_process_that_made_it(thread: ThreadEngine) -> None:
    client = thread.client()
    client.list("")
    pid = os.fork()
    if not pid:
        code = 1
        try:
            client.list("")
        except NotInitialized:
            code = 0
        finally:
            client.close()
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    client.list("")
    assert thread.connections() == 1


def test_nothing_is_answered_that_could_not_be_stored() -> None:
    """A server whose disk is full ends; what it did is neither stored nor told."""
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    found, errors = Server(listener, KEYS), []

    def save(*_: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    def run() -> None:
        try:
            found.run()
        except sqlite3.OperationalError as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    client = EmbeddedDirectory(address, KEYS, 1.0)
    client.list("")
    found._store.save = save
    with pytest.raises(DirectoryLost, match="read it again"):
        client.swap("a", b"")
    thread.join(PATIENCE)
    assert len(errors) == 1
    client.close()


# Keys and strangers


def test_a_client_with_another_key_is_refused(thread: ThreadEngine) -> None:
    for keys in (Keyring([OTHER]), open_ring(), KEYS.within("another group")):
        with pytest.raises(AuthenticationFailed, match=r"the directory at .* same key"):
            thread.client(keys=keys).list("")
    thread.client().list("")


def test_a_server_with_another_key_is_not_believed() -> None:
    found = ThreadEngine(open_ring())
    with pytest.raises(AuthenticationFailed):
        found.client().list("")
    found.client(keys=open_ring()).list("")
    found.close()


def test_keys_are_replaced() -> None:
    old = b"tgk1-" + 43 * b"A"
    found = ThreadEngine(Keyring([old, OTHER]))
    found.client(keys=Keyring([old])).list("")
    found.client(keys=Keyring([OTHER])).list("")
    found.client(keys=Keyring([OTHER, old])).list("")
    found.close()
    found = ThreadEngine(Keyring([old]))
    found.client(keys=Keyring([OTHER, old])).list("")
    found.close()


@pytest.mark.parametrize(
    "said", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x00\x05hello", b"\x00\x00", b"\xff" * 5000]
)
def test_a_stranger_is_sent_away(thread: ThreadEngine, monkeypatch: pytest.MonkeyPatch, said: bytes) -> None:
    monkeypatch.setattr(server, "INTRODUCTION", 0.2)
    with socket.create_connection(thread.address, PATIENCE) as sock:
        sock.sendall(said)
        with contextlib.suppress(ConnectionResetError):
            while sock.recv(4096):
                pass
    thread.client().list("")


def test_many_strangers_do_not_keep_a_client_out(thread: ThreadEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MOST_STRANGERS", 8)
    strangers = [socket.create_connection(thread.address) for _ in range(20)]
    thread.client().list("")
    until(lambda: thread.connections() == 8)
    for each in strangers:
        each.close()


def test_there_is_a_limit_of_connections(thread: ThreadEngine) -> None:
    client = thread.client()
    client.list("")
    thread.server._most = 1
    with pytest.raises(DirectoryLost):
        thread.client(0.5).list("")
    client.list("")
    thread.server._most = 2
    thread.client().list("")


def test_no_descriptor_is_left(thread: ThreadEngine) -> None:
    """The server accepts again once there is one."""
    client = thread.client()
    client.list("")
    real = thread.server._listener

    class Full:
        def fileno(self) -> int:
            return real.fileno()

        def accept(self) -> None:
            raise OSError(24, "Too many open files")

        def close(self) -> None:
            real.close()

    thread.server._listener = Full()  # type: ignore[assignment]
    second = thread.client(0.3)
    with pytest.raises(DirectoryLost):
        second.list("")
    client.list("")
    thread.server._listener = real
    thread.client().list("")


# The process and its keeper


@pytest.fixture
def keeper() -> Iterator[Keeper]:
    found = Keeper(KEYS)
    yield found
    found.close()


@pytest.fixture
def client(keeper: Keeper) -> Iterator[EmbeddedDirectory]:
    found = EmbeddedDirectory(keeper.address, KEYS, PATIENCE)
    yield found
    found.close()


def end(keeper: Keeper) -> None:
    os.kill(keeper.pid, signal.SIGKILL)
    os.waitid(os.P_PID, keeper.pid, os.WEXITED | os.WNOWAIT)


def test_the_process_has_one_thread_and_no_torch(keeper: Keeper, client: EmbeddedDirectory) -> None:
    client.list("")
    process = pathlib.Path(f"/proc/{keeper.pid}")
    assert "Threads:\t1\n" in (process / "status").read_text()
    assert "torch" not in (process / "maps").read_text()


def test_a_keeper_starts_the_process_when_it_has_ended(keeper: Keeper, client: EmbeddedDirectory) -> None:
    client.list("")
    first = keeper.pid
    assert not keeper.restart_if_ended()
    end(keeper)
    assert keeper.restart_if_ended()
    assert keeper.pid != first
    client.list("")


def test_a_server_on_ipv6() -> None:
    try:
        keeper = Keeper(KEYS, "::1")
    except OSError:
        pytest.skip("this host has no IPv6")
    client = EmbeddedDirectory(keeper.address, KEYS)
    client.list("")
    client.close()
    keeper.close()


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="in use"):
        Keeper(KEYS, port=taken.getsockname()[1])


def test_a_directory_that_lost_its_state_is_another_one(keeper: Keeper, client: EmbeddedDirectory) -> None:
    client.swap("a", b"")
    end(keeper)
    remove(keeper._path)
    keeper.restart_if_ended()
    with pytest.raises(DirectoryReset, match="started anew without what it knew"):
        client.list("")
    fresh = EmbeddedDirectory(keeper.address, KEYS)
    assert fresh.list("").entries == ()
    fresh.close()


def test_a_lease_has_its_whole_ttl_from_the_restart(keeper: Keeper, client: EmbeddedDirectory) -> None:
    lease = client.grant(1.0)
    entry = written(client.swap("a", b"", lease=lease))
    client.watch("nothing", entry.revision, 0.7)
    end(keeper)
    started = time.monotonic()
    keeper.restart_if_ended()
    wait_for(client, "a", entry.revision, is_gone, PATIENCE)
    assert time.monotonic() >= started + 1.0


def test_a_lease_does_not_end_while_the_server_is_stopped(keeper: Keeper, client: EmbeddedDirectory) -> None:
    """Its holder could not renew it; it has stopped to act as an owner by its own clock, and may go on."""
    lease = client.grant(1.0)
    entry = written(client.swap("a", b"", lease=lease))
    os.kill(keeper.pid, signal.SIGSTOP)
    time.sleep(2.5)
    os.kill(keeper.pid, signal.SIGCONT)
    client.list("")
    lease = client.renew(lease)
    assert client.list("a").entries == (entry,)
    wait_for(client, "a", entry.revision, is_gone, PATIENCE)
    with pytest.raises(LeaseLost):
        client.renew(lease)


def test_a_directory_with_a_path_stays(tmp_path: pathlib.Path) -> None:
    path = str(tmp_path / "directory")
    keeper = Keeper(KEYS, path=path)
    client = EmbeddedDirectory(keeper.address, KEYS)
    entry = written(client.swap("a", b"1"))
    client.close()
    keeper.close()
    keeper = Keeper(KEYS, path=path)
    client = EmbeddedDirectory(keeper.address, KEYS)
    assert client.list("").entries == (entry,)
    client.close()
    keeper.close()


PROGRAM = """
import os, sys, time
from telegrad.directory.keeper import Keeper
from telegrad.keyring import Keyring
keeper = Keeper(Keyring([b"tgk1-" + 43 * b"A"]))
if not os.fork():  # a child that holds the pipe, too
    sys.stdout.close()
    time.sleep(600)
    os._exit(0)
print(keeper.pid, keeper.address[1], keeper._path, flush=True)
time.sleep(600)
"""


def is_over(pid: int) -> bool:
    try:
        return "State:\tZ" in pathlib.Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True


def test_the_process_ends_with_its_keeper_and_leaves_nothing() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        pid, port, path = process.stdout.readline().split()
        client = EmbeddedDirectory(("127.0.0.1", int(port)), KEYS, PATIENCE)
        client.swap("a", b"")
        client.close()
        assert os.path.exists(path)
        process.kill()
        process.wait()
        until(
            lambda: not os.path.exists(f"/proc/{pid}") or "State:\tZ" in pathlib.Path(f"/proc/{pid}/status").read_text()
        )
        assert not os.path.exists(path)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.stdout.close()
