"""Failures that the program never looks at: logged when their future is dropped, or when the program ends."""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable
from math import inf
from time import perf_counter
from typing import Any, NoReturn

from telegrad._core import forks
from telegrad._core.pickling.exceptions import fresh
from telegrad.errors import CallCancelled, ShutDown, WorkersFailed

QUIET = 5.0  # seconds in which similar failures are not logged again
REMEMBERED = 256

log = logging.getLogger("telegrad")

Kind = tuple[str, str]  # of failures: the class of the error, and the function
_logged: dict[Kind, float] = {}  # when such a failure was last logged
_retrieved: dict[Kind, float] = {}  # when the program last saw one
_held: set[weakref.ref[UnretrievedError]] = set()  # all that exist, except those that were `seen` from the start


def _was_asked_for(error: BaseException) -> bool:
    """Return True if the program itself ended the operation."""
    if isinstance(error, WorkersFailed) and error.errors:
        return all(map(_was_asked_for, error.errors.values()))
    return isinstance(error, ShutDown | CallCancelled)


class UnretrievedError:
    """The failure of a future. Logged if it is dropped, or the program ends, before it was `seen`."""

    __slots__ = ("__weakref__", "_about", "_begun", "_similar", "kind", "seen", "text")

    def __init__(self, about: str, error: BaseException, begun: float) -> None:
        """`about` describes the failed operation, as users know it; it has `begun` at that time."""
        self.seen: bool = _was_asked_for(error)
        self._about, self._begun = about, begun
        self.kind: str = type(error).__name__
        self._similar: Kind = self.kind, about.partition(" on worker ")[0]
        try:
            self.text: str = str(error)
        except Exception:
            self.text = "(its text could not be formatted)"
        if not self.seen:
            _held.add(weakref.ref(self, _held.discard))

    def __repr__(self) -> str:
        return f"{self.kind} of {self._about}"

    def raise_fresh(self, error: Any) -> NoReturn:
        """Mark the failure as seen, and raise a fresh copy of the future's error."""
        self.see(perf_counter())
        raise fresh(error)

    def see(self, now: float) -> None:
        """Mark the failure as seen: the program may drop those of similar calls that have begun before `now`."""
        self.seen = True
        _note(_retrieved, self._similar, now)

    def log(self) -> None:
        """Log the failure, at most once, if the program has not seen it, nor a similar one."""
        # A wait for several calls, as by `collect_all` or in a loop, raises the first failure, and the others are
        # dropped, at once or much later, or held until the program ends. They have begun before that failure was seen.
        # A call that began afterwards has nothing to do with it.
        now, similar = perf_counter(), self._similar
        handled = self._begun <= _retrieved.get(similar, -inf)
        if not self.seen and not handled and now - _logged.get(similar, -inf) >= QUIET:
            _note(_logged, similar, now)
            log.error(
                "telegrad: %s failed, and its error was never retrieved: wait for its future (or use its reference), "
                "or add a callback to the future\n%s: %s",
                *(self._about, self.kind, self.text),
            )
        self.seen = True

    # The function is a default argument, since names of a module may be cleared before the last futures are freed.
    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not self.seen and not is_finalizing():
            self.log()


def log_held() -> None:
    """Log the failures that the program still holds when it ends."""
    for held in _held.copy():  # copied in one step: other threads add and discard
        if (failure := held()) is not None:
            failure.log()


@forks.in_child
def _leave_to_parent() -> None:
    """Mark the failures of the parent, which logs them, as seen."""
    for held in _held.copy():
        if (failure := held()) is not None:
            failure.seen = True
    _held.clear()


def _note(times: dict[Kind, float], similar: Kind, now: float) -> None:
    if len(times) >= REMEMBERED:
        times.clear()
    times[similar] = now
