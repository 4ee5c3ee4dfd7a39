"""Who reads a connection: one thread at a time, and never nobody while something is awaited from it.

    NOBODY  --take-->   WAITER    a thread that waits for an answer reads by itself
    NOBODY  --watch-->  LEADER    the poller tells the leader when something comes
    LEADER  --take-->   WAITER    unless the leader is at it; the poller is asked no longer
    LEADER  --begin-->  LEADER    is at it
    whoever --pass_on-> LANE      what comes next is brought by further streams; one of their threads goes on
    whoever --give_back-> LEADER  where answers are expected, NOBODY else

Who expects an answer notes that first and calls `watch` then; who gives the right back looks for such notes. Both hold
the lock for that, so one of them sees the other. Only here the poller is told whether to look for what comes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from enum import Enum


class Owner(Enum):
    NOBODY = "nobody"
    LEADER = "the leader"
    WAITER = "a waiter"
    LANE = "a lane"


class Reading:
    """The right to read one connection."""

    def __init__(
        self,
        lock: AbstractContextManager[object],
        arm: Callable[[bool], None],
        expected: Callable[[], object],
        finish: Callable[[], None],
    ) -> None:
        """`arm` tells the poller whether to look for what comes, `expected` whether anything is awaited.

        `finish` is called once, when the connection has ended and nobody reads it any more.
        """
        self._lock = lock  # guards all below; `watch` peeks at the owner without it, see there
        self._arm = arm
        self._expected = expected
        self._finish = finish
        self.owner = Owner.NOBODY
        self._at_it = False  # the leader reads, and does not only wait to be told
        self._is_held = False  # the leader shall not read
        self._ended = False

    def take(self) -> bool:
        """Whether the thread that asks, since it waits, may read now; `give_back` must follow then."""
        with self._lock:
            owner = self.owner
            if owner is Owner.LEADER:
                if self._at_it:
                    return False
                self._arm(False)
            elif owner is not Owner.NOBODY or self._ended:
                return False
            self.owner = Owner.WAITER
            return True

    def begin(self) -> bool:
        """Whether the leader, told that something came, may read it; `give_back` must follow then."""
        with self._lock:
            if self.owner is not Owner.LEADER or self._at_it or self._is_held:
                return False
            self._at_it = True
            return True

    def pass_on(self) -> None:
        """Who reads waits for what further streams bring: the last of these goes on."""
        with self._lock:
            self._put_down()
            self.owner = Owner.LANE

    def give_back(self) -> None:
        """Who has read does so no longer."""
        with self._lock:
            ended = self._ended
            if ended:
                self.owner = Owner.NOBODY
            elif self.owner is Owner.LEADER:
                self._at_it = False
            elif self._expected():
                self.owner = Owner.LEADER
                self._arm(not self._is_held)
            else:
                self.owner = Owner.NOBODY
        if ended:
            self._finish()

    def watch(self) -> None:
        """Something may come: the leader shall read it, unless somebody does already.

        One look at the owner needs no lock: while the leader is that, whoever takes the right sees later what is
        expected as he gives it back.
        """
        if self.owner is Owner.LEADER:
            return
        with self._lock:
            if self.owner is Owner.NOBODY and not self._ended:
                self.owner = Owner.LEADER
                self._arm(not self._is_held)

    def hold(self, is_held: bool) -> None:
        """Keep the leader from reading, or let it read again; threads that wait may read in any case."""
        with self._lock:
            self._is_held = is_held
            if self.owner is Owner.LEADER and not self._ended:
                self._arm(not is_held)

    def end(self) -> None:
        """The connection has ended; who reads it finishes."""
        with self._lock:
            self._ended = True
            free = self.owner is Owner.NOBODY or (self.owner is Owner.LEADER and not self._at_it)
            if free:
                self._put_down()
                self.owner = Owner.NOBODY
        if free:
            self._finish()

    def _put_down(self) -> None:
        """With the lock held: where the leader has the right, it has it no longer."""
        if self.owner is Owner.LEADER:
            self._at_it = False
            self._arm(False)

    def __repr__(self) -> str:
        return f"<Reading: {self.owner.value}{', at it' * self._at_it}{', ended' * self._ended}>"
