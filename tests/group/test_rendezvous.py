"""Tests of how groups of fixed size form: the members learn of each other, or all get the same error."""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch.distributed as dist

from telegrad import errors
from telegrad._core import texts
from telegrad._core.membership.members import Member
from telegrad._core.membership.rendezvous import RankTable, StaticJoin
from telegrad._core.security.keyring import Keyring, new_key
from telegrad._core.stores.sealed_store import REFUSED, KeyValueStore, SealedStore
from tests.cluster import PATIENCE, opened, processes, run_all, sealed, wait_until
from tests.group.members import member

T = TypeVar("T")
Stores = Callable[[], SealedStore]
Join = tuple[SealedStore, Member, int, float]

WAIT = 30.0  # torch looks up the name of each address that connects, which takes 5 s with a slow name service


def outcome(function: Callable[..., T], *args: Any) -> T | errors.TelegradError:
    try:
        return function(*args)
    except errors.TelegradError as error:
        return error


def together(*joins: Join) -> list[Any]:
    """Let all join at once, each in a thread; return what each got, an error included."""
    with ThreadPoolExecutor(len(joins)) as pool:
        futures = [pool.submit(outcome, StaticJoin(*join).join) for join in joins]
        return [future.result(PATIENCE) for future in futures]


def crowd(store: SealedStore, size: int, timeout: float = WAIT) -> list[Join]:
    return [(store, member(f"w{rank}", rank), size, timeout) for rank in range(size)]


@pytest.fixture(params=["hash", "file", "tcp"])
def stores(request: pytest.FixtureRequest, tmp_path: Path) -> Stores:
    """Return a function that opens another worker's store of the same place."""
    if request.param == "hash":
        store = dist.HashStore()
        return lambda: sealed(store)
    if request.param == "file":
        return lambda: sealed(dist.FileStore(f"{tmp_path}/store", -1))
    served = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return lambda: sealed(dist.TCPStore("127.0.0.1", served.port, is_master=False, wait_for_workers=False))


def test_all_members_learn_of_all_others_and_of_their_group(stores: Stores) -> None:
    rosters = together(*[(stores(), member(f"w{rank}", rank), 4, WAIT) for rank in range(4)])
    for roster in rosters:
        assert list(roster.members) == [member(f"w{rank}", rank) for rank in range(4)]
        assert roster.group == rosters[0].group
    assert len(rosters[0].group) >= 32


def test_several_groups_form_in_turn_in_a_lasting_store(stores: Stores) -> None:
    groups = [{roster.group for roster in together(*crowd(stores(), 2))} for _ in range(4)]
    assert all(len(of_one_group) == 1 for of_one_group in groups)
    assert len(set.union(*groups)) == 4


def test_a_worker_with_another_key_is_refused_and_reported_to_others() -> None:
    store = dist.HashStore()
    keys = [Keyring([new_key()]), Keyring([new_key()])]
    mine, other = together(*[(sealed(store, ring), member(f"w{rank}", rank), 2, 0.5) for rank, ring in enumerate(keys)])
    refused, missed = (mine, other) if isinstance(mine, errors.AuthenticationFailed) else (other, mine)
    assert type(refused) is errors.StoreUntrusted
    assert "TELEGRAD_KEY" in str(refused)
    assert type(missed) is errors.GroupIncomplete
    assert "1 tried to join with another key" in str(missed)


