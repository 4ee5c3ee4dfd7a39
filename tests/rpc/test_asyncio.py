"""Tests of calls that asyncio awaits: any loop and thread, cancellation, and loops that end early."""

import asyncio
import contextlib
import contextvars
import importlib
import operator
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
import torch

import telegrad.autograd as autograd
import telegrad.rpc as rpc
from telegrad._core.worker.current import Worker
from telegrad.errors import CallCancelled, CallTimeout, GroupError
from telegrad.rpc import rpc_async
from tests.cluster import in_threads, next_turn, wait_until
from tests.rpc.members import Counter

pytestmark = pytest.mark.usefixtures("here")

opened = threading.Event()  # `hold` waits for it
Run = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture(autouse=True)
def closed(five: list[Worker]) -> Iterator[None]:
    opened.clear()
    yield
    opened.set()
    wait_until(lambda: all(worker.agent.idle for worker in five))


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    """Return `asyncio.run`, and that of uvloop where it is installed."""
    if request.param == "asyncio":
        return asyncio.run
    return pytest.importorskip("uvloop").run


# Functions that are called


def hold(value: int = 0) -> int:
    """Wait until the call is cancelled or `opened` is set; return the value."""
    while not rpc.cancelled() and not opened.wait(0.005):
        pass
    return value


def fail(text: str) -> None:
    raise KeyError(text)


def give_up() -> None:
    """Make a call, cancel it, and wait for it."""
    future = rpc_async("w2", hold)
    future.cancel()
    future.wait()


async def await_one_given_up() -> None:
    future = rpc_async("w2", hold)
    asyncio.get_running_loop().call_later(0.01, future.cancel)
    await future


def count(n: int) -> Iterator[int]:
    yield from range(n)


# Values and errors


@pytest.mark.usefixtures("run")
async def test_every_kind_of_future_can_be_awaited() -> None:
    counter = rpc.remote("w1", Counter)
    await counter.future()
    assert await counter.rpc_async().add(2) == 2
    assert await rpc_async("w1", abs, (-1,)).then(lambda done: done.value() + 1) == 2
    assert [item async for item in rpc.rpc_stream("w1", count, (3,))] == [0, 1, 2]
    group = rpc.group(["w1", "w2"])
    assert await group.rpc_async(abs, (-1,)) == [1, 1]
    assert await group.rpc_async(abs, (-1,), reduce=operator.add) == 2
    assert await group.map(abs, range(-3, 0)) == [3, 2, 1]
    counters = group.remote(Counter)
    await counters.future()
    assert await counters.rpc_async().add(1) == [1, 1]
    assert await counters.map("add", [1, 2]) == [2, 3]
    with autograd.context() as context_id:
        x = torch.ones(2, requires_grad=True)
        loss = (await rpc_async("w1", torch.mul, (x, 3))).sum()
        await autograd.backward_async(context_id, loss)
        assert autograd.get_gradients(context_id)[x].tolist() == [3, 3]


@pytest.mark.usefixtures("run")
async def test_a_thousand_calls_are_awaited_at_once() -> None:
    assert await asyncio.gather(*(rpc_async("w1", abs, (-i,)) for i in range(1000))) == [*range(1000)]


async def test_functions_and_timeouts_of_asyncio_accept_calls() -> None:
    futures = [rpc_async("w1", abs, (-i,)) for i in range(5)]
    assert sorted([await each for each in asyncio.as_completed(futures)]) == [*range(5)]
    done, _ = await asyncio.wait([asyncio.ensure_future(each) for each in futures])
    assert len(done) == 5
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(rpc_async("w1", hold), 0.02)
    with pytest.raises(CallTimeout):
        await rpc_async("w1", hold, timeout=0.05)
    with pytest.raises(KeyError, match="On worker 'w1'"):
        await rpc_async("w1", fail, ("text",))


async def test_asyncio_wait_refuses_futures_of_calls() -> None:
    with pytest.raises(TypeError, match=r"asyncio\.ensure_future\(future\)"):
        await asyncio.wait([rpc_async("w1", abs, (-1,))])  # type: ignore[type-var]


def test_the_loops_of_several_threads_can_await_the_same_future(run: Run) -> None:
    future = rpc_async("w1", hold, (7,))

    async def use() -> Any:
        return await future

    assert in_threads(*[lambda: run(use())] * 3, opened.set) == [7, 7, 7, None]


