"""How members of a dynamic group are lost: processes that end or are stopped, seen by all members alike."""

from __future__ import annotations

import os
import queue
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import telegrad.rpc as rpc
from telegrad import errors
from telegrad._core.stores import find_directory
from telegrad._core.worker import current
from telegrad._core.worker.options import TelegradOptions
from tests.cluster import PATIENCE, Process, free_port, in_threads, processes, wait_until

SILENCE = 3.0
AT_ONCE = 2.0  # seconds on a busy machine, less than the silence; an idle one needs some milliseconds
COUNT = 5

events: queue.Queue[tuple[str, str]] = queue.Queue()


def join(where: str, rank: int, name: str = "", watch: bool = False) -> None:
    options = TelegradOptions(init_method=where, rpc_timeout=PATIENCE, silence=SILENCE)
    rpc.init_rpc(name or f"w{rank}", rank=rank, rpc_backend_options=options)
    if watch:
        rpc.on_lost(lambda worker, why: events.put(("lost", worker.name)))
        rpc.on_leave(lambda worker, how: events.put((how, worker.name)))


def names() -> list[str]:
    """Return the members without asking the directory."""
    return [worker.name for worker in current.here().membership.view().workers]


def asked_names() -> list[str]:
    return [worker.name for worker in rpc.workers()]


def next_event() -> tuple[str, str]:
    return events.get(timeout=PATIENCE)


def is_quiet() -> bool:
    return events.empty()


def call(to: str) -> int:
    return int(rpc.rpc_sync(to, sum, ([1, 2],)))


def error_of(function: Callable[..., object], *args: Any) -> tuple[type[Exception] | None, str]:
    try:
        function(*args)
    except Exception as error:
        return type(error), str(error)
    return None, ""


def connections() -> int:
    """Return how many workers this one has a connection to."""
    return len(current.here().agent._connections._peers)


@pytest.fixture
def where() -> str:
    return f"tcp://127.0.0.1:{free_port()}"


@pytest.fixture
def members(where: str) -> Iterator[list[Process]]:
    """Members that call nobody."""
    with processes(COUNT) as made:
        for rank, process in enumerate(made):
            process.run(join, where, rank)
        for process in made:
            process.run(rpc.wait_for_workers, COUNT, PATIENCE)
        yield made


def wait_for(made: list[Process], wanted: list[str], limit: float) -> None:
    """Wait until all these workers see the wanted members."""
    ends = time.monotonic() + limit
    while any(process.run(names) != wanted for process in made):
        assert time.monotonic() < ends, [process.run(names) for process in made]
        time.sleep(0.01)


# Processes that end


@pytest.mark.parametrize("dead", [(2,), (4,), (2, 3), (1, 2, 3)])
def test_the_death_of_workers_that_nobody_calls_is_seen_at_once(members: list[Process], dead: tuple[int, ...]) -> None:
    for rank in dead:
        members[rank].kill()
    rest = [rank for rank in range(COUNT) if rank not in dead]
    wait_for([members[rank] for rank in rest], [f"w{rank}" for rank in rest], AT_ONCE)
    for rank in rest:
        assert members[rank].run(asked_names) == [f"w{rank}" for rank in rest]
        assert members[rank].run(call, f"w{rest[0]}") == 3


def test_the_death_of_the_worker_that_keeps_the_directory_is_seen_at_once(members: list[Process]) -> None:
    members[0].kill()
    wait_for(members[1:], ["w1", "w2", "w3", "w4"], AT_ONCE)


def test_workers_that_call_nobody_are_connected_to_few(members: list[Process]) -> None:
    assert all(1 <= process.run(connections) <= 2 for process in members)


def directory_pid() -> int:
    return int(current.here().directory._keeping._keeper.pid)


def test_a_death_is_seen_without_a_directory(members: list[Process]) -> None:
    """Once the request to take the dead worker out has failed."""
    pid = members[0].run(directory_pid)
    members[0].kill()
    members[0].join()
    os.kill(pid, signal.SIGKILL)
    members[3].kill()
    wait_for([members[2]], ["w1", "w2", "w4"], find_directory.PATIENCE + AT_ONCE)
    assert members[1].run(call, "w4") == 3
    began = time.monotonic()
    in_threads(*[lambda process=process: process.run(rpc.shutdown) for process in (members[1], members[2], members[4])])
    assert time.monotonic() - began < 3 * AT_ONCE


