"""Tests of groups as values: members, derived groups, groups in arguments, and errors of wrong uses."""

import copy
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import telegrad.rpc as rpc
from telegrad import errors
from tests.cluster import PATIENCE, agents_here, processes, wait_until
from tests.rpc.members import error_of, join


@pytest.fixture(scope="module", autouse=True)
def six() -> Iterator[None]:
    """Start `w0` as a learner, `w1` to `w4` as actors, and `w5` without a role."""
    with agents_here(6, role_of=lambda rank: {0: "learner", 5: ""}.get(rank, "actor")):
        yield


def odd(worker: rpc.WorkerInfo) -> bool:
    return worker.id % 2 == 1


def test_a_group_has_the_workers_of_a_role_or_list() -> None:
    actors = rpc.group("actor")
    assert actors.names == ["w1", "w2", "w3", "w4"]
    assert [worker.role for worker in actors] == ["actor"] * 4
    assert len(actors) == 4
    assert actors[0] == ("w1", 1) == actors[-4]
    assert "w2" in actors
    assert rpc.WorkerInfo("w2", 2) in actors
    assert 2 in actors
    assert "w0" not in actors
    assert True not in actors  # though rank 1 is in it
    assert rpc.group().names == [f"w{rank}" for rank in range(6)]
    assert rpc.group(["w3", 1, rpc.WorkerInfo("w0", 0)]).names == ["w3", "w1", "w0"]
    assert rpc.group(actors) == actors


def test_slices_filters_differences_and_unions_of_groups() -> None:
    actors = rpc.group("actor")
    assert actors[1:3].names == ["w2", "w3"]
    assert actors[::-1].names == ["w4", "w3", "w2", "w1"]
    assert actors.filter(odd).names == ["w1", "w3"]
    assert actors.filter(lambda worker: worker.name > "w2")[:1].names == ["w3"]
    assert actors.without("w1", rpc.WorkerInfo("w2", 2)).names == ["w3", "w4"]
    assert (rpc.group() - actors).names == ["w0", "w5"]
    assert (rpc.group("learner") | actors[:1] | actors[:2]).names == ["w0", "w1", "w2"]
    assert not rpc.group("learner").without(0)


def test_the_repr_liveness_and_version_of_a_group() -> None:
    actors = rpc.group("actor")
    assert repr(actors) == "<Group role 'actor': w1, w2, w3, w4>"
    assert repr(actors[:2]) == "<Group role 'actor' [:2]: w1, w2>"
    assert repr(actors[::-2]) == "<Group role 'actor' [::-2]: w4, w2>"
    assert repr(actors.filter(odd)) == f"<Group role 'actor' where {__name__}.odd: w1, w3>"
    assert (
        repr(actors - rpc.group(["w1"]) | rpc.group(["w5"])) == "<Group role 'actor' without w1 and w5: w2, w3, w4, w5>"
    )
    pair = rpc.group(["w1", "w2"])
    assert repr(pair) == "<Group w1, w2>"
    assert repr(pair.filter(odd)) == f"<Group w1, w2 where {__name__}.odd>"
    assert (pair - pair).names == []
    assert (pair | pair).names == ["w1", "w2"]
    assert actors.live
    assert (pair | actors).live
    assert (actors - pair).live
    assert not (pair | pair)[:1].live
    assert actors.version == rpc.group("learner").version
    assert not actors.now().live
    assert (actors.now().version, actors.now()) == (0, rpc.group(["w1", "w2", "w3", "w4"]))


def test_groups_compare_and_hash_by_value() -> None:
    assert rpc.group("actor") == rpc.group("actor") != rpc.group("learner")
    assert rpc.group("actor")[1:] == rpc.group("actor")[1:]
    assert len({rpc.group("actor"), rpc.group("actor"), rpc.group()}) == 2
    assert copy.deepcopy(rpc.group("actor")) == rpc.group("actor")
    assert rpc.group("actor") != "actor"


def names_and_type(group: rpc.Group, *more: Any) -> tuple[list[str], str, rpc.Group]:
    return group.names, rpc.get_worker_info().name, group


@pytest.mark.parametrize("make", [lambda group: group, lambda group: group[1:], lambda group: group.filter(odd)])
def test_a_group_can_be_sent_and_returned(make: Callable[[rpc.Group], rpc.Group]) -> None:
    group = make(rpc.group("actor"))
    names, where, back = rpc.rpc_sync("w5", names_and_type, (group,))
    assert (names, where, back.names) == (group.names, "w5", group.names)


