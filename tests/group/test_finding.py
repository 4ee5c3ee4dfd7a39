"""Tests of how members of a dynamic group find their directory: by a pointer, by a note, and after failures."""

import contextlib
import os
import pathlib
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist

import telegrad.rpc as rpc
from telegrad import errors
from telegrad._core.membership import join as joining
from telegrad._core.membership.generations import COME, GENERATION, Arrival, Formed
from telegrad._core.membership.join import _directory_is_used
from telegrad._core.membership.members import Member
from telegrad._core.membership.registry import Registry
from telegrad._core.security.keyring import Keyring, new_key
from telegrad._core.sockets import host_identity
from telegrad._core.stores import find_directory as finding
from telegrad._core.stores.directory import Directory
from telegrad._core.stores.directory_server import ServerProcess
from telegrad._core.stores.find_directory import POINTER, DirectoryMonitor, Found, Pointer, find_directory
from telegrad._core.stores.sealed_store import OPEN, SERVED, KeyValueStore
from telegrad._core.worker import current
from tests.cluster import KEYS, PATIENCE, free_port, in_threads, is_over, processes, run_all, sealed, wait_until
from tests.directory.harness import written
from tests.rpc.members import call, join, names

LONG = 60.0  # the ttl of a lease that does not end within a test


class Finder:
    """Workers in this process that look for their directory."""

    def __init__(self) -> None:
        self.port = free_port()  # the store's port, if a worker serves it
        self.found: list[Found] = []

    def find(
        self, store: Any, serves: bool = False, keys: Keyring = KEYS, seconds: float = PATIENCE, port: int = 0
    ) -> Found:
        until = time.monotonic() + seconds
        served = (port or self.port) if serves else None
        found = find_directory(sealed(store, keys), "here", served, "127.0.0.1", until)
        self.found.append(found)
        return found

    def close(self) -> None:
        for each in self.found:
            each.directory.close()
            if each.keeping is not None:
                each.keeping.close()


@pytest.fixture
def finder() -> Iterator[Finder]:
    finder = Finder()
    yield finder
    finder.close()


@pytest.fixture
def listening() -> Iterator[Member]:
    """Yield a member that listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield Member("w", 1, "life", "", "host", "", server.getsockname()[:2])


def pointer_in(store: Any) -> Pointer:
    return Pointer.from_json(KeyValueStore(sealed(store)).read(POINTER))


def point(store: Any, pointer: Pointer) -> None:
    KeyValueStore(sealed(store)).write(POINTER, pointer.to_json())


def kept(found: Found) -> ServerProcess:
    assert found.keeping is not None
    assert found.keeping._keeper is not None
    return found.keeping._keeper


def has_started(found: Found) -> bool:
    return found.keeping is not None and found.keeping._keeper is not None


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: is_over(pid))


def values(directory: Directory) -> list[bytes]:
    return [entry.value for entry in directory.list("").entries]


# The pointer


def test_the_worker_that_serves_the_store_starts_the_directory_and_others_find_it(finder: Finder) -> None:
    store = dist.HashStore()
    KeyValueStore(sealed(store)).write(SERVED, OPEN)
    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(finder.find, store)
        with pytest.raises(errors.StoreUnreachable, match="does not say where the group's directory is"):
            finder.find(store, seconds=0.1)
        first = finder.find(store, True)
        second = early.result(PATIENCE)
    assert first.keeping is not None
    assert second.keeping is None
    assert not second.launched
    written(first.directory.swap("a", b"1"))
    assert values(second.directory) == [b"1"]


def test_a_directory_is_noted_before_others_can_join_it(finder: Finder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise its worker, if it is killed at that moment, would begin another group once it is restarted."""
    noted, write = list[Pointer | None](), finding.write_pointer

    def look_and_write(*args: Any) -> bool:
        noted.append(finding.noted(finder.port))
        return write(*args)

    monkeypatch.setattr(finding, "write_pointer", look_and_write)
    found = finder.find(dist.HashStore(), True)
    assert noted == [found.pointer]


def test_workers_that_come_at_once_start_a_single_directory(finder: Finder, tmp_path: pathlib.Path) -> None:
    stores = [dist.FileStore(f"{tmp_path}/store", -1) for _ in range(4)]
    found = in_threads(*[partial(finder.find, store) for store in stores])
    (keeping,) = [each.keeping for each in found if each.keeping is not None]
    written(found[0].directory.swap("a", b"1"))
    assert [values(each.directory) for each in found] == [[b"1"]] * 4
    pid = keeping._keeper.pid
    assert pointer_in(stores[0]).path == keeping._keeper.path
    assert not is_over(pid)


def test_a_directory_that_a_launcher_keeps_is_not_started_by_workers(finder: Finder) -> None:
    store = dist.HashStore()
    keeping = finder.find(dist.HashStore(), True).keeping
    assert keeping is not None
    point(store, keeping.pointer._replace(launched=True))
    assert finder.find(store).launched
    keeping.close()
    with pytest.raises(errors.StoreUnreachable, match="does not answer"):
        finder.find(store, seconds=0.2)


