"""Tests of dynamic and elastic groups whose directory is a server of etcd or Redis."""

import contextlib
import pathlib
from collections.abc import Iterator
from functools import partial

import pytest

import telegrad.rpc as rpc
from telegrad import errors
from telegrad._core.calls.settings import TelegradOptions
from telegrad._core.membership import form_generations
from telegrad._core.worker import current
from tests.cluster import PATIENCE, free_port, in_background, opened, processes, run_all, wait_until
from tests.directory import etcd_servers, redis_server
from tests.rpc.members import call, join, names


@pytest.mark.parametrize("host", ["127.0.0.1", "no..name"])
@pytest.mark.parametrize("engine", ["etcd", "redis"])
def test_a_server_is_contacted_only_when_the_directory_is_used(engine: str, host: str) -> None:
    meeting = opened(f"{engine}://{host}:{free_port()}", 3, None, 0.2)
    assert (meeting.rank, meeting.world_size, meeting.host, meeting.serves) == (3, None, None, False)
    assert meeting.where.startswith(f"{engine} at {host}:")
    assert meeting.directory is not None
    with pytest.raises(errors.RendezvousError), contextlib.closing(meeting.directory()) as directory:
        directory.list("")


def test_a_password_is_not_shown() -> None:
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
def test_the_route_to_a_server_on_another_host_sets_the_own_address(url: str, host: str | None) -> None:
    assert opened(url, -1, None, 1).host == host


# Whole workers


Server = etcd_servers.Node | redis_server.Server


@pytest.fixture(
    params=[
        pytest.param(partial(etcd_servers.Node, "n"), marks=etcd_servers.needs_etcd, id="etcd"),
        pytest.param(redis_server.Server, marks=redis_server.NEEDED, id="redis"),
    ]
)
def stopped(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Iterator[Server]:
    server: Server = request.param(tmp_path)
    yield server
    server.kill()


@pytest.fixture
def server(stopped: Server) -> Server:
    stopped.start()
    return stopped


def test_workers_join_call_one_another_and_are_replaced(server: Server) -> None:
    with processes(4) as made:
        boss, x, y, again = made
        assert boss.run(join, "boss", server.where, 0) == 0
        assert x.run(join, "x", server.where) == 1
        assert y.run(join, "y", server.where) == 2
        for process in (boss, x, y):
            process.run(rpc.wait_for_workers, 3, PATIENCE)
            assert process.run(names) == ["boss", "x", "y"]
        assert boss.run(call, "y") == x.run(call, "boss") == y.run(call, "x") == 3
        y.kill()
        wait_until(lambda: boss.run(names) == x.run(names) == ["boss", "x"])
        assert again.run(join, "y", server.where) == 2
        assert x.run(rpc.wait_for_workers, ["y"], PATIENCE)
        assert x.run(call, "y") == again.run(call, "boss") == 3
        again.run(rpc.shutdown)
        wait_until(lambda: x.run(names) == ["boss", "x"])
        x.begin(rpc.serve)
        boss.run(rpc.shutdown)
        assert x.end() is None
        assert boss.run(join, "alone", server.where) == 1  # nothing is left


def test_workers_wait_for_a_server_that_is_not_there_yet(stopped: Server) -> None:
    with processes(1) as (boss,):
        boss.begin(join, "boss", stopped.where)
        with in_background(stopped.start, after=0.5):
            assert boss.end() == 1


@pytest.mark.nightly
def test_workers_go_on_without_the_server_and_meet_again(server: Server) -> None:
    with processes(3) as made:
        for process, name in zip(made, "xyz", strict=True):
            if name != "z":
                process.run(join, name, server.where)
        made[0].run(rpc.wait_for_workers, 2, PATIENCE)
        server.kill()
        assert made[0].run(call, "y") == made[1].run(call, "x") == 3
        made[2].begin(join, "z", server.where)
        server.start()
        assert made[2].end() == 3
        made[0].run(rpc.wait_for_workers, 3, PATIENCE)
        assert made[0].run(call, "z") == made[2].run(call, "y") == 3


def again(url: str, name: str, count: int) -> tuple[int, list[str], list[str]]:
    """Join an elastic group, unless this worker is in it, and wait until the group has `count` workers."""
    if current.worker is None:
        form_generations.LAST_CALL = 0.3
        options = TelegradOptions(init_method=url, rpc_timeout=PATIENCE)
        rpc.init_rpc(name, min_workers=1, max_workers=3, rpc_backend_options=options)
    wait_until(lambda: rpc.rendezvous_again().size == count)
    return rpc.generation().number, list(rpc.generation().survivors), names()


def test_an_elastic_group_forms_its_generations_in_a_server(server: Server) -> None:
    url = server.where
    with processes(4) as made:
        first = run_all(made[:3], lambda rank: again(url, f"w{rank}", 3))
        number = first[0][0]  # a worker that comes late joins a later generation
        assert [each[::2] for each in first] == [(number, first[0][2])] * 3
        made[0].kill()
        second = run_all(made[1:], lambda rank: again(url, f"w{rank + 1}", 3))
        stay = [name for name in first[0][2] if name != "w0"]
        assert second in [[(number + more, stay, [*stay, "w3"])] * 3 for more in (1, 2)]
        run_all(made[1:], lambda _: rpc.shutdown())
        assert made[1].run(again, server.where, "w1", 1)[0] == second[0][0] + 1  # the numbers go on


@pytest.mark.nightly
def test_an_elastic_group_goes_on_without_the_server(server: Server) -> None:
    url = server.where
    with processes(3) as made:
        number = run_all(made[:2], lambda rank: again(url, f"w{rank}", 2))[0][0]
        server.kill()
        assert [each[0] for each in run_all(made[:2], lambda rank: again(url, f"w{rank}", 2))] == [number] * 2
        made[2].begin(again, server.where, "w2", 3)
        server.start()
        assert [each[0] for each in run_all(made[:2], lambda rank: again(url, f"w{rank}", 3))] == [number + 1] * 2
        assert made[2].end()[0] == number + 1


def test_elastic_and_dynamic_groups_do_not_mix_in_a_server(server: Server) -> None:
    with processes(2) as (first, second):
        first.run(join, "first", server.where)
        with pytest.raises(AssertionError, match="mixes"):
            second.run(again, server.where, "second", 1)
        first.run(rpc.shutdown)
        second.run(again, server.where, "second", 1)
        with pytest.raises(AssertionError, match="mixes"):
            first.run(join, "first", server.where)


@pytest.mark.parametrize("url", ["etcd://127.0.0.1:1", "redis://127.0.0.1:1", "rediss://127.0.0.1:1"])
def test_groups_of_fixed_size_are_refused(url: str) -> None:
    with pytest.raises(
        errors.UsageError, match=f"{url.partition('127')[0]} is for dynamic and elastic groups: leave world_size"
    ):
        rpc.init_rpc("w", rank=0, world_size=2, rpc_backend_options=TelegradOptions(init_method=url))