untyped: Any = rpc.group


@pytest.mark.parametrize(
    ("make", "kind", "words"),
    [
        (lambda: untyped("acto"), errors.UnknownWorker, "no worker has the role 'acto'; the roles are: actor, l"),
        (lambda: untyped("w1"), errors.UnknownWorker, "there is a worker of that name: group(['w1'])"),
        (lambda: untyped(["w1", "w9"]), errors.UnknownWorker, "no worker is named 'w9'"),
        (lambda: untyped(["w1", 1]), errors.InvalidArgument, "worker 'w1' is in the group twice"),
        (lambda: untyped([]), errors.InvalidArgument, "needs at least one"),
        (lambda: untyped(3), errors.InvalidArgument, "for one worker: group([worker]), not 3"),
        (
            lambda: untyped(rpc.WorkerInfo("w1", 1)),
            errors.InvalidArgument,
            "for one worker: group([worker]), not WorkerInfo",
        ),
        (lambda: untyped("actor")[9], IndexError, "has 4 workers now, and none at 9"),
        (lambda: untyped("actor")[True], errors.InvalidArgument, "must be the place of a worker, or a slice, not True"),
        (lambda: untyped("actor")[:"a"], errors.InvalidArgument, "the place of a worker, or a slice, not sl"),
        (lambda: untyped("actor").remote(int)[True], errors.UnknownWorker, "worker True"),
        (lambda: untyped("actor")["w1"], errors.InvalidArgument, "must be the place of a worker, or a slice, not 'w1'"),
        (lambda: untyped("actor").without("w9"), errors.UnknownWorker, "no worker is named 'w9'"),
        (
            lambda: untyped("actor")[9:].rpc_sync(odd, (1,)),
            errors.UnknownWorker,
            "(role 'actor' [9:]) has no workers now",
        ),
        (lambda: untyped("actor") - "w1", TypeError, "unsupported operand"),
        (lambda: untyped("actor") | "w1", TypeError, "unsupported operand"),
    ],
)
def test_wrong_uses_raise_clear_errors(make: Callable[[], Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind) as caught:
        make()
    assert words in str(caught.value)


kept: list[rpc.Group] = []


def keep(role: str) -> None:
    kept.append(rpc.group(role))


def look() -> tuple[list[str], int]:
    return kept[0].names, kept[0].version


def call() -> Any:
    future = kept[0].rpc_async(rpc.get_worker_info)
    return [worker.name for worker in future.wait()], future.workers, future.version


def after(version: int, count: int) -> tuple[list[str], int]:
    """Wait until the group has that many workers; return its names and version."""
    rpc.wait_for_workers(count, PATIENCE, role="actor")
    wait_until(lambda: rpc.workers() and len(kept[0]) == count)
    assert kept[0].version > version
    return look()


def test_a_live_group_follows_joins_leaves_and_deaths(tmp_path: pathlib.Path) -> None:
    where = f"file://{tmp_path}/store"
    with processes(4) as made:
        boss, *others = made
        boss.run(join, "boss", where)
        boss.run(keep, "actor")
        with pytest.raises(AssertionError, match=r"no worker has the role 'actor'; .*wait_for_workers\(1, role"):
            boss.run(call)
        versions = [boss.run(look)[1]]
        for count, process in enumerate(others, 1):
            process.run(join, None, where, -1, "actor")
            names, version = boss.run(after, versions[-1], count)
            assert names == [f"actor{number}" for number in range(count)]
            versions.append(version)
        assert boss.run(call) == (names, names, versions[-1])
        others[0].run(rpc.shutdown)
        assert boss.run(after, versions[-1], 2)[0] == ["actor1", "actor2"]
        assert boss.run(call)[0] == ["actor1", "actor2"]
        others[1].kill()
        assert boss.run(after, versions[-1], 1)[0] == ["actor2"]


def use_after_leaving(where: str) -> tuple[type[Exception] | None, str]:
    join("alone", where, -1, "actor")
    group = rpc.group("actor")
    rpc.shutdown()
    return error_of(group.rpc_sync, odd, (1,))


def test_a_group_that_is_used_after_shutdown_raises(tmp_path: pathlib.Path) -> None:
    with processes(1) as made:  # children of another process, which have left themselves
        kind, said = made[0].run(use_after_leaving, f"file://{tmp_path}/store")
        assert kind is errors.NotInitialized
        assert said.startswith("RPC has not been initialized: this process has left its group, by shutdown()")
        assert "A process that a worker starts" not in said
