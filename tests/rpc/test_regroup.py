"""Tests of successive groups in one store, of workers that were in a group before and of new ones."""

import itertools
import operator
import os
import pathlib
import random
from collections.abc import Iterator
from time import monotonic
from typing import Any

import pytest
import torch.distributed as dist

import telegrad.rpc as rpc
from telegrad import errors
from telegrad._core.calls.settings import TelegradOptions
from telegrad._core.security.keyring import user_keys
from telegrad._core.stores.sealed_store import KeyValueStore
from telegrad._core.stores.stores import open_store
from tests.cluster import PATIENCE, free_port, processes, run_all, wait_until
from tests.rpc.members import error_of

Place = tuple[str, dict[str, str]]

PLACES = ["tcp", pytest.param("file", marks=pytest.mark.nightly), "agent store"]


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Iterator[Place]:
    """Return the URL at which groups meet, and variables of the environment."""
    if request.param == "tcp":
        yield f"tcp://127.0.0.1:{free_port()}", {}
    elif request.param == "file":
        yield f"file://{tmp_path}/store", {}
    else:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        yield (
            "env://",
            {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "TORCHELASTIC_RESTART_COUNT": "0",
            },
        )


def begin_to_join(place: Place, rank: int = 1, size: int = 2) -> None:
    url, variables = place
    os.environ.update(variables)
    options = TelegradOptions(init_method=url, rpc_timeout=PATIENCE)
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=size, rpc_backend_options=options)


def live(rank: int, size: int, place: Place) -> int:
    """Join a group, call the next worker, and leave; return the answer."""
    begin_to_join(place, rank, size)
    found = rpc.rpc_sync(f"w{(rank + 1) % size}", operator.add, (rank, 1))
    rpc.shutdown()
    return found


@pytest.mark.parametrize("place", PLACES, indirect=True)
def test_workers_of_earlier_groups_meet_new_workers(place: Place) -> None:
    with processes(6) as made:
        chosen = random.Random(3)
        for size in (2, 3, 2, 3, 3, 1, 2):  # rank 0 served a store before, or is new
            assert run_all(chosen.sample(made, size), live, size, place) == list(range(1, size + 1))


@pytest.mark.parametrize("place", PLACES, indirect=True)
def test_a_process_meets_a_new_worker_again_and_again(place: Place) -> None:
    """A notebook does so when it restarts its workers."""
    with processes(5) as made:
        for fresh in made[1:]:
            assert run_all([made[0], fresh], live, 2, place) == [1, 2]
            fresh.stop()


def wait_until_claimed(url: str, rank: int) -> None:
    """Wait until a worker of that rank waits for the others of its group."""
    board = KeyValueStore(open_store(url, 1, 2, user_keys(), PATIENCE).store, "telegrad/1")
    wait_until(board.terms)
    assert board.wait(f"rank/{rank}", monotonic() + PATIENCE)


def test_a_worker_that_died_while_the_group_formed_is_replaced(tmp_path: pathlib.Path) -> None:
    place: Place = f"file://{tmp_path}/store", {}
    with processes(3) as (first, second, third):
        first.begin(begin_to_join, place, 1)
        wait_until_claimed(place[0], 1)
        first.kill()
        first.join()
        assert run_all([second, third], live, 2, place) == [1, 2]


def test_a_worker_that_waits_for_a_dead_one_meets_its_successor(tmp_path: pathlib.Path) -> None:
    place: Place = f"file://{tmp_path}/store", {}
    with processes(4) as (dead, waits, successor, last):
        for process, rank in ((dead, 1), (waits, 2)):
            process.begin(begin_to_join, place, rank, 3)
            wait_until_claimed(place[0], rank)
        dead.kill()
        dead.join()
        successor.begin(begin_to_join, place, 1, 3)
        last.begin(begin_to_join, place, 0, 3)
        for process in (last, successor, waits):
            process.end()


def test_a_second_group_beside_a_running_one_is_warned_of(tmp_path: pathlib.Path) -> None:
    place: Place = f"file://{tmp_path}/store", {}

    def join_and_hear(rank: int) -> list[str]:
        import logging

        said = []
        handler = logging.Handler()
        handler.emit = lambda record: said.append(record.getMessage())
        logging.getLogger("telegrad").addHandler(handler)
        begin_to_join(place, rank)
        return said

    with processes(4) as made:
        assert run_all(made[:2], join_and_hear) == [[], []]
        for rank, (said,) in enumerate(run_all(made[2:], join_and_hear)):
            assert f"'w{rank}'" in said
            assert "still runs in the first" in said


KINDS: list[dict[str, Any]] = [{"world_size": 1}, {"min_workers": 1}, {}]


@pytest.mark.parametrize(
    "kinds",
    [
        *itertools.combinations(KINDS, 2),
        *(pytest.param(each, marks=pytest.mark.nightly) for each in itertools.combinations(KINDS[::-1], 2)),
    ],
)
def test_groups_of_two_kinds_do_not_mix(tmp_path: pathlib.Path, kinds: tuple[dict[str, Any], dict[str, Any]]) -> None:
    def join(kind: dict[str, Any]) -> tuple[type[Exception] | None, str]:
        options = TelegradOptions(init_method=f"file://{tmp_path}/store", rpc_timeout=PATIENCE)
        rank = -1 if "min_workers" in kind else 0
        return error_of(rpc.init_rpc, "w0", rank=rank, rpc_backend_options=options, **kind)

    with processes(2) as made:
        assert made[0].run(join, kinds[0]) == (None, "")
        kind, said = made[1].run(join, kinds[1])
    assert issubclass(kind, errors.RendezvousError)
    assert "mixes statically and dynamically" in said
    assert "world_size, or all of them min_workers or max_workers" in said
