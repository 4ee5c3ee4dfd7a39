"""What is to be run, the queue of one caller in which it waits for that, and a thread that runs it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

# Not counted and short; counted and short; counted, and the lead goes first; as INSTANT, once nothing else is there;
# as INSTANT, and not dropped at the end: somebody waits for it.
INSTANT, QUICK, LONG, IDLE, OWED = range(5)


class Work:
    """Something to be run once: `run(argument)`. No NamedTuple, of which one takes twice as long to make."""

    __slots__ = ("argument", "cost", "run", "size")

    def __init__(self, run: Callable[[Any], None], argument: Any, cost: int, size: int = 0) -> None:
        self.run = run
        self.argument = argument
        self.cost = cost
        self.size = size  # bytes that it keeps while it waits


class WorkQueue:
    """The works of one caller that have not begun.

    Any thread may `append`; it lists the queue with the reactor where `append` says so. All else is guarded by the
    reactor's lock, but for looks at the length and at `size`.
    """

    __slots__ = ("came", "gone", "has_slots", "held", "is_held_up", "is_listed", "is_parked", "works")

    def __init__(self, has_slots: bool = True) -> None:
        """Without slots, the works are short and run as soon as it is this queue's turn."""
        self.has_slots = has_slots
        self.works: deque[Work] = deque()
        self.held = 0  # slots
        self.is_held_up = False
        self.is_listed = False  # it will be looked at again without being listed
        self.is_parked = False  # among those that wait for a slot
        self.came = self.gone = 0  # bytes; the first is changed by the one thread that reads the caller's connection

    def __len__(self) -> int:
        return len(self.works)

    @property
    def size(self) -> int:
        """Return the bytes of the works that wait."""
        return self.came - self.gone

    def append(self, work: Work) -> bool:
        """Add a work; True if the queue must be listed now."""
        if work.size:
            self.came += work.size
        self.works.append(work)
        if self.is_listed:
            return False
        self.is_listed = True
        return True

    def pop(self) -> tuple[Work | None, bool]:
        """Take the first work, if there is one; and whether the queue must be listed again, since there are more."""
        work = None
        if self.works:
            work = self.works.popleft()
            self.gone += work.size
        if self.works:
            return work, True
        self.is_listed = False
        if self.works and not self.is_listed:  # added meanwhile, by a thread that saw it listed
            self.is_listed = True
            return work, True
        return work, False

    def drop(self, unwanted: set[int]) -> list[int]:
        """Remove the works with these ids (of `id`); return the ids of those that were there."""
        found: list[int] = []
        for _ in range(len(self.works)):
            work = self.works.popleft()
            if id(work) in unwanted:
                self.gone += work.size
                found.append(id(work))
            else:
                self.works.append(work)
        return found


class Runner:
    """A thread of the reactor; only it changes its fields. Others look at `since` and `counted`."""

    __slots__ = ("counted", "since", "waited", "wakeup")

    def __init__(self) -> None:
        self.wakeup = threading.Lock()  # held while the worker stands by; released to wake it
        self.wakeup.acquire()
        self.since = 0.0  # when the leader began the work it runs by itself
        self.waited = 0.0  # when the work that it runs first waited for something
        self.counted: WorkQueue | None = None  # of which it runs a call