async def test_awaiting_a_call_keeps_the_context_variables_of_the_task() -> None:
    own: contextvars.ContextVar[int] = contextvars.ContextVar("own")

    async def one(i: int) -> bool:
        own.set(i)
        return await rpc_async("w1", abs, (-i,)) == own.get()

    assert all(await asyncio.gather(*map(one, range(100))))


# Cancelling


async def _awaited(future: Any) -> Any:
    return await future


@pytest.mark.usefixtures("run")
@pytest.mark.parametrize("begin", [lambda: rpc_async("w1", hold), lambda: rpc.group(["w1", "w2"]).rpc_async(hold)])
async def test_a_task_and_its_call_are_cancelled_together(begin: Callable[[], Any], five: list[Worker]) -> None:
    future = begin()
    task = asyncio.create_task(_awaited(future))
    await next_turn()
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert future.done()
    wait_until(lambda: five[1].agent.idle)  # its function waits until it is cancelled

    future = begin()
    tasks = [asyncio.create_task(_awaited(future)) for _ in range(2)]
    await next_turn()
    assert future.cancel()
    await asyncio.wait(tasks)
    assert [task.cancelled() for task in tasks] == [True, True]
    with pytest.raises(asyncio.CancelledError):
        await future
    error = (await asyncio.gather(asyncio.to_thread(future.wait), return_exceptions=True))[0]
    assert type(error) in {CallCancelled, GroupError}  # for threads, it is no CancelledError
    assert (error.__cause__ is not None) == isinstance(error, GroupError)


async def test_a_task_group_survives_a_task_whose_call_is_cancelled() -> None:
    group_of_tasks: Any = getattr(asyncio, "TaskGroup", None)
    if group_of_tasks is None:
        pytest.skip("it came with Python 3.11")

    future = rpc_async("w1", hold)
    async with group_of_tasks() as tasks:
        made = [tasks.create_task(_awaited(future)), tasks.create_task(_awaited(rpc_async("w2", hold, (3,))))]
        await next_turn()
        future.cancel()
        opened.set()
    assert [task.cancelled() or task.result() for task in made] == [True, 3]


@pytest.mark.parametrize("function", [give_up, await_one_given_up])
async def test_a_call_cancelled_on_another_worker_does_not_cancel_the_task(function: Callable[[], Any]) -> None:
    task = asyncio.create_task(_awaited(rpc_async("w1", function)))
    await asyncio.wait([task])
    assert not task.cancelled()
    error = task.exception()
    assert isinstance(error, CallCancelled)
    assert not isinstance(error, asyncio.CancelledError)
    assert "On worker 'w1'" in str(error)


async def test_a_shielded_call_goes_on() -> None:
    future = rpc_async("w1", hold, (4,))
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(asyncio.shield(future), 0.02)
    opened.set()
    assert await future == 4


# Loops that end


def test_the_end_of_a_run_cancels_the_calls_that_its_tasks_await(run: Run) -> None:
    future = rpc_async("w1", hold)
    tasks = []

    async def use() -> None:
        tasks.append(asyncio.create_task(_awaited(future)))
        await next_turn()

    run(use())
    assert future.done()


@pytest.mark.parametrize("kind", ["asyncio", "uvloop"])
def test_a_loop_closed_before_the_answer_disturbs_no_other_wait(kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    loop = (importlib.import_module(kind) if kind == "asyncio" else pytest.importorskip(kind)).new_event_loop()
    one = rpc_async("w1", hold, (1,))
    several = rpc.group(["w1", "w2"]).rpc_async(hold, (2,))

    async def as_they_come() -> None:
        async for _ in several.as_completed():
            pass

    async def begin() -> None:
        tasks.append(asyncio.ensure_future(_awaited(one)))
        tasks.append(asyncio.ensure_future(as_they_come()))
        await next_turn()

    tasks: list[asyncio.Future[Any]] = []
    loop.run_until_complete(begin())
    loop.close()
    opened.set()
    assert (one.wait(), several.wait()) == (1, [2, 2])
    for task in tasks:
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        with contextlib.suppress(RuntimeError):
            task.get_coro().close()  # type: ignore[attr-defined]
    assert "callback" not in capfd.readouterr().err