# What is told


def test_all_are_told_the_same_of_those_that_go(where: str) -> None:
    with processes(4) as made:
        for rank, process in enumerate(made):
            process.run(join, where, rank, "", True)
        for process in made:
            process.run(rpc.wait_for_workers, 4, PATIENCE)
        made[3].run(rpc.shutdown)
        for process in made[:3]:
            assert process.run(next_event) == ("left", "w3")
        made[2].kill()
        for process in made[:2]:
            assert {process.run(next_event) for _ in range(2)} == {("lost", "w2")}
            assert process.run(is_quiet)
            assert process.run(asked_names) == process.run(names) == ["w0", "w1"]


# Processes that are stopped


def stop(process: Process) -> None:
    process.kill(signal.SIGSTOP)


def resume(process: Process) -> None:
    process.kill(signal.SIGCONT)


def test_a_stopped_worker_is_lost_with_its_lease_and_ends(members: list[Process], where: str) -> None:
    boss, *_, stopped = members
    assert boss.run(call, "w4") == 3
    stop(stopped)
    wait_for(members[:4], ["w0", "w1", "w2", "w3"], SILENCE + 2)
    resume(stopped)
    calls = [stopped.run(error_of, call, "w0")]
    while "declared lost" not in calls[-1][1]:
        assert calls[-1][0] is not None
        calls.append(stopped.run(error_of, call, "w0"))
    assert calls[-1][0] is errors.PeerLost
    kind, text = stopped.run(error_of, rpc.wait_for_workers, 9)
    assert (kind, "declared lost" in text) == (errors.PeerLost, True)
    kind, text = boss.run(error_of, call, "w4")
    assert kind in (errors.UnknownWorker, errors.PeerLost)
    for process in members[:4]:
        assert process.run(names) == ["w0", "w1", "w2", "w3"]
    assert stopped.run(error_of, rpc.shutdown)[0] is errors.PeerLost
    assert members[1].run(asked_names) == ["w0", "w1", "w2", "w3"]
    stopped.run(join, where, 4)  # anew, under its old name
    assert boss.run(call, "w4") == 3


def error_of_ending_while_declared_lost(end: Callable[[], None]) -> tuple[type[Exception] | None, str]:
    """The calls of this worker fail already, and its group is not yet ended for the process."""
    own = current.here()
    own.at_declared_lost = lambda error: None
    own.directory._declared_lost("a test")
    return error_of(end)


@pytest.mark.parametrize("end", [rpc.shutdown, rpc.serve])
def test_who_shuts_down_while_it_is_declared_lost_is_told(where: str, end: Callable[[], None]) -> None:
    with processes(1) as (process,):
        process.run(join, where, 0)
        kind, text = process.run(error_of_ending_while_declared_lost, end)
        assert kind is errors.PeerLost
        assert "declared lost (a test)" in text


def test_a_worker_that_was_stopped_for_less_than_its_lease_goes_on(members: list[Process]) -> None:
    stop(members[2])
    time.sleep(SILENCE / 3)
    resume(members[2])
    assert members[2].run(call, "w1") == members[1].run(call, "w2") == 3
    assert members[0].run(asked_names) == [f"w{rank}" for rank in range(COUNT)]


def test_the_group_goes_on_where_the_worker_that_keeps_the_directory_is_stopped(where: str) -> None:
    with processes(4) as made:
        boss, x, y, again = made
        boss.run(join, where, 0, "boss")
        x.run(join, where, 1)
        y.run(join, where, 2)
        x.run(rpc.wait_for_workers, 3, PATIENCE)
        stop(boss)
        wait_for([x, y], ["w1", "w2"], SILENCE + 2)
        assert x.run(call, "w2") == 3
        resume(boss)
        wait_until(lambda: boss.run(error_of, call, "w1")[0] is errors.PeerLost)
        again.run(join, where, 0, "boss")
        x.run(rpc.wait_for_workers, ["boss"], PATIENCE)
        assert x.run(call, "boss") == again.run(call, "w2") == 3


def test_a_server_that_was_declared_lost_ends_with_that_error(members: list[Process]) -> None:
    members[2].begin(error_of, rpc.serve)
    stop(members[2])
    wait_for([members[0]], ["w0", "w1", "w3", "w4"], SILENCE + 2)
    resume(members[2])
    kind, text = members[2].end()
    assert kind is errors.PeerLost
    assert "start it again" in text.lower()
