"""Dynamic groups whose directory is a server of etcd or Redis."""

from __future__ import annotations

import contextlib
import pathlib
import threading
from collections.abc import Callable, Iterator

import pytest

import telegrad.rpc as rpc
from telegrad import errors
from telegrad.rpc.options import TelegradOptions
from tests.cluster import PATIENCE, free_port, opened, processes, wait_until
from tests.directory import etcd_servers, redis_server


@pytest.mark.parametrize("engine", ["etcd", "redis", "rediss"])
def test_a_server_keeps_dynamic_groups_alone(engine: str) -> None:
    with pytest.raises(
        errors.UsageError, match=f"{engine}:// keeps the directory of a dynamic group: leave world_size"
    ):
        opened(f"{engine}://127.0.0.1:1", 0, 2, 30)


@pytest.mark.parametrize("engine", ["etcd", "redis"])
def test_a_server_is_asked_once_the_directory_is(engine: str) -> None:
    meeting = opened(f"{engine}://127.0.0.1:{free_port()}", 3, None, 0.2)
    assert (meeting.rank, meeting.world_size, meeting.host, meeting.serves) == (3, None, None, False)
    assert meeting.where.startswith(f"{engine} at 127.0.0.1:")
    assert meeting.directory is not None
    with pytest.raises(errors.RendezvousError), contextlib.closing(meeting.directory()) as directory:
        directory.list("")


def test_a_password_is_not_told() -> None:
    assert opened("redis://user:secret@127.0.0.1:1", -1, None, 1).where == "redis at 127.0.0.1:1"


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("redis://192.0.2.7:1/0", "192.0.2.7"),
        ("redis://user:a@b@192.0.2.7", "192.0.2.7"),
        ("etcd://localhost:1,nowhere.invalid:1,[2001:db8::1]:1,192.0.2.7:1/place?user=a", "2001:db8::1"),
        ("etcd://127.0.0.1:1,[::1]:1", None),
        ("etcd://nowhere.invalid", None),
    ],
)
def test_the_way_to_a_server_on_another_host_tells_a_worker_its_address(url: str, host: str | None) -> None:
    assert opened(url, -1, None, 1).host == host


# Whole workers


class Server:
    """A server that is started, and where it is."""

    def __init__(self, url: str, start: Callable[[], None], kill: Callable[[], None]) -> None:
        self.url, self.start, self.kill = url, start, kill


@contextlib.contextmanager
def etcd(folder: pathlib.Path) -> Iterator[Server]:
    node = etcd_servers.Node("n", folder)
    try:
        yield Server(f"etcd://127.0.0.1:{node.port}/tests", node.start, node.kill)
    finally:
        node.kill()


@contextlib.contextmanager
def redis(folder: pathlib.Path) -> Iterator[Server]:
    server = redis_server.Server(folder)
    started: list[bool] = []

    def start() -> None:
        server.start()
        started.append(True)

    try:
        yield Server(server.url, start, server.kill)
    finally:
        if started:
            server.kill()


@pytest.fixture(
    params=[
        pytest.param(etcd, marks=etcd_servers.needs_etcd, id="etcd"),
        pytest.param(redis, marks=redis_server.NEEDED, id="redis"),
    ]
)
def stopped(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Iterator[Server]:
    with request.param(tmp_path) as server:
        yield server


@pytest.fixture
def server(stopped: Server) -> Server:
    stopped.start()
    return stopped


def join(url: str, name: str, rank: int = -1) -> int:
    options = TelegradOptions(init_method=url, rpc_timeout=PATIENCE)
    rpc.init_rpc(name, rank=rank, rpc_backend_options=options)
    return rpc.get_worker_info().id


def names() -> list[str]:
    return [worker.name for worker in rpc.workers()]


def call(to: str) -> int:
    return int(rpc.rpc_sync(to, sum, ([1, 2],)))


def test_workers_meet_call_one_another_and_are_replaced(server: Server) -> None:
    with processes(4) as made:
        boss, x, y, again = made
        assert boss.run(join, server.url, "boss", 0) == 0
        assert x.run(join, server.url, "x") == 1
        assert y.run(join, server.url, "y") == 2
        for process in (boss, x, y):
            process.run(rpc.wait_for_workers, 3, PATIENCE)
            assert process.run(names) == ["boss", "x", "y"]
        assert boss.run(call, "y") == x.run(call, "boss") == y.run(call, "x") == 3
        y.kill()
        wait_until(lambda: boss.run(names) == x.run(names) == ["boss", "x"])
        assert again.run(join, server.url, "y") == 2
        assert x.run(rpc.wait_for_workers, ["y"], PATIENCE)
        assert x.run(call, "y") == again.run(call, "boss") == 3
        again.run(rpc.shutdown)
        wait_until(lambda: x.run(names) == ["boss", "x"])
        x.begin(rpc.serve)
        boss.run(rpc.shutdown)
        assert x.end() is None
        assert boss.run(join, server.url, "alone") == 1  # nothing is left


def test_workers_wait_for_a_server_that_is_not_there_yet(stopped: Server) -> None:
    with processes(1) as (boss,):
        boss.begin(join, stopped.url, "boss")
        started = threading.Timer(0.5, stopped.start)
        started.start()
        assert boss.end() == 1
        started.join()


def test_workers_go_on_without_the_server_and_meet_again(server: Server) -> None:
    with processes(3) as made:
        for process, name in zip(made, "xyz", strict=True):
            if name != "z":
                process.run(join, server.url, name)
        made[0].run(rpc.wait_for_workers, 2, PATIENCE)
        server.kill()
        assert made[0].run(call, "y") == made[1].run(call, "x") == 3
        made[2].begin(join, server.url, "z")
        server.start()
        assert made[2].end() == 3
        made[0].run(rpc.wait_for_workers, 3, PATIENCE)
        assert made[0].run(call, "z") == made[2].run(call, "y") == 3


@pytest.mark.parametrize("size", ["world_size", "min_workers", "max_workers"])
@pytest.mark.parametrize("url", ["etcd://127.0.0.1:1", "redis://127.0.0.1:1"])
def test_groups_with_a_size_are_refused(url: str, size: str) -> None:
    with pytest.raises(errors.UsageError, match=f"{url.partition(':')[0]}.*leave "):
        rpc.init_rpc("w", rank=0, rpc_backend_options=TelegradOptions(init_method=url), **{size: 2})  # type: ignore[arg-type]
