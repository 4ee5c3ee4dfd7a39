"""Tests of calls to groups: order of results, reductions, maps, errors, deaths and cancelling."""

import asyncio
import itertools
import operator
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

import telegrad.rpc as rpc
from telegrad import autograd, errors
from telegrad._core.calls.futures import wait_for
from telegrad._core.rpc.joint_calls import first_cause
from telegrad.groups import collectives
from telegrad.groups.collectives import parts, tree_of
from telegrad.rpc import functions
from tests.agent.test_fanout import count_encodings
from tests.cluster import PATIENCE, Process, group, in_background

NAMES = [f"w{rank}" for rank in range(1, 6)]


def name(*_: Any) -> str:
    return rpc.get_worker_info().name


def number() -> int:
    return rpc.get_worker_info().id


def odd_ones_fail(value: Any) -> Any:
    if number() % 2:
        raise ValueError(f"not on {name()}")
    return value


gates: dict[str, threading.Event] = {each: threading.Event() for each in NAMES}


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    for gate in gates.values():
        gate.clear()
    yield
    for gate in gates.values():
        gate.set()


def pass_gate() -> str:
    assert gates[name()].wait(PATIENCE)
    return name()


def test_results_come_in_the_order_of_the_group(actors: rpc.Group) -> None:
    assert actors.rpc_sync(name) == NAMES
    future = actors[::-1].rpc_async(name)
    assert future.wait() == NAMES[::-1] == future.workers
    assert future.done()
    assert future.results() == {each: each for each in NAMES}
    assert future.errors() == {}
    assert repr(future) == f"<GroupFuture of {__name__}.name: done>"
    assert actors.rpc_sync(operator.add, (1, 2)) == [3] * 5
    assert actors.rpc_sync(name, kwargs={}, timeout=0) == NAMES
    assert actors.gather(number) == {f"w{rank}": rank for rank in range(1, 6)}


def test_arguments_are_encoded_once(actors: rpc.Group, monkeypatch: pytest.MonkeyPatch) -> None:
    made = count_encodings(monkeypatch)
    actors.rpc_sync(torch.sum, (torch.ones(1 << 18),))
    assert len(made) == 1
    refs = actors.remote(list, ([1],))
    refs.rpc_sync().append(torch.ones(8))
    assert len(made) == 3
    refs.remote().copy()
    assert len(made) == 4


def test_a_group_error_has_the_errors_and_results_by_worker(actors: rpc.Group) -> None:
    future = actors.rpc_async(odd_ones_fail, (7,))
    with pytest.raises(errors.GroupError) as caught:
        future.wait()
    error = caught.value
    assert isinstance(error, errors.WorkersFailed)
    assert sorted(error.errors) == ["w1", "w3", "w5"]
    assert error.results == {"w2": 7, "w4": 7} == future.results()
    assert "odd_ones_fail failed for 3 of 5:" in str(error)
    assert "  w3: ValueError: not on w3" in str(error)
    assert all(isinstance(each, ValueError) for each in future.errors().values())
    assert isinstance(error.__cause__, ValueError)
    assert first_cause({"w1": errors.CallTimeout(), "w3": error.__cause__}) is error.__cause__
    assert repr(future).endswith("done, 3 failed>")
    with pytest.raises(errors.GroupError):
        actors.gather(odd_ones_fail, (7,))


class Mute(Exception):
    def __str__(self) -> str:
        raise ZeroDivisionError


def fail_mutely(*_: Any) -> None:
    raise Mute


def test_an_error_whose_text_cannot_be_formatted_ends_the_calls(actors: rpc.Group) -> None:
    reduction = actors.rpc_async(fail_mutely, reduce=operator.add)
    for future in (actors.rpc_async(fail_mutely), actors.map(fail_mutely, range(9)), reduction):
        assert wait_for(future, PATIENCE)
        with pytest.raises(errors.GroupError, match=r": Mute: \(its text could not be formatted\)"):
            future.wait()


def fails_as_a_group() -> None:
    rpc.group("actor").rpc_sync(odd_ones_fail, (7,))


def test_a_group_error_is_raised_at_another_worker(actors: rpc.Group) -> None:
    with pytest.raises(errors.GroupError, match="w5: ValueError: not on w5") as caught:
        rpc.rpc_sync("w2", fails_as_a_group)
    assert sorted(caught.value.errors) == ["w1", "w3", "w5"]


def test_as_completed_yields_results_as_they_come(actors: rpc.Group) -> None:
    future = actors.rpc_async(pass_gate)
    assert repr(future).endswith("0 of 5 are there>")
    come = iter(future.as_completed())
    for each in ("w3", "w1", "w5"):
        gates[each].set()
        assert next(come) == (each, each)
    assert list(future.first(2)) == ["w3", "w1"]
    assert not future.done()
    gates["w2"].set()
    gates["w4"].set()
    assert {each for each, _ in come} == {"w2", "w4"}
    assert [each for each, _ in future.as_completed()][:3] == ["w3", "w1", "w5"]
    assert future.wait() == NAMES


