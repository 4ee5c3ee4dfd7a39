"""Runs the users' callbacks about joining and leaving workers."""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable
from typing import Any

from telegrad._core import forks
from telegrad._core.membership.members import Member, WorkerInfo, info
from telegrad._core.membership.registry import LEFT, LOST
from telegrad._core.threads import Background

log = logging.getLogger("telegrad")


class CallbackThread:
    """Calls the users' callbacks, one at a time, on its own thread.

    The owner of this object guards its lists.
    """

    def __init__(self, entered: Callable[[], None]) -> None:
        self.of_joins: list[Callable[[WorkerInfo], Any]] = []
        self.of_ends: list[Callable[[WorkerInfo, str], Any]] = []
        self.of_losses: list[Callable[[WorkerInfo, Exception], Any]] = []
        self._entered = entered
        self._queue: queue.SimpleQueue[tuple[Callable[..., Any], tuple[Any, ...]] | None] = queue.SimpleQueue()
        self._thread = Background("telegrad-members", self._main)

    def begin(self) -> None:
        """Start the thread: a callback was added."""
        self._thread.want()

    @property
    def hears_of_ends(self) -> bool:
        """Return True if there is a callback for leaving or lost workers."""
        return bool(self.of_ends or self.of_losses)

    def come(self, member: Member) -> None:
        for callback in self.of_joins:
            self.tell(callback, info(member))

    def gone(self, member: Member, lost: Exception | None) -> None:
        """Schedule the callbacks for a member that is gone; without a reason of its loss, it has left."""
        for callback in self.of_ends:
            self.tell(callback, info(member), LOST if lost else LEFT)
        for told in self.of_losses if lost else ():
            self.tell(told, info(member), lost)

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
            except BaseException:  # sys.exit too, because it would end only this thread
                forks.exit_if_user_code_ended()
                log.exception("telegrad: a callback of on_join, on_leave or on_lost failed for %s", args[0])
