"""The one thread of a worker that knows the time: it watches the leader, and ends what ran out of time."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from time import monotonic, perf_counter, sleep

from telegrad.agent.reactor import Reactor
from telegrad.threads import Thread

WATCH_EVERY = 5e-3
LONGEST_PAUSE = 1.0  # between ticks
QUIET_AFTER = 40  # looks without new work, then the watch sleeps

log = logging.getLogger("telegrad")


class Clock:
    """Calls `reactor.unstick` while there is work, and `tick(now)` when the time comes that it last returned."""

    def __init__(self, tick: Callable[[float], float]) -> None:
        self._tick = tick
        self._alarm = threading.Lock()  # held while the thread may sleep; released to wake it
        self._alarm.acquire()
        self._lock = threading.Lock()  # guards changes of _due
        self._due = 0.0
        self._looking = False  # every few milliseconds anyway
        self._closed = False
        self._thread: threading.Thread | None = None

    def start(self, reactor: Reactor) -> None:
        self._thread = Thread(target=self._main, args=(reactor,), name="telegrad-clock")
        self._thread.start()

    def wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # awake already
            self._alarm.release()

    def before(self, when: float, rough: bool = False) -> None:
        """Have `tick` called at `when` at the latest; where a `rough` time will do, without waking for that alone."""
        if when < self._due:
            with self._lock:
                self._due = min(self._due, when)
            if not (rough and self._looking):
                self.wake()

    def close(self) -> None:
        self._closed = True
        self.wake()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(1.0)

    def _main(self, reactor: Reactor) -> None:
        while not self._closed:
            try:
                self._watch(reactor)
            except MemoryError:  # without this thread, nobody would hear of the end of anything
                sleep(WATCH_EVERY)

    def _watch(self, reactor: Reactor) -> None:
        quiet, runs = 0, -1
        while not self._closed:
            now = monotonic()
            if now >= self._due:
                with self._lock:
                    self._due = now + LONGEST_PAUSE  # so that `before` can bring it forward while the tick runs
                upcoming = self._safe_tick(now)
                with self._lock:
                    self._due = min(self._due, upcoming)
            reactor.unstick(perf_counter())
            quiet = quiet + 1 if reactor.runs == runs else 0
            runs = reactor.runs
            reactor.watched = quiet < QUIET_AFTER or reactor.backed_up
            self._looking = reactor.watched
            pause = max(0.0, self._due - monotonic())
            self._alarm.acquire(timeout=min(pause, WATCH_EVERY) if reactor.watched else pause)

    def _safe_tick(self, now: float) -> float:
        try:
            return self._tick(now)
        except Exception:
            log.exception("telegrad: the agent's tick failed")
            return now + LONGEST_PAUSE
