"""Tests of a replaced key: after the steps in docs/security.md, the new key alone reads all entries of a store."""

import contextlib
import json
import os
import pathlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from telegrad import errors
from telegrad._core.calls.settings import TelegradOptions
from telegrad._core.membership.form_generations import DirectoryLease, JoinRequest
from telegrad._core.membership.generations import Before, GroupSize
from telegrad._core.rpc.cluster import start
from telegrad._core.security.keyring import Keyring, new_key, read_keys
from telegrad._core.stores import sealed_store
from telegrad._core.stores.directory import Directory
from telegrad._core.stores.raw_stores import FileStore
from telegrad._core.stores.sealed_store import OPEN, SERVED, KeyValueStore, SealedStore, Sealer, SealRenewal
from telegrad._core.stores.stores import RendezvousStore, join_store, open_store
from telegrad._core.worker import current
from telegrad._core.worker.current import Worker
from tests.cluster import PATIENCE, in_threads, wait_until
from tests.directory import redis_server

OLD, NEW = new_key(), new_key()
names = st.sampled_from(["a", "terms", "b/terms", "rank", "7"])


class KeyFile:
    """A key file as it changes during the documented steps."""

    def __init__(self, folder: pathlib.Path, *keys: bytes) -> None:
        self.path = str(folder / "group.key")
        self.put(*keys)

    def put(self, *keys: bytes) -> None:
        with open(f"{self.path}.new", "wb", opener=partial(os.open, mode=0o600)) as file:
            file.write(b"\n".join(keys))
        os.replace(f"{self.path}.new", self.path)

    def ring(self) -> Keyring:
        return Keyring(read_keys(self.path), self.path)

    def replace(self, raw: Any) -> None:
        """Go through the documented steps, which say how long to wait before the last one."""
        self.put(OLD, NEW)
        self.put(NEW, OLD)
        wait_until(lambda: not unreadable(raw))
        self.put(NEW)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealed_store, "LOOK", 0.1)


@pytest.fixture
def file(tmp_path: pathlib.Path) -> KeyFile:
    return KeyFile(tmp_path, OLD)


def unreadable(raw: Any) -> list[str]:
    """Return the entries of a store that cannot be opened with the new key."""
    sealer, groups = Sealer(Keyring([NEW]), "reader"), {""}
    places = sorted(raw.list_keys(), key=lambda place: (place.count("/"), not place.endswith("/terms")))
    found = []
    for place in places:
        text = raw.multi_get([place])[0].decode()
        if text.isdecimal():
            continue  # a counter, which has no seal
        for group in groups:
            with contextlib.suppress(errors.StoreUntrusted):
                value = sealer.open(group, place, text).value
                if place.endswith("/terms") and not group:
                    groups.add(json.loads(value)[0])
                break
        else:
            found.append(place)
    return found


@contextlib.contextmanager
def ending(workers: list[Worker]) -> Iterator[list[Worker]]:
    try:
        yield workers
    finally:
        for worker in workers:
            worker.end("")


def begin(name: str, meet: Any) -> Worker:
    return start(name, lambda _: meet(), TelegradOptions(rpc_timeout=PATIENCE), current.enter)


@given(
    st.dictionaries(st.sampled_from(["telegrad/1", "telegrad/elastic", "telegrad/1/2"]), st.sets(names)), st.booleans()
)
def test_entries_of_writers_that_have_gone_are_renewed(boards: dict[str, set[str]], lists: bool) -> None:
    """The member that renews has not read any of these entries before."""
    with contextlib.ExitStack() as stack:
        monkeypatch = stack.enter_context(pytest.MonkeyPatch.context())
        store = dist.HashStore()
        for number, (prefix, keys) in enumerate(boards.items()):
            board = KeyValueStore(SealedStore(store, Keyring([OLD])), prefix)
            board.claim_terms(json.dumps([f"group {number}"]))
            for key in keys - {"terms"}:
                board.write(key, "value")
                board.write(key, "" if key == "7" else "value")
            board.add_hint("changes")
        KeyValueStore(SealedStore(store, Keyring([OLD]))).write(SERVED, OPEN)
        member = SealedStore(store, Keyring([OLD, NEW]))
        monkeypatch.setattr(member.keys, "secrets", Keyring([NEW, OLD]).secrets)
        if lists:
            member.renew()
            assert unreadable(store) == []
        else:  # a stranger has filled the store: entries that were read are renewed still
            monkeypatch.setattr(sealed_store, "_MOST_PLACES", 0)
            member._sealer._renew_at = 0
            KeyValueStore(member).read(SERVED)
            member.renew()
            assert SERVED not in unreadable(store)


