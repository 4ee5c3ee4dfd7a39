"""Tests of the collectives of a group: barriers, small reductions, and process groups of torch."""

import contextlib
import gc
import itertools
import operator
import os
import pathlib
import random
import signal
import threading
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist

import telegrad
import telegrad.rpc as rpc
from telegrad import errors
from telegrad._core import texts
from telegrad._core.membership.members import Identity
from telegrad._core.worker import current
from telegrad._core.worker.current import Worker
from telegrad.groups import collectives
from telegrad.groups.collectives import CollectiveArrival, CollectiveManager
from tests.cluster import PATIENCE, agents_here, group, in_background, processes, run_all, wait_until
from tests.rpc.members import check_error, error_of, join

come: list[str] = []


def number() -> int:
    return rpc.get_worker_info().id


def meet(members: rpc.Group, name: str = "") -> int:
    """Wait at a barrier; return how many workers had arrived when this one went on."""
    come.append(rpc.get_worker_info().name)
    members.barrier(name)
    return len(come)


def sum_up(members: rpc.Group, **how: Any) -> Any:
    return members.all_reduce(torch.ones(2) * number(), **how)


def test_a_cancelled_call_withdraws_its_arrival_at_a_barrier(team: list[Worker], actors: rpc.Group) -> None:
    for callee in ("w1", "w2"):  # w1 tracks the arrivals
        with pytest.raises(errors.CallTimeout):
            rpc.rpc_sync(callee, meet, (actors, "cancelled"), timeout=0.2)
    kept = team[1].attached(CollectiveManager)._meetings
    wait_until(lambda: not kept and not team[1].agent._server.going_on)
    rest = actors[2:].rpc_async(meet, (actors, "cancelled"))
    wait_until(lambda: [meeting.missing for each in kept.values() for meeting in each] == [["w1", "w2"]])
    assert not rest.done()
    actors[:2].rpc_sync(meet, (actors, "cancelled"))
    rest.wait()


def test_a_barrier_holds_until_all_have_arrived(actors: rpc.Group) -> None:
    for _ in range(5):
        come.clear()
        assert actors.rpc_sync(meet, (actors,)) == [5] * 5
        come.clear()
        assert actors[1:3].rpc_sync(meet, (actors[1:3], "two")) == [2] * 2


def test_barriers_of_other_names_and_groups_are_separate(actors: rpc.Group) -> None:
    pair = rpc.group(["w1", "w2"])
    first = pair.rpc_async(meet, (pair, "a"))
    second = rpc.rpc_async("w1", meet, (pair, "b"))
    third = rpc.rpc_async("w1", meet, (actors, "a"))
    assert first.wait()
    assert not second.done()
    assert not third.done()
    assert rpc.rpc_sync("w2", meet, (pair, "b"))
    assert actors[1:].rpc_sync(meet, (actors, "a"))
    second.wait()
    third.wait()


def test_all_reduce_combines_the_values_of_all(actors: rpc.Group) -> None:
    assert [each.tolist() for each in actors.rpc_sync(sum_up, (actors,))] == [[15, 15]] * 5
    assert [each.tolist() for each in actors.rpc_sync(sum_up, (actors,), {"op": torch.maximum})] == [[5, 5]] * 5
    with pytest.raises(errors.GroupError, match="w3: TypeError"):
        actors.rpc_sync(sum_up, (actors,), {"op": operator.index})


def wait_in_vain(members: rpc.Group) -> str:
    try:
        members.barrier("lost", timeout=1.2)
    except errors.CallTimeout as error:
        return str(error)
    return ""


def test_workers_that_did_not_arrive_are_named(actors: rpc.Group) -> None:
    others = actors.without("w2")
    future = others.rpc_async(wait_in_vain, (actors,))
    waits: list[texts.Wait] = []

    def is_late() -> bool:
        waits.extend(wait for wait in texts.under_way() if wait.what == "barrier" and wait.missing())
        return bool(waits)

    wait_until(is_late)
    assert waits[0].missing() == ["w2"]
    assert waits[0].text() == "barrier 'lost' of the group (role 'actor'): 'w2' did not arrive yet"
    for said in future.wait():
        assert said.startswith("barrier 'lost' of the group (role 'actor'): after 1.2 s 'w2' did not arrive.")
    late = rpc.rpc_async("w2", meet, (actors, "lost"))
    others.rpc_sync(meet, (actors, "lost"))
    late.wait()


