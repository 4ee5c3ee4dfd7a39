"""Ownership of the right to read a connection.

At most one thread reads. While a response is expected, the right always has an owner.

    NOBODY  --take-->   WAITER    a thread that waits for a response reads by itself
    NOBODY  --watch-->  LEADER    the poller notifies the leader thread when data is available
    LEADER  --take-->   WAITER    unless the leader is reading; the poller stops watching
    LEADER  --begin-->  LEADER    and is reading
    any     --pass_on-> LANE      the next data arrives on lanes; one of their threads continues
    any     --give_back-> LEADER  if responses are expected, otherwise NOBODY

A thread that expects a response records that first and then calls `watch`. A thread that gives the right back checks
for such records. Both hold the lock, so one of them sees the other. Only this class changes what the poller watches.

The waiting thread reads because waking another thread costs more than most calls. So no thread is the reader for good:
a thread that waits for one answer may read those of others, and a thread that finds the right taken relies on the owner
to read on, or to pass the right on.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from enum import Enum

from telegrad._core.wire.messages import FrameReader


class ReadOwner(Enum):
    NOBODY = "nobody"
    LEADER = "the leader"
    WAITER = "a waiter"
    LANE = "a lane"


class ReadRight:
    def __init__(
        self,
        lock: AbstractContextManager[object],
        arm: Callable[[bool], None],
        expected: Callable[[], object],
        finish: Callable[[], None],
        reader: FrameReader,
        continue_on_lanes: Callable[[], bool],
    ) -> None:
        """`arm` makes the poller watch for data, or stop. `expected` returns True if a response is expected.

        `finish` is called once, when the connection has ended and no thread reads it. If a frame of `reader` awaits
        lanes, `continue_on_lanes` passes the right on to them, or returns False if none of them needs it.
        """
        self._lock = lock  # guards all below; `watch` also reads the owner without it
        self._arm = arm
        self._expected = expected
        self._finish = finish
        self._reader = reader
        self._continue_on_lanes = continue_on_lanes
        self.owner = ReadOwner.NOBODY
        self._at_it = False  # the leader is reading, not only waiting for a notification
        self._is_held = False  # the leader must not read
        self._ended = False

    def take(self) -> bool:
        """Return True if the calling thread, which waits for a response, may read. `give_back` must follow."""
        with self._lock:
            owner = self.owner
            if owner is ReadOwner.LEADER:
                if self._at_it:
                    return False
                # The poller stops watching, or the leader would wake up for each answer that the waiting thread is
                # about to read.
                self._arm(False)
            elif owner is not ReadOwner.NOBODY or self._ended:
                return False
            self.owner = ReadOwner.WAITER
            return True

    def begin(self) -> bool:
        """Return True if the leader may read available data and must call `give_back` afterwards."""
        with self._lock:
            if self.owner is not ReadOwner.LEADER or self._at_it or self._is_held:
                return False
            self._at_it = True
            return True

    def pass_on(self) -> None:
        """Pass the right to the lanes: the thread that receives the last stripe continues."""
        with self._lock:
            self._put_down()
            self.owner = ReadOwner.LANE

    def give_back(self) -> None:
        """Give the right back; if the next frame awaits lanes, to the thread of the lane that ends last."""
        if self._reader.awaits_lanes and self._continue_on_lanes():
            return
        with self._lock:
            ended = self._ended
            if ended:
                self.owner = ReadOwner.NOBODY
            # The leader keeps the right, also if no response is expected: data may arrive on an idle connection, and
            # its end.
            elif self.owner is ReadOwner.LEADER:
                self._at_it = False
            elif self._expected():
                self.owner = ReadOwner.LEADER
                self._arm(not self._is_held)
            else:
                self.owner = ReadOwner.NOBODY
        if ended:
            self._finish()

    def watch(self) -> None:
        """Make the leader the owner unless there is one, because data may arrive.

        The first check needs no lock: a thread that takes the right from the leader checks `expected` when it gives it
        back.
        """
        if self.owner is ReadOwner.LEADER:
            return
        with self._lock:
            if self.owner is ReadOwner.NOBODY and not self._ended:
                self.owner = ReadOwner.LEADER
                self._arm(not self._is_held)

    def hold(self, is_held: bool) -> None:
        """Stop the leader from reading, or let it read again. Threads that wait may always read."""
        with self._lock:
            self._is_held = is_held
            if self.owner is ReadOwner.LEADER and not self._ended:
                self._arm(not is_held)

    def end(self) -> None:
        """Mark the connection as ended. `finish` is called now, or when the reading thread gives the right back."""
        with self._lock:
            self._ended = True
            # A thread that reads now, or a lane, gives the right back later and finds `_ended`. Exactly one thread
            # calls `finish`.
            free = self.owner is ReadOwner.NOBODY or (self.owner is ReadOwner.LEADER and not self._at_it)
            if free:
                self._put_down()
                self.owner = ReadOwner.NOBODY
        if free:
            self._finish()

    def _put_down(self) -> None:
        """Take the right from the leader if it owns it. Call it with the lock held."""
        if self.owner is ReadOwner.LEADER:
            self._at_it = False
            self._arm(False)
