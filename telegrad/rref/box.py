"""A value at its owner: there, still to come, or an error in its place."""

from __future__ import annotations

import threading
from typing import Any

from telegrad.agent.futures import Future
from telegrad.wire.failures import rebuild


class Box:
    """Filled once; others may wait for that."""

    __slots__ = ("_future", "_lock", "failure", "full", "value")

    def __init__(self) -> None:
        self.full = False
        self.value: Any = None
        self.failure = b""  # the description: an exception would keep alive the frames where it was raised
        self._lock = threading.Lock()  # guards `full` and _future
        self._future: Future[Any] | None = None

    @classmethod
    def of(cls, value: Any) -> Box:
        box = cls()
        box.value, box.full = value, True
        return box

    def fulfil(self, value: Any) -> None:
        self.value = value
        self._told()

    def fail(self, failure: bytes) -> None:
        self.failure = failure
        self._told()

    def _told(self) -> None:
        with self._lock:
            self.full = True
            future, self._future = self._future, None
        if future is not None:
            self._pass_on(future)

    def future(self) -> Future[Any]:
        """A future of what will be inside."""
        with self._lock:
            if not self.full:
                if self._future is None:
                    self._future = Future()
                return self._future
        future: Future[Any] = Future()
        self._pass_on(future)
        return future

    def _pass_on(self, future: Future[Any]) -> None:
        if self.failure:
            future.set_exception(rebuild(self.failure))
        else:
            future.set_result(self.value)

    def open(self) -> Any:
        """What is inside a box that is full."""
        if self.failure:
            raise rebuild(self.failure)
        return self.value