def test_a_pointer_with_a_wrong_key_is_not_followed(finder: Finder) -> None:
    store = dist.HashStore()
    store.set(POINTER, Pointer("127.0.0.1", 9, "host", "file").to_json())
    with pytest.raises(errors.StoreUntrusted, match=POINTER):
        finder.find(store, True)


# Failures


def hold(found: Found) -> None:
    """Write an entry under a lease."""
    written(found.directory.swap("a", b"kept", lease=found.directory.grant(LONG)))


def test_a_server_that_was_killed_is_started_again_by_its_keeper(finder: Finder) -> None:
    store = dist.HashStore()
    first = finder.find(store, True)
    hold(first)
    pid = kept(first).pid
    kill(pid)
    assert values(first.directory) == [b"kept"]
    assert kept(first).pid != pid
    assert values(finder.find(store).directory) == [b"kept"]


def test_the_directory_outlives_its_keeper_and_the_next_store_finds_it(finder: Finder) -> None:
    first = finder.find(dist.HashStore(), True)
    hold(first)
    assert first.keeping is not None
    first.keeping.leave()
    store = dist.HashStore()
    found = finder.find(store, True)
    assert not has_started(found)
    assert values(found.directory) == values(finder.find(store).directory) == [b"kept"]
    assert has_started(finder.find(dist.HashStore(), True, port=free_port()))


def keep(path: str, port: int | None) -> tuple[int, Pointer]:
    """Start a directory in this process and keep a lease in it."""
    store = dist.FileStore(path, -1)
    found = find_directory(sealed(store), "here", port, "127.0.0.1", time.monotonic() + PATIENCE)
    _held.append(found)
    hold(found)
    return kept(found).pid, pointer_in(store)


_held: list[Found] = []


@pytest.mark.parametrize("served", [False, True], ids=["file", "note"])
def test_a_directory_killed_with_its_keeper_is_restarted_with_its_entries(
    finder: Finder, tmp_path: pathlib.Path, served: bool
) -> None:
    with processes(1) as (process,):
        pid, pointer = process.run(keep, f"{tmp_path}/store", finder.port if served else None)
        process.kill()
        process.join()
    kill(pid)
    stores = [dist.HashStore()] if served else [dist.FileStore(f"{tmp_path}/store", -1) for _ in range(3)]
    found = in_threads(*[partial(finder.find, store, served) for store in stores])
    assert len([each for each in found if has_started(each)]) == 1
    assert [values(each.directory) for each in found] == [[b"kept"]] * len(stores)
    assert pointer_in(stores[0]) == pointer