@pytest.mark.parametrize("kept", [False, True])
def test_a_dynamic_group_renews_its_entries(
    file: KeyFile, tmp_path: pathlib.Path, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store is a file, or it is kept by no worker, as under torchrun."""
    monkeypatch.setattr(sealed_store, "RENEW_AGAIN", 0.1)
    raw: Any = FileStore(f"{tmp_path}/store")
    if kept:
        raw = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def meet(ring: Keyring | None = None) -> RendezvousStore:
        keys = ring or file.ring()
        if not kept:
            return open_store(f"file://{tmp_path}/store", -1, None, keys, PATIENCE)
        store = join_store("127.0.0.1", raw.port, keys, PATIENCE, lasting=True)
        return RendezvousStore(store, "127.0.0.1", -1, None, raw.port)

    with ending([begin("first", meet), begin("guest", meet)]) as workers:
        if kept:
            KeyValueStore(SealedStore(raw, file.ring())).write(SERVED, OPEN)  # after the workers have looked for it
        workers[1].shutdown(True, PATIENCE)
        workers.append(begin("second", meet))
        file.put(OLD, NEW)
        file.put(NEW, OLD)
        wait_until(lambda: not unreadable(raw))
        slow = begin("slow", partial(meet, Keyring([OLD, NEW])))  # on a host that is a step behind
        slow.shutdown(True, PATIENCE)
        file.replace(raw)
        for name in ("guest", "slow", "another"):
            workers.append(begin(name, partial(meet, Keyring([NEW]))))
        assert {each.name for each in workers[0].membership.workers()} >= {"first", "second", "guest", "another"}


@redis_server.NEEDED
def test_a_dynamic_group_with_a_server_renews_its_entries(file: KeyFile, tmp_path: pathlib.Path) -> None:
    (tmp_path / "redis").mkdir()
    with redis_server.running(tmp_path / "redis") as server:

        def meet(keys: Keyring) -> RendezvousStore:
            return open_store(server.url, -1, None, keys, PATIENCE)

        def is_renewed() -> bool:
            with (
                contextlib.suppress(errors.StoreUntrusted),
                contextlib.closing(directory(meet(Keyring([NEW])))) as each,
            ):
                return bool(each.list("").entries)
            return False

        with ending([begin("first", partial(meet, file.ring()))]) as workers:
            file.put(OLD, NEW)
            file.put(NEW, OLD)
            wait_until(is_renewed)
            file.put(NEW)
            workers.append(begin("second", partial(meet, Keyring([NEW]))))
            assert [each.name for each in workers[0].membership.workers()] == ["first", "second"]
            assert workers[0].agent.call("second", abs, (-1,), {}) == 1
            assert not workers[0].membership.serving.ended.is_set()


def directory(meeting: RendezvousStore) -> Directory:
    assert meeting.directory is not None
    return meeting.directory()


def test_a_group_of_fixed_size_renews_its_entries_in_a_lasting_store(file: KeyFile, tmp_path: pathlib.Path) -> None:
    """torchrun restarts the workers with the same store in this way."""

    def meet(rank: int, keys: Keyring) -> RendezvousStore:
        return open_store(f"file://{tmp_path}/store", rank, 2, keys, PATIENCE)

    def form(keys: Keyring) -> list[Worker]:
        return in_threads(*(partial(begin, f"w{rank}", partial(meet, rank, keys)) for rank in range(2)))

    with ending(form(file.ring())):
        pass
    with ending(form(file.ring())):
        file.replace(FileStore(f"{tmp_path}/store"))
    with ending(form(Keyring([NEW]))):
        pass


def test_an_elastic_group_renews_its_entries(file: KeyFile, tmp_path: pathlib.Path) -> None:
    def meet(held: DirectoryLease) -> RendezvousStore:
        return JoinRequest(held, held.keys, GroupSize(1, 1), Before(), -1, PATIENCE).meet(0)

    first, second = (DirectoryLease(f"file://{tmp_path}/store", keys, 60.0) for keys in (file.ring(), Keyring([NEW])))
    with contextlib.closing(first), contextlib.closing(second):
        with ending([begin("w", partial(meet, first))]) as (worker,):
            file.replace(FileStore(f"{tmp_path}/store"))
            assert worker.turning is not None
            assert worker.turning.generation.number == 1
        with ending([begin("w", partial(meet, second))]) as (worker,):
            assert worker.turning is not None
            assert worker.turning.generation.number == 2


def test_a_store_without_workers_is_renewed(file: KeyFile) -> None:
    """`telegrad run` keeps such a store while it restarts all workers."""
    raw = dist.HashStore()
    store = SealedStore(raw, file.ring())
    KeyValueStore(store).write(SERVED, OPEN)
    failures = iter([errors.StoreLost("it is locked by another process")])

    def renew() -> None:
        for error in failures:  # only the first time
            raise error
        store.renew()

    renewal = SealRenewal(renew)
    renewal.begin()
    file.replace(raw)
    renewal.close()
    assert KeyValueStore(SealedStore(raw, Keyring([NEW]))).read(SERVED) == OPEN


def test_a_renewal_that_fails_is_repeated(file: KeyFile) -> None:
    """The store may be lost, and be found again over another connection."""
    raw = dist.HashStore()
    store = SealedStore(raw, file.ring())
    for place in ("telegrad/a", "telegrad/b"):
        KeyValueStore(store).write(place, "value")
    file.put(NEW, OLD)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(store, "look_up", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            store.renew()
    store.renew()
    assert unreadable(raw) == []
