"""Who is in the group: asked, waited for, told; and whom a worker of a dynamic group serves."""

from __future__ import annotations

import contextlib
import logging
import operator
import os
import pathlib
import queue
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist

import telegrad.rpc as rpc
from telegrad import errors
from telegrad._core.security.keyring import user_keys
from telegrad._core.stores import supervised
from telegrad._core.stores.find_directory import POINTER, DirectoryMonitor
from telegrad._core.stores.sealed_store import OPEN, SERVED, KeyValueStore, SealedStore
from telegrad._core.worker import current
from telegrad._core.worker.options import TelegradOptions
from tests.cluster import PATIENCE, Process, free_port, group, processes, wait_until

events: queue.Queue[tuple[Any, ...]] = queue.Queue()
lines: queue.Queue[str] = queue.Queue()


def join(name: str, where: str, rank: int = -1, watch: bool = True) -> int:
    """Join a dynamic group, and keep account of what happens in it."""
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.put(record.getMessage())
    logging.getLogger("telegrad").addHandler(handler)
    rpc.init_rpc(name, rank=rank, rpc_backend_options=TelegradOptions(init_method=where, rpc_timeout=PATIENCE))
    if watch:
        account()
    return rpc.get_worker_info().id


def account() -> None:
    rpc.on_join(lambda worker: events.put(("join", worker.name, rpc.rpc_sync(worker, operator.add, (1, 2)))))
    rpc.on_leave(lambda worker, how: events.put((how, worker.name)))


def next_event() -> tuple[Any, ...]:
    return events.get(timeout=PATIENCE)


def line_with(words: str) -> str:
    while words not in (line := lines.get(timeout=PATIENCE)):
        pass
    return line


def names() -> list[str]:
    return [worker.name for worker in rpc.workers()]


def error_of(function: Callable[..., object], *args: Any) -> tuple[type[Exception] | None, str]:
    try:
        function(*args)
    except Exception as error:
        return type(error), str(error)
    return None, ""


def call(to: str, function: Callable[..., Any] = operator.add, args: tuple[Any, ...] = (1, 2)) -> Any:
    return rpc.rpc_sync(to, function, args)


