"""Chooses the next work, and limits how many calls run at once. The reactor's lock guards everything here.

Each caller has a queue of works that have not begun. The queues are served in turn, one work each, so a caller that
sends a thousand calls at once does not delay the one call of another. Rules for slots:

1. At most `count` works of such queues run at once. A work that waits for something releases its slot meanwhile.
2. A queue that finds no slot waits for one; the waiting queues are served in turn, too.
3. If a queue holds several slots, a queue that holds none gets a slot beyond `count` at once. No caller can therefore
   hold all slots for long. With one slot the rule does not apply: no queue holds several.
4. If works wait, and all running works sleep, one more work begins every STALLED_AFTER seconds, at most MOST_LENT in
   all: the sleeping works may wait for the very calls that they block.
5. A queue that is held up gets no slot, because its caller does not read the answers to earlier calls.
"""

from collections import deque
from collections.abc import Callable
from typing import Any

STALLED_AFTER = 0.25  # seconds
ASLEEP_BELOW = 0.01  # the threads of running calls sleep if they use less than this share of a processor
MOST_LENT = 256  # slots


class Work:
    """A function to run once: `run(argument)`. Not a NamedTuple, which takes twice as long to create."""

    __slots__ = ("argument", "is_long", "run", "size")

    def __init__(self, run: Callable[[Any], None], argument: Any, is_long: bool = False, size: int = 0) -> None:
        """The leader passes the lead before work that `is_long`; the waiting work holds `size` bytes of memory."""
        self.run = run
        self.argument = argument
        self.is_long = is_long
        self.size = size


class WorkQueue:
    """The works of one caller that have not begun. Threads may read the length and `size` without a lock."""

    __slots__ = ("has_slots", "held", "is_held_up", "is_listed", "size", "works")

    def __init__(self, has_slots: bool = True) -> None:
        """Without slots, the works are short and run as soon as it is this queue's turn."""
        self.has_slots = has_slots
        self.works: deque[Work] = deque()
        self.size = 0  # bytes of the works
        self.held = 0  # slots
        self.is_held_up = False
        self.is_listed = False  # is in one of the scheduler's lists

    def __len__(self) -> int:
        return len(self.works)


class Scheduler:
    """The works that have not begun, and the slots of running works."""

    def __init__(self, count: int) -> None:
        self.ready: deque[Work | WorkQueue] = deque()  # to be served in turn; works without a queue are short
        self.waiting: deque[WorkQueue] = deque()  # for a slot
        self.held_up: set[WorkQueue] = set()
        self.busy = 0  # number of slots in use
        self.count = count
        self._holders_of_several = 0  # number of queues
        self._lent = 0  # slots of `count` that `lend` added; the next call that ends removes one
        self._ended = 0  # number of calls so far
        self._progress = 0.0, -1, 0.0  # the last progress that `lend` saw: time, _ended, processor time

    def add(self, submitted: deque[tuple[Work, WorkQueue | None]]) -> None:
        """Move each work to its queue; a work without one is short and needs no slot.

        Each work is in `submitted`, here, or in both, so `Polling.poll` cannot miss it between the two.
        """
        while submitted:
            work, queue = submitted[0]
            if queue is None:
                self.ready.append(work)
            else:
                queue.works.append(work)
                queue.size += work.size
                if not queue.is_listed:
                    queue.is_listed = True
                    self.ready.append(queue)
            submitted.popleft()

    def next(self, queues: deque[Any]) -> tuple[Work | None, WorkQueue | None]:
        """Take the next work of `ready` or `waiting`; also return the queue that holds its slot, if it needs one."""
        for _ in range(len(queues)):
            queue = queues.popleft()
            if type(queue) is Work:
                return queue, None
            if not queue.works:
                queue.is_listed = False
                continue
            has_slots = queue.has_slots
            if has_slots:
                if queue.is_held_up:
                    self.held_up.add(queue)
                    continue
                if self.busy >= self.count and (queue.held or not self._holders_of_several):
                    self.waiting.append(queue)
                    continue
                self.busy += 1  # `resume`, inlined, since this runs for each call
                queue.held += 1
                if queue.held == 2:
                    self._hold_several()
            work = queue.works.popleft()
            queue.size -= work.size
            if queue.works:
                queues.append(queue)
            else:
                queue.is_listed = False
            return work, queue if has_slots else None
        return None, None

    def end(self, queue: WorkQueue, is_over: bool = True) -> None:
        """Release the slot of a call that has ended or starts to wait; `retry` or `next` must follow."""
        self.busy -= 1
        queue.held -= 1
        if queue.held == 1:
            self._holders_of_several -= 1
        if is_over:
            self._ended += 1
            if self._lent:
                self._lent -= 1
                self.count -= 1

    def resume(self, queue: WorkQueue) -> None:
        """Return its slot to a call that has waited; slots in use may exceed the count for a while."""
        self.busy += 1
        queue.held += 1
        if queue.held == 2:
            self._hold_several()

    def retry(self) -> None:
        """Let waiting queues try again, as many as may get a slot."""
        # `next` moves a queue that gets no slot back to `waiting`, so only as many are tried as may get one: if a queue
        # holds several slots, possibly all (rule 3). They go to the front of `ready`, since they have waited.
        most = len(self.waiting) if self._holders_of_several else min(self.count - self.busy, len(self.waiting))
        self.ready.extendleft(reversed([self.waiting.popleft() for _ in range(most)]))

    def hold_up(self, queue: WorkQueue, is_held_up: bool) -> None:
        """Block or unblock a queue: no work of a blocked queue begins."""
        queue.is_held_up = is_held_up
        if is_held_up and queue in self.waiting:
            self.waiting.remove(queue)
            self.held_up.add(queue)
        elif not is_held_up and queue in self.held_up:
            self.held_up.remove(queue)
            self.ready.append(queue)

    def drop(self, queue: WorkQueue, unwanted: set[Work]) -> list[Work]:
        """Remove these works from a queue, as far as they are in it, and return them."""
        dropped = [work for work in queue.works if work in unwanted]
        queue.works = deque(work for work in queue.works if work not in unwanted)
        queue.size -= sum(work.size for work in dropped)
        # An empty queue in `ready` or `held_up` does no harm, since `next` skips it. In `waiting` it would use up one
        # of the attempts of `retry`, and a queue behind it would not get the free slot.
        if not queue.works and queue in self.waiting:
            self.waiting.remove(queue)
            queue.is_listed = False
        return dropped

    def clear(self) -> list[Work]:
        """Drop everything that has not begun; return the works that have no queue and need no slot."""
        works = [each for each in self.ready if isinstance(each, Work)]
        for queues in (self.ready, self.waiting, self.held_up):
            queues.clear()
        return works

    def lend(self, now: float, used: float | None) -> bool:
        """Add a slot if all running calls sleep in waits unknown to this package (rule 4); return True if so.

        `used` is the processor time of the threads that run them, or None if unknown.
        """
        since, ended_then, used_then = self._progress
        # Where the platform does not report the processor time of threads, no slot is lent: calls that compute could
        # not be told from calls that sleep.
        if used is None or self._ended != ended_then or used - used_then > ASLEEP_BELOW * (now - since):
            self._progress = now, self._ended, used or 0.0
            return False
        if now - since <= STALLED_AFTER or self._lent >= MOST_LENT:
            return False
        self._progress = now, self._ended, used
        self.count += 1
        self._lent += 1
        self.retry()
        return True

    def _hold_several(self) -> None:
        self._holders_of_several += 1
        if self._holders_of_several == 1:
            self.retry()  # rule 3
