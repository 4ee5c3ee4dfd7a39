"""Finds workers that live and do not run: the rim of `silence`.

A process that was stopped keeps its connections, and so nothing tells of it. On this host the kernel knows its state,
so that one which is only busy is never taken for silent. Of all others only what they say can be seen: a heartbeat is
asked for where the user wants that, and one that is busy for longer, and lets no other thread run, is silent then, too.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable
from math import inf
from time import process_time

from telegrad._core.transport.link import Link
from telegrad._core.transport.process_state import Stops, stopped
from telegrad._core.transport.silence import Silence
from telegrad.errors import PeerSilent

TICKS = 1.0  # seconds at most between two ticks of a worker that runs
LATEST = 20  # times the interval of the interpreter (0.1 s by default): on a crowded machine a thread may wake so late

log = logging.getLogger("telegrad")

try:
    from resource import RUSAGE_THREAD, getrusage
except ImportError:  # not on macOS and Windows

    def _woken() -> int:
        return 0

else:

    def _woken() -> int:
        """How often this thread has gone to sleep, and so woken, until now."""
        return getrusage(RUSAGE_THREAD).ru_nvcsw


class Health:
    """Whether those run whom this worker calls; for the clock's thread alone."""

    def __init__(self, silence: float, heartbeat: float, end: Callable[[Link, PeerSilent], None]) -> None:
        """After `silence` seconds a stopped process is told of, after `heartbeat` who does not answer; 0 for never.

        `end` is called with the connection of a worker that is silent.
        """
        self._silence = silence
        self._heartbeat = heartbeat
        self._end = end
        self._watched: dict[Link, _Watched] = {}
        self._next = 0.0
        self._ticked, self._used, self._woken = inf, 0.0, 0  # when, and the processor time and wakings until then

    def tick(self, now: float, links: Iterable[Link]) -> float:
        """Look at whom it is time to look at; when to look again."""
        self._look_at_itself(now)
        if now < self._next:
            return self._next
        self._watched = {link: self._watched.get(link) or self._watch(link) for link in links}
        for link, watched in self._watched.items():
            if watched.due <= now and (why := watched.look(now)):
                self._end(link, PeerSilent(f"worker {link.peer!r} is silent: {why}"))
        soonest = Silence(min(self._silence or inf, self._heartbeat or inf)).pause  # for those that come meanwhile
        self._next = min([now + soonest, *(watched.due for watched in self._watched.values())])
        return self._next

    def _watch(self, link: Link) -> _Watched:
        return _Watched(link, self._silence if link.process else 0.0, self._heartbeat)

    def _look_at_itself(self, now: float) -> None:
        """Say so where this worker has been stopped, as others may have taken it for lost.

        A thread that waits for the interpreter wakes after each of its intervals (5 ms) to ask for it, one that is
        stopped does not. So a thread that holds the interpreter for seconds, asleep or not, is no stop.
        """
        used, woken = process_time(), _woken()
        stood = now - self._ticked
        if self._silence and stood > self._silence + TICKS:
            asleep = (woken - self._woken) * sys.getswitchinterval() * LATEST < stood
            if asleep and used - self._used < stood / 2:
                log.warning(
                    "telegrad: this process did not run for %.0f s: it was stopped, or its machine slept. Others may "
                    "have taken its worker for lost",
                    stood,
                )
        self._ticked, self._used, self._woken = now, used, woken


class _Watched:
    """One worker, by the connection to it."""

    def __init__(self, link: Link, silence: float, heartbeat: float) -> None:
        self.due = 0.0
        self._link = link
        self._limits = silence, heartbeat
        self._process, self._voice = Silence(silence), Silence(heartbeat)
        self._stops = Stops(link.process)
        self._taken = -1  # bytes from it until the last look, before which it was asked
        self._sending, self._written = False, 0  # bytes to it likewise, where they had to wait for it

    def look(self, now: float) -> str:
        """Why it is silent, or an empty text."""
        silence, heartbeat = self._limits
        why = ""
        if silence and self._process.look(now, not self._stops.look()):
            why = f"for {silence:g} s {stopped(self._link.process)}"
        elif heartbeat and self._voice.look(now, self._is_heard()) and not self._link.has_unread():
            why = (
                f"it has not answered for {heartbeat:g} s, the option `heartbeat`: it was stopped, or a thread holds "
                "its interpreter (`telegrad why` tells)"
            )
        self.due = now + min(self._process.pause, self._voice.pause)
        return (
            why and f"{why}. Calls in flight to it may or may not have run; if it goes on, the next call connects anew"
        )

    def _is_heard(self) -> bool:
        """Whether it gave a sign of life since the last look; if so, it is asked for the next."""
        link, taken = self._link, self._link.taken
        heard = taken != self._taken or (self._sending and link.written != self._written)
        self._taken, self._sending = taken, link.is_sending
        if heard:
            link.ask()
        self._written = link.written
        return heard
