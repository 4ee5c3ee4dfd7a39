"""Forms the generations of an elastic group, one after the other, in its directory: the I/O of `quorum.py`.

The worker that came first decides, or the next if that one has died. A worker that finds itself among the members of a
generation is in it; all others wait for the next one. If a member dies before it has found that, the generation has
lost a member, as if it had died later.
"""

from __future__ import annotations

import contextlib
import os
from math import inf
from time import monotonic, sleep
from typing import NamedTuple

from telegrad._core.directory.directory import ABSENT, Compacted, Directory, DirectoryLost, DirectoryReset, LeaseLost
from telegrad._core.joining.directory_lease import DirectoryLease
from telegrad._core.joining.generation_keys import COME, GENERATION, PREFIX, ElasticState, IsAlive, look
from telegrad._core.joining.quorum import Arrival, Before, Formed, GroupSize, Quorum
from telegrad._core.membership.members import Member
from telegrad._core.membership.registry import Registry
from telegrad._core.progress import Wait
from telegrad._core.security.keyring import Keyring
from telegrad._core.stores.stores import RendezvousStore, open_store
from telegrad.errors import GroupEnded, GroupIncomplete, RendezvousError, UsageError, WorkerTaken

LAST_CALL = 3.0  # seconds without a new worker after which a first generation with enough workers is complete
KNOCK_AGAIN = 0.5  # seconds between two probes of a worker that is awaited, or came first
LOOK = 1.0  # seconds between two checks of the arrivals, by workers that do not decide


class JoinRequest(NamedTuple):
    """A worker's request to join the next generation."""

    held: DirectoryLease | None  # None: a launcher decides the members
    keys: Keyring
    limits: GroupSize
    before: Before  # the generation that it was in
    rank: int  # the preferred one
    timeout: float  # seconds; without limit for a spare worker while a generation runs

    def meet(self, _: float) -> RendezvousStore:
        """Open the store."""
        if self.held is None:
            if not (size := os.environ.get("WORLD_SIZE", "")).isdecimal():
                raise UsageError(
                    f"torchrun has started this process (TORCHELASTIC_RUN_ID is set), but WORLD_SIZE is {size!r}: "
                    "set it as torchrun does, or unset both to form a group without torchrun"
                )
            return open_store("env://", -1, int(size), self.keys, self.timeout)._replace(coming=self)
        return self.held.meet(self.timeout)._replace(rank=self.rank, coming=self)

    def join(self, held: DirectoryLease, me: Member, is_alive: IsAlive) -> Formed:
        """Join the next generation, as soon as there is one; return it.

        Raises:
            GroupIncomplete: too few workers came in time.
            GroupEnded: the group for which this worker has waited has ended.
            WorkerTaken: another worker has this one's name.
            DirectoryLost: the directory did not answer in time.
            DirectoryReset: it is another one than that of the last generation.
            RendezvousError: the group has other limits.
        """
        return _Joining(held, self, me, is_alive).join()


