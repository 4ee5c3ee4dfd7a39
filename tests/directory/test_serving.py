"""Tests of the server of an embedded directory: clients that misbehave, strangers, and keys."""

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest

from telegrad._core.security.keyring import Keyring, open_ring
from telegrad._core.stores import directory_requests as messages
from telegrad._core.stores import directory_server
from telegrad._core.stores.directory import Directory, DirectoryLost, LeaseLost
from telegrad._core.stores.directory_client import KEPT, EmbeddedDirectory, EmbeddedSession
from telegrad._core.stores.directory_requests import Request, write_request
from telegrad._core.stores.directory_server import DirectoryServer
from telegrad.errors import AuthenticationFailed, InvalidArgument, UsageError
from tests.cluster import KEYS, in_background, wait_until
from tests.directory.engines import Middleman, ThreadEngine
from tests.directory.harness import PATIENCE, SOON, assert_refused_in_a_child, written

OTHER = b"tgk1-" + 43 * b"B"


@pytest.fixture
def thread() -> Iterator[ThreadEngine]:
    found = ThreadEngine()
    yield found
    found.close()


def slowest(client: Directory, count: int = 20) -> float:
    """Return the longest time of some writes."""
    times, revision = [], client.list("measured").entries[0].revision if client.list("measured").entries else 0
    for _ in range(count):
        started = time.monotonic()
        revision = written(client.swap("measured", b"", revision)).revision
        times.append(time.monotonic() - started)
    return max(times)


# Clients


def send(session: EmbeddedSession, *requests: Request) -> None:
    session._sock.sendall(b"".join(session._channel.encrypt(write_request(each)) for each in requests))


def test_a_client_keeps_its_connections(thread: ThreadEngine) -> None:
    client = thread.client()
    for _ in range(3):
        since = client.list("").revision
        with ThreadPoolExecutor(6) as pool:
            watching = [pool.submit(client.watch, f"{n}", since, PATIENCE) for n in range(6)]
            wait_until(lambda: len(thread.server.watches._waiting) == 6)
            for n in range(6):
                entries = client.list(f"{n}").entries
                client.swap(f"{n}", None if entries else b"", entries[0].revision if entries else 0)
            assert all(each.result(PATIENCE) for each in watching)
    wait_until(lambda: 1 <= thread.connections() <= KEPT)
    client.close()
    wait_until(lambda: thread.connections() == 0)


def test_the_server_notices_the_end_of_a_client_that_watches(thread: ThreadEngine) -> None:
    session = thread.session()
    send(session, Request(messages.WATCH, "a", seconds=1000.0))
    wait_until(lambda: len(thread.server.watches._waiting) == 1)
    session.close()
    wait_until(lambda: not thread.server.watches._waiting)
    assert thread.connections() == 0


def test_a_client_that_does_not_read_delays_no_other(thread: ThreadEngine) -> None:
    client, session = thread.client(), thread.session()
    for n in range(16):  # more than the buffers of two sockets
        client.swap(f"large/{n}", bytes(1_000_000))
    send(session, Request(messages.LIST, "large/"))
    wait_until(lambda: any(each.unsent for own in thread.server._clients.values() for each in own))
    assert slowest(client) < SOON
    found: list[bytes] = []
    while not found:  # once it reads, it gets all
        found = session._channel.decrypt(session._sock.recv(1 << 18))
    assert len(messages.read_reply(found[0]).changes) == 16
    session.close()


def is_closed(session: EmbeddedSession) -> bool:
    session._sock.settimeout(PATIENCE)
    return not session._sock.recv(1)


@pytest.mark.parametrize("kind", ["no request", "two at once", "one while another waits"])
def test_invalid_requests_end_only_their_connection(thread: ThreadEngine, kind: str) -> None:
    client, session = thread.client(), thread.session()
    client.list("")
    waits = Request(messages.WATCH, "a", seconds=1000.0)
    if kind == "no request":
        session._sock.sendall(session._channel.encrypt(b"no request"))
    elif kind == "two at once":
        send(session, waits, waits)
    else:
        send(session, waits)
        wait_until(lambda: len(thread.server.watches._waiting) == 1)
        send(session, Request(messages.LIST))
    assert is_closed(session)
    wait_until(lambda: not thread.server.watches._waiting)
    session.close()
    client.list("")
    assert thread.connections() == 1


def test_the_oldest_connection_of_a_client_with_too_many_ends(
    thread: ThreadEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory_server, "MOST_OF_ONE", 4)
    client = thread.client()
    sessions = [thread.session(client) for _ in range(5)]
    assert is_closed(sessions[0])
    wait_until(lambda: thread.connections() == 4)
    for each in sessions:
        each.close()


def test_invalid_arguments_raise_in_the_caller(thread: ThreadEngine) -> None:
    """The client goes on afterwards."""
    client = thread.client()
    for ask in (
        lambda: client.swap("a", b"", -1),
        lambda: client.list("\ud800"),
        lambda: client.watch("x" * 70_000, 0, 1.0),
        lambda: client.watch("a", 2**70, 1.0),
        lambda: client.grant(float("inf")),
    ):
        with pytest.raises(InvalidArgument):
            ask()
    client.list("")


def test_an_invalid_address_cannot_be_connected_to() -> None:
    client = EmbeddedDirectory(("a" * 300, 1), KEYS, 0.5)
    with pytest.raises(DirectoryLost, match="the connection failed"):
        client.list("")
    client.close()


