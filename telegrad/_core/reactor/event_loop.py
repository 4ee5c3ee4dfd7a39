"""The asyncio event loop of one worker, which runs the `async def` functions that other workers call."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from functools import partial
from typing import Any

from telegrad._core import forks
from telegrad._core.calls.futures import run_on
from telegrad._core.threads import Background

log = logging.getLogger("telegrad")


class EventLoop:
    """An asyncio event loop that starts on first use, on its own thread."""

    def __init__(self, entered: Callable[[], None]) -> None:
        """`entered` is the first function called on that thread."""
        self._entered = entered
        self._lock = threading.Lock()  # guards _begun; `runs_here` reads it without the lock
        self._begun: tuple[asyncio.AbstractEventLoop, Background] | None = None
        # Strong references to running coroutines: asyncio keeps only weak ones. No lock: each use is one set operation.
        self._running: set[Future[None]] = set()

    def run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        with self._lock:
            if self._begun is None:
                loop = asyncio.new_event_loop()
                self._begun = loop, Background("telegrad-asyncio", partial(self._main, loop))
            loop, thread = self._begun
        thread.want()  # without a free thread this raises, the next call retries, and earlier coroutines wait
        running = asyncio.run_coroutine_threadsafe(coroutine, loop)
        self._running.add(running)
        running.add_done_callback(self._running.discard)

    def stopper(self, may: Callable[[], bool]) -> Callable[[], None]:
        """Return a function for any thread that cancels the current task, if `may()` then returns True."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def stop() -> None:
            if may():
                task.cancel()

        return partial(run_on, loop, stop)

    def _main(self, loop: asyncio.AbstractEventLoop) -> None:
        self._entered()
        asyncio.set_event_loop(loop)
        while not self._has_run(loop):
            pass
        for task in asyncio.all_tasks(loop):
            task.cancel()
        with contextlib.suppress(SystemExit, KeyboardInterrupt):
            loop.run_until_complete(asyncio.sleep(0))
        loop.close()

    def _has_run(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Run the loop. Return False if SystemExit or KeyboardInterrupt ended it; its caller gets that exception."""
        try:
            loop.run_forever()
        except (SystemExit, KeyboardInterrupt) as error:
            forks.exit_if_user_code_ended()
            log.warning(
                "telegrad: %s was raised in a task or a callback of asyncio; the event loop continues", repr(error)
            )
            return self._begun is None  # asyncio may have lost the request to stop
        return True

    def runs_here(self) -> bool:
        begun = self._begun
        try:
            return begun is not None and asyncio.get_running_loop() is begun[0]
        except RuntimeError:  # no loop runs in this thread
            return False

    def close(self) -> None:
        with self._lock:
            begun, self._begun = self._begun, None
        if begun is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: an exception has just ended it
                begun[0].call_soon_threadsafe(begun[0].stop)
