"""Limits the waiting work of each caller, by back-pressure on its connection.

A caller limits itself to 32,768 calls in flight, except for calls that it makes while it serves others. The limits here
are higher and hold for any caller, so a well-behaved program never meets them:

1. If `most_calls` (`Settings.most_waiting`) calls of a caller are unanswered, or `most_bytes` (`most_waiting_bytes`)
   of its data have not begun, its connection is not read. Its further messages wait on its side, without an error.
2. If AHEAD of its calls have not begun, its connection is not read until half of them have, or for READ_ON seconds.
   Quick calls end sooner than that, so few of them wait here at a time. Otherwise tens of thousands of calls would be
   created and freed repeatedly. Each time the garbage collector would visit all objects of the process (0.1 s), while
   the other callers wait. Slow calls are read on, about twice as many after each READ_ON.
3. The connection may bring what the waiting calls need: a CANCEL, a control message, a call that opens a gate. So if
   none of its calls has begun or ended for STALLED_AFTER seconds, the connection is read once. At each check the caller
   also gets a PULSE, since its own requests for a sign of life are not read.
4. If MOST_UNREAD bytes were sent to a caller since it had last read everything, no further call of it begins until it
   has. The connection alone cannot show this: lent memory leaves at once, as a frame of a few bytes.
5. Through rule 3, twice `most_calls` can accumulate in minutes in which nothing ends. Further calls are refused.

Only connections over which other workers call are read slowly. Answers to this worker's calls arrive over other
connections, so two workers that call each other cannot deadlock here.
"""

import contextlib
from math import inf
from time import monotonic

from telegrad._core.agent.incoming import Caller, Incoming
from telegrad._core.reactor.reactor import Reactor
from telegrad._core.reactor.scheduler import Work
from telegrad._core.sockets import unread
from telegrad._core.transport.connect import LoopEnd
from telegrad._core.transport.link import Link
from telegrad._core.wire.messages import PULSE, Message
from telegrad.errors import LimitReached, PeerError

AHEAD = 64  # calls of one caller that are read before their duration is known
READ_ON = 0.05  # seconds: AHEAD quick calls take 10 to 30 ms
FEW = 16  # number of calls or messages below which no check is made
MOST_NAMES = 4096
MOST_UNREAD = 1 << 28  # bytes of answers and of the memory in them
LOOK_AGAIN = 0.01  # seconds
# Seconds; less than the scheduler takes to lend another slot, since each call that begins so is a change.
STALLED_AFTER = 0.2


