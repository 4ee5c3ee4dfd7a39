"""Mutual exclusion in order of arrival, without holding a lock during the work."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from telegrad._core.calls.futures import Signal
from telegrad._core.worker import current


class FifoLock:
    """Admits one thread at a time, in order of arrival. A waiting thread releases its slot to other calls."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards _last
        self._last: Signal | None = None  # happens when the last thread in line is done

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Run the block of `with turns.taken():` exclusively."""
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
