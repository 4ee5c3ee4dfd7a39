"""Finds processes that are alive but do not run; applies `transport.silence` to connections.

The connections of a stopped process stay open, so nothing reports the stop. On the same host the kernel knows a
process's state, so a busy process is never considered silent. From other hosts only messages can be seen, so the
`heartbeat` option requests them. A process that is busy for longer and lets no other thread run also counts as silent.
"""

import logging
import sys
from collections.abc import Callable, Iterable
from math import inf
from time import process_time

from telegrad._core.processes import Stops, stopped, wake_ups
from telegrad._core.transport.link import Link
from telegrad._core.transport.silence import Silence
from telegrad.errors import PeerSilent

TICKS = 1.0  # maximal seconds between two ticks of a running worker
LATEST = 20  # switch intervals of the interpreter (0.1 s by default): the latest wake-up of a thread on a busy machine

log = logging.getLogger("telegrad")


class Health:
    """Checks the workers that this worker calls; only the timer thread may use it."""

    def __init__(self, silence: float, heartbeat: float, end: Callable[[Link, PeerSilent], None]) -> None:
        """Report stopped processes after `silence` seconds, and missing heartbeats after `heartbeat`; 0 for never.

        `end` is called with the connection of a silent worker.
        """
        self._silence = silence
        self._heartbeat = heartbeat
        self._end = end
        self._watched: dict[Link, _Watched] = {}
        self._next = 0.0
        self._looked, self._used, self._woken = inf, 0.0, 0  # at the last look: time, processor time, wake-ups

    def tick(self, now: float, links: Iterable[Link]) -> float:
        """Check the links that are due; return the time of the next check."""
        if now < self._next:
            return self._next
        self._watched = {
            link: self._watched.get(link) or _Watched(link, self._silence, self._heartbeat) for link in links
        }
        for link, watched in self._watched.items():
            if watched.due <= now and (why := watched.look(now)):
                self._end(link, PeerSilent(f"worker {link.peer!r} is silent: {why}"))
        soonest = Silence(min(self._silence or inf, self._heartbeat or inf)).pause  # for links that are added meanwhile
        self._next = min([now + soonest, *(watched.due for watched in self._watched.values())])
        return self._next

    def look_at_itself(self, now: float) -> None:
        """Log a warning if this worker has been stopped, as other workers may have declared it lost.

        Call it at each wake-up of the timer thread, because the wake-ups since the last call are counted.
        A thread that waits for the interpreter wakes up after each switch interval (5 ms) to request it; a stopped
        thread does not. A thread that holds the interpreter for seconds, asleep or not, is therefore not mistaken for a
        stop.
        """
        used, woken = process_time(), wake_ups()
        stood = now - self._looked
        if self._silence and stood > self._silence + TICKS:
            asleep = (woken - self._woken) * sys.getswitchinterval() * LATEST < stood
            if asleep and used - self._used < stood / 2:
                log.warning(
                    "telegrad: this process did not run for %.0f s: it was stopped, or its machine slept. Other "
                    "workers may have declared this worker lost",
                    stood,
                )
        self._looked, self._used, self._woken = now, used, woken


class _Watched:
    """One worker, seen through the connection to it."""

    def __init__(self, link: Link, silence: float, heartbeat: float) -> None:
        self.due = 0.0
        self._link = link
        # The process of another host cannot be seen: it has no limit.
        self._process, self._voice = Silence(silence if link.process else 0.0), Silence(heartbeat)
        self._stops = Stops(link.process)
        self._taken = -1  # bytes received until the last check; -1 before the first
        self._sending, self._written = False, 0  # likewise for sending, if bytes had to wait

    def look(self, now: float) -> str:
        """Return why the worker is silent, or an empty text."""
        why = ""
        if self._process.look(now, not self._stops.look()):
            why = f"for {self._process.limit:g} s {stopped(self._link.process)}"
        # Unread bytes are a sign of life, too: the answer has come, and this worker is the slow one.
        elif self._voice.limit < inf and self._voice.look(now, self._is_heard()) and not self._link.has_unread():
            why = (
                f"it has not answered for {self._voice.limit:g} s (option `heartbeat`): it was stopped, or a thread "
                "holds the interpreter lock (see `telegrad why`)"
            )
        self.due = now + min(self._process.pause, self._voice.pause)
        return why and f"{why}. Its calls in flight may or may not have run; if it continues, the next call reconnects"

    def _is_heard(self) -> bool:
        """Return True if the worker gave a sign of life since the last check; if so, request the next one."""
        link, taken = self._link, self._link.taken
        # A worker that takes bytes of a large message is alive, although it cannot answer before the end of the
        # message.
        heard = taken != self._taken or (self._sending and link.written != self._written)
        self._taken, self._sending = taken, link.is_sending
        # One request for each sign of life: a quiet worker has one request to answer, however often it is looked at.
        if heard:
            link.ask()
        self._written = link.written
        return heard
