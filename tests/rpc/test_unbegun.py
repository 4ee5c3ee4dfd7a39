"""A call whose start or whose answer fails in the code of this package ends with that error, and holds nothing."""

import asyncio
import errno
import gc
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, NoReturn

import pytest
import torch

import telegrad.rpc as rpc
from telegrad import errors
from telegrad._core.agent import call_server
from telegrad._core.agent.incoming import Answers
from telegrad._core.memory.device_streams import Streams
from telegrad._core.rpc.idempotency import IdempotentCalls
from telegrad._core.streams import producer
from telegrad._core.worker.current import Worker
from tests.cluster import agents_here, next_turn, wait_until

pytestmark = pytest.mark.filterwarnings("error")  # a coroutine that was never awaited


@pytest.fixture
def callee(monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    monkeypatch.setattr(producer, "MOST_STREAMS", 1)
    with agents_here(2, rpc_timeout=5) as (_, other):
        yield other


async def one() -> int:
    return 1


def plain() -> int:
    return 1


@rpc.functions.async_execution
def future() -> torch.futures.Future[int]:
    made: torch.futures.Future[int] = torch.futures.Future()
    made.set_result(1)
    return made


async def items() -> AsyncIterator[int]:
    yield 1


async def listed() -> list[int]:
    return [1]


@rpc.functions.batch(max_size=1, max_wait=60.0)
async def batched(values: list[int]) -> list[int]:
    return values


@rpc.actor
class Actor:
    async def method(self) -> int:
        return 1


KINDS: dict[str, Callable[[], Any]] = {
    "call": lambda: rpc.rpc_sync("w1", one, timeout=0),
    "remote": lambda: rpc.remote("w1", one).to_here(),
    "stream": lambda: list(rpc.rpc_stream("w1", items)).pop(),
    "coroutine of a stream": lambda: list(rpc.rpc_stream("w1", listed)).pop(),
    "idempotent": lambda: rpc.rpc_sync("w1", one, idempotent=True),
    "batch": lambda: rpc.rpc_sync("w1", batched, (1,)),
    "plain": lambda: rpc.rpc_sync("w1", plain),
    "future": lambda: rpc.rpc_sync("w1", future),
    "remote future": lambda: rpc.remote("w1", future).to_here(),
    "idempotent future": lambda: rpc.rpc_sync("w1", future, idempotent=True),
}
OF_LOOP = [*KINDS][:6]


class Used(tuple[int, ...]):
    """The devices of a worker that seems to use some."""

    def __bool__(self) -> bool:
        return True


def no_file(*_: Any) -> NoReturn:
    raise OSError(errno.EMFILE, "Too many open files")


def check_is_free(callee: Worker) -> None:
    """Check that the callee counts no call as in flight, which `shutdown` waits for, and has dropped all coroutines."""
    wait_until(lambda: callee.agent._server.idle)
    wait_until(lambda: not len(callee.attached(IdempotentCalls)))
    gc.collect(1)  # they are young


@pytest.mark.parametrize("kind", OF_LOOP)
@pytest.mark.parametrize("lack", ["descriptors", "threads", "loop"])
def test_an_async_call_without_a_loop_fails(
    kind: str, lack: str, callee: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def no_thread(thread: threading.Thread) -> None:
        if thread.name == "telegrad-asyncio":
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        if lack == "descriptors":
            patch.setattr(asyncio, "new_event_loop", no_file)
        elif lack == "threads":
            patch.setattr(threading.Thread, "start", no_thread)
        else:
            patch.setattr(asyncio, "run_coroutine_threadsafe", no_file)
        told = "limit of threads" if lack == "threads" else r"this process may open at most .* \(`ulimit -n`\)"
        for _ in range(2):
            with pytest.raises(errors.TelegradError, match=f"worker 'w1' could not begin .*{told}"):
                KINDS[kind]()
            check_is_free(callee)
    assert KINDS[kind]() == 1


def test_an_actor_keeps_no_turn_for_a_method_that_could_not_begin(
    callee: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    actor = rpc.remote("w1", Actor)
    with monkeypatch.context() as patch:
        patch.setattr(asyncio, "new_event_loop", no_file)
        for call in [actor.rpc_async().method() for _ in range(3)]:
            with pytest.raises(errors.TelegradError, match=r"could not begin .*method"):
                call.wait()
    check_is_free(callee)
    assert actor.rpc_async().method().wait() == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("step", [(Answers, "made_of"), (call_server, "_note"), (Streams, "turn"), (Answers, "fail")])
def test_any_step_that_fails_ends_the_call(
    kind: str, step: tuple[Any, str], callee: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(*step, no_file)
        if step[1] == "turn":
            patch.setattr(callee.agent._server._streams, "used", Used())
        if step[1] == "fail":  # of its own error, whose answer fails
            patch.setattr(Answers, "made_of", no_file)
        if step[1] != "_note" or kind != "plain":  # `_serve` has that step inlined
            with pytest.raises(OSError, match="Too many open files"):
                KINDS[kind]()
    check_is_free(callee)
    assert KINDS[kind]() == 1


def test_an_error_that_cannot_be_answered_ends_the_connection(callee: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Answers, "_failure", no_file)
        patch.setattr(Answers, "made_of", no_file)
        with pytest.raises(errors.PeerLost):
            rpc.rpc_sync("w1", plain)
    check_is_free(callee)
    assert rpc.rpc_sync("w1", plain) == 1


class Fails(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        raise LookupError("no such record")


def fail() -> NoReturn:
    raise ValueError("no")


def test_a_filter_of_the_log_that_fails_does_not_keep_the_answer(callee: Worker, caplog: Any) -> None:
    caplog.set_level(logging.DEBUG, "telegrad")
    failing = Fails()
    call_server.log.addFilter(failing)
    try:
        with pytest.raises(LookupError, match="no such record"):
            rpc.rpc_sync("w1", fail)
    finally:
        call_server.log.removeFilter(failing)
    check_is_free(callee)


class Unmeasured:
    def __sizeof__(self) -> int:
        raise ValueError("no size")


def test_a_result_without_a_size_completes_an_idempotent_call(callee: Worker) -> None:
    assert type(rpc.rpc_sync("w1", Unmeasured, idempotent=True)) is Unmeasured
    check_is_free(callee)


@rpc.functions.batch(max_size=2, max_wait=60.0)
async def pairs(values: list[int]) -> list[int]:
    return values


async def test_a_batch_that_cannot_begin_fails_all_its_calls(callee: Worker) -> None:
    calls = [asyncio.ensure_future(pairs(each)) for each in range(2)]
    loop = asyncio.get_running_loop()
    loop.set_task_factory(no_file)
    try:
        await next_turn()
    finally:
        loop.set_task_factory(None)
    assert [type(each) for each in await asyncio.gather(*calls, return_exceptions=True)] == [OSError, OSError]
