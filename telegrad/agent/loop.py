"""The event loop of one worker, on which the `async def` functions run that others call."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from functools import partial
from typing import Any

from telegrad.agent.awaiting import run_on
from telegrad.threads import Background


class EventLoop:
    """It begins with the first use, on a thread of its own."""

    def __init__(self, entered: Callable[[], None]) -> None:
        """`entered` is called first on that thread."""
        self._entered = entered
        self._lock = threading.Lock()  # guards _begun; `runs_here` peeks at it
        self._begun: tuple[asyncio.AbstractEventLoop, Background] | None = None
        # What runs: asyncio itself does not keep what waits for something that nobody else holds. No lock: each use is
        # one operation of a set.
        self._running: set[Future[None]] = set()

    def run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Have it run."""
        with self._lock:
            if self._begun is None:
                loop = asyncio.new_event_loop()
                self._begun = loop, Background("telegrad-asyncio", partial(self._main, loop))
            loop, thread = self._begun
        thread.want()  # where there is no thread left, the next call tries again, and what others gave the loop waits
        running = asyncio.run_coroutine_threadsafe(coroutine, loop)
        self._running.add(running)
        running.add_done_callback(self._running.discard)

    def stopper(self, may: Callable[[], bool]) -> Callable[[], None]:
        """What cancels the task that this code runs in, if it `may` then; for any thread."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def stop() -> None:
            if may():
                task.cancel()

        return partial(run_on, loop, stop)

    def _main(self, loop: asyncio.AbstractEventLoop) -> None:
        self._entered()
        asyncio.set_event_loop(loop)
        loop.run_forever()
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()

    def runs_here(self) -> bool:
        """Whether this thread is the loop's."""
        begun = self._begun
        try:
            return begun is not None and asyncio.get_running_loop() is begun[0]
        except RuntimeError:  # no loop runs in this thread
            return False

    def close(self) -> None:
        with self._lock:
            begun, self._begun = self._begun, None
        if begun is not None:
            begun[0].call_soon_threadsafe(begun[0].stop)
