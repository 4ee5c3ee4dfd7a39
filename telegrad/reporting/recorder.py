"""What has happened on this worker lately: the last events, always kept, and written to a file when it matters."""

from __future__ import annotations

import threading
from collections import deque

from telegrad.ext.events import CALLED, PASSED, STEPPED, Event
from telegrad.ext.events import events as instruments
from telegrad.ext.processes import in_child, renewed

LAST = 10_000  # events that are kept


class Recorder:
    """One for all workers of a process, most of which have one."""

    def __init__(self) -> None:
        self._ring: deque[Event] = deque(maxlen=LAST)
        self._note = self._ring.append  # the same object at each look, so that it can be removed
        self._lock = renewed(threading.Lock())  # guards _users
        self._users = 0

    def __repr__(self) -> str:
        return f"<Recorder: {len(self._ring)} events>"

    def begin(self) -> None:
        """A worker has begun."""
        with self._lock:
            self._users += 1
            if self._users == 1:
                instruments.add(self._note)

    def end(self) -> None:
        """It has ended; what was recorded stays."""
        with self._lock:
            self._users -= 1
            if not self._users:
                instruments.remove(self._note)

    def forget(self) -> None:
        """In a forked child: drop what the parent's workers recorded; none of them is here."""
        self._users = 0
        self._ring.clear()
        instruments.remove(self._note)

    def events(self, after: float = 0.0) -> list[Event]:
        """Those that ended after that moment of `perf_counter`, in the order in which they ended."""
        return [event for event in self._ring.copy() if event[2] > after]

    def last_own(self) -> float:
        """When something ended last that this worker began, and not another one; 0 where that is not known."""
        own = (CALLED, PASSED, STEPPED)
        return next((event[2] for event in reversed(self._ring.copy()) if event[0] in own), 0.0)


recorder = Recorder()
in_child(recorder.forget)
