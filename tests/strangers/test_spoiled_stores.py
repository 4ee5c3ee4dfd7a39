"""A stranger writes garbage into the store: groups form or name the spoiled key, within bounded time."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

import telegrad.rpc as rpc
from telegrad import errors
from telegrad._core.calls.settings import TelegradOptions
from telegrad._core.membership import rendezvous
from telegrad._core.membership.members import Member
from telegrad._core.membership.rendezvous import RankTable, StaticJoin
from telegrad._core.stores.find_directory import POINTER, find_directory
from telegrad._core.stores.sealed_store import OPEN, SERVED, KeyValueStore, SealedDirectory
from telegrad._core.worker import current
from tests.cluster import KEYS, PATIENCE, free_port, processes, sealed, takes_less_than

SOON = 10.0  # seconds for steps of bounded time, on a busy machine
GARBAGE = ["stoll", "absent", "-5", "9" * 30, "9223372036854775807", "\x1b[31m", "7x", "\0"]


def member(name: str, rank: int) -> Member:
    return Member(name, rank, f"life of {name}", "program", "host", "", ("127.0.0.1", 1))


class Spoiled:
    """A store of torch in which a stranger changes the value of a key just before somebody writes it."""

    def __init__(self, key: str, value: str, times: int = 1) -> None:
        self.store = dist.HashStore()
        self._key, self._value, self._times = key, value, times

    def compare_set(self, key: str, *values: str) -> Any:
        if key.endswith(self._key) and self._times:
            self._times -= 1
            self.store.set(key, self._value)
        return self.store.compare_set(key, *values)

    def __getattr__(self, method: str) -> Any:
        return getattr(self.store, method)


def joined(store: Any, rank: int, size: int, timeout: float) -> RankTable | errors.TelegradError:
    try:
        return StaticJoin(sealed(store), member(f"w{rank}", rank), size, timeout).join()
    except errors.TelegradError as error:
        return error


# Groups of fixed size


@pytest.mark.parametrize("key", ["come/1", "gone/0", "read/1", "complete", "ready"])
@pytest.mark.parametrize("forged", [*GARBAGE, "0", "77"])
def test_a_fixed_group_forms_or_names_the_spoiled_key(key: str, forged: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "LINGER", 0.1)
    monkeypatch.setattr(rendezvous, "CHECK_AFTER", 0.05)
    store = Spoiled(key, forged)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda rank: joined(store, rank, 2, 3.0), range(2)))
    assert store._times < Spoiled(key, forged)._times  # the key was used
    for outcome in found:
        if not isinstance(outcome, RankTable):
            assert isinstance(outcome, errors.StoreUntrusted), repr(outcome)
            assert f"{key}'" in str(outcome)
            assert key != "gone/0"  # which is only waited for


@pytest.mark.parametrize("key", ["rank/1", "terms", "come/0"])
def test_a_fixed_group_with_a_deleted_value_ends_with_an_error(key: str) -> None:
    store = dist.HashStore()
    with ThreadPoolExecutor(3) as pool:
        found = [pool.submit(joined, store, rank, 3, 1.0) for rank in range(2)]
        store.wait(["telegrad/1/come/0", "telegrad/1/come/1"])
        store.delete_key(f"telegrad/1/{key}")
        found.append(pool.submit(joined, store, 2, 3, 1.0))
    assert {type(each.result()) for each in found} <= {errors.StoreUntrusted, errors.GroupIncomplete}


def test_an_entry_without_a_seal_is_refused() -> None:
    store = dist.HashStore()
    store.set("telegrad/1/come/1", "1")
    error = joined(store, 0, 2, 0.3)
    assert isinstance(error, errors.StoreUntrusted)
    assert "'telegrad/1/come/1'" in str(error)


# A dynamic group, whose members need the store only while they join


def spoil(store: Any, value: str) -> None:
    for key in store.list_keys():
        store.set(key, value)


@pytest.mark.parametrize("forged", GARBAGE)
def test_the_error_names_a_spoiled_pointer(forged: str) -> None:
    store = dist.HashStore()
    store.set(POINTER, forged)
    with pytest.raises(errors.StoreUntrusted, match=f"'{POINTER}'"):
        find_directory(sealed(store), "here", free_port(), "127.0.0.1", time.monotonic() + SOON)


def spoiled_while_it_runs(port: int) -> str:
    rpc.init_rpc("w", rpc_backend_options=TelegradOptions(init_method=f"tcp://127.0.0.1:{port}", rpc_timeout=PATIENCE))
    spoil(dist.TCPStore("127.0.0.1", port, is_master=False), "stoll")
    with takes_less_than(SOON):
        rpc.workers()
        rpc.shutdown()
    try:
        rpc.workers()
    except errors.NotInitialized:
        return "left"
    return "still there"


def test_shutdown_of_a_dynamic_group_ignores_a_spoiled_store() -> None:
    with processes(1) as (process,):
        assert process.run(spoiled_while_it_runs, free_port()) == "left"


def test_a_stranger_who_deletes_the_pointer_splits_a_group_only_if_the_mark_is_deleted_too() -> None:
    """docs/security.md says so."""
    store = dist.HashStore()
    KeyValueStore(sealed(store)).write(SERVED, OPEN)
    find = lambda seconds, port=None: find_directory(  # noqa: E731
        sealed(store), "here", port, "127.0.0.1", time.monotonic() + seconds
    )
    first = find(SOON, free_port())
    store.delete_key(POINTER)
    with pytest.raises(errors.StoreUnreachable, match="does not say where the group's directory is"):
        find(0.1)
    store.delete_key(SERVED)
    second = find(SOON)
    assert second.pointer != first.pointer
    for each in (first, second):
        each.directory.close()
        each.keeping.close()


# The next generation of an elastic group


def outcome(act: Callable[[], object]) -> tuple[str, str]:
    try:
        act()
    except errors.TelegradError as error:
        return type(error).__name__, str(error)
    return "", ""


def spoiled_between_generations(port: int) -> list[tuple[str, str]]:
    options = TelegradOptions(init_method=f"tcp://127.0.0.1:{port}", rpc_timeout=PATIENCE)
    rpc.init_rpc("w", min_workers=1, rpc_backend_options=options)
    rpc.rendezvous_again()
    elastic = current.joined().elastic
    elastic.turning_of(current.joined())._steps.want(True)  # a worker waits to join
    found = elastic._held.found  # as if a foreign server had values that a stranger wrote
    elastic._held.found = found._replace(directory=SealedDirectory(found.directory, KEYS, "place"))
    return [outcome(act) for act in (rpc.rendezvous_again, rpc.workers, lambda: rpc.rpc_sync("w", abs, (1,)))] + [
        outcome(rpc.shutdown),
        outcome(rpc.workers),
    ]


def test_each_call_in_a_spoiled_generation_raises_until_shutdown() -> None:
    with processes(1) as (process,):
        *told, last = process.run(spoiled_between_generations, free_port())
    assert [name for name, _ in told] == ["StoreUntrusted"] * 4
    assert all("the group's store at 'group' was not written" in text for _, text in told)
    assert last[0] == "NotInitialized"