@pytest.mark.parametrize("spoiled", [False, True])
def test_the_wait_reports_that_a_worker_came_with_another_key(
    spoiled: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(texts, "FIRST", 0.1)
    store = dist.HashStore()
    KeyValueStore(sealed(store)).add_hint(REFUSED)
    if spoiled:  # a spoiled hint must not end the wait
        store.set(REFUSED, "many")
    with pytest.raises(errors.TelegradError), caplog.at_level(logging.INFO, "telegrad"):
        StaticJoin(sealed(store), member("a", 0), 2, 0.5).join()
    assert ("1 tried to join with another key" in caplog.text) is not spoiled
    assert "rank 1 did not join" in caplog.text


@pytest.mark.parametrize(
    ("second", "what"), [(("w1", 2), "the name 'w1'"), (("other", 1), "the rank 1")], ids=["name", "rank"]
)
def test_a_name_or_rank_used_twice_is_an_error_for_all(stores: Stores, second: tuple[str, int], what: str) -> None:
    workers = [member("w0", 0), member("w1", 1), member(*second)]
    for error in together(*[(stores(), worker, 3, WAIT) for worker in workers]):
        assert type(error) is errors.WorkerTaken
        assert what in str(error)
        assert str(workers[1]) in str(error)
        assert str(workers[2]) in str(error)


def test_two_workers_that_serve_the_store_both_get_an_error(tcp: str) -> None:
    def join(name: str) -> RankTable:
        return StaticJoin(opened(tcp, 0, 2, WAIT).store, member(name, 0), 2, WAIT).join()

    with processes(2) as made:
        found = run_all(made, lambda rank: outcome(join, f"w{rank}"))
    assert [type(error) for error in found] == [errors.WorkerTaken] * 2
    assert all("'w0'" in str(error) and "'w1'" in str(error) for error in found)


@pytest.mark.parametrize(
    ("rank", "place", "reported"),
    [
        (0, "localhost:1", True),
        (0, "[::1]:1", True),
        (1, "localhost:1", False),
        (0, "host:1", False),
        (0, "file:///store", False),
    ],
)
def test_rank_0_reports_that_other_hosts_cannot_reach_its_store(
    rank: int, place: str, reported: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(texts, "FIRST", 0.05)
    with pytest.raises(errors.GroupIncomplete), caplog.at_level(logging.INFO, "telegrad"):
        StaticJoin(sealed(dist.HashStore()), member("a", rank), 2, 0.2, place=place).join()
    assert f"at {place}" in caplog.text
    assert ("which other hosts cannot reach" in caplog.text) is reported


def test_other_threads_see_who_is_missing_while_a_group_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "LINE", 0.01)
    joins = crowd(sealed(dist.HashStore()), 3)

    def await_missing(names: list[str]) -> None:
        wait_until(lambda: names in [wait.missing() for wait in texts.under_way() if wait.worker == "w0"])

    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(StaticJoin(*joins[0], lambda _: True, "host:1").join)
        await_missing(["rank 1", "rank 2"])
        (wait,) = (wait for wait in texts.under_way() if wait.worker == "w0")
        assert (wait.what, wait.place) == ("init_rpc", "host:1")
        assert wait.text() == "ranks 1, 2 did not join ('w0' joins a group of 3 at host:1)"
        second = pool.submit(StaticJoin(*joins[1]).join)
        await_missing(["rank 2"])
        third = pool.submit(StaticJoin(*joins[2]).join)
        assert len({future.result(PATIENCE).group for future in (first, second, third)}) == 1
    assert not [wait for wait in texts.under_way() if wait.worker in ("w0", "w1", "w2")]


def test_different_sizes_are_an_error_for_all() -> None:
    store = sealed(dist.HashStore())
    found = together(*[(store, member(f"w{rank}", rank), size, WAIT) for rank, size in enumerate((2, 3))])
    assert [type(error) for error in found] == [errors.RendezvousError] * 2
    assert all("world_size" in str(error) for error in found)


@pytest.mark.parametrize("rank", [2, -1])
def test_a_rank_out_of_range_is_an_error_for_all(rank: int) -> None:
    store = sealed(dist.HashStore())
    found = together((store, member("w0", 0), 2, WAIT), (store, member("stray", rank), 2, WAIT))
    assert [type(error) for error in found] == [errors.RendezvousError] * 2
    assert all(f"'stray' has rank {rank}" in str(error) and "0 to 1" in str(error) for error in found)


def test_missing_ranks_are_named_to_all() -> None:
    came = crowd(sealed(dist.HashStore()), 5)
    patient = came[3]
    hasty = (*came[0][:3], 0.05)
    found = together(hasty, patient)
    assert [type(error) for error in found] == [errors.GroupIncomplete] * 2
    assert all("ranks 1, 2, 4 did not join" in str(error) and "0.05 s" in str(error) for error in found)


def test_a_worker_that_gives_up_informs_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    store = sealed(dist.HashStore())
    waiting = threading.Event()
    real = KeyValueStore.wait

    def interrupted(board: KeyValueStore, key: str, until: float, *others: Any) -> str:
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        waiting.set()
        return real(board, key, until, *others)

    monkeypatch.setattr(KeyValueStore, "wait", interrupted)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(outcome, StaticJoin(*crowd(store, 3)[0]).join)
        assert waiting.wait(WAIT)
        with pytest.raises(KeyboardInterrupt):
            StaticJoin(*crowd(store, 3)[1]).join()
        assert "'w1' (rank 1" in str(other.result(WAIT))
        assert "KeyboardInterrupt" in str(other.result(WAIT))


def test_a_late_worker_of_a_used_rank_waits_for_the_next_group() -> None:
    store = sealed(dist.HashStore())
    together(*crowd(store, 2))
    late = outcome(StaticJoin(store, member("late", 1), 2, 0.05).join)
    assert isinstance(late, errors.GroupIncomplete)
    assert "rank 0 did not join; another group of 2 formed in this store before" in str(late)
    formed = KeyValueStore(store, "telegrad/1")
    assert formed.terms()
    assert formed.read("complete") == formed.read("ready") == "opened"


def meet_again_and_again(rank: int, url: str, size: int, times: int) -> list[tuple[int, str]]:
    seen = []
    for _ in range(times):
        meeting = opened(url, rank, size, WAIT)
        roster = StaticJoin(meeting.store, member(f"w{rank}", rank), size, WAIT).join()
        del meeting
        seen.append((len(roster.members), roster.group))
    return seen


def test_groups_follow_each_other_on_one_port(tcp: str) -> None:
    with ThreadPoolExecutor(3) as pool:
        seen = list(pool.map(lambda rank: meet_again_and_again(rank, tcp, 3, 4), range(3)))
    assert seen[0] == seen[1] == seen[2]
    assert len(set(seen[0])) == 4


def test_sixteen_workers_meet_within_two_seconds() -> None:
    served = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    clients = [dist.TCPStore("127.0.0.1", served.port, is_master=False, wait_for_workers=False) for _ in range(16)]
    start = time.perf_counter()
    rosters = together(*[(sealed(client), member(f"w{rank}", rank), 16, WAIT) for rank, client in enumerate(clients)])
    assert all(len(roster.members) == 16 for roster in rosters)
    assert time.perf_counter() - start < 2