class _PausedCaller:
    """A caller whose connection is not read."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.since = monotonic()
        self._seen: tuple[int, ...] = ()  # the counts at the last check that found a change
        self._since = 0.0

    def stalls(self, has: tuple[int, ...], now: float) -> bool:
        """Return True if nothing has changed for a while, and start the next period."""
        stalled = has == self._seen
        if stalled and now - self._since < STALLED_AFTER:
            return False
        self._seen, self._since = has, now
        return stalled


class BackPressure:
    """Slows callers down, and drops cancelled calls."""

    def __init__(self, reactor: Reactor, most_calls: int, most_bytes: int) -> None:
        """The timer of the reactor must call `tick`."""
        self._reactor = reactor
        self._most_calls = most_calls
        self._most_bytes = most_bytes
        # No lock: each use is one operation of a dict or of a set.
        self.stopped: dict[Caller, _PausedCaller] = {}
        self._unread: dict[Caller, Link] = {}  # held up, since they do not read
        self.may_drop: set[bytes] = set()  # names of functions whose cancelled calls need not run

    def excess(self, caller: Caller) -> LimitReached | None:
        """Return the error for the latest call of a caller if it must be refused."""
        most = 2 * self._most_calls
        if len(caller.calls) <= most:
            return None
        return LimitReached(
            f"a call by worker {caller.name!r} was refused: {most:,} of its calls are not answered yet, the limit "
            "for one worker. Wait for some of them before making more"
        )

    def check(self, caller: Caller, link: Link | LoopEnd) -> None:
        """After each read of a connection: stop reading if too much work of the caller waits."""
        waits = _waiting(caller)
        if waits <= AHEAD // 2:
            caller.slow = 0
        if (waits >= caller.slow + AHEAD or self._has_too_much(caller)) and isinstance(link, Link):
            # Hold first, then store, as in `sent`: a thread that finds the caller in `stopped` undoes both. Other
            # threads may have begun the counted works before they could find the caller there. So the last step looks
            # once more.
            link.reading.hold(True)
            stopped = self.stopped.setdefault(caller, _PausedCaller(link))
            self.look(caller)
            self._reactor.timer.wake_by(stopped.since + READ_ON, rough=True)

    def look(self, caller: Caller) -> bool:
        """Read the connection of a caller again if its work is below the limits; return True if so."""
        if _waiting(caller) > caller.slow + AHEAD // 2 or self._has_too_much(caller):
            return False
        stopped = self.stopped.pop(caller, None)
        if stopped is not None:
            stopped.link.reading.hold(False)
        return True

    def tick(self, now: float) -> float:
        """Check the connections that are not read; return the time of the next check."""
        for caller, link in list(self._unread.items()):
            if _has_read(caller, link):
                self._unread.pop(caller, None)
                self._reactor.hold_up(caller.queue, False)
        upcoming = now + LOOK_AGAIN if self._unread else inf
        for caller, stopped in list(self.stopped.items()):
            if self.look(caller):
                continue
            if not self._has_too_much(caller):
                # Calls that are held up cannot begin, so their number says nothing about their duration. They are read
                # more slowly.
                due = stopped.since + (STALLED_AFTER if caller.queue.is_held_up else READ_ON)
                if now >= due:
                    # These calls are slow. Reading goes on until as many more and AHEAD wait.
                    caller.slow = 2 * _waiting(caller)
                    self.look(caller)
                else:
                    upcoming = min(upcoming, due)
                continue
            upcoming = min(upcoming, now + STALLED_AFTER)
            if not stopped.link.is_congested:  # a congested peer gets other frames anyway
                with contextlib.suppress(PeerError):
                    stopped.link.send(Message(PULSE))
            if stopped.stalls((len(caller.calls), len(caller.queue), len(caller.control)), now):
                stopped.link.reading.hold(False)  # until `check`
        return upcoming

    def sent(self, caller: Caller, link: Link | LoopEnd) -> None:
        """After each answer with memory: hold up a caller that does not read its answers."""
        if isinstance(link, Link) and link.sent - caller.read > MOST_UNREAD and not _has_read(caller, link):
            # Hold up first, then store. `tick` and `lost` release only callers that they find in `_unread`: if one of
            # them ran between the two in the opposite order, it would release the queue before it is held up, and no
            # call would begin again.
            self._reactor.hold_up(caller.queue, True)
            self._unread[caller] = link
            self._reactor.timer.wake_by(monotonic() + LOOK_AGAIN)

    def _has_too_much(self, caller: Caller) -> bool:
        calls = max(len(caller.calls), len(caller.queue), len(caller.control))
        return calls >= self._most_calls or caller.queue.size + caller.control.size >= self._most_bytes

    # Cancelled calls

    def note(self, name: bytes, must_finish: bool) -> None:
        """Record a resolved function: `must_finish` if it must run even after its call was cancelled."""
        if not must_finish:
            if len(self.may_drop) >= MOST_NAMES:
                self.may_drop.clear()
            self.may_drop.add(name)

    def cancelled(self, caller: Caller) -> None:
        """Count a cancelled call; if many were cancelled, drop those that have not begun."""
        caller.cancelled += 1
        if caller.cancelled > max(FEW, len(caller.queue) // 2):
            self._drop_cancelled(caller)

    def lost(self, caller: Caller) -> None:
        """Clean up after a caller that has gone; its calls are already cancelled."""
        self.stopped.pop(caller, None)
        self._drop_cancelled(caller)
        if self._unread.pop(caller, None) is not None:
            self._reactor.hold_up(caller.queue, False)

    def _drop_cancelled(self, caller: Caller) -> None:
        caller.cancelled = 0

        def is_unwanted(work: Work) -> bool:
            call = work.argument
            if not isinstance(call, Incoming) or not call.cancelled or call.destination is not None:
                return False
            return call.message.head in self.may_drop

        for work in self._reactor.drop(caller.queue, is_unwanted):
            caller.calls.pop(work.argument.message.id, None)


def _waiting(caller: Caller) -> int:
    """Return the number of the caller's calls, or of its control messages and calls to refuse, that have not begun."""
    return max(len(caller.queue.works), len(caller.control.works))


def _has_read(caller: Caller, link: Link) -> bool:
    """Return True if a caller has read everything sent to it, or will read no more."""
    # Loaded before the socket is examined: bytes that another thread sends meanwhile were not read.
    sent = link.sent
    if link.is_sending or unread(link):
        return False
    caller.read = sent
    return True
