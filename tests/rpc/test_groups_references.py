"""Tests of groups of references: one value on each worker of a group."""

import threading
from typing import Any

import pytest
import torch

import telegrad.rpc as rpc
from telegrad import errors
from telegrad._core.agent.peer import Peer
from telegrad._core.worker.current import Worker
from tests.cluster import PATIENCE, agents_here, group, wait_until
from tests.rpc import members

NAMES = ["w1", "w2", "w3", "w4", "w5"]


class Counter(members.Counter):
    def __init__(self, start: int = 0) -> None:
        if start < 0 and rpc.get_worker_info().name == "w2":
            raise ValueError("not here")
        super().__init__(start)

    def where(self) -> str:
        return rpc.get_worker_info().name

    def part(self, name: str) -> "Counter":
        return Counter(self.count)

    def __call__(self, more: int) -> int:
        return self.count + more


@rpc.actor
class Ordered:
    def __init__(self) -> None:
        self.seen: list[int] = []

    def note(self, number: int, gate: Any = None) -> list[int]:
        self.seen.append(number)
        return list(self.seen)


def test_remote_of_a_group_makes_a_value_on_each_worker(actors: rpc.Group) -> None:
    refs = actors.remote(Counter, (5,))
    assert (refs.names, len(refs), [each.owner_name() for each in refs]) == (NAMES, 5, NAMES)
    assert "w3" in refs
    assert rpc.WorkerInfo("w0", 0) not in refs
    assert repr(refs) == "<RefGroup of 5, on 'w1', 'w2', 'w3', 'w4', 'w5'>"
    assert refs.future().wait() == [None] * 5
    assert refs.rpc_sync().where() == NAMES
    assert refs.rpc_sync().add(1) == [6] * 5
    assert refs[1:3].rpc_async().add(1).results() == {"w2": 7, "w3": 7}
    assert refs[0].rpc_sync().add(0) == refs["w4"].rpc_sync().add(0) == refs[actors[3]].rpc_sync().add(0) == 6
    assert [each.count for each in refs.to_here()] == [6, 7, 7, 6, 6]
    assert refs.remote().part("x")[1:].rpc_sync().add(1) == [8, 8, 7, 7]
    assert refs.rpc_sync()(10) == [16, 17, 17, 16, 16]


def test_a_group_with_this_worker_has_a_local_value(actors: rpc.Group) -> None:
    refs = rpc.group().remote(Counter, (5,))
    assert refs.to_here()[0] is refs[0].local_value()
    assert refs.rpc_sync().where() == ["w0", *NAMES]
    assert refs.remote().part("x").rpc_sync().add(1) == [6] * 6


gate = threading.Event()


def gated(fails: bool = False) -> int:
    assert gate.wait(PATIENCE)
    return 1 // (not fails)


def test_a_timeout_holds_for_a_value_of_this_worker_that_is_being_made(team: list[Worker]) -> None:
    gate.clear()
    here = rpc.group(["w0"])
    refs, failing = here.remote(gated), here.remote(gated, (True,))
    with pytest.raises(errors.GroupError, match="w0: CallTimeout"):
        refs.to_here(timeout=0.05)
    threading.Timer(0.05, gate.set).start()
    assert refs.to_here(timeout=PATIENCE) == [1]
    for _ in range(2):
        with pytest.raises(errors.GroupError, match="w0: ZeroDivisionError"):
            failing.to_here()


def test_map_calls_a_method_with_items(actors: rpc.Group) -> None:
    refs = actors.remote(Counter)
    assert refs.map("add", [1, 2, 3, 4, 5]).wait() == [1, 2, 3, 4, 5]
    assert refs.map("add", [0] * 20).errors() == {}
    assert {each.owner_name() for each in refs} == set(NAMES)
    with pytest.raises(errors.InvalidArgument, match="the name of a method"):
        refs.map(Counter.add, [1])  # type: ignore[arg-type]
    with pytest.raises(errors.InvalidArgument, match="map has no items"):
        refs.map("add", [])


