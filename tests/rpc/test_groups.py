"""Tests of groups of processes: how they form, end and fail."""

import operator
import os
import pathlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import telegrad.rpc as rpc
from telegrad import errors
from telegrad._core.agent.agent import Agent
from telegrad._core.agent.incoming import Handlers
from telegrad._core.calls.settings import TelegradOptions
from telegrad._core.membership.members import Member
from telegrad._core.rpc.cluster import start
from telegrad._core.stores.stores import open_store
from tests.cluster import KEYS, PATIENCE, Process, agents, free_port, group, in_threads, init, processes, run_all
from tests.links import wait_for_calls
from tests.rpc.members import call, join

ONE_SECOND = 1.0

Outcome = tuple[type[Exception] | None, str, float]


def error_of(function: Callable[..., Any], *args: Any) -> Outcome:
    """Return the type and the text of a call's error, and the seconds that it took."""
    start = time.monotonic()
    try:
        function(*args)
    except Exception as error:
        return type(error), str(error), time.monotonic() - start
    return None, "", time.monotonic() - start


def test_a_process_is_in_one_group(workers: list[Process]) -> None:
    kind, text, _ = workers[0].run(error_of, rpc.init_rpc, "again")
    assert kind is errors.AlreadyInitialized
    assert "shutdown" in text


@pytest.mark.parametrize("options", [{}, {"transport": "tcp"}, {"transport": "unix"}, {"shared_memory": 0}], ids=str)
def test_tensors_by_each_transport(options: dict[str, Any]) -> None:
    with group(2, **options) as made:
        for size in 2 * (10, 100_000, 3_000_000):
            total = made[0].run(lambda n: float(rpc.rpc_sync("worker1", torch.add, (torch.ones(n), 1)).sum()), size)
            assert total == 2 * size


def test_repeated_groups_leak_no_descriptors() -> None:
    def rounds(rank: int, port: int) -> int:
        for generation in range(6):
            init(rank, 2, port)
            assert rpc.rpc_sync(f"worker{1 - rank}", operator.add, (generation, 1)) == generation + 1
            rpc.shutdown()
        return len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0

    with processes(2) as made:
        port = free_port()
        first = run_all(made, rounds, port)
        assert run_all(made, rounds, port) == first  # nothing leaks


def test_shutdown_waits_for_the_work_of_all() -> None:
    def slow_start(rank: int, port: int) -> bool:
        init(rank, 3, port)
        if rank == 0:  # leaves work behind at the others, and is first to want to leave
            for to in (1, 2):
                rpc.rpc_async(f"worker{to}", relay, (3 - to, 0.2))
        rpc.shutdown()
        return True

    with processes(3) as made:
        assert run_all(made, slow_start, free_port()) == [True] * 3


def relay(to: int, pause: float) -> int:
    time.sleep(pause)  # a function that takes a while
    return rpc.rpc_sync(to, operator.add, (1, 1))


def test_messages_of_shutdown_may_arrive_while_a_worker_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    told = threading.Event()
    join, take = Agent.join, Handlers.take

    def join_and_wait(agent: Agent, me: Member, *rest: Any) -> None:
        join(agent, me, *rest)
        assert me.id != 0 or told.wait(PATIENCE)

    def take_and_tell(handlers: Handlers, *notice: Any) -> None:
        take(handlers, *notice)
        told.set()

    monkeypatch.setattr(Agent, "join", join_and_wait)
    monkeypatch.setattr(Handlers, "take", take_and_tell)
    port = free_port()

    def live(rank: int) -> None:
        options = TelegradOptions(rpc_timeout=PATIENCE)
        meet = partial(open_store, f"tcp://127.0.0.1:{port}", rank, 2, KEYS)
        start(f"early{rank}", meet, options, lambda worker: None).shutdown(True, PATIENCE / 2)

    in_threads(lambda: live(0), lambda: live(1))


def test_a_timeout_of_shutdown_names_the_missing_worker() -> None:
    with group(2) as made:
        kind, text, took = made[0].run(error_of, rpc.shutdown, True, 0.3)
        assert kind is errors.CallTimeout
        assert "'worker1'" in text
        assert took < 3


@pytest.mark.parametrize("victim", [2, 0])  # the second is the leader
def test_shutdown_without_a_worker_that_died(victim: int) -> None:
    with group(3) as made:
        made[victim].kill()
        run_all([process for process in made if process is not made[victim]], lambda _: rpc.shutdown())


def test_calls_to_a_killed_worker_fail_at_once() -> None:
    with group(3) as made:
        made[0].begin(error_of, call, "worker1", time.sleep, (PATIENCE,))
        made[2].run(call, "worker0", int, ())
        made[2].begin(lambda: error_of(rpc.rpc_async("worker1", time.sleep, (PATIENCE,)).wait))
        made[1].run(wait_for_calls, 2)
        killed = time.monotonic()
        made[1].kill()
        for process in (made[0], made[2]):
            kind, text, _ = process.end()
            assert kind is errors.PeerLost
            assert "'worker1'" in text
        assert time.monotonic() - killed < ONE_SECOND
        kind, text, took = made[0].run(error_of, call, "worker1", int, ())
        assert kind is errors.PeerUnreachable
        assert "'worker1'" in text
        assert took < ONE_SECOND
        assert made[0].run(call, "worker2") == 3


