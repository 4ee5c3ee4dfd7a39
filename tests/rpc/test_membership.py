"""Tests of the members of a group: lists, waits, callbacks, names by role, and `serve`."""

import logging
import os
import pathlib
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from functools import partial

import pytest
import torch.distributed as dist

import telegrad
import telegrad.rpc as rpc
from telegrad import errors
from telegrad._core.calls.settings import TelegradOptions
from telegrad._core.membership import membership
from telegrad._core.security.keyring import user_keys
from telegrad._core.stores import launchers
from telegrad._core.stores.find_directory import POINTER, DirectoryMonitor
from telegrad._core.stores.sealed_store import OPEN, SERVED, KeyValueStore, SealedStore
from telegrad._core.worker import current
from tests.cluster import PATIENCE, Process, agents_here, free_port, group, processes, run_all, wait_until
from tests.rpc.members import account, call, check_error, error_of, is_quiet, join, line_with, names, next_event


@pytest.fixture(params=["tcp", pytest.param("file", marks=pytest.mark.nightly)])
def where(request: pytest.FixtureRequest, tcp: str, tmp_path: pathlib.Path) -> str:
    return tcp if request.param == "tcp" else f"file://{tmp_path}/store"


def join_and_watch(name: str, where: str, rank: int = -1, losses: bool = False) -> None:
    join(name, where, rank)
    account(losses=losses)


def test_callbacks_of_a_dynamic_group_report_joins_leaves_and_losses(where: str) -> None:
    with processes(4) as (boss, x, y, z):
        boss.run(join_and_watch, "boss", where, 0, True)
        x.run(join_and_watch, "x", where, -1, True)
        assert (boss.run(next_event), x.run(next_event)) == (("join", "x", 3), ("join", "boss", 3))
        y.run(join_and_watch, "y", where)
        assert boss.run(next_event) == x.run(next_event) == ("join", "y", 3)
        assert boss.run(names) == y.run(names) == ["boss", "x", "y"]
        z.run(join, "z", where)
        assert boss.run(next_event) == x.run(next_event) == ("join", "z", 3)
        assert {y.run(next_event)[:2] for _ in range(3)} == {("join", "boss"), ("join", "x"), ("join", "z")}
        z.run(rpc.shutdown)
        assert boss.run(next_event) == x.run(next_event) == y.run(next_event) == ("left", "z")
        y.kill()
        for each in (boss, x):
            assert {each.run(next_event)[:2] for _ in range(2)} == {("lost", "y"), ("y", "PeerLost")}
            assert "'y' was lost" in each.run(line_with, "lost")
            assert each.run(is_quiet)
            assert each.run(names) == ["boss", "x"]