def test_methods_of_actors_keep_their_order(actors: rpc.Group) -> None:
    refs = actors.remote(Ordered)
    futures = [refs.rpc_async().note(number) for number in range(50)]
    assert futures[-1].wait() == [list(range(50))] * 5
    assert refs[0].rpc_sync().note(50) == list(range(51))


def test_a_broadcast_value_is_local_at_each_worker(actors: rpc.Group) -> None:
    value = torch.arange(4.0)
    refs = actors.broadcast(value)
    value.zero_()
    assert all(each.tolist() == [0, 1, 2, 3] for each in refs.to_here())
    assert actors.rpc_sync(use, (refs,)) == [6.0] * 5


def use(refs: rpc.RefGroup) -> float:
    return float(refs[rpc.get_worker_info().name].local_value().sum())


def test_references_of_a_group_can_be_sent_and_are_freed(actors: rpc.Group, team: list[Worker]) -> None:
    refs = actors.remote(Counter, (1,))
    back = rpc.rpc_sync("w1", pass_on, (refs,))
    assert back.rpc_sync().add(1) == [3] * 5
    del refs, back
    wait_until(lambda: not any(worker.references.counts()["owners"] for worker in team))


def pass_on(refs: rpc.RefGroup) -> rpc.RefGroup:
    refs.rpc_sync().add(1)
    return refs


def test_a_value_that_cannot_be_made_fails_on_its_worker_alone(actors: rpc.Group) -> None:
    refs = actors.remote(Counter, (-1,))
    with pytest.raises(errors.GroupError, match="w2: ValueError: not here") as caught:
        refs.rpc_sync().add(1)
    assert caught.value.results == {"w1": 0, "w3": 0, "w4": 0, "w5": 0}
    with pytest.raises(errors.GroupError):
        refs.to_here()
    assert list(refs.future().errors()) == ["w2"]
    assert list(refs.map("add", [1] * 8).errors()) == [1]


def test_wrong_uses_raise_clear_errors(actors: rpc.Group) -> None:
    refs = actors.remote(Counter)
    with pytest.raises(errors.UnknownWorker, match="none of these references is to a value of worker 'w9'"):
        refs["w9"]
    with pytest.raises(errors.GroupError, match="has no attribute 'none'"):
        refs.rpc_sync().none()
    lock = threading.Lock()
    with pytest.raises(errors.CannotEncode):
        refs.rpc_async().add(lock)
    with pytest.raises(errors.CannotEncode):
        actors.remote(Counter, (lock,))
    with pytest.raises(errors.CannotEncode):
        actors.broadcast(lock)
    with pytest.raises(errors.InvalidArgument, match="no references"):
        refs[9:].rpc_sync().add(1)


kept: list[rpc.RefGroup] = []


def make() -> None:
    kept.append(rpc.group().remote(Counter))


def use_them() -> dict[str, bool]:
    return {name: isinstance(error, errors.PeerError) for name, error in kept[0].rpc_async().add(1).errors().items()}


def create_after_a_death() -> list[str]:
    refs = rpc.group([0, 1, 2]).remote(Counter)
    return list(refs.rpc_async().add(1).errors())


def test_an_owner_that_died_is_named() -> None:
    with group(3) as made:
        made[0].run(make)
        assert made[0].run(use_them) == {}
        made[1].kill()
        made[1].join()
        assert made[0].run(use_them) == {"worker1": True}
        assert made[0].run(create_after_a_death) == ["worker1"]


def test_an_interrupt_while_a_group_of_values_is_made_frees_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call of w1 is answered, and that of w2 waits for room."""
    with agents_here(3) as (here, one, _):

        def wait(_: Peer) -> None:
            wait_until(lambda: len(here.references._creations) == 1)
            raise KeyboardInterrupt

        monkeypatch.setattr(Peer, "is_full", property(lambda peer: peer.name == "w2"))
        monkeypatch.setattr(Peer, "wait_for_capacity", wait)
        with pytest.raises(KeyboardInterrupt):
            rpc.group(["w1", "w2"]).remote(Counter)
        monkeypatch.undo()
        wait_until(lambda: not any(here.references.counts().values()) and not one.references.counts()["owners"])
