"""One after the other, without a lock around what they do."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from telegrad.agent.futures import Future
from telegrad.rpc import current


class Turns:
    """Lets in one at a time, in the order in which they came. Who waits leaves its place to other calls meanwhile."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards _last
        self._last: Future[None] | None = None  # done when whoever came last is through

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """`with turns.taken():` what runs inside runs alone."""
        through: Future[None] = Future()
        with self._lock:
            before, self._last = self._last, through

        def leave(_: Any = None) -> None:
            through.set_result(None)

        if before is not None and not before.done():
            try:
                current.agent().wait_for(before)
            except BaseException:
                before.add_done_callback(leave)
                raise
        try:
            yield
        finally:
            leave()
