"""Record the latest events of this process's workers. They are always kept, and written to dumps."""

from __future__ import annotations

import threading
from collections import deque

from telegrad.ext.events import BACKWARD_PASS, CALLED, STEPPED, Event
from telegrad.ext.events import events as instruments
from telegrad.ext.processes import in_child, renewed

LAST = 10_000  # number of events kept


class Recorder:
    """One recorder for all workers of a process; most processes have one worker."""

    def __init__(self) -> None:
        self._ring: deque[Event] = deque(maxlen=LAST)
        # One bound method, because each access would make a new one, which `remove` would not find.
        self._note = self._ring.append
        self._lock = renewed(threading.Lock())  # guards _users
        self._users = 0

    def begin(self) -> None:
        """Start recording for one more worker."""
        with self._lock:
            self._users += 1
            if self._users == 1:
                instruments.add(self._note)

    def end(self) -> None:
        """Stop recording for one worker; recorded events stay."""
        with self._lock:
            self._users -= 1
            if not self._users:
                instruments.remove(self._note)

    def forget(self) -> None:
        """Drop the parent's events in a forked child, which has none of its workers."""
        self._users = 0
        self._ring.clear()
        instruments.remove(self._note)

    def events(self, after: float = 0.0) -> list[Event]:
        """Return the events that ended after that time of `perf_counter`, in the order in which they ended."""
        return [event for event in self._ring.copy() if event[2] > after]

    def last_own(self) -> float:
        """Return the end of the last event that this worker itself began; 0 if none is recorded."""
        own = (CALLED, BACKWARD_PASS, STEPPED)
        return next((event[2] for event in reversed(self._ring.copy()) if event[0] in own), 0.0)


recorder = Recorder()
in_child(recorder.forget)
