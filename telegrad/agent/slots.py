"""How many calls may run at once, and which wait for their turn."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

STALLED_AFTER = 0.25  # seconds: calls that wait, while those that run only sleep, are let in one by one
ASLEEP_BELOW = 0.01  # share of the time that running calls use a processor

W = TypeVar("W")


class Slots(Generic[W]):
    """Each running call has one; a call that waits for something gives its own back meanwhile."""

    def __init__(self, count: int) -> None:
        self.waiting: deque[W] = deque()  # what found none
        self.busy = 0
        self.count = count
        self._lent = 0  # of them, beyond those that were asked for; each goes with the next call that ends
        self._ended = 0  # calls, so far
        self._seen = 0.0, -1, 0.0  # at the last look that found progress: when, _ended, processor time

    def take(self, work: W) -> bool:
        """Whether there is a slot for `work`, which waits otherwise."""
        if self.busy >= self.count:
            self.waiting.append(work)
            return False
        self.busy += 1
        return True

    def end(self) -> None:
        """A call has ended."""
        self.busy -= 1
        self._ended += 1
        if self._lent:
            self._lent -= 1
            self.count -= 1

    def pause(self) -> None:
        """A call begins to wait for something."""
        self.busy -= 1

    def resume(self) -> None:
        """It goes on; there may be more for a while than there are slots."""
        self.busy += 1

    def next(self) -> W | None:
        """One of those that wait, which has a slot now; None where there is none, or no slot."""
        if not self.waiting or self.busy >= self.count:
            return None
        self.busy += 1
        return self.waiting.popleft()

    def free(self) -> list[W]:
        """Those that wait and may try again now, in order."""
        return [self.waiting.popleft() for _ in range(min(self.count - self.busy, len(self.waiting)))]

    def lend(self, now: float, used: float | None) -> bool:
        """Whether there is one slot more, since all running calls sleep in waits that this package does not see.

        They may wait for the very calls that they keep from running. `used` is their processor time, where it is known.
        """
        since, ended_then, used_then = self._seen
        if used is None or self._ended != ended_then or used - used_then > ASLEEP_BELOW * (now - since):
            self._seen = now, self._ended, used or 0.0
            return False
        if now - since <= STALLED_AFTER:
            return False
        self._seen = now, self._ended, used
        self.count += 1
        self._lent += 1
        return True

    def __repr__(self) -> str:
        return f"<Slots: {self.busy} of {self.count} busy, {len(self.waiting)} wait>"