@pytest.mark.parametrize("answers", [True, False], ids=["runs", "is stopped"])
def test_a_worker_uses_the_directory_that_another_has_just_restarted(
    finder: Finder, monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    """Another worker has restarted it after this one checked, so that its port is taken."""
    first = finder.find(dist.HashStore(), True)
    hold(first)
    seen = iter([(False, True), (answers, False)])
    monkeypatch.setattr(finding, "_probe", lambda *_: next(seen))
    late = DirectoryMonitor(KEYS, "127.0.0.1", first.pointer)
    try:
        assert late.pointer == first.pointer
        assert late._keeper is None
    finally:
        late.close()


def test_a_worker_waits_for_a_stopped_directory_and_starts_no_second_one(finder: Finder) -> None:
    first = finder.find(dist.HashStore(), True)
    hold(first)
    pid = kept(first).pid
    os.kill(pid, signal.SIGSTOP)
    try:
        with ThreadPoolExecutor(2) as pool:
            noted = pool.submit(finder.find, dist.HashStore(), True)
            store = dist.HashStore()
            point(store, pointer_in_note(finder))
            pointed = pool.submit(finder.find, store)
            with pytest.raises(TimeoutError):
                noted.result(0.5)
            assert not pointed.done()
            os.kill(pid, signal.SIGCONT)
            for each in (noted, pointed):
                assert values(each.result(PATIENCE).directory) == [b"kept"]
                assert not has_started(each.result())
    finally:
        os.kill(pid, signal.SIGCONT)


def pointer_in_note(finder: Finder) -> Pointer:
    pointer = finding.noted(finder.port)
    assert pointer is not None
    return pointer


def test_a_directory_with_another_key_at_the_noted_address_is_left_alone(finder: Finder) -> None:
    first = finder.find(dist.HashStore(), True)
    hold(first)
    other = finder.find(dist.HashStore(), True, Keyring([new_key()]))
    assert other.keeping is not None
    assert values(other.directory) == []
    assert kept(other).path != kept(first).path
    assert os.path.exists(kept(first).path)
    assert values(first.directory) == [b"kept"]


@pytest.fixture(params=["directory", "greets", "closes"])
def stranger(request: pytest.FixtureRequest, finder: Finder) -> Iterator[int]:
    """The port of a directory that has gone is used by a directory of another group, or by another program."""
    if request.param == "directory":
        yield kept(finder.find(dist.HashStore(), True, port=free_port())).address[1]
        return
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    with listener.accept()[0] as sock:
                        if request.param == "greets":
                            sock.sendall(b"220 smtp.example ESMTP\r\n")
                            sock.recv(1 << 16)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_another_program_at_the_port_is_not_taken_for_the_directory(
    finder: Finder, stranger: int, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finding, "PATIENCE", 0.5)
    store = dist.HashStore()
    point(store, Pointer("127.0.0.1", stranger, host_identity(), f"{tmp_path}/removed"))
    found = finder.find(store)
    assert found.keeping is not None
    assert values(found.directory) == []
    assert pointer_in(store).port != stranger


def test_a_stale_pointer_to_another_host_is_reported(finder: Finder) -> None:
    store = dist.HashStore()
    pointer = Pointer("127.0.0.1", free_port(), "another host", "/nowhere")
    point(store, pointer)
    with pytest.raises(errors.StoreUnreachable, match=rf"{pointer}.*its host be reached from here"):
        finder.find(store, seconds=0.2)


# Groups in use


def test_a_dynamic_group_is_in_use_while_one_of_its_members_lives(finder: Finder, listening: Member) -> None:
    store = dist.HashStore()
    assert not _directory_is_used(sealed(store))
    found = finder.find(store)
    assert not _directory_is_used(sealed(store))
    for me, lives in (listening, True), (listening._replace(incarnation="dead", tcp=("127.0.0.1", free_port())), False):
        lease = found.directory.grant(LONG)
        registry = Registry(found.directory)
        registry.publish(registry.reserve(me, lease, lambda _: True), lease)
        assert _directory_is_used(sealed(store)) == lives
        Registry(found.directory).leave(me, lease)
        assert not _directory_is_used(sealed(store))


def test_an_elastic_group_is_in_use_while_a_member_or_an_arrival_lives(finder: Finder, listening: Member) -> None:
    store = dist.HashStore()
    directory = finder.find(store).directory
    come = directory.swap(COME + "life", Arrival(listening).to_json().encode()).entry
    assert come is not None
    assert _directory_is_used(sealed(store))
    directory.swap(COME + "life", None, come.revision)
    assert not _directory_is_used(sealed(store))
    revision = 0
    for formed, lives in (Formed(1, (listening,)), True), (Formed(1, (listening,), has_ended=True), False):
        entry = directory.swap(GENERATION, formed.to_json().encode(), revision).entry
        assert entry is not None
        revision = entry.revision
        assert _directory_is_used(sealed(store)) == lives


def test_no_group_is_in_use_if_its_pointer_is_stale(
    finder: Finder, stranger: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "CONNECT_TIMEOUT", 0.5)
    store = dist.HashStore()
    for port in (stranger, free_port()):
        point(store, Pointer("127.0.0.1", port, "host", "/nowhere"))
        assert not _directory_is_used(sealed(store))


# Whole workers


def directory_pid() -> int:
    keeping = current.joined().directory._keeping
    return int(keeping._keeper.pid)


def test_workers_go_on_if_the_directory_is_killed_with_its_keeper(tcp: str) -> None:
    with processes(4) as made:
        boss, x, y, again = made
        boss.run(join, "boss", tcp, 0)
        for process, name in ((x, "x"), (y, "y")):
            process.run(join, name, tcp)
        x.run(rpc.wait_for_workers, ["y"], PATIENCE)
        pid = boss.run(directory_pid)
        boss.kill()
        boss.join()
        kill(pid)
        assert x.run(call, "y") == 3
        again.run(join, "boss", tcp, 0)
        for process in (x, y, again):
            process.run(rpc.wait_for_workers, ["boss", "x", "y"], PATIENCE)
            wait_until(lambda process=process: process.run(names) == ["boss", "x", "y"])  # type: ignore[misc]
            assert process.run(call, "boss") == 3


def init_torch(port: int, rank: int) -> None:
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    dist.barrier()


@pytest.mark.parametrize("torch_first", [False, True])
def test_torchs_process_group_uses_the_same_port(torch_first: bool) -> None:
    port = free_port()
    acts: list[Callable[[int], object]] = [
        lambda rank: join(f"w{rank}", f"tcp://127.0.0.1:{port}", rank),
        partial(init_torch, port),
    ]
    with processes(2) as made:
        for act in reversed(acts) if torch_first else acts:
            run_all(made, act)
        assert made[0].run(call, "w1") == made[1].run(call, "w0") == 3
        run_all(made, lambda _: dist.barrier())
        for process in made:
            process.run(rpc.shutdown)
