"""One after the other, without a lock around what they do."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from telegrad._core.calls.futures import Signal
from telegrad._core.worker import current


class Turns:
    """Lets in one at a time, in the order in which they came. Who waits leaves its place to other calls meanwhile."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards _last
        self._last: Signal | None = None  # happens when whoever came last is through

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """`with turns.taken():` what runs inside runs alone."""
        through = Signal()
        with self._lock:
            before, self._last = self._last, through

        if before is not None and not before.done():
            try:
                current.agent().wait_for(before)
            except BaseException:
                before.add_done_callback(lambda _: through.set_result())
                raise
        try:
            yield
        finally:
            through.set_result()
