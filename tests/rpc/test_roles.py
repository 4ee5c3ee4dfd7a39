"""Workers with a role: named after it, told of it, found by it."""

from __future__ import annotations

import pathlib
import pickle

import pytest

import telegrad
import telegrad.rpc as rpc
from telegrad import errors
from telegrad._core.membership.members import Member, named
from telegrad._core.worker.options import TelegradOptions
from tests.cluster import PATIENCE, free_port, processes, run_all


def member(name: str, id_: int, role: str = "") -> Member:
    return Member(name, id_, f"incarnation{id_}", "p", "h", "", ("127.0.0.1", 1), role=role)


def test_numbers_go_by_rank_within_a_role_and_past_names_that_are_taken() -> None:
    come = [member("", 3, "actor"), member("", 1, "actor"), member("actor1", 0), member("", 2, "learner")]
    assert [each.name for each in named(come)] == ["actor1", "actor0", "learner0", "actor2"]


def test_a_worker_info_is_a_pair_and_knows_its_role() -> None:
    info = rpc.WorkerInfo("a", 1, role="actor")
    name, number = info
    assert (name, number, info.role) == ("a", 1, "actor")
    assert info == rpc.WorkerInfo("a", 1) == ("a", 1)
    assert pickle.loads(pickle.dumps(info)).role == "actor"
    assert repr(info) == "WorkerInfo(name='a', id=1, role='actor')"
    assert repr(rpc.WorkerInfo("a", 1)) == "WorkerInfo(name='a', id=1)"


def join(rank: int, size: int | None, where: str, names: dict[int, str]) -> str:
    options = TelegradOptions(init_method=where, rpc_timeout=PATIENCE)
    role = "learner" if rank == 0 else "actor"
    rpc.init_rpc(names.get(rank), rank=rank if size else -1, world_size=size, rpc_backend_options=options, role=role)
    return rpc.get_worker_info().name


def roles() -> list[tuple[str, str]]:
    return [(worker.name, worker.role) for worker in rpc.workers()]


def ask(to: str) -> str:
    return rpc.rpc_sync(to, current_name)


def current_name() -> str:
    return rpc.get_worker_info().name


def leave(rank: int) -> None:
    rpc.shutdown()


@pytest.mark.parametrize("kind", ["tcp", "file"])
def test_workers_of_a_group_of_fixed_size_are_named_by_rank_again_and_again(kind: str, tmp_path: pathlib.Path) -> None:
    where = f"tcp://127.0.0.1:{free_port()}" if kind == "tcp" else f"file://{tmp_path}/store"
    with processes(4) as made:
        for _ in range(2):
            assert run_all(made, join, 4, where, {3: "extra"}) == ["learner0", "actor0", "actor1", "extra"]
            everyone = [("learner0", "learner"), ("actor0", "actor"), ("actor1", "actor"), ("extra", "actor")]
            assert made[0].run(roles) == made[2].run(roles) == everyone
            assert made[0].run(ask, "actor1") == "actor1"
            assert made[1].run(ask, "actor0") == "actor0"
            run_all(made, leave)


def test_workers_of_a_dynamic_group_take_the_lowest_free_number(tmp_path: pathlib.Path) -> None:
    where = f"file://{tmp_path}/store"
    with processes(4) as made:
        assert made[0].run(join, 0, None, where, {}) == "learner0"
        assert [made[rank].run(join, rank, None, where, {}) for rank in (1, 2)] == ["actor0", "actor1"]
        made[1].run(rpc.shutdown)
        assert made[3].run(join, 3, None, where, {}) == "actor0"
        assert [name for name, _ in made[0].run(roles)] == ["learner0", "actor0", "actor1"]
        found = made[0].run(lambda: rpc.wait_for_workers(2, PATIENCE, role="actor"))
        assert len(found) == 3
        with pytest.raises(AssertionError, match="there are 2 workers of role 'actor', not 3: actor0, actor1"):
            made[0].run(lambda: rpc.wait_for_workers(3, 0.1, role="actor"))


def test_a_worker_needs_a_name_or_a_role() -> None:
    with pytest.raises(errors.UsageError, match='init_rpc\\(role="actor"\\)'):
        rpc.init_rpc()


@pytest.mark.timeout(2 * PATIENCE)
def test_local_workers_have_roles() -> None:
    with telegrad.local({"learner": 1, "actor": 2}) as group:
        assert list(group) == ["learner0", "actor0", "actor1"]
        found = [(worker.name, worker.role) for worker in rpc.workers()]
    assert found == [("driver", ""), ("learner0", "learner"), ("actor0", "actor"), ("actor1", "actor")]