def test_as_completed_yields_errors_too(actors: rpc.Group) -> None:
    come = dict(actors.rpc_async(odd_ones_fail, (7,)).as_completed())
    assert come["w2"] == come["w4"] == 7
    assert "not on w1" in str(come["w1"])


def test_results_can_be_asked_at_the_moment_of_the_last_arrival(actors: rpc.Group) -> None:
    for _ in range(50):  # a thread completes the future right after the last result has come
        future = actors.rpc_async(odd_ones_fail, (7,))
        assert len(list(future.as_completed())) == len(NAMES)
        assert future.done()
        assert (sorted(future.errors()), future.results()) == (["w1", "w3", "w5"], {"w2": 7, "w4": 7})


def test_first_returns_the_first_results_that_succeed(actors: rpc.Group) -> None:
    assert set(actors.rpc_async(odd_ones_fail, (7,)).first(2)) == {"w2", "w4"}
    with pytest.raises(errors.GroupError):
        actors.rpc_async(odd_ones_fail, (7,)).first(3)
    with pytest.raises(errors.InvalidArgument, match="n must be a number of the calls"):
        actors.rpc_async(number).first(6)


async def test_group_futures_in_asyncio(actors: rpc.Group) -> None:
    future = actors.rpc_async(name)
    seen = [each async for each, _ in future.as_completed()]
    assert future.done()
    later = [each async for each, _ in future.as_completed()]
    assert [await future, sorted(seen), sorted(later)] == [NAMES, NAMES, NAMES]


async def ask_all() -> Any:
    return await rpc.group("actor").rpc_async(name)


def ask_all_later() -> Any:
    return rpc.group("actor").rpc_async(name).then(lambda future: future.value()[::-1])


later = functions.async_execution(ask_all_later)


def test_remote_functions_can_call_groups(actors: rpc.Group) -> None:
    assert rpc.rpc_sync("w1", ask_all) == NAMES
    assert rpc.rpc_sync("w1", later) == NAMES[::-1]
    assert actors.rpc_sync(ask_all) == [NAMES] * 5


def test_callbacks_of_group_futures(actors: rpc.Group) -> None:
    assert actors.rpc_async(number).then(lambda future: sum(future.value())).wait() == 15
    several = actors.rpc_async(number)
    assert several.then(lambda _: len(list(several.as_completed()))).wait() == len(NAMES)
    assert torch.futures.collect_all([actors.rpc_async(number)]).wait()[0].wait() == [1, 2, 3, 4, 5]


def test_gradients_flow_through_group_calls(actors: rpc.Group) -> None:
    with autograd.context() as context:
        weight = torch.ones(2, requires_grad=True)
        loss = sum(actors.rpc_sync(torch.mul, (weight, 3))).sum()
        reduced = actors.rpc_sync(torch.mul, (weight, 2), reduce=torch.add).sum()
        mapped = sum(actors[:2].map(torch.mul, [weight] * 4, [1.0] * 4).wait()).sum()
        autograd.backward(context, [loss + reduced + mapped])
        assert autograd.get_gradients(context)[weight].tolist() == [29, 29]


# Reductions


def test_reductions_keep_the_order(actors: rpc.Group) -> None:
    future = actors.rpc_async(name, reduce=operator.add)
    assert (future.wait(), future.errors(), future.workers) == ("".join(NAMES), {}, NAMES)
    assert actors[:1].rpc_sync(name, reduce=operator.add) == "w1"
    assert rpc.group().rpc_sync(name, reduce=operator.add) == "".join(["w0", *NAMES])
    assert actors.rpc_sync(torch.full, ((2,), 2.0), reduce=torch.add).tolist() == [10, 10]
    assert actors.rpc_sync(number, reduce=max) == 5
    assert actors.rpc_sync(later, reduce=lambda first, second: first) == NAMES[::-1]


def test_closures_can_be_called_and_can_reduce(actors: rpc.Group) -> None:
    factor = 3
    assert actors.rpc_sync(lambda: number() * factor, reduce=lambda first, second: first + second) == 45


def test_errors_of_a_reduction_are_named_with_the_partial_result(actors: rpc.Group) -> None:
    future = actors.rpc_async(odd_ones_fail, (7,), reduce=operator.add)
    with pytest.raises(errors.GroupError, match="not on w1") as caught:
        future.wait()
    assert sorted(caught.value.errors) == ["w1", "w3", "w5"] == sorted(future.errors())
    assert caught.value.reduced == 14
    assert "failed for 3 of 5" in str(caught.value)
    with pytest.raises(errors.GroupError, match="unsupported operand"):
        actors.rpc_sync(name, reduce=operator.sub)


