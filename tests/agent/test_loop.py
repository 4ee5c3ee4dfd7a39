"""The event loop of a worker keeps what runs on it."""

from __future__ import annotations

import asyncio
import gc
import threading

from telegrad.agent.loop import EventLoop
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
