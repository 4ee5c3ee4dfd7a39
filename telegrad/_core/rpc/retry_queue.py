"""Decides which calls are retried, and when. Without I/O or a clock: `tests/sim/test_lives.py` tests it.

The failed calls to one worker are retried together: `due` returns the worker after growing pauses, as long as any of
its calls waits. A call that may have run also waits for its own backoff time.
"""

from enum import Enum
from math import inf
from typing import Generic, NamedTuple, Protocol, TypeVar

from telegrad.errors import DirectoryLost, HandshakeError, PeerError, PeerUnreachable, UnknownWorker

FIRST_PAUSE, LONGEST_PAUSE = 0.02, 0.25  # seconds between two attempts to call one worker
FIRST_BACKOFF, LONGEST_BACKOFF = 0.05, 2.0  # seconds before the third and later attempts of a call that may have run


class RetryPolicy(NamedTuple):
    """The retry policy of a call."""

    waits: bool  # for its worker, while that is absent
    repeats: bool  # if it may have run


class Failure(Enum):
    """Kinds of failures of calls."""

    NOT_RUN = "its worker was not there"
    MAY_HAVE_RUN = "its worker was lost, or the way to it"
    FINAL = "it has run, is out of time, or cannot be made"


def classify(error: BaseException) -> Failure:
    if isinstance(error, UnknownWorker | PeerUnreachable | DirectoryLost):
        return Failure.NOT_RUN
    if isinstance(error, PeerError) and not isinstance(error, HandshakeError):
        return Failure.MAY_HAVE_RUN
    return Failure.FINAL


def should_retry(policy: RetryPolicy, failure: Failure, may_have_run: bool) -> bool:
    """Return True if a call with this failure is retried. `may_have_run`: it may, since an earlier failure."""
    if failure is Failure.NOT_RUN:
        return policy.waits and (policy.repeats or not may_have_run)
    return failure is Failure.MAY_HAVE_RUN and policy.repeats


def backoff(repeats: int) -> float:
    """Return the seconds before the next attempt of a call that may have run and was already repeated so often."""
    return 0.0 if not repeats else min(FIRST_BACKOFF * 2.0 ** (repeats - 1), LONGEST_BACKOFF)


class Queued(Protocol):
    @property
    def to(self) -> str | int: ...

    @property
    def until(self) -> float:
        """Return the call's deadline."""

    def __hash__(self) -> int: ...


C = TypeVar("C", bound=Queued)


class _Target(Generic[C]):
    """The failed calls to one worker that have not ended, each with its time of retry (inf during an attempt)."""

    def __init__(self, now: float) -> None:
        self.calls: dict[C, float] = {}
        self.pause = FIRST_PAUSE
        self.due = now  # time of the next attempt at the earliest
        self.why = ""  # the failure of the last call

    @property
    def next(self) -> float:
        return max(self.due, min(self.calls.values()))


class RetryQueue(Generic[C]):
    """All failed calls of one worker that are retried."""

    def __init__(self) -> None:
        self._targets: dict[str | int, _Target[C]] = {}
        self.closed = False

    @property
    def empty(self) -> bool:
        return not self._targets

    def wait(self, call: C, now: float, pause: float = 0.0, why: str = "") -> bool:
        """Queue a call for at least `pause` seconds; return False if this worker leaves."""
        if self.closed:
            return False
        target = self._targets.setdefault(call.to, _Target(now))
        # The order of `calls` is that of the attempts. A call that has failed again goes to the end, so that it does
        # not keep the others from theirs.
        target.calls.pop(call, None)
        target.calls[call] = now + pause
        target.why = why
        return True

    def due(self, now: float) -> list[str | int]:
        """Return the workers whose calls in `ready` are due now, and set the time of their next attempt."""
        # A target whose calls are all in an attempt has the time inf, and is not due.
        found = [to for to, target in self._targets.items() if target.next <= now]
        for to in found:
            target = self._targets[to]
            target.due = now + target.pause
            target.pause = min(2 * target.pause, LONGEST_PAUSE)
        return found

    def ready(self, to: str | int, now: float) -> list[C]:
        target = self._targets.get(to)
        return [call for call, at in target.calls.items() if at <= now] if target is not None else []

    def begin(self, call: C) -> bool:
        """Record that an attempt starts now; return False if the call no longer waits."""
        if not self._waits(call):
            return False
        self._targets[call.to].calls[call] = inf
        return True

    def withdraw(self, call: C) -> bool:
        """Remove a waiting call; return False if it does not wait, or an attempt is in flight."""
        return self._waits(call) and self.end(call)

    def _waits(self, call: C) -> bool:
        target = self._targets.get(call.to)
        return target is not None and target.calls.get(call, inf) < inf

    def end(self, call: C, answered: bool = False) -> bool:
        """Remove an ended call; return False if it was not queued. After an answer, retry the others at once."""
        target = self._targets.get(call.to)
        if target is None or target.calls.pop(call, None) is None:
            return False
        if not target.calls:
            del self._targets[call.to]
        # An answer shows that the worker is there.
        elif answered:
            target.due, target.pause = 0.0, FIRST_PAUSE
        return True

    def why(self, to: str | int) -> str:
        target = self._targets.get(to)
        return target.why if target is not None else ""

    def expired(self, now: float) -> list[tuple[C, str]]:
        """Remove waiting calls that have timed out; return them with the failures of their workers."""
        late = [(call, target.why) for target in self._targets.values() for call in target.calls if call.until <= now]
        return [(call, why) for call, why in late if self.withdraw(call)]

    def next_of(self, call: C) -> float:
        """Return the time of the next event of a waiting call."""
        target = self._targets[call.to]
        return min(max(target.due, target.calls[call]), call.until)

    def next(self) -> float:
        """Return the time of the next event, if nothing happens before."""
        times = [target.next for target in self._targets.values()]
        waiting = (call for target in self._targets.values() for call, at in target.calls.items() if at < inf)
        return min([*times, *(call.until for call in waiting)], default=inf)

    def close(self) -> list[C]:
        self.closed = True
        waiting = [call for target in self._targets.values() for call, at in target.calls.items() if at < inf]
        self._targets.clear()
        return waiting
