"""Calls back those who want to know who comes and who goes."""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable
from typing import Any

from telegrad.threads import Background

log = logging.getLogger("telegrad")


class Teller:
    """Calls the callbacks of users, one after the other, on a thread of its own."""

    def __init__(self, entered: Callable[[], None]) -> None:
        self._entered = entered
        self._queue: queue.SimpleQueue[tuple[Callable[..., Any], tuple[Any, ...]] | None] = queue.SimpleQueue()
        self._thread = Background("telegrad-members", self._main)

    def begin(self) -> None:
        """There is somebody to be told."""
        self._thread.want()

    def tell(self, callback: Callable[..., Any], *args: Any) -> None:
        self._queue.put((callback, args))

    def close(self) -> None:
        self._queue.put(None)

    def _main(self) -> None:
        self._entered()
        while (told := self._queue.get()) is not None:
            callback, args = told
            try:
                callback(*args)
            except Exception:
                log.exception("telegrad: a callback of on_join, on_leave or on_lost failed for %s", args[0])