def test_a_client_connects_again_with_growing_pauses() -> None:
    """The server accepts and closes at once, like a proxy whose server is down."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        count = 0

        def refuse() -> None:
            nonlocal count
            with contextlib.suppress(OSError):
                while True:
                    listener.accept()[0].close()
                    count += 1

        threading.Thread(target=refuse, daemon=True).start()
        client = EmbeddedDirectory(listener.getsockname(), KEYS, 0.5)
        with pytest.raises(DirectoryLost, match="the connection failed"):
            client.list("")
        assert 2 <= count < 10
        client.close()
        listener.shutdown(socket.SHUT_RDWR)


def test_only_a_compare_and_set_is_not_repeated(thread: ThreadEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second attempt of a compare-and-set would have another outcome."""
    client = thread.client()
    client.list("")

    def lose_reply() -> None:
        def drop(connection: directory_server._Connection, data: bytes) -> None:
            monkeypatch.undo()
            thread.server._drop(connection)

        monkeypatch.setattr(directory_server._Connection, "reply", drop)

    lose_reply()
    with pytest.raises(DirectoryLost, match="outcome is unknown: read the key again"):
        client.swap("a", b"1")
    [entry] = client.list("").entries
    assert entry.value == b"1"
    lose_reply()
    lease = client.grant(10.0)
    lose_reply()
    client.renew(lease)
    lose_reply()
    assert client.list("").entries == (entry,)
    lose_reply()
    client.revoke(lease)
    with pytest.raises(LeaseLost):
        client.renew(lease)


def test_a_client_belongs_to_the_process_that_made_it(thread: ThreadEngine) -> None:
    client = thread.client()
    client.list("")
    assert_refused_in_a_child(client)
    client.list("")
    assert thread.connections() == 1


def test_operations_that_could_not_be_stored_are_not_confirmed() -> None:
    """A server whose disk is full ends; its last operation is neither stored nor confirmed."""
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    found, errors = DirectoryServer(listener, KEYS), []

    def run() -> None:
        try:
            found.run()
        except UsageError as error:
            errors.append(error)

    with in_background(run):
        client = EmbeddedDirectory(address, KEYS, 1.0)
        client.list("")
        found.table.file.commit = Mock(side_effect=UsageError("database or disk is full"))
        with pytest.raises(DirectoryLost, match="read the key again"):
            client.swap("a", b"")
    assert len(errors) == 1
    client.close()


# Altered connections


@pytest.fixture
def middleman(thread: ThreadEngine) -> Iterator[Middleman]:
    found = Middleman(thread.address)
    yield found
    found.close()


@pytest.fixture
def behind(middleman: Middleman) -> Iterator[EmbeddedDirectory]:
    """Yield a client behind a proxy; it has had a session."""
    client = EmbeddedDirectory(middleman.address, KEYS, 2.0)
    client.list("")
    yield client
    client.close()


def test_altered_replies_and_handshakes_count_as_broken_connections(
    thread: ThreadEngine, middleman: Middleman, behind: EmbeddedDirectory
) -> None:
    middleman.to_alter = 5
    with pytest.raises(DirectoryLost, match="read the key again"):
        behind.swap("a", b"1")
    assert written(behind.swap("b", b"1"))
    assert middleman.altered == 5
    middleman.to_alter = 5
    assert (len(behind.list("").entries), middleman.altered) == (2, 10)


def test_a_path_that_alters_everything_is_an_error_after_the_patience(
    middleman: Middleman, behind: EmbeddedDirectory
) -> None:
    middleman.to_alter, behind._sessions.patience = float("inf"), 0.5
    for ask in (lambda: behind.list(""), lambda: behind.swap("a", b"")):
        with pytest.raises(DirectoryLost, match=r"the directory at .* did not answer within 0\.5 s"):
            ask()
    middleman.to_alter, behind._sessions.patience = 0, PATIENCE
    behind.list("")


def test_another_server_at_the_address_is_not_the_directory(
    thread: ThreadEngine, middleman: Middleman, behind: EmbeddedDirectory
) -> None:
    """The other server has the key of another group; the client waits for its own to come back."""
    other = ThreadEngine(Keyring([OTHER]))
    middleman.targets = itertools.cycle([other.address])
    middleman.cut()
    behind._sessions.patience = 0.5
    with pytest.raises(DirectoryLost, match=r"did not answer within 0\.5 s .*same key"):
        behind.list("")
    behind._sessions.patience = PATIENCE
    middleman.targets = itertools.cycle([thread.address])
    behind.list("")
    other.close()


# Keys and strangers


def test_a_client_with_another_key_is_refused(thread: ThreadEngine) -> None:
    for keys in (Keyring([OTHER]), open_ring(), KEYS.within("another group")):
        with pytest.raises(AuthenticationFailed, match=r"the directory at .* same key"):
            thread.client(keys=keys).list("")
    thread.client().list("")


def test_a_server_with_another_key_is_not_trusted() -> None:
    found = ThreadEngine(open_ring())
    with pytest.raises(AuthenticationFailed):
        found.client().list("")
    found.client(keys=open_ring()).list("")
    found.close()


def test_connections_work_while_keys_are_replaced() -> None:
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
def test_a_stranger_is_disconnected(thread: ThreadEngine, monkeypatch: pytest.MonkeyPatch, said: bytes) -> None:
    monkeypatch.setattr(directory_server, "INTRODUCTION", 0.2)
    with socket.create_connection(thread.address, PATIENCE) as sock:
        sock.sendall(said)
        with contextlib.suppress(ConnectionResetError):
            while sock.recv(4096):
                pass
    thread.client().list("")


def test_many_strangers_do_not_keep_a_client_out(thread: ThreadEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory_server, "MOST_STRANGERS", 8)
    strangers = [socket.create_connection(thread.address) for _ in range(20)]
    thread.client().list("")
    wait_until(lambda: thread.connections() == 8)
    for each in strangers:
        each.close()


def test_the_server_survives_a_lack_of_descriptors(thread: ThreadEngine) -> None:
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
