"""A stranger with access to the store of a group can keep the group from forming, and nothing else."""

import base64
import json
import operator
import os
import pathlib
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from time import monotonic
from typing import Any

import pytest
import torch.distributed as dist

import telegrad
import telegrad.rpc
from telegrad import errors
from telegrad._core import sockets
from telegrad._core.calls.settings import TelegradOptions
from telegrad._core.membership.members import Member
from telegrad._core.membership.registry import Registry
from telegrad._core.membership.rendezvous import StaticJoin
from telegrad._core.rpc.cluster import start
from telegrad._core.security.handshake import PURPOSE
from telegrad._core.security.keyring import Keyring
from telegrad._core.stores import raw_stores
from telegrad._core.stores.find_directory import POINTER, find_directory
from telegrad._core.stores.sealed_store import SealedDirectory
from telegrad._core.stores.stores import RendezvousStore
from telegrad._core.worker import current
from telegrad._core.worker.current import Worker
from telegrad.ext import workers as ext_workers
from tests.cluster import PATIENCE, sealed
from tests.directory.naive import NaiveEngine
from tests.strangers.door import listening

KEY = b"the key that nobody else knows"
KEYS = Keyring([KEY])


class Recorded:
    """A store that records all requests."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.said: list[str] = []

    def __getattr__(self, method: str) -> Callable[..., Any]:
        def ask(*arguments: Any) -> Any:
            answer = getattr(self._store, method)(*arguments)
            self.said.append(repr((arguments, answer)))
            return answer

        return ask


def spellings(secret: bytes) -> list[str]:
    return [
        secret.hex(),
        repr(secret)[2:-1],
        base64.b64encode(secret).decode(),
        base64.urlsafe_b64encode(secret).decode(),
    ]


@pytest.mark.parametrize("size", [2, None], ids=["static", "dynamic"])
def test_nothing_that_proves_membership_is_in_the_store(size: int | None) -> None:
    recorded = Recorded(dist.HashStore())

    def begin(rank: int) -> Worker:
        meet = lambda _: RendezvousStore(sealed(recorded, KEYS), None, rank, size)  # noqa: E731
        return start(f"w{rank}", meet, TelegradOptions(rpc_timeout=PATIENCE, transport="tcp"), current.enter)

    with ThreadPoolExecutor(2) as pool:
        workers = list(pool.map(begin, range(2)))
    try:
        assert workers[0].agent.call("w1", operator.add, (1, 2), {}) == 3
        group = workers[0].agent.keys.group
    finally:
        for worker in workers:
            worker.end("")
    secrets = [KEY, *KEYS.secrets()]
    for ring in (KEYS, KEYS.within(group)):
        secrets += [secret for purpose in (b"store", PURPOSE, b"") for secret in ring.derive(purpose)]
    assert len(recorded.said) > 5
    text = "\n".join(recorded.said)
    assert (group if size else POINTER) in text  # the record contains what the store contains
    for secret in secrets:
        for spelling in spellings(secret):
            assert spelling not in text


def member(name: str, rank: int, port: int) -> Member:
    return Member(name, rank, f"life of {name}", "program", "host", "", ("127.0.0.1", port))


def redirected(sealed_entry: str, port: int) -> str:
    """Return the entry with another address, as anybody who can write to the store could change it."""
    head, _, entry = sealed_entry.partition("[")
    told = json.loads(f"[{entry}")
    told[5], told[6] = "", ["127.0.0.1", port]
    return head + json.dumps(told)


def test_members_of_a_fixed_group_refuse_a_redirected_address() -> None:
    store = dist.HashStore()
    with ThreadPoolExecutor(3) as pool, socket.create_server(("127.0.0.1", 0)) as trap:
        join = lambda rank: StaticJoin(sealed(store, KEYS), member(f"w{rank}", rank, 1), 3, PATIENCE).join()  # noqa: E731
        early = [pool.submit(join, rank) for rank in (0, 1)]
        entry = store.get("telegrad/1/rank/1").decode()  # waits for the entry
        store.set("telegrad/1/rank/1", redirected(entry, trap.getsockname()[1]))
        for future in (*early, pool.submit(join, 2)):
            with pytest.raises(errors.StoreUntrusted):
                future.result(PATIENCE)
        trap.settimeout(0)
        with pytest.raises(BlockingIOError):
            trap.accept()


def test_a_forged_failure_is_not_shown() -> None:
    store = dist.HashStore()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(StaticJoin(sealed(store, KEYS), member("w0", 0, 1), 2, PATIENCE).join)
        store.get("telegrad/1/rank/0")
        store.set("telegrad/1/complete", json.dumps(["RendezvousError", "\x1b[31mrun this", 0]))
        with pytest.raises(errors.StoreUntrusted) as caught:
            first.result(PATIENCE)
        assert "run this" not in str(caught.value)


def test_a_worker_of_a_dynamic_group_refuses_a_redirected_directory() -> None:
    store = dist.HashStore()
    find = lambda: find_directory(sealed(store, KEYS), "here", None, "127.0.0.1", monotonic() + PATIENCE)  # noqa: E731
    found = find()
    assert found.keeping is not None
    try:
        entry = store.get(POINTER).decode()
        with socket.create_server(("127.0.0.1", 0)) as trap:
            told = json.loads(entry[entry.index("[") :])
            port = trap.getsockname()[1]
            for forged in (json.dumps(["127.0.0.1", port, *told[2:]]), entry.replace(str(told[1]), str(port))):
                store.set(POINTER, forged)
                with pytest.raises(errors.StoreUntrusted):
                    find()
            trap.settimeout(0)
            with pytest.raises(BlockingIOError):
                trap.accept()
        store.set(POINTER, entry)
        find().directory.close()
    finally:
        found.directory.close()
        found.keeping.close()


def test_redirected_entries_in_a_foreign_directory_are_refused() -> None:
    raw = NaiveEngine().client()
    directory = SealedDirectory(raw, KEYS, "place")
    registry = Registry(directory)
    lease = directory.grant(PATIENCE)
    registry.publish(registry.reserve(member("w1", 1, 1), lease, lambda _: True), lease)
    (entry,) = raw.list("live/member/").entries
    (claim,) = raw.list("name/").entries
    assert registry.find("w1") is not None
    raw.swap(entry.key, redirected(entry.value.decode(), 9).encode(), entry.revision)
    raw.swap("name/w2", claim.value)
    for name in ("w1", "w2"):
        with pytest.raises(errors.StoreUntrusted):
            registry.find(name)


def test_a_forged_end_of_a_member_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    raw = NaiveEngine().client()
    registry = Registry(SealedDirectory(raw, KEYS, "place"))
    since = registry.roster().revision
    raw.swap("live/ended", b"of a stranger")
    assert registry.watch(since, 0.0)[1] == []
    assert "'live/ended'" in caplog.text


# Over TCP


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.0.0.2"])
def test_a_store_on_loopback_listens_only_there(host: str) -> None:
    store, port = raw_stores.serve_tcp(host, 0)
    wanted = socket.inet_aton(socket.gethostbyname(host))[::-1].hex().upper()
    assert [address for address, at, _ in listening() if at == port] == [wanted]
    del store


def test_a_host_name_that_resolves_to_loopback_is_served_on_all_interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian's /etc/hosts maps the host's own name to 127.0.1.1."""
    real = socket.getaddrinfo
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda host, *rest, **named: real("127.0.1.1" if host == b"node7" else host, *rest, **named),
    )
    assert sockets.listening_address("node7") == "0.0.0.0"
    assert sockets.listening_address("localhost") == "127.0.0.1"
    assert sockets.listening_address("192.0.2.1") == "0.0.0.0"  # an address of a NAT in front of this host


def test_the_key_of_a_local_group_is_hidden_from_other_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """The key is passed by a pipe, since every user can read the store and the command lines of processes."""
    stores: list[Recorded] = []
    serve = raw_stores.serve_on

    def recorded(listener: socket.socket) -> tuple[Recorded, int]:
        store, port = serve(listener)
        stores.append(Recorded(store))
        return stores[0], port

    monkeypatch.setattr(ext_workers, "serve_on", recorded)
    with telegrad.local(1, driver="boss") as workers:
        pid = telegrad.rpc.rpc_sync(workers[0], os.getpid)
        command = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
        environment = pathlib.Path(f"/proc/{pid}/environ").read_bytes()
    assert b"worker0" in command
    assert any("worker0" in said for said in stores[0].said)
    for text in (command.decode(), environment.decode(errors="replace"), *stores[0].said):
        assert "tgk1-" not in text