def test_wrong_uses_of_reductions_raise_clear_errors(actors: rpc.Group) -> None:
    with pytest.raises(errors.InvalidArgument, match=r"such as torch\.add, not 'sum'"):
        actors.rpc_async(name, reduce="sum")  # type: ignore[call-overload]
    lock = threading.Lock()
    with pytest.raises(errors.CannotEncode):
        actors.rpc_async(name, reduce=lambda first, second: lock)
    future = actors.rpc_async(name, reduce=operator.add)
    for ask in (future.results, future.first, future.as_completed):
        with pytest.raises(errors.UsageError, match="are combined on the way"):
            ask()
    assert future.wait()


def test_a_worker_that_is_late_in_a_reduction_is_named(actors: rpc.Group) -> None:
    for each in NAMES:
        if each != "w4":
            gates[each].set()
    with pytest.raises(errors.GroupError) as caught:
        actors.rpc_sync(pass_gate, timeout=5, reduce=operator.add)
    assert list(caught.value.errors) == ["w4"]
    assert isinstance(caught.value.errors["w4"], errors.CallTimeout)
    assert caught.value.reduced == "w1w2w3w5"


def test_reductions_leave_most_of_the_time(actors: rpc.Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "BRANCHES", 1)  # a chain
    for each in NAMES[:-1]:
        gates[each].set()
    with in_background(gates["w5"].set, after=1.2):
        assert actors.rpc_sync(pass_gate, timeout=2, reduce=operator.add) == "".join(NAMES)


def fail_at(victim: str, how: Callable[..., Any], first: list[str], second: list[str]) -> Any:
    return how() if name() == victim else first + second


# `operator.add()` raises; a lock cannot be sent; for a closed gate, the time runs out.
@pytest.mark.parametrize("how", [operator.add, sys.exit, threading.Lock, pass_gate])
@pytest.mark.parametrize("branches", [1, 2, 3])
def test_each_value_is_in_the_result_of_a_reduction_or_its_worker_is_named(
    actors: rpc.Group, monkeypatch: pytest.MonkeyPatch, how: Callable[..., Any], branches: int
) -> None:
    monkeypatch.setattr(collectives, "BRANCHES", branches)
    limit = 0.2 if how is pass_gate else PATIENCE
    for size, victim in itertools.product((2, 5), NAMES):
        named: list[str] = []
        try:
            found = actors[:size].rpc_sync(lambda: [name()], timeout=limit, reduce=partial(fail_at, victim, how))
        except errors.GroupError as error:
            found, named = error.reduced or [], [*error.errors]
            assert victim in named
        assert sorted(found + named) == NAMES[:size]


def in_order(tree: range) -> list[int]:
    """Return the places in the order in which they are combined."""
    return [tree.start, *(place for part in parts(tree) for place in in_order(part))]


@pytest.mark.parametrize("size", range(1, 101, 3))
def test_the_tree_of_a_reduction_keeps_the_order(size: int) -> None:
    assert in_order(range(size)) == list(range(size))
    found = {place: tree_of(size, place) for place in range(size)}
    for tree, depth in found.values():
        assert depth <= 4
        assert all(found[part.start] == (part, depth + 1) for part in parts(tree))


# Maps

running: dict[str, int] = {}
most: dict[str, int] = {}


def square_alone(value: int) -> int:
    here = name()
    running[here] = running.get(here, 0) + 1
    most[here] = max(most.get(here, 0), running[here])
    rpc.rpc_sync("w0", abs, (-1,))  # another thread may run meanwhile
    running[here] -= 1
    return value * value


def test_a_map_of_at_most_as_many_items_as_workers(actors: rpc.Group) -> None:
    assert actors.map(lambda item: (item, name()), "abcde").wait() == list(zip("abcde", NAMES, strict=True))
    assert actors.map(name, [1, 2]).wait() == ["w1", "w2"]
    assert actors.map(operator.sub, [5, 6, 7], [1, 2, 3]).wait() == [4, 4, 4]


def test_a_map_of_more_items_than_workers(actors: rpc.Group) -> None:
    future = actors.map(square_alone, range(40))
    assert future.wait() == [item * item for item in range(40)]
    assert set(most.values()) == {1}
    assert sorted(item for item, _ in future.as_completed()) == list(range(40))
    assert future.results()[39] == 39 * 39


def test_items_of_a_map_go_to_a_free_worker(actors: rpc.Group) -> None:
    gates["w1"].set()
    future = actors[:2].map(lambda _: pass_gate(), range(6))
    assert set(future.first(5).values()) == {"w1"}
    gates["w2"].set()
    assert future.wait() == ["w1", "w2", "w1", "w1", "w1", "w1"]


