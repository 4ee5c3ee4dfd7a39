"""Which work runs next: whose turn it is, and how many calls may run at once. The reactor's lock guards all of it.

Each caller has a queue of works that have not begun. The queues are served in turn, one work each, so a caller that
sends a thousand calls at once does not delay the one call of another. Rules for slots:

1. At most `count` works of such queues run at once. A work that waits for something releases its slot meanwhile.
2. A queue that finds no slot waits for one; the queues that wait are served in turn, too.
3. Where a queue holds several slots, a queue that holds none gets a slot beyond `count` at once. So no caller can take
   all slots for as long as it likes. With one slot this does not apply: no queue holds several.
4. Where works wait, and all that run only sleep, one more begins every STALLED_AFTER seconds, at most MOST_LENT in
   all: those that sleep may wait for the very calls that they keep from running.
5. A queue that is held up gets no slot, because its caller does not read the answers to the calls that have run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

STALLED_AFTER = 0.25  # seconds
ASLEEP_BELOW = 0.01  # share of the time that running calls use a processor
MOST_LENT = 256  # slots


class Work:
    """A function to be run once: `run(argument)`. No NamedTuple, of which one takes twice as long to make."""

    __slots__ = ("argument", "is_long", "run", "size")

    def __init__(self, run: Callable[[Any], None], argument: Any, is_long: bool = False, size: int = 0) -> None:
        """The leader hands over the lead before work that `is_long`; `size` are the bytes that it keeps as it waits."""
        self.run = run
        self.argument = argument
        self.is_long = is_long
        self.size = size


class WorkQueue:
    """The works of one caller that have not begun. Threads may look at the length and `size` without a lock."""

    __slots__ = ("has_slots", "held", "is_held_up", "is_listed", "size", "works")

    def __init__(self, has_slots: bool = True) -> None:
        """Without slots, the works are short and run as soon as it is this queue's turn."""
        self.has_slots = has_slots
        self.works: deque[Work] = deque()
        self.size = 0  # bytes of the works
        self.held = 0  # slots
        self.is_held_up = False
        self.is_listed = False  # in one of the scheduler's lists

    def __len__(self) -> int:
        return len(self.works)


class Scheduler:
    """The works that have not begun, and the slots of those that run."""

    def __init__(self, count: int) -> None:
        self.ready: deque[Work | WorkQueue] = deque()  # to be looked at, in turn; works of no queue are short
        self.waiting: deque[WorkQueue] = deque()  # for a slot
        self.held_up: set[WorkQueue] = set()
        self.busy = 0  # slots
        self.count = count
        self._holders_of_several = 0  # queues
        self._lent = 0  # slots of `count` that were added by `lend`; each goes with the next call that ends
        self._ended = 0  # calls, so far
        self._progress = 0.0, -1, 0.0  # as `lend` last found any: when, _ended, processor time

    def __repr__(self) -> str:
        waiting = sum(map(len, self.waiting.copy()))
        return f"<Scheduler: {self.busy} of {self.count} slots busy, {waiting} works wait for one>"

    def add(self, work: Work, queue: WorkQueue | None) -> None:
        """Add a work to a queue, or one that is short and needs no slot."""
        if queue is None:
            self.ready.append(work)
            return
        queue.works.append(work)
        queue.size += work.size
        if not queue.is_listed:
            queue.is_listed = True
            self.ready.append(queue)

    def next(self, queues: deque[Any]) -> tuple[Work | None, WorkQueue | None]:
        """Take the next work of `ready` or of `waiting`, and the queue that holds a slot for it, if it needs one."""
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
                self.busy += 1  # as `resume`, in place, since this is done for each call
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
        """Release the slot of a call that has ended, or begins to wait for something; `retry` or `next` must follow."""
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
        """Give a call that has waited its slot again; there may be more for a while than there are slots."""
        self.busy += 1
        queue.held += 1
        if queue.held == 2:
            self._hold_several()

    def retry(self) -> None:
        """Let queues that wait for a slot try again, as many as may get one."""
        most = len(self.waiting) if self._holders_of_several else min(self.count - self.busy, len(self.waiting))
        self.ready.extendleft(reversed([self.waiting.popleft() for _ in range(most)]))

    def hold_up(self, queue: WorkQueue, is_held_up: bool) -> None:
        """Let no further work of a queue begin, or let them begin again."""
        queue.is_held_up = is_held_up
        if is_held_up and queue in self.waiting:
            self.waiting.remove(queue)
            self.held_up.add(queue)
        elif not is_held_up and queue in self.held_up:
            self.held_up.remove(queue)
            self.ready.append(queue)

    def drop(self, queue: WorkQueue, unwanted: set[int]) -> list[Work]:
        """Remove the works with these ids (of `id`) from a queue; return those that were there."""
        dropped = [work for work in queue.works if id(work) in unwanted]
        queue.works = deque(work for work in queue.works if id(work) not in unwanted)
        queue.size -= sum(work.size for work in dropped)
        if not queue.works and queue in self.waiting:
            self.waiting.remove(queue)
            queue.is_listed = False
        return dropped

    def clear(self) -> list[Work]:
        """Forget all that has not begun; return the works that need no slot and are in no queue."""
        works = [each for each in self.ready if isinstance(each, Work)]
        for queues in (self.ready, self.waiting, self.held_up):
            queues.clear()
        return works

    def lend(self, now: float, used: float | None) -> bool:
        """Add a slot if all running calls sleep in waits that this package does not see (rule 4); return True if so.

        `used` is the processor time of the threads that run them, where it is known.
        """
        since, ended_then, used_then = self._progress
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