def test_a_thread_that_times_out_keeps_the_arrival_of_another_thread(team: list[Worker], actors: rpc.Group) -> None:
    kept = team[1].attached(CollectiveManager)._meetings
    pair = rpc.group(["w1", "w2"])
    first = rpc.rpc_async("w2", sum_up, (pair,))
    wait_until(lambda: kept)
    with pytest.raises(errors.CallTimeout, match=r"after 0\.1 s 'w1' did not arrive"):
        rpc.rpc_sync("w2", sum_up, (pair,), {"timeout": 0.1})
    assert not first.done()
    assert rpc.rpc_sync("w1", sum_up, (pair,)).tolist() == first.wait().tolist() == [3, 3]


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such signals")
def test_an_interrupted_wait_withdraws_its_arrival(team: list[Worker], actors: rpc.Group) -> None:
    kept = team[1].attached(CollectiveManager)._meetings
    main = threading.get_ident()

    def interrupt() -> None:
        wait_until(lambda: kept)
        signal.pthread_kill(main, signal.SIGINT)

    current.enter(team[2])  # which is an actor
    with in_background(interrupt), pytest.raises(KeyboardInterrupt):
        actors.barrier("interrupted")
    current.enter(team[0])
    wait_until(lambda: not kept)


def leave_by_exit(first: Any, second: Any) -> Any:
    raise SystemExit


def test_a_reduction_that_raises_system_exit_fails_for_all(actors: rpc.Group) -> None:
    with pytest.raises(errors.GroupError) as caught:
        actors.rpc_async(sum_up, (actors,), {"op": leave_by_exit, "timeout": 5.0}).wait()
    assert all("SystemExit" in str(error) for error in caught.value.errors.values())


def test_only_members_may_call_barrier_and_process_group(actors: rpc.Group) -> None:
    with pytest.raises(
        errors.UsageError, match="barrier must be called by the workers of the group, and 'w0' is not in"
    ):
        actors.barrier()
    with pytest.raises(errors.UsageError, match="process_group must be called by"):
        telegrad.process_group(actors)


@pytest.mark.parametrize("seed", range(50))
def test_collectives_in_any_order_of_arrivals_and_withdrawals(seed: int) -> None:
    """Each worker arrives for several rounds, withdraws some arrivals, and gets the values of each round."""
    draw, server = random.Random(seed), CollectiveManager.__new__(CollectiveManager)
    server._lock, server._meetings = threading.Lock(), {}
    names = ["a", "b", "c"][: draw.randint(2, 3)]
    key = ("barrier", "everybody", "")
    numbers = itertools.count()
    waits: dict[str, list[tuple[CollectiveArrival, int, Any]]] = {name: [] for name in names}
    got: dict[str, list[list[int]]] = {name: [] for name in names}
    brought = dict.fromkeys(names, 0)
    while min(map(len, got.values())) < 4:
        name = draw.choice(names)
        arrival = CollectiveArrival(Identity(name, 0, name), next(numbers))
        if draw.random() < 0.3 and waits[name]:
            given_up, value, _ = waits[name].pop()  # the last: so the values that count are in order
            missing = server.missing(given_up)
            assert missing
            assert server.missing(given_up, withdraws=True) == missing
            assert server.missing(given_up, withdraws=True) is None
            brought[name] = value - 1
        elif len(waits[name]) < 3:
            brought[name] += 1
            waits[name].append((arrival, brought[name], server.arrive(key, arrival, names, brought[name], None)))
        for each, waiting in waits.items():
            while waiting and waiting[0][2].done():
                got[each].append([value for _, value in waiting.pop(0)[2].value()])
    for found in got.values():
        assert found[:4] == [[number] * len(names) for number in range(1, 5)]
    for name in names:
        for arrival, _, _ in waits[name]:
            server.missing(arrival, withdraws=True)
    assert not server._meetings


