"""The event loop of a worker keeps what runs on it."""

from __future__ import annotations

import asyncio
import gc
import queue
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from telegrad._core.reactor.leader_threads import EventLoop
from tests.cluster import PATIENCE


class Waiting:
    """Holds what it waits for, and is held by nobody else."""

    def __init__(self) -> None:
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def wait(self, began: threading.Event, ended: list[BaseException]) -> None:
        began.set()
        try:
            await self.future
        except BaseException as error:
            ended.append(error)
            raise


def test_what_waits_for_something_that_nobody_else_holds_goes_on() -> None:
    loop, began, ended = EventLoop(lambda: None), threading.Event(), list[BaseException]()

    async def begin() -> None:
        await Waiting().wait(began, ended)

    loop.run(begin())
    assert began.wait(PATIENCE)
    for _ in range(3):
        gc.collect()
    looked = threading.Event()

    async def look() -> None:
        looked.set()

    loop.run(look())
    assert looked.wait(PATIENCE)
    assert ended == []
    loop.close()


async def leave(kind: type[BaseException]) -> None:
    raise kind


async def gathered(kind: type[BaseException]) -> None:
    await asyncio.gather(leave(kind), asyncio.sleep(0))


async def called_soon(kind: type[BaseException]) -> None:
    def raise_it() -> None:
        raise kind

    asyncio.get_running_loop().call_soon(raise_it)


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
@pytest.mark.parametrize("act", [gathered, called_soon])
def test_the_loop_goes_on_where_a_task_or_a_callback_would_end_the_program(
    act: Callable[[type[BaseException]], Coroutine[Any, Any, None]],
    kind: type[BaseException],
    caplog: pytest.LogCaptureFixture,
) -> None:
    loop, ended, thread = EventLoop(lambda: None), queue.SimpleQueue[str](), list[threading.Thread]()

    async def run(what: Coroutine[Any, Any, None]) -> None:
        thread.append(threading.current_thread())
        try:
            await what
        except BaseException as error:
            ended.put(type(error).__name__)
        else:
            ended.put("")

    for _ in range(2):
        loop.run(run(act(kind)))
        assert ended.get(timeout=PATIENCE) == (kind.__name__ if act is gathered else "")
        loop.run(run(asyncio.sleep(0)))
        assert ended.get(timeout=PATIENCE) == ""
    loop.close()
    thread[0].join(PATIENCE)
    assert not thread[0].is_alive()
    assert caplog.text.count("the event loop continues") == 2
