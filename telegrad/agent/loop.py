"""The event loop of one worker, on which the `async def` functions run that others call."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any


class EventLoop:
    """It begins with the first use, on a thread of its own."""

    def __init__(self, entered: Callable[[], None]) -> None:
        """`entered` is called first on that thread."""
        self._entered = entered
        self._lock = threading.Lock()  # guards _loop; `runs_here` peeks at it
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Have it run."""
        asyncio.run_coroutine_threadsafe(coroutine, self._begun())

    def _begun(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is not None:
                return self._loop
            loop = self._loop = asyncio.new_event_loop()
        try:
            threading.Thread(target=self._main, args=(loop,), name="telegrad-asyncio", daemon=True).start()
        except BaseException:  # no memory, or no thread left: the next call tries again
            with self._lock:
                self._loop = None
            loop.close()
            raise
        return loop

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
        try:
            return asyncio.get_running_loop() is self._loop
        except RuntimeError:  # no loop runs in this thread
            return False

    def close(self) -> None:
        with self._lock:
            loop, self._loop = self._loop, None
        if loop is not None:
            loop.call_soon_threadsafe(loop.stop)
