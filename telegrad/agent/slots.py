"""Which work runs next: how many calls may run at once, and whose turn it is.

Each caller has a queue of works that have not begun. The queues are served in turn, one work each, so a caller that
sends a thousand calls at once does not hold up the one call of another. Rules for slots:

1. At most `count` works run at once. A work that waits for something gives its slot back meanwhile.
2. Of the queues that find no slot, the next free one goes to the queue that holds the fewest, and among equals to the
   queue that has waited longest.
3. Where a queue holds several slots, one that holds none gets a slot beyond `count` at once. So no caller can take all
   slots for as long as it likes. With one slot this does not apply: nobody holds several.
4. Where works wait, and all that run only sleep, one more is let in every STALLED_AFTER seconds, at most MOST_LENT in
   all: those that sleep may wait for the very calls that they keep from running.
5. A queue that is held up gets no slot, because its caller does not read the answers to what has run.
"""

from __future__ import annotations

from telegrad.agent.works import Work, WorkQueue

STALLED_AFTER = 0.25  # seconds: calls that wait, while those that run only sleep, are let in one by one
ASLEEP_BELOW = 0.01  # share of the time that running calls use a processor
MOST_LENT = 256  # slots


class Slots:
    """The slots, and the queues that wait for one."""

    def __init__(self, count: int) -> None:
        self.waiting: list[WorkQueue] = []  # that found no slot, or are held up; in order
        self.busy = 0
        self.count = count
        self._holders_of_several = 0  # queues
        self._lent = 0  # of the slots, beyond those that were asked for; each goes with the next call that ends
        self._ended = 0  # calls, so far
        self._seen = 0.0, -1, 0.0  # at the last look that found progress: when, _ended, processor time

    def begin(self, queue: WorkQueue) -> tuple[Work | None, bool]:
        """Take the next work of a queue, with a slot for it; and whether the queue is to be listed again.

        There is no work if there is no slot, for which the queue waits then.
        """
        # As `again`, `pop` and `_hold`, in place, since this is done for each call.
        has_slots = queue.has_slots
        if has_slots and (queue.is_held_up or (self.busy >= self.count and not self._is_owed(queue))):
            self.park(queue)
            return None, False
        works = queue.works
        if not works:
            return queue.pop()
        work = works.popleft()
        queue.gone += work.size
        if has_slots:
            self.busy += 1
            queue.held += 1
            if queue.held == 2:
                self._holders_of_several += 1
        if not works:
            queue.is_listed = False
            if not works or queue.is_listed:  # else added meanwhile, by a thread that saw it listed
                return work, False
            queue.is_listed = True
        return work, True

    def again(self, queue: WorkQueue) -> bool:
        """Whether a queue with more works may try for a slot now; else it waits for one."""
        if queue.is_held_up or (self.busy >= self.count and not self._is_owed(queue)):
            self.park(queue)
            return False
        return True

    def park(self, queue: WorkQueue) -> None:
        """Have a queue wait for a slot."""
        if not queue.is_parked:
            queue.is_parked = True
            self.waiting.append(queue)

    def end(self, queue: WorkQueue) -> None:
        """A call of a queue has ended."""
        self.busy -= 1
        queue.held -= 1
        if queue.held == 1:
            self._holders_of_several -= 1
        self._ended += 1
        if self._lent:
            self._lent -= 1
            self.count -= 1

    def pause(self, queue: WorkQueue) -> None:
        """A call of a queue begins to wait for something."""
        self.busy -= 1
        queue.held -= 1
        if queue.held == 1:
            self._holders_of_several -= 1

    def resume(self, queue: WorkQueue) -> None:
        """It goes on; there may be more for a while than there are slots."""
        self._hold(queue)

    def next(self) -> tuple[WorkQueue | None, Work | None, bool]:
        """Take the next work of a queue that waited, with a slot for it; and whether to list the queue again."""
        while (queue := self._first()) is not None:
            self._unpark(queue)
            work, has_more = queue.pop()
            if work is not None:
                self._hold(queue)
                return queue, work, has_more and self.again(queue)
        return None, None, False

    def free(self) -> list[WorkQueue]:
        """Return the queues that waited and may try again now, in order."""
        found: list[WorkQueue] = []
        while (queue := self._first(len(found))) is not None:
            self._unpark(queue)
            found.append(queue)
        return found

    @property
    def has_waiting(self) -> bool:
        """Whether a queue waits that only lacks a slot."""
        return any(not queue.is_held_up for queue in self.waiting)

    def lend(self, now: float, used: float | None) -> bool:
        """Whether there is one slot more, since all running calls sleep in waits that this package does not see.

        They may wait for the very calls that they keep from running. `used` is their processor time, where it is known.
        """
        since, ended_then, used_then = self._seen
        if used is None or self._ended != ended_then or used - used_then > ASLEEP_BELOW * (now - since):
            self._seen = now, self._ended, used or 0.0
            return False
        if now - since <= STALLED_AFTER or self._lent >= MOST_LENT:
            return False
        self._seen = now, self._ended, used
        self.count += 1
        self._lent += 1
        return True

    def _first(self, others: int = 0) -> WorkQueue | None:
        """The queue whose turn it is, if it may have a slot beside so many others that were chosen."""
        fit = [queue for queue in self.waiting if not queue.is_held_up]
        if not fit:
            return None
        queue = min(fit, key=lambda each: each.held)
        return queue if self.busy + others < self.count or self._is_owed(queue) else None

    def _is_owed(self, queue: WorkQueue) -> bool:
        return not queue.held and self._holders_of_several > 0

    def _hold(self, queue: WorkQueue) -> None:
        self.busy += 1
        queue.held += 1
        if queue.held == 2:
            self._holders_of_several += 1

    def _unpark(self, queue: WorkQueue) -> None:
        queue.is_parked = False
        self.waiting.remove(queue)

    def __repr__(self) -> str:
        waiting = sum(map(len, self.waiting))
        return f"<Slots: {self.busy} of {self.count} busy, {waiting} wait>"
