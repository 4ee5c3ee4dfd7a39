"""Tests of bugs that chaos has found, each in its shortest form."""

import gc
import pathlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import telegrad.autograd as autograd
import telegrad.rpc as rpc
from telegrad import errors
from telegrad._core.transport import link
from telegrad._core.wire import messages
from telegrad._core.worker import current
from tests.chaos import functions, life
from tests.chaos.board import Board
from tests.chaos.leaks import wait_for_nothing
from tests.chaos.proxy import Proxy
from tests.cluster import PATIENCE, Process, agents, free_port, processes

WORKERS = 3
LIMIT = 8.0  # seconds for what should take milliseconds


@pytest.fixture
def behind_proxy(tmp_path: pathlib.Path) -> Iterator[tuple[Proxy, list[Process]]]:
    """Three workers that reach each other through a proxy."""
    board = f"{tmp_path}/board"
    Board(board, WORKERS)
    with Proxy() as proxy, processes(WORKERS) as group:
        port = free_port()
        for rank, process in enumerate(group):
            process.begin(life.join, rank, WORKERS, port, "tcp", PATIENCE, proxy.address, board)
        for process in group:
            process.end()
        yield proxy, group


def relayed(to: str, x: torch.Tensor) -> torch.Tensor:
    return rpc.rpc_sync(to, torch.sin, (x,))


held: dict[str, Any] = {}  # in a worker's process


def enter_context(over: str, to: str) -> None:
    held["context"] = autograd.context()
    held["context"].__enter__()
    rpc.rpc_sync(over, relayed, (to, torch.ones(3, requires_grad=True)))


def leave_context() -> None:
    held.pop("context").__exit__(None, None, None)


def contexts() -> int:
    return len(current.conductor().contexts)


def test_a_context_ends_on_a_worker_that_a_dead_one_brought_into_it(behind_proxy: tuple[Proxy, list[Process]]) -> None:
    _, group = behind_proxy
    group[0].run(enter_context, "worker1", "worker2")
    assert group[2].run(contexts) == 1
    group[1].kill()
    group[1].join()
    group[0].run(leave_context)
    assert group[2].run(wait_for_nothing, contexts) == 0


def call_in_vain(to: str) -> None:
    """Call until no connection can be made any more."""
    while True:
        try:
            rpc.rpc_sync(to, int)
        except errors.PeerLost:
            continue
        except errors.PeerError:
            return


def call_until_it_works(to: str) -> int:
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return rpc.rpc_sync(to, int)
        except errors.PeerError:
            assert time.monotonic() < deadline


def shut(proxy: Proxy, worker: Process, silent: bool = False) -> None:
    """Break the connections to a worker; new ones are refused, or get no answer."""

    def act() -> None:
        weather = proxy.doors[worker.name].weather
        weather.shut, weather.silent = not silent, silent
        proxy.doors[worker.name].reset_all()

    proxy.do(act)


def open_again(proxy: Proxy, worker: Process) -> None:
    proxy.do(lambda: vars(proxy.doors[worker.name].weather).update(shut=False, silent=False))


def test_a_context_ends_also_on_a_worker_out_of_reach(behind_proxy: tuple[Proxy, list[Process]]) -> None:
    proxy, group = behind_proxy
    group[0].run(enter_context, "worker0", "worker1")
    assert group[1].run(contexts) == 1
    shut(proxy, group[1], silent=True)
    assert group[1].run(call_until_it_works, "worker0") == 0  # before that it has asked if the context lives
    group[0].run(leave_context)
    shut(proxy, group[1])
    group[0].run(call_in_vain, "worker1")
    open_again(proxy, group[1])
    for one, other in ((0, 1), (1, 0)):
        assert group[one].run(call_until_it_works, f"worker{other}") == 0
    assert group[1].run(wait_for_nothing, contexts) == 0


def hold(on: str) -> None:
    held["reference"] = rpc.remote(on, torch.ones, (2,))
    held["reference"].to_here()


def let_go() -> None:
    del held["reference"]
    gc.collect()


def owned() -> int:
    return rpc.debug_info()["owners"]


def test_a_reference_ends_although_its_owner_was_out_of_reach(behind_proxy: tuple[Proxy, list[Process]]) -> None:
    proxy, group = behind_proxy
    group[0].run(hold, "worker1")
    assert group[1].run(owned) == 1
    shut(proxy, group[1], silent=True)
    assert group[1].run(call_until_it_works, "worker0") == 0
    assert group[1].run(owned) == 1  # by now it has asked if the reference came, and learned that it did
    assert group[1].run(call_until_it_works, "worker0") == 0
    shut(proxy, group[1])
    group[0].run(call_in_vain, "worker1")
    open_again(proxy, group[1])
    group[0].run(let_go)
    for one, other in ((0, 1), (1, 0)):
        assert group[one].run(call_until_it_works, f"worker{other}") == 0
    assert group[1].run(wait_for_nothing, owned) == 0


