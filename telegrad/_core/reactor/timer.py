"""The timer thread of a worker: it watches the leader, and ends calls that have timed out."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from time import monotonic, perf_counter, sleep

from telegrad._core.threads import Thread

WATCH_EVERY = 5e-3
LONGEST_PAUSE = 1.0  # between ticks
QUIET_AFTER = 40  # calls of `watch` without new work until the thread stops watching

log = logging.getLogger("telegrad")


class TimerThread:
    """Calls `tick(now)` when its last result is due, and `watch(now)` every 5 ms while works run."""

    def __init__(self, tick: Callable[[float], float]) -> None:
        self._tick = tick
        self._alarm = threading.Lock()  # held while the thread may sleep; released to wake it
        self._alarm.acquire()
        self._lock = threading.Lock()  # guards changes of _due
        self._due = 0.0
        self.is_watching = False
        self._closed = False
        self._thread: threading.Thread | None = None

    def start(self, watch: Callable[[float], float]) -> None:
        """Start the thread; `watch` returns a value that changes if anything has happened since its last call."""
        self._thread = Thread(target=self._main, args=(watch,), name="telegrad-clock")
        self._thread.start()

    def wake(self) -> None:
        """Call `watch` now, and then regularly."""
        with contextlib.suppress(RuntimeError):  # already awake
            self._alarm.release()

    def wake_by(self, when: float, rough: bool = False) -> None:
        """Call `tick` at `when` at the latest; if `rough`, up to milliseconds later, which can save a wake-up."""
        if when < self._due:
            with self._lock:
                self._due = min(self._due, when)
            if not (rough and self.is_watching):
                self.wake()

    def close(self) -> None:
        self._closed = True
        self.wake()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(1.0)

    def _main(self, watch: Callable[[float], float]) -> None:
        while not self._closed:
            try:
                self._run(watch)
            except MemoryError:  # this thread must survive: it ends calls that would wait forever
                sleep(WATCH_EVERY)

    def _run(self, watch: Callable[[float], float]) -> None:
        quiet, seen = 0, -1.0
        while not self._closed:
            now = monotonic()
            if now >= self._due:
                with self._lock:
                    self._due = now + LONGEST_PAUSE  # lets `wake_by` set an earlier time while the tick runs
                try:
                    upcoming = self._tick(now)
                except Exception:
                    log.exception("telegrad: the agent's tick failed")
                else:
                    with self._lock:
                        self._due = min(self._due, upcoming)
            before, seen = seen, watch(perf_counter())
            quiet = quiet + 1 if seen == before else 0
            self.is_watching = quiet < QUIET_AFTER
            pause = max(0.0, self._due - monotonic())
            self._alarm.acquire(timeout=min(pause, WATCH_EVERY) if self.is_watching else pause)