def test_a_member_that_left_while_the_first_arrived_is_named(
    team: list[Worker], actors: rpc.Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its departure was told when there was no meeting yet that waited for it."""
    membership, record = team[1].membership, CollectiveManager.arrive  # w1 tracks the arrivals

    def leave_first(*args: Any) -> Any:
        stays = tuple(worker for worker in view().workers if worker.name != "w2")
        monkeypatch.setattr(membership, "view", lambda: view()._replace(workers=stays))
        return record(*args)

    view = membership.view
    monkeypatch.setattr(CollectiveManager, "arrive", leave_first)
    with pytest.raises(errors.PeerLost, match=r"worker 'w2', .* will not arrive: it is no longer in the group"):
        rpc.rpc_sync("w1", meet, (actors, "left"))


def test_departures_are_noticed_though_the_first_arrival_found_no_free_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        monkeypatch.undo()
        raise RuntimeError("can't start new thread")

    with agents_here(2) as (keeper, other):
        monkeypatch.setattr(keeper.membership._teller.thread, "want", fail)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            rpc.group().barrier()
        met = rpc.rpc_async("w0", meet, (rpc.group(),), timeout=PATIENCE)
        wait_until(lambda: bool(keeper.attached(CollectiveManager)._meetings))
        other.end("")
        with pytest.raises(errors.PeerLost, match="'w1', for which all wait here, will not arrive"):
            met.wait()


def test_workers_that_withdrew_are_named_only_if_no_others_are_missing() -> None:
    meeting = collectives.Collective(["a", "b", "c"])
    meeting.withdrew.add("a")
    assert meeting.missing == ["b", "c"]
    meeting.withdrew |= {"b", "c"}
    assert meeting.missing == ["a", "b", "c"]


# In processes


def misses(name: str) -> None:
    kept = current.here().attached(CollectiveManager)._meetings
    wait_until(lambda: [meeting.missing for each in kept.values() for meeting in each] == [[name]])


@pytest.mark.parametrize("victim", [1, 0])
def test_a_worker_that_dies_before_it_arrives_is_named(victim: int) -> None:
    with group(3) as made:
        others = [process for rank, process in enumerate(made) if rank != victim]
        for process in others:
            process.begin(error_of, lambda: rpc.group().barrier("x", timeout=0))
        made[victim].run(rpc.rpc_sync, "worker0", misses, (f"worker{victim}",))  # that one tracks the arrivals
        made[victim].kill()
        for process in others:
            check_error(process.end(), errors.PeerLost, f"worker 'worker{victim}'")


def meet_a_stopped_worker() -> None:
    collectives.PATIENCE = 0.2
    rpc.group().barrier("stopped", timeout=1.0)


def has_meetings(count: int) -> None:
    wait_until(lambda: len(current.here().attached(CollectiveManager)._meetings) == count)


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such signals")
def test_a_barrier_times_out_while_the_worker_that_tracks_it_is_stopped() -> None:
    with group(3, silence=0) as made:
        made[1].begin(error_of, meet_a_stopped_worker)
        made[0].run(has_meetings, 1)
        made[0].kill(signal.SIGSTOP)
        assert made[1].end() == (
            errors.CallTimeout,
            "barrier 'stopped' of the group (everybody): after 1 s worker 'worker0', which tracks the arrivals, does "
            "not answer. `python -m telegrad why` shows what they are doing; a longer timeout= waits longer",
        )
        made[0].kill(signal.SIGCONT)
        made[0].run(has_meetings, 0)


def barrier_of_all(_: int) -> list[str]:
    members = rpc.group("actor")
    members.barrier()
    return members.names


def test_a_barrier_of_a_live_group_waits_for_current_members_only(tmp_path: pathlib.Path) -> None:
    where = f"file://{tmp_path}/store"
    with processes(3) as made:
        for process, name in zip(made, "abc", strict=True):
            process.run(join, name, where, -1, "actor")
        assert run_all(made, barrier_of_all) == [["a", "b", "c"]] * 3
        made[2].run(rpc.shutdown)
        for process in made[:2]:
            process.run(rpc.workers)
        assert run_all(made[:2], barrier_of_all) == [["a", "b"]] * 2


made_groups: list[Any] = []


def collect(_: int, backend: str = "gloo") -> tuple[list[float], int, int, bool]:
    members = rpc.group(["worker2", "worker1", "worker0"])
    pg = telegrad.process_group(members, backend)
    made_groups.append(pg)
    value = torch.ones(2) * (number() + 1)
    dist.all_reduce(value, group=pg)
    others = [torch.zeros(1) for _ in members]
    dist.all_gather(others, torch.tensor([float(number())]), group=pg)
    dist.broadcast(value, 0, group=pg)
    assert [int(each) for each in others] == [2, 1, 0]
    return value.tolist(), pg.rank(), pg.size(), dist.is_initialized()


def leave(_: int) -> bool:
    rpc.shutdown()
    with contextlib.suppress(Exception):
        dist.get_backend(made_groups[0])
        return False
    return True


def destroy(_: int) -> bool:
    gone = weakref.ref(made_groups[-1])
    dist.destroy_process_group(made_groups.pop())
    gc.collect()
    return gone() is None


def test_process_groups_reduce_gather_and_broadcast() -> None:
    with group(3) as made:
        expected = [([6.0, 6.0], 2 - rank, 3, False) for rank in range(3)]
        assert run_all(made, collect) == expected
        assert run_all(made, collect, "cpu:gloo") == expected
        assert run_all(made, destroy) == [True] * 3
        assert run_all(made, leave) == [True] * 3


def ask_for(backend: Any) -> str:
    try:
        telegrad.process_group(rpc.group([0]) if isinstance(backend, str) else backend, str(backend))
    except errors.InvalidArgument as error:
        return str(error)
    return ""


def test_wrong_uses_of_process_groups_raise_clear_errors() -> None:
    with group(1) as made:
        assert "no backend 'foo'; it has gloo, " in made[0].run(ask_for, "foo")
        assert "takes a group of workers, such as" in made[0].run(ask_for, ["worker0"])