class _Joining:
    """One worker that joins."""

    def __init__(self, held: DirectoryLease, coming: JoinRequest, me: Member, is_alive: IsAlive) -> None:
        self._held = held
        self._limits = coming.limits
        self._me = me
        self._before = coming.before
        self._timeout = coming.timeout
        self._is_alive = is_alive
        self._until = monotonic() + coming.timeout
        self._state = ElasticState()
        self._quorum = Quorum(coming.limits)
        self._came = monotonic()  # the time of the last arrival, as this worker saw it
        self._waits_for = coming.before.number  # the last generation that ran while this worker waited for the next
        self._lost = ""  # why the directory does not answer
        self._dead: set[str] = set()
        self._knocked: dict[str, float] = {}  # the time, by incarnation

    def join(self) -> Formed:
        with Wait("init_rpc", self._text, lambda: self._quorum.missing(), worker=self._me.name) as self._wait:
            self._wait.place = self._held.meet(0).where
            while True:
                try:
                    return self._join_in(self._held.directory)
                except LeaseLost:
                    with contextlib.suppress(DirectoryLost):
                        self._held.renew()
                except DirectoryLost as error:
                    self._lost = f"the directory of the group does not answer: {error}"
                    if monotonic() > self._until:
                        raise
                    self._held.restart()
                    sleep(KNOCK_AGAIN)
                self._wait.look()

    def _join_in(self, directory: Directory) -> Formed:
        group, _ = Registry(directory, "").identify()
        if self._before.group not in ("", group):
            raise DirectoryReset("the directory of the group was restarted without its data: start the group again")
        arrival = Arrival(self._me, self._before, str(self._limits))
        while True:
            self._look(directory)
            come = [each.member.incarnation for each in self._state.arrivals]
            mine = self._state.came[come.index(self._me.incarnation)] if self._me.incarnation in come else ABSENT
            if self._me.incarnation in self._state.running.lives:
                if mine != ABSENT:
                    directory.swap(COME + self._me.incarnation, None, mine)
                return self._state.running._replace(group=group)
            if mine == ABSENT:
                directory.swap(COME + self._me.incarnation, arrival.to_json().encode(), ABSENT, self._held.lease)
                continue
            first = next(each for each in self._state.arrivals if self._lives(each.member))
            self._check(mine, first)
            decides = first.member.incarnation == self._me.incarnation
            late = monotonic() > self._until
            if (decides or late) and self._decide(directory, late):
                continue
            self._wait.look()
            with contextlib.suppress(Compacted):  # too many changes: read all again
                quiet = self._came + LAST_CALL - monotonic()
                pause = min(KNOCK_AGAIN, quiet if quiet > 0 else inf) if decides else LOOK
                pause = max(0.0, min(pause, self._until - monotonic()))
                directory.watch(PREFIX if decides else GENERATION, self._state.revision, pause)

    def _look(self, directory: Directory) -> None:
        """Read the arrivals, and probe the awaited members of the last generation."""
        known, self._state = self._state, look(directory)
        self._lost = ""
        if max(self._state.came, default=0) > max(known.came, default=0):
            self._came = monotonic()
        running = self._state.running
        self._quorum = Quorum(self._limits, running, self._state.arrivals, self._dead)
        if running.has_ended and running.number >= self._waits_for > 0:
            raise GroupEnded(
                f"the group that {self._me} waited for has ended normally, after generation {running.number}"
            )
        for member in self._quorum.awaited():
            self._lives(member)
        if self._quorum.awaited():
            self._waits_for = running.number
            if self._before.me not in running.lives:
                self._until = monotonic() + self._timeout  # it waits as long as that generation lives

    def _check(self, mine: int, first: Arrival) -> None:
        """Raise an error if this worker, which came at the revision `mine`, cannot join the group."""
        running = self._state.running
        for other in running.members:
            if other.name == self._me.name and self._state.since > mine and not running.has_ended:
                raise WorkerTaken(
                    f"the name {self._me.name!r} is not unique, two workers claim it: {other} and {self._me}. Give "
                    "each its own name; or give a role and no name, and names are assigned"
                )
        told = [(first.member, first.limits), *((each, running.limits) for each in self._quorum.awaited())]
        for other, limits in told:
            if limits != str(self._limits):
                raise RendezvousError(
                    f"{self._me} expects a group of {self._limits} workers, but {other} expects one of {limits}: "
                    "give all workers the same min_workers and max_workers"
                )

    def _decide(self, directory: Directory, late: bool) -> bool:
        """Return True if a generation has formed, or members of it were found dead."""
        formed = self._quorum.decide(monotonic() - self._came > LAST_CALL, late)
        if formed is not None:
            if all(self._lives(member, fresh=True) for member in formed.members):
                directory.swap(GENERATION, formed.to_json().encode(), self._state.since)
            return True
        if late:
            raise GroupIncomplete(
                f"{self._me} has waited {self._timeout:g} s for a group of {self._limits} workers: "
                f"{self._quorum.lacks()}. Check the logs of the other workers, or allow more time with rpc_timeout"
            )
        return False

    def _lives(self, member: Member, fresh: bool = False) -> bool:
        """Return True if a worker answers, probed at intervals, or now if `fresh`. A dead worker stays dead."""
        if member.incarnation in self._dead or member.incarnation == self._me.incarnation:
            return member.incarnation not in self._dead
        now = monotonic()
        if fresh or now - self._knocked.get(member.incarnation, -inf) > KNOCK_AGAIN:
            if not self._is_alive(member):
                self._dead.add(member.incarnation)
                return False
            self._knocked[member.incarnation] = monotonic()
        return True

    def _text(self) -> str:
        me = self._me.name or self._me.role
        return f"{self._lost or self._quorum.lacks()} ({me!r} joins an elastic group of {self._limits} workers)"