def test_errors_of_a_map_are_named_by_item(actors: rpc.Group) -> None:
    with pytest.raises(errors.GroupError, match="item 3: ZeroDivisionError") as caught:
        actors.map(operator.floordiv, [6] * 5, [1, 2, 3, 0, 6]).wait()
    assert caught.value.results == {0: 6, 1: 3, 2: 2, 4: 1}
    lock = threading.Lock()
    with pytest.raises(errors.GroupError) as caught:
        actors.map(name, [1, lock, 3]).wait()
    assert isinstance(caught.value.errors[1], errors.CannotEncode)
    with pytest.raises(errors.CannotEncode):
        actors.map(name, [lock, 2])


def modes(_: int) -> tuple[bool, bool]:
    return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")


def test_group_calls_run_in_the_modes_of_the_caller(actors: rpc.Group) -> None:
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert set(actors.map(modes, range(30)).wait()) == {(False, True)}
        assert set(actors.rpc_sync(modes, (0,))) == {(False, True)}
    assert set(actors.map(modes, range(30)).wait()) == set(actors.rpc_sync(modes, (0,))) == {(True, False)}


def test_wrong_uses_of_maps_raise_clear_errors(actors: rpc.Group) -> None:
    with pytest.raises(errors.InvalidArgument, match="map has no items"):
        actors.map(name, [])
    with pytest.raises(errors.InvalidArgument, match="map has no items"):
        actors.map(name)
    with pytest.raises(errors.InvalidArgument, match="different lengths"):
        actors.map(name, [1], [1, 2])
    with pytest.raises(errors.InvalidArgument, match="lists of items, not 3"):
        actors.map(name, 3)  # type: ignore[arg-type]
    with pytest.raises(errors.InvalidArgument, match="should be callable"):
        actors.map("name", [3])  # type: ignore[arg-type]


# Deaths, in processes


def hang_on(victim: str) -> str:
    if name() == victim:
        called.set()
        threading.Event().wait()
    return name()


def call_all(victim: str, **how: Any) -> dict[str, Any]:
    try:
        rpc.group().rpc_sync(hang_on, (victim,), timeout=0, **how)
    except errors.GroupError as error:
        kinds = {each: type(why).__name__ for each, why in error.errors.items()}
        return vars(error) | {"errors": kinds, "text": str(error)}
    return {}


def map_all(victim: str) -> dict[Any, str]:
    future = rpc.group().map(hang_on, [victim] * 12, timeout=0)
    return {item: type(error).__name__ for item, error in future.errors().items()}


called = threading.Event()


def is_called() -> bool:
    return called.wait(PATIENCE)


def kill_once_it_is_called(made: list[Process], victim: int) -> None:
    assert made[victim].run(is_called)
    made[victim].kill()


def test_a_worker_that_dies_during_a_group_call_is_named() -> None:
    with group(4) as made:
        made[0].begin(call_all, "worker2")
        kill_once_it_is_called(made, 2)
        told = made[0].end()
        assert told["errors"] == {"worker2": "PeerLost"}
        assert told["results"] == {each: each for each in ("worker0", "worker1", "worker3")}


def test_a_death_in_a_reduction_names_the_worker_and_those_behind_it() -> None:
    with group(7) as made:
        made[0].begin(partial(call_all, reduce=operator.add), "worker1")  # which also collects the part of worker2
        kill_once_it_is_called(made, 1)
        told = made[0].end()
        assert told["errors"] == {"worker1": "PeerLost", "worker2": "PeerLost"}
        assert told["reduced"] == "worker0worker3worker4worker5worker6"
        assert "idempotent" not in told["text"]  # which is refused for a reduction


def test_a_map_loses_only_the_item_that_ran_on_a_dead_worker() -> None:
    with group(4) as made:
        made[0].begin(map_all, "worker2")
        kill_once_it_is_called(made, 2)
        assert made[0].end() == {2: "PeerLost"}


async def for_ever(_: Any = None) -> None:
    await asyncio.Event().wait()


def test_a_group_call_is_cancelled_on_all(actors: rpc.Group) -> None:
    future = actors.rpc_async(for_ever)
    assert future.cancel()
    assert set(future.errors()) == set(NAMES)
    with pytest.raises(errors.GroupError, match="CallCancelled"):
        future.wait()
    assert not future.cancel()


def test_a_map_is_cancelled_with_the_items_that_wait(actors: rpc.Group) -> None:
    future = actors.map(for_ever, range(20))
    assert future.cancel()
    assert all(isinstance(error, errors.CallCancelled) for error in future.errors().values())
    assert len(future.errors()) == 20