def test_a_worker_that_did_not_join_is_named() -> None:
    kind, text, took = error_of(init_alone, 2, 0.3)
    assert kind is errors.GroupIncomplete
    assert "rank 1" in text
    assert took < 3


def init_alone(count: int, timeout: float) -> None:
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{free_port()}", rpc_timeout=timeout)
    rpc.init_rpc("alone", rank=0, world_size=count, rpc_backend_options=options)


def test_calls_before_init() -> None:
    for act in (lambda: rpc.rpc_sync("a", int), rpc.shutdown, rpc.get_worker_info):
        with pytest.raises(errors.NotInitialized, match=r"call init_rpc first$"):
            act()


@pytest.mark.parametrize("url", ["tcp://[::1]:{port}", "tcp://127.0.0.1:{port}", "file://{folder}/store"])
def test_groups_form_by_each_kind_of_url(url: str, tmp_path: pathlib.Path) -> None:
    def meet(rank: int, method: str) -> tuple[int, None]:
        options = rpc.TensorPipeRpcBackendOptions(init_method=method, transport="tcp", rpc_timeout=PATIENCE)
        rpc.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=options)
        return rpc.rpc_sync(f"w{1 - rank}", operator.add, (1, 2)), rpc.shutdown()

    with processes(2) as made:
        assert run_all(made, meet, url.format(port=free_port(), folder=tmp_path)) == [(3, None)] * 2


@pytest.mark.nightly
def test_sixty_four_workers_on_one_machine() -> None:
    def ring(rank: int) -> tuple[int, int]:
        found = rpc.rpc_sync(f"worker{(rank + 1) % 64}", operator.add, (rank, 1))
        return found, len(os.listdir("/proc/self/fd"))

    with group(64) as made:
        found = run_all(made, ring)
        assert [value for value, _ in found] == list(range(1, 65))
        assert max(count for _, count in found) < 64
        run_all(made, lambda _: rpc.shutdown())


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_messages_above_4_gb(transport: str) -> None:
    def send() -> tuple[int, int]:
        tensor = torch.zeros((4 << 30) + 4096, dtype=torch.uint8)
        tensor[-1] = 7
        return rpc.rpc_sync("worker1", last_of, (tensor,))

    with group(2, transport=transport, rpc_timeout=200) as made:
        assert made[0].run(send, patience=200) == ((4 << 30) + 4096, 7)


def last_of(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.numel(), int(tensor[-1])


# Dynamic groups


def test_workers_join_and_leave_a_dynamic_group(tcp: str) -> None:
    with processes(3) as made:
        assert made[0].run(join, "first", tcp, 0) == 0
        assert made[1].run(join, "second", tcp) == 1
        assert made[0].run(call, "second") == 3
        assert made[2].run(join, "third", tcp) == 2
        assert made[2].run(call, "first") == 3
        made[1].run(rpc.shutdown)
        kind, _, _ = made[0].run(error_of, call, "second", int, ())
        if kind is errors.ShutDown:  # it was sent before the connection reported the end
            kind, _, _ = made[0].run(error_of, call, "second", int, ())
        assert kind is errors.UnknownWorker
        assert made[1].run(join, "second", tcp) == 1  # a new worker under the old name
        assert (made[0].run(call, "second"), made[2].run(call, 1)) == (3, 3)
        kind, text, _ = made[1].run(error_of, join_again, tcp)
        assert kind is errors.WorkerTaken
        assert "'third'" in text


def join_again(where: str) -> None:
    rpc.shutdown()
    join("third", where)


# Ends of programs

PROGRAM = """
import os, signal, sys, threading, time
import telegrad.rpc as rpc
options = rpc.TensorPipeRpcBackendOptions(init_method="tcp://127.0.0.1:{port}")
rpc.init_rpc("only", rank=0, world_size=1, rpc_backend_options=options)
rpc.rpc_async("only", int)
{end}
"""
INTERRUPTED = """
threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
try: {call}
except KeyboardInterrupt: sys.exit(7)
"""


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("", 0),
        pytest.param("raise SystemExit(3)", 3, marks=pytest.mark.nightly),
        pytest.param(
            INTERRUPTED.format(call="rpc.rpc_async('only', time.sleep, (60,)).wait()"), 7, marks=pytest.mark.nightly
        ),
        pytest.param(INTERRUPTED.format(call="rpc.rpc_sync('only', time.sleep, (60,))"), 7, marks=pytest.mark.nightly),
    ],
    ids=["forgets shutdown", "exits", "Ctrl-C in wait", "Ctrl-C in a call"],
)
def test_programs_end_without_shutdown_with_their_exit_code(end: str, code: int) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(port=free_port(), end=end)], timeout=PATIENCE, capture_output=True
    )
    assert ran.returncode == code, ran.stderr.decode()


def test_a_worker_unreachable_for_a_moment_is_not_considered_dead() -> None:
    with agents(2) as (first, second):
        for told in second.agent.lost:
            told(first.me.identity, errors.PeerUnreachable("it broke off the handshake"))
        in_threads(*[partial(worker.shutdown, True, PATIENCE / 2, [first.me, second.me]) for worker in (first, second)])