@pytest.fixture(params=["tcp", "file"])
def where(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> str:
    return f"tcp://127.0.0.1:{free_port()}" if request.param == "tcp" else f"file://{tmp_path}/store"


def test_members_of_a_dynamic_group_are_told_who_comes_and_who_goes(where: str) -> None:
    with processes(3) as made:
        boss, x, y = made
        boss.run(join, "boss", where, 0)
        x.run(join, "x", where)
        assert boss.run(next_event) == ("join", "x", 3)
        assert x.run(next_event) == ("join", "boss", 3)
        y.run(join, "y", where)
        assert boss.run(next_event) == x.run(next_event) == ("join", "y", 3)
        assert boss.run(names) == y.run(names) == ["boss", "x", "y"]
        x.run(rpc.shutdown)
        assert boss.run(next_event) == ("left", "x")
        assert {y.run(next_event)[:2], y.run(next_event)[:2]} == {("join", "boss"), ("join", "x")}
        assert y.run(next_event) == ("left", "x")
        y.kill()
        assert boss.run(next_event) == ("lost", "y")
        assert "'y' was lost" in boss.run(line_with, "lost")
        assert boss.run(names) == ["boss"]


def test_who_is_not_connected_to_a_member_that_died_hears_of_it_by_others(where: str) -> None:
    with processes(3) as made:
        boss, x, y = made
        boss.run(join, "boss", where, 0, False)
        for process, name in ((x, "x"), (y, "y")):
            process.run(join, name, where, -1, process is x)  # only x is connected to all
        assert {x.run(next_event)[:2], x.run(next_event)[:2]} == {("join", "boss"), ("join", "y")}
        boss.run(rpc.wait_for_workers, 3, PATIENCE)
        y.kill()
        assert x.run(next_event) == ("lost", "y")
        assert "'y' was lost" in boss.run(line_with, "lost")
        assert boss.run(names) == ["boss", "x"]


@pytest.fixture(params=["tcp", "file", "agent store", "telegrad run"])
def variables(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Iterator[dict[str, str]]:
    """Those of the environment that say where workers meet, and for a file its URL."""
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
            yield kept | {supervised.STORE: f"127.0.0.1:{store.port}"}
            keeping.close()


def join_there(name: str, rank: int, variables: dict[str, str]) -> int:
    os.environ.update(variables)
    return join(name, variables.get("URL", "env://"), rank, False)


def test_serving_ends_as_rank_0_leaves_in_order_whatever_the_store(variables: dict[str, str]) -> None:
    with processes(3) as made:
        boss, x, again = made
        boss.run(join_there, "boss", 0, variables)
        x.run(join_there, "x", -1, variables)
        x.run(rpc.wait_for_workers, ["boss"], PATIENCE)
        x.begin(rpc.serve)
        boss.kill()
        again.run(join_there, "boss", 0, variables)
        assert again.run(call, "x") == 3  # which served on
        again.run(rpc.shutdown)
        assert x.end() is None


def test_members_of_a_group_of_fixed_size_are_told_who_goes() -> None:
    with group(3) as made:
        made[0].run(account)
        assert {made[0].run(next_event)[1] for _ in range(2)} == {"worker1", "worker2"}
        made[1].kill()
        assert made[0].run(next_event) == ("lost", "worker1")
        assert made[0].run(names) == ["worker0", "worker2"]
        assert made[0].run(error_of, rpc.wait_for_workers, 3)[0] is errors.PeerLost
        made[2].run(rpc.shutdown, False)
        assert made[0].run(next_event)[1] == "worker2"


def test_waiting_for_workers(where: str) -> None:
    with processes(3) as made:
        made[0].run(join, "boss", where, 0, False)
        kind, text = made[0].run(error_of, partial(rpc.wait_for_workers, role="r"), ["x", "boss"], 0.1)
        assert (kind, "role needs a number of workers" in text) == (errors.InvalidArgument, True)
        kind, text = made[0].run(error_of, rpc.wait_for_workers, ["x", "boss"], 0.1)
        assert kind is errors.CallTimeout
        assert "'x' missing; the group has boss" in text
        made[0].begin(rpc.wait_for_workers, 3, PATIENCE)
        for process, name in zip(made[1:], "xy", strict=True):
            process.run(join, name, where, -1, False)
        assert [worker.name for worker in made[0].end()] == ["boss", "x", "y"]
        assert made[0].run(lambda: [worker.id for worker in rpc.wait_for_workers("y")]) == [0, 1, 2]


def serve(*required: str) -> tuple[type[Exception], str] | None:
    try:
        rpc.serve(require=required)
    except Exception as error:
        return type(error), str(error)
    return None


def test_a_server_of_a_dynamic_group_serves_until_it_is_told_or_the_group_ends() -> None:
    where = f"tcp://127.0.0.1:{free_port()}"
    with processes(4) as made:
        boss, *servers = made
        boss.run(join, "boss", where, 0, False)
        for process, name in zip(servers, "xyz", strict=True):
            process.run(join, name, where, -1, False)
            assert process.run(serve, "boss", "bos")[0] is errors.UnknownWorker  # and it is still in the group
            process.begin(serve)
            assert boss.run(call, name) == 3
        boss.run(call, "x", rpc.stop_serving, ())
        assert servers[0].end() is None
        assert boss.run(names) == ["boss", "y", "z"]
        began = time.monotonic()
        boss.run(rpc.shutdown)
        assert [servers[1].end(), servers[2].end()] == [None, None]
        assert time.monotonic() - began < 2  # less than the leaving server would wait in vain


def test_who_serves_goes_on_once_the_store_was_lost() -> None:
    where = f"tcp://127.0.0.1:{free_port()}"
    with processes(3) as made:
        boss, x, again = made
        boss.run(join, "boss", where, 0, False)
        x.run(join, "x", where, -1, False)
        x.begin(serve)
        boss.kill()
        again.run(join, "boss", where, 0, False)
        assert again.run(call, "x") == 3
        again.run(call, "x", rpc.stop_serving, ())
        assert x.end() is None


def test_who_serves_for_somebody_ends_where_that_one_dies() -> None:
    where = f"tcp://127.0.0.1:{free_port()}"
    with processes(3) as made:
        boss, x, y = made
        boss.run(join, "boss", where, 0, False)
        for process, name in ((x, "x"), (y, "y")):
            process.run(join, name, where, -1, False)
        assert x.run(serve_for, "nobody")[0] is errors.UnknownWorker  # and x stays in the group
        x.begin(serve, "boss")
        assert boss.run(call, "y") == 3
        y.kill()
        boss.run(wait_for_names, ["boss", "x"])
        assert boss.run(call, "x") == 3
        boss.kill()
        kind, text = x.end()
        assert kind is errors.PeerLost
        assert "'boss' was lost" in text


def test_who_serves_ends_with_an_error_where_the_program_of_rank_0_ends_without_shutdown() -> None:
    where = f"tcp://127.0.0.1:{free_port()}"
    with processes(4) as made:
        boss, *servers, y = made
        boss.run(join, "boss", where, 0, False)
        y.run(join, "y", where)
        for process, required in zip(servers, ((), ("boss",)), strict=True):
            process.run(join, f"w{len(required)}", where, -1, False)
            process.begin(serve_for, *required)
            assert boss.run(call, f"w{len(required)}") == 3
        boss.run(lambda: current.here().end_with_the_program())
        for process in servers:
            kind, text = process.end()
            assert kind is errors.PeerLost
            assert "'boss' was lost" in text
        assert [y.run(next_event)[:2] for _ in range(4)][-1] == ("lost", "boss")


def hold_changes() -> None:
    """Have what the directory tells wait."""
    current.here().directory._applying.acquire()


def take_changes() -> None:
    worker = current.here()
    wait_until(lambda: bool(worker.membership._lost_unseen))
    worker.directory._applying.release()


def test_a_worker_that_died_before_it_was_seen_in_the_directory_is_lost() -> None:
    where = f"tcp://127.0.0.1:{free_port()}"
    with processes(2) as (boss, other):
        boss.run(join, "boss", where, 0)
        boss.run(hold_changes)
        other.run(join, "other", where, -1, False)
        assert boss.run(call, "other") == 3
        other.kill()
        boss.run(take_changes)
        boss.run(wait_for_names, ["boss"])
        assert boss.run(next_event)[:2] in (("join", "other"), ("lost", "other"))


def serve_for(*required: str) -> Any:
    return serve(*required)


def wait_for_names(wanted: list[str]) -> None:
    until = time.monotonic() + PATIENCE
    while names() != wanted:
        assert time.monotonic() < until, names()
        time.sleep(0.01)


def test_stop_serving_is_for_dynamic_groups(workers: list[Process]) -> None:
    kind, text = workers[0].run(error_of, call, "worker1", rpc.stop_serving, ())
    assert kind is errors.UsageError
    assert "fixed size" in text


# The store


def test_rank_0_need_not_be_first() -> None:
    where = f"tcp://127.0.0.1:{free_port()}"
    with processes(3) as made:
        assert made[0].run(join, "early", where, -1, False) == 1
        assert made[1].run(join, "boss", where, 0, False) == 0
        assert made[2].run(join, "late", where, -1, False) == 2
        assert made[1].run(call, "early") == made[2].run(call, "boss") == 3


def test_a_worker_with_another_rank_waits_for_rank_0() -> None:
    where = f"tcp://127.0.0.1:{free_port()}"
    with processes(2) as made:
        made[0].begin(join, "early", where, 5, False)
        assert made[1].run(join, "boss", where, 0, False) == 0
        assert made[0].end() == 5
        assert made[1].run(call, "early") == 3


def test_one_process_leads_one_dynamic_group_after_the_other() -> None:
    where = f"tcp://127.0.0.1:{free_port()}"
    with processes(4) as made:
        for fresh in made[1:]:
            made[0].run(join, "boss", where, 0, False)
            fresh.run(join, "x", where, -1, False)
            assert made[0].run(call, "x") == 3
            fresh.begin(serve)
            made[0].run(rpc.shutdown)
            assert fresh.end() is None


def test_a_callback_that_fails_does_not_end_the_others(caplog: pytest.LogCaptureFixture) -> None:
    with contextlib.ExitStack() as stack:
        made = stack.enter_context(group(2))

        def watch() -> tuple[Any, ...]:
            rpc.on_join(lambda worker: 1 / 0)
            account()
            return next_event()

        assert made[0].run(watch) == ("join", "worker1", 3)