def put_on(to: str) -> None:
    rpc.rpc_sync(to, functions.put, (1, held["reference"]))


def left() -> dict[str, int]:
    gc.collect()
    return {name: count for name, count in rpc.debug_info().items() if count}


def test_a_passed_reference_ends_although_its_sender_was_out_of_reach(
    behind_proxy: tuple[Proxy, list[Process]],
) -> None:
    proxy, group = behind_proxy
    group[0].run(hold, "worker1")
    shut(proxy, group[0])
    group[0].run(put_on, "worker2")
    group[2].run(call_in_vain, "worker0")
    open_again(proxy, group[0])
    assert group[2].run(call_until_it_works, "worker0") == 0
    group[0].run(let_go)
    group[2].run(functions.clear_shelf)
    assert [process.run(wait_for_nothing, left) for process in group] == [{}, {}, {}]


# Threads that cannot be started: the first failure when memory is short


@pytest.fixture
def no_more_threads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list for the names of threads, each of which fails to start once."""
    start = threading.Thread.start
    fails: list[str] = []

    def start_or_fail(thread: threading.Thread) -> None:
        if thread.name in fails:
            fails.remove(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_or_fail)
    return fails


def test_a_call_works_after_a_connection_without_a_thread(no_more_threads: list[str]) -> None:
    with agents(2) as (worker, _):
        no_more_threads.append("telegrad-connect")
        with pytest.raises((RuntimeError, errors.PeerError)):
            worker.agent.call("w1", int, (), None, LIMIT)
        assert worker.agent.call("w1", int, (), None, LIMIT) == 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_call_works_after_a_leader_without_a_thread(no_more_threads: list[str]) -> None:
    with agents(2) as (worker, _):
        no_more_threads.append("telegrad-worker")
        with suppress(errors.TelegradError, RuntimeError):
            worker.agent.call("w1", int, (), None, 1)  # not known to be short: another thread shall lead meanwhile
        assert not no_more_threads
        assert worker.agent.call("w1", int, (), None, LIMIT) == 0


# Lack of memory: no call waits for ever, and the next one works


def fails_once(
    monkeypatch: pytest.MonkeyPatch, where: object, name: str, when: Callable[..., bool] = lambda *_: True
) -> list[bool]:
    """Let the next call of a function with such arguments find no memory; return a list that says if it did."""
    function = getattr(where, name)
    failed: list[bool] = []

    def without_memory(*args: Any, **named: Any) -> Any:
        if not failed and when(*args, **named):
            failed.append(True)
            raise MemoryError
        return function(*args, **named)

    monkeypatch.setattr(where, name, without_memory)
    return failed


def test_a_call_works_after_an_answer_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    with agents(2) as (worker, _):
        assert worker.agent.call("w1", int, (), None, LIMIT) == 0
        monkeypatch.setattr(link, "PREFIX", prefix := SimpleNamespace(pack=messages.PREFIX.pack))
        failed = fails_once(monkeypatch, prefix, "pack", lambda kind, *_: kind == messages.RESULT)
        with pytest.raises(errors.PeerLost):
            worker.agent.call("w1", int, (), None, LIMIT)
        assert failed
        assert worker.agent.call("w1", int, (), None, LIMIT) == 0


def test_calls_work_after_a_poll_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    with agents(2) as (worker, callee):
        failed = fails_once(monkeypatch, callee.agent._reactor.poller, "poll")
        assert worker.agent.call("w1", int, (), None, LIMIT) == 0
        assert worker.agent.call("w1", int, (), None, LIMIT) == 0
        assert failed


def test_a_timeout_works_after_a_watch_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    with agents(2) as (worker, _):
        failed = fails_once(monkeypatch, worker.agent._reactor, "watch")
        with pytest.raises(errors.CallTimeout):
            worker.agent.call_async("w1", time.sleep, (0.5,), None, 0.1).wait()
        assert failed


def test_a_reference_ends_despite_a_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    with agents(2) as (worker, owner):
        current.enter(worker)
        held = rpc.remote("w1", torch.ones, (2,))
        held.to_here()
        failed = fails_once(monkeypatch, worker.references, "_step")
        del held
        assert wait_for_nothing(lambda: owner.references.counts()["owners"]) == 0
        assert failed
        current.enter(None)