@pytest.fixture(params=["tcp", pytest.param("file", marks=pytest.mark.nightly), "agent store", "telegrad run"])
def variables(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Iterator[dict[str, str]]:
    """Return the variables of the environment by which workers meet, or the URL of a file."""
    if request.param == "tcp":
        yield {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    elif request.param == "file":
        yield {"URL": f"file://{tmp_path}/store"}
    else:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        kept = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
        if request.param == "agent store":
            yield kept | {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
        else:
            keys = user_keys()
            keeping = DirectoryMonitor(keys, "127.0.0.1")
            KeyValueStore(SealedStore(store, keys)).write(POINTER, keeping.pointer._replace(launched=True).to_json())
            KeyValueStore(SealedStore(store, keys)).write(SERVED, OPEN)
            yield kept | {launchers.STORE: f"127.0.0.1:{store.port}"}
            keeping.close()


def join_there(name: str, rank: int, variables: dict[str, str]) -> int:
    os.environ.update(variables)
    return join(name, variables.get("URL", "env://"), rank)


def test_serving_ends_when_rank_0_leaves_in_order_with_any_store(variables: dict[str, str]) -> None:
    with processes(3) as (boss, x, again):
        boss.run(join_there, "boss", 0, variables)
        x.run(join_there, "x", -1, variables)
        x.run(rpc.wait_for_workers, ["boss"], PATIENCE)
        x.begin(rpc.serve)
        boss.kill()
        boss.join()
        again.run(join_there, "boss", 0, variables)
        assert again.run(call, "x") == 3  # x still serves
        again.run(rpc.shutdown)
        assert x.end() is None


def fail(_: object) -> None:
    raise ZeroDivisionError


def account_behind_a_callback_that_fails() -> None:
    rpc.on_join(fail)
    account(losses=True)


def test_callbacks_of_a_fixed_group_report_losses_and_their_reasons() -> None:
    with group(3) as made:
        made[0].run(account_behind_a_callback_that_fails)
        assert {made[0].run(next_event) for _ in range(2)} == {("join", "worker1", 3), ("join", "worker2", 3)}
        made[1].kill()
        assert {made[0].run(next_event)[:2] for _ in range(2)} == {("lost", "worker1"), ("worker1", "PeerLost")}
        assert made[0].run(names) == ["worker0", "worker2"]
        assert made[0].run(error_of, rpc.wait_for_workers, 3)[0] is errors.PeerLost
        made[2].run(rpc.shutdown, False)
        assert {made[0].run(next_event)[:2] for _ in range(2)} == {("lost", "worker2"), ("worker2", "LeftEarly")}


def test_wait_for_workers_waits_for_names_or_a_number(where: str) -> None:
    with processes(3) as made:
        made[0].run(join, "boss", where, 0)
        told = made[0].run(error_of, partial(rpc.wait_for_workers, role="r"), ["x", "boss"], 0.1)
        check_error(told, errors.InvalidArgument, "role needs a number of workers")
        told = made[0].run(error_of, rpc.wait_for_workers, ["x", "boss"], 0.1)
        check_error(told, errors.CallTimeout, "'x' missing; the group has boss")
        made[0].begin(rpc.wait_for_workers, 3, PATIENCE)
        for process, name in zip(made[1:], "xy", strict=True):
            process.run(join, name, where)
        assert [worker.name for worker in made[0].end()] == ["boss", "x", "y"]
        assert made[0].run(lambda: [worker.id for worker in rpc.wait_for_workers("y")]) == [0, 1, 2]


def serve(*required: str) -> tuple[type[Exception], str] | None:
    try:
        rpc.serve(require=required)
    except Exception as error:
        return type(error), str(error)
    return None


def test_a_server_serves_until_stop_serving_or_the_end_of_its_group(tcp: str) -> None:
    with processes(4) as made:
        boss, *servers = made
        boss.run(join, "boss", tcp, 0)
        for process, name in zip(servers, "xyz", strict=True):
            process.run(join, name, tcp)
            assert process.run(serve, "boss", "bos")[0] is errors.UnknownWorker  # and it is still in the group
            process.begin(serve)
            assert boss.run(call, name) == 3
        boss.run(call, "x", rpc.stop_serving, ())
        assert servers[0].end() is None
        assert boss.run(names) == ["boss", "y", "z"]
        began = time.monotonic()
        boss.run(rpc.shutdown)
        assert [servers[1].end(), servers[2].end()] == [None, None]
        assert time.monotonic() - began < 2  # less than a server that leaves would wait in vain


def test_serving_ends_when_a_required_worker_dies(tcp: str) -> None:
    with processes(3) as (boss, x, y):
        boss.run(join, "boss", tcp, 0)
        for process, name in ((x, "x"), (y, "y")):
            process.run(join, name, tcp)
        assert x.run(serve, "nobody")[0] is errors.UnknownWorker  # and x stays in the group
        x.begin(serve, "boss")
        assert boss.run(call, "y") == 3
        y.kill()
        wait_until(lambda: boss.run(names) == ["boss", "x"])
        assert boss.run(call, "x") == 3
        boss.kill()
        check_error(x.end(), errors.PeerLost, "'boss' was lost")


def wait_until_serving() -> None:
    """Wait until the main thread of this process is in `serve`."""
    main = threading.main_thread().ident
    assert main is not None
    stack = lambda: [frame.f_code.co_name for frame, _ in traceback.walk_stack(sys._current_frames()[main])]  # noqa: E731
    wait_until(lambda: "wait_for_end" in stack())


class Stopping(logging.Handler):
    """Ends `serve` of this worker at its first warning."""

    def emit(self, record: logging.LogRecord) -> None:
        said.append(record.getMessage())
        current.here().stop_serving()


said: list[str] = []


def serve_until_told() -> list[str]:
    membership.ALONE = 0.1
    log = logging.getLogger("telegrad")
    log.addHandler(handler := Stopping(logging.WARNING))
    rpc.serve()
    log.removeHandler(handler)
    return said


def test_a_worker_that_serves_alone_says_so(tcp: str) -> None:
    with processes(1) as (late,):
        late.run(join, "late", tcp)
        (told,) = late.run(serve_until_told)
        assert "worker 'late' serves, and no other worker is in its group" in told


def test_serving_fails_if_rank_0_ends_without_shutdown(tcp: str) -> None:
    with processes(4) as made:
        boss, *servers, y = made
        boss.run(join, "boss", tcp, 0)
        y.run(join_and_watch, "y", tcp)
        for process, required in zip(servers, ((), ("boss",)), strict=True):
            process.run(join, f"w{len(required)}", tcp)
            process.begin(serve, *required)
            boss.run(call, f"w{len(required)}", wait_until_serving, ())
        boss.run(lambda: current.here().end_with_the_program())
        for process in servers:
            check_error(process.end(), errors.PeerLost, "'boss' was lost")
        assert [y.run(next_event)[:2] for _ in range(4)][-1] == ("lost", "boss")


def take_changes() -> None:
    worker = current.here()
    wait_until(lambda: bool(worker.membership._lost_unseen))
    worker.directory._applying.release()


def test_a_worker_that_died_before_it_was_seen_in_the_directory_is_lost(tcp: str) -> None:
    with processes(2) as (boss, other):
        boss.run(join_and_watch, "boss", tcp, 0)
        boss.run(lambda: current.here().directory._applying.acquire())  # delays the changes that the directory reports
        other.run(join, "other", tcp)
        assert boss.run(call, "other") == 3
        other.kill()
        boss.run(take_changes)
        wait_until(lambda: boss.run(names) == ["boss"])
        assert boss.run(next_event)[:2] == ("lost", "other")


def test_stop_serving_is_for_dynamic_groups(workers: list[Process]) -> None:
    check_error(workers[0].run(error_of, call, "worker1", rpc.stop_serving, ()), errors.UsageError, "fixed size")


# The store


def test_rank_0_need_not_be_first(tcp: str) -> None:
    """A worker that was given another rank waits for the worker of rank 0."""
    with processes(4) as made:
        assert made[0].run(join, "early", tcp) == 1
        made[3].begin(join, "another", tcp, 5)
        assert made[1].run(join, "boss", tcp, 0) == 0
        assert made[3].end() == 5
        assert made[2].run(join, "late", tcp) == 2
        assert made[1].run(call, "early") == made[2].run(call, "boss") == made[1].run(call, "another") == 3


def test_a_process_leads_successive_dynamic_groups(tcp: str) -> None:
    with processes(3) as made:
        for fresh in made[1:]:
            made[0].run(join, "boss", tcp, 0)
            fresh.run(join, "x", tcp)
            assert made[0].run(call, "x") == 3
            fresh.begin(serve)
            made[0].run(rpc.shutdown)
            assert fresh.end() is None


# Roles: workers are named after their roles, know them, and are found by them


def join_with_role(rank: int, size: int | None, where: str, names: dict[int, str]) -> str:
    options = TelegradOptions(init_method=where, rpc_timeout=PATIENCE)
    role = "learner" if rank == 0 else "actor"
    rpc.init_rpc(names.get(rank), rank=rank if size else -1, world_size=size, rpc_backend_options=options, role=role)
    return rpc.get_worker_info().name


def roles() -> list[tuple[str, str]]:
    return [(worker.name, worker.role) for worker in rpc.workers()]


def current_name() -> str:
    return rpc.get_worker_info().name


def test_workers_of_a_group_of_fixed_size_are_named_by_rank_again_and_again(where: str) -> None:
    with processes(4) as made:
        for _ in range(2):
            assert run_all(made, join_with_role, 4, where, {3: "extra"}) == ["learner0", "actor0", "actor1", "extra"]
            everyone = [("learner0", "learner"), ("actor0", "actor"), ("actor1", "actor"), ("extra", "actor")]
            assert made[0].run(roles) == made[2].run(roles) == everyone
            assert made[0].run(call, "actor1", current_name, ()) == "actor1"
            assert made[1].run(call, "actor0", current_name, ()) == "actor0"
            run_all(made, lambda _: rpc.shutdown())


def test_workers_of_a_dynamic_group_take_the_lowest_free_number(tmp_path: pathlib.Path) -> None:
    where = f"file://{tmp_path}/store"
    with processes(4) as made:
        assert made[0].run(join_with_role, 0, None, where, {}) == "learner0"
        assert [made[rank].run(join_with_role, rank, None, where, {}) for rank in (1, 2)] == ["actor0", "actor1"]
        made[1].run(rpc.shutdown)
        assert made[3].run(join_with_role, 3, None, where, {}) == "actor0"
        assert [name for name, _ in made[0].run(roles)] == ["learner0", "actor0", "actor1"]
        assert len(made[0].run(lambda: rpc.wait_for_workers(2, PATIENCE, role="actor"))) == 3
        with pytest.raises(AssertionError, match="the group has 2 workers of role 'actor', not 3: actor0, actor1"):
            made[0].run(lambda: rpc.wait_for_workers(3, 0.1, role="actor"))


def test_a_worker_needs_a_name_or_a_role() -> None:
    with pytest.raises(errors.UsageError, match='init_rpc\\(role="actor"\\)'):
        rpc.init_rpc()


@pytest.mark.nightly
@pytest.mark.timeout(2 * PATIENCE)
def test_local_workers_have_roles() -> None:
    with telegrad.local({"learner": 1, "actor": 2}) as group:
        assert list(group) == ["learner0", "actor0", "actor1"]
        found = [(worker.name, worker.role) for worker in rpc.workers()]
    assert found == [("driver", ""), ("learner0", "learner"), ("actor0", "actor"), ("actor1", "actor")]


def test_a_called_function_can_use_its_group_before_init_rpc_has_returned() -> None:
    with agents_here(2, dynamic=True):  # without a worker of the process, as before `init_rpc` returns
        assert rpc.rpc_sync("w1", rpc.workers) == rpc.workers()
        rpc.rpc_sync("w1", rpc.stop_serving)
