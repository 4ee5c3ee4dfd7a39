"""Detects workers that make no progress with a long call, such as the writing of a checkpoint.

The whole call may take any time, but each step of it has a limit. The callee counts its steps. The caller periodically
requests the count, with a call that needs no slot. A stopped process does not answer, and a hanging one answers with
the same count.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from time import monotonic
from typing import Any

from telegrad._core.calls.futures import Future
from telegrad._core.rpc.remote_calls import rpc_async
from telegrad._core.transport.silence import Silence
from telegrad._core.worker import current
from telegrad._core.worker.worker import Worker
from telegrad.errors import CallTimeout, TelegradError

LONGEST = 3600.0  # seconds between two checks: locks have a maximal timeout


class StepCounter:
    def __init__(self, _: Any) -> None:
        self.count = 0

    def note(self) -> None:
        """Count a step, on any thread; if two threads do so at once, one step may be lost."""
        self.count += 1


def serve(worker: Worker) -> None:
    """Let other workers request the number of steps."""
    worker.agent.run_at_once(count_here)


def count_here() -> int:
    return current.here().attached(StepCounter).count


class StallWatch:
    """Checks the progress of callees; for one thread."""

    def __init__(self, calls: Mapping[str, Future[Any]], limit: float) -> None:
        """`calls` by workers; `limit` is that of one step in seconds, 0 for none."""
        self.errors: dict[str, CallTimeout] = {}  # of workers without progress; their calls were cancelled
        self._calls = calls
        self._limit = limit
        self._silences = {worker: Silence(limit) for worker in calls} if limit else {}
        self._counts: dict[str, int] = {}
        self._asked: dict[str, Future[int]] = {}
        self._due = monotonic() + min(limit / 3, LONGEST) if limit else inf

    @property
    def left(self) -> float:
        """Seconds until the next check."""
        return min(LONGEST, max(0.0, self._due - monotonic()))

    def look(self) -> None:
        """Check the workers whose calls are not done, if it is time."""
        now = monotonic()
        if now < self._due:
            return
        pause = LONGEST
        for worker, call in self._calls.items():
            if call.done():
                continue
            silence = self._silences[worker]
            if silence.look(now, self._gets_on(worker)):
                self.errors[worker] = CallTimeout(
                    f"worker {worker!r} made no progress for {self._limit:g} s (`rpc_timeout` in the options): its "
                    "process is stopped, hangs, or waits for a disk (see `telegrad why`). It may still continue"
                )
                call.cancel()
            pause = min(pause, silence.pause)
        self._due = now + pause

    def _gets_on(self, worker: str) -> bool:
        """Return True if the worker has reported a step since the last check; request the next count."""
        asked = self._asked.get(worker)
        if asked is not None and not asked.done():
            return False
        before = self._counts.get(worker)
        try:
            if asked is not None:
                self._counts[worker] = asked.wait()
            self._asked[worker] = rpc_async(worker, count_here, timeout=self._limit)
            self._asked[worker].heed()
        except TelegradError:  # the call itself will fail, too
            self._asked.pop(worker, None)
        return self._counts.get(worker) != before
