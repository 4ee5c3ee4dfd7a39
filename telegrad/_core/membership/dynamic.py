"""One worker's life in a dynamic group, whose members are in a directory (`registry.py`).

The life depends on a lease. One thread renews it, another watches the members: a watch may wait for seconds for a lost
packet, and the lease must not end meanwhile. While the directory does not answer, the known members stay as they are:
they can be called, and they call. Operations that need a decision (a join, a worker that is not known yet, a claim)
fail with DirectoryLost. A worker that has not renewed its lease in time by its own clock owns nothing any more (`holds`
is False), because the directory may have given its claims to others. Once the directory answers again, the lease is
still valid, or the worker learns that it was declared lost. Then its life is over. It does not continue under its old
name: its program ends, or joins again.
"""

import contextlib
import logging
import threading
from collections.abc import Callable
from time import monotonic

from telegrad._core.membership.members import Member, unknown
from telegrad._core.membership.registry import (
    LOST,
    Change,
    Claim,
    Claimed,
    Ended,
    IsAlive,
    LifeOver,
    MemberGone,
    MemberJoined,
    Registered,
    Registry,
    Roster,
)
from telegrad._core.stores.directory import (
    CLOCK_DRIFT,
    LONGEST_TTL,
    SHORTEST_TTL,
    Compacted,
    Directory,
    DirectoryLost,
    DirectoryRefused,
    DirectoryReset,
    Lease,
    LeaseLost,
)
from telegrad._core.stores.find_directory import DirectoryMonitor, remove_pointer
from telegrad._core.stores.sealed_store import SealedStore
from telegrad._core.threads import LONGEST_WAIT, Background, run_in_thread
from telegrad.errors import PeerLost, ShutDown, StoreUntrusted, TelegradError

RENEWALS = 3  # per ttl of a lease: two may fail
SHORTEST_PAUSE, LONGEST_PAUSE = 0.05, 1.0  # seconds between two attempts while the directory does not answer
UNUSABLE = DirectoryLost, DirectoryRefused, StoreUntrusted  # errors of a directory that may work again later
HAS_LEFT = "this worker has left the group"
PATIENCE = 2.0  # seconds to notify the directory of leaving, and for a thread to end

log = logging.getLogger("telegrad")


def ttl_of(silence: float) -> float:
    """Return the ttl of a member's lease, for `silence` seconds after which a worker is lost; 0 means never."""
    return min(max(silence, SHORTEST_TTL), LONGEST_TTL) if silence else LONGEST_TTL


class DynamicGroup:
    """This worker's registration, and the members known here."""

    def __init__(
        self, directory: Directory, ttl: float, launched: bool = False, clock: Callable[[], float] = monotonic
    ) -> None:
        """Initialise without joining. `leave` closes `directory`, whose lease ends are those of `clock`.

        `ttl`: seconds after which a worker is lost that does not renew its lease. `launched`: a launcher started the
        directory: it has made the group, and restarts failed workers.
        """
        self.directory = directory
        self.registry = Registry(directory, clock)
        self.identity = ""
        self.over = ""  # why this life has ended; set once
        self._ttl, self._clock = ttl, clock
        self._lease = Lease(0, ttl, 0.0)  # no lock: replaced as a whole, by one thread at a time
        self._epoch = 0
        self._is_alive: IsAlive = lambda _: None  # given to `join`
        self._me: Member | None = None  # None before the join, and once `leave` was called, at any moment
        self._name = ""
        self._launched = launched
        self._founded = False  # this worker has made the group, or was the first living member
        self._store: SealedStore | None = None  # the store that this worker may serve for later workers
        self._keeping: DirectoryMonitor | None = None  # the process of the directory, if this worker has started it
        self._applying = threading.Lock()  # guards changes of these two; changes are applied one at a time
        self._since = 0  # the revision up to which changes were applied
        self._known: dict[str, Registered] = {}  # by life; copied in one step by readers, which take no lock
        self._gone: set[str] = set()  # names of members that have left or were lost; also read without the lock
        self._on_change: Callable[[Change], None] = lambda _: None
        self._stands_for: Callable[[], float] = lambda: 0.0
        self.claims: dict[str, Claim] = {}  # to published values, as known here; written under _applying
        self.on_claim: Callable[[str], None] = lambda _: None  # called like `on_change`, with the name of the value
        self._stopped = threading.Event()
        # Acquired once, without waiting, by the thread that ends this life: it finds the end, or leaves.
        self._ending = threading.Lock()
        self._renewal_pause = self._watch_pause = SHORTEST_PAUSE  # seconds until the retry, if an attempt fails
        self._unrenewed = ""  # the logged reason of the last failed renewal; set by the renewing thread
        self._thread = Background("telegrad-directory", self._main)
        self._renewing = Background("telegrad-lease", self._renew)
        self.is_lost = False  # the directory did not answer last, or refused; set by the watching thread

    # Joining

    def join(self, me: Member, is_alive: IsAlive) -> Member:
        """Register, and read the members. Raises the errors of `Registry.reserve`, and LifeOver."""
        self.identity, has_made = self.registry.identify()
        self._is_alive = is_alive
        self._lease = self.directory.grant(self._ttl)
        try:
            # Read the members before a key of this worker is written. The watch begins at the revision of this list, so
            # it reports the end of this worker whenever that happens. The list also shows which names and ranks are
            # taken, so `reserve` does not try them.
            roster = self.registry.roster()
            members = [each.member for each in roster.members.values()]
            registered = self._publish(self.registry.reserve(me, self._lease, is_alive, members))
        except BaseException:
            # Without an answer, the end of the lease deletes all keys that this attempt has written.
            with contextlib.suppress(*UNUSABLE):
                self.directory.revoke(self._lease)
            raise
        self._me, self._epoch = registered
        self._name = registered.member.name
        self._known = {**roster.members, me.incarnation: registered}
        self.claims, self._since = dict(roster.claims), roster.revision
        self._founded = has_made or not any(map(is_alive, members))
        return registered.member

    def _publish(self, me: Member) -> Registered:
        """Publish this worker; if the outcome is unknown, retry, because its incarnation is used only once. Raise
        LeaseLost if it was not published, and LifeOver if that is not known and the lease has ended."""
        pause, unknown = SHORTEST_PAUSE, None
        while True:
            try:
                return self.registry.publish(me, self._lease)
            except DirectoryLost as error:
                unknown = error
            except LeaseLost:
                # If this is the first answer, the worker was never published, and the caller may try again with another
                # lease. After an attempt without an answer, the worker may have been a member for a while. Then the
                # others have seen this incarnation go, and would ignore it if it joined again (`Membership._apply`).
                if unknown is None:
                    raise
                break
            if not self.holds:
                break
            self._stopped.wait(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        raise LifeOver(
            f"worker {me.name!r} may have joined and then lost its lease, since the directory of the group did not "
            f"answer in time: {unknown}. Start it again"
        ) from unknown

    def keeps(self, store: SealedStore | None, keeping: DirectoryMonitor | None) -> None:
        """Keep the store and the process of the directory until this worker leaves."""
        self._store, self._keeping = store, keeping

    def begin(self, on_change: Callable[[Change], None], stands_for: Callable[[], float] = lambda: 0.0) -> None:
        """Start the threads.

        `on_change` is called with each change, one at a time except for this worker's end; it must not call `refresh`.
        `stands_for` returns for how many seconds this worker has not answered. If that is longer than the ttl, the
        lease is not renewed: then others, and this worker, detect its loss.
        """
        self._on_change, self._stands_for = on_change, stands_for
        self._renewing.want()
        self._thread.want()

    @property
    def holds(self) -> bool:
        """Return True while this worker may act as the owner of its claims."""
        return not self.over and self._clock() < self._lease.ends - CLOCK_DRIFT * self._lease.ttl

    # Published values

    def claim(self, name: str) -> Claim:
        """Claim a published value for this member; return its owner's claim. Raises the errors of `Registry.claim`."""
        # Read it once: `leave`, on another thread, may set it to None meanwhile.
        me = self._me
        if me is None:
            raise LeaseLost("this worker has left the group and no longer owns any values")
        claim = self.registry.claim(name, me.incarnation, self._lease, self._is_alive)
        with self._applying:
            self._apply(Claimed(name, claim))
        return claim

    def owns(self, name: str, claim: Claim) -> bool:
        """Return True while this member, which made that claim, may act as the owner."""
        # A higher token belongs to a later change: the claim was deleted, or another worker has made a later one. The
        # watch can report that before this worker's own clock ends the lease.
        return self.holds and self.claims.get(name, claim).token <= claim.token

    def look_for_owner(self, name: str) -> None:
        """Read the owner of a published value from the directory. Raises DirectoryLost."""
        claim = self.registry.owner(name)
        if claim is not None:
            with self._applying:
                self._apply(Claimed(name, claim))

    # Looking up

    def members(self) -> list[Member]:
        """Return the members known here, by name."""
        return sorted((each.member for each in self._known.copy().values()), key=lambda member: member.name)

    def find(self, to: str | int) -> Member:
        """Return the member that has a name or a rank.

        Raises:
            UnknownWorker: there is none.
            DirectoryLost: it is not known here, and the directory does not answer.
            PeerLost: this worker was declared lost.
            ShutDown: it has left.
        """
        if self.over:
            raise ShutDown(self.over) if self.over == HAS_LEFT else PeerLost(self.over)
        for known in self._known.copy().values():
            if to in (known.member.name, known.member.id):
                return known.member
        # A directory that did not answer last is not asked: each call to an unknown worker would block until the
        # patience of the connection is over.
        if self.is_lost:
            raise DirectoryLost(
                f"worker {to!r} is not known here, and the directory of the group does not answer: check that the "
                "process that keeps it runs and can be reached from here"
            )
        found = self.registry.find(to)
        if found is not None:
            return found.member
        names = [member.name for member in self.members()]
        raise unknown(to, names, "; with wait_for_worker=True, a call waits until it has", self._gone)

    def declare_lost(self, member: Member, why: str, unanswered: Callable[[], None] = lambda: None) -> None:
        """Declare a member lost that was found dead, unless it is out already; the watch reports which.

        If the directory cannot record that, `unanswered` is called; the end of the lease removes that member.
        """
        if self.is_lost:
            unanswered()
        else:
            # The calling thread also probes the other suspects (`membership.py`), and the directory may take seconds to
            # answer.
            run_in_thread("telegrad-declare", self._tell_lost, member, why, unanswered)

    def _tell_lost(self, member: Member, why: str, unanswered: Callable[[], None]) -> None:
        try:
            self.registry.declare_lost(member.incarnation, why)
        except DirectoryReset:  # it has lost this group, which ends at the next renewal
            pass
        except TelegradError:  # no answer, a refusal, or a directory without room
            unanswered()

    # The threads

    def _renew(self) -> None:
        wait = self._until_renewal()
        while not self._stopped.wait(min(wait, LONGEST_WAIT)) and not self.over:
            wait = self.renew_if_due()

    def renew_if_due(self) -> float:
        """Renew the lease if it is time; return the seconds until the next call."""
        if (wait := self._until_renewal()) > 0:
            return wait
        # This thread may run although the worker does not serve, because no thread polls its connections. Such a worker
        # must not keep its lease. It counts as lost once the lease has ended by its own clock: until then the directory
        # gives its name and its claims to no other worker.
        if self._stands_for() >= self._ttl:
            if not self.holds:
                self._declared_lost("it was stopped for longer than its lease lasts")
            return SHORTEST_PAUSE
        pause, self._renewal_pause = self._renewal_pause, SHORTEST_PAUSE
        try:
            self._lease = self.directory.renew(self._lease)
            self._unrenewed = ""
        except UNUSABLE as error:
            # A server that is down, or that refuses every request, is reported by the watching thread, which asks it
            # every third of the ttl at least. Only a server that refuses renewals alone is reported here, with a third
            # of the lease left: by then the watching thread would have noticed an outage.
            is_late = self._clock() > self._lease.ends - self._ttl / RENEWALS
            is_refused = is_late and not (self.is_lost or isinstance(error, DirectoryLost))
            if is_refused and str(error) != self._unrenewed:
                self._unrenewed = str(error)
                log.warning("telegrad: the lease in the group's directory could not be renewed: %s", error)
            self._renewal_pause = min(2 * pause, LONGEST_PAUSE)
            return pause
        except DirectoryReset as error:
            self._end(f"worker {self._name!r} no longer has a group: {error}")
        except LeaseLost:
            self._declared_lost("the directory has ended its lease, which was not renewed in time")
        except Exception:
            # This thread must survive any error: without it, the lease ends.
            log.exception("telegrad: the lease in the group's directory could not be renewed")
            return LONGEST_PAUSE
        return self._until_renewal()

    def _until_renewal(self) -> float:
        return max(0.0, self._lease.ends - self._ttl * (1 - 1 / RENEWALS) - self._clock())

    def _main(self) -> None:
        wait = 0.0
        while not self._stopped.wait(wait) and not self.over:
            wait = self.watch_once()

    def watch_once(self) -> float:
        """Wait for changes and apply them; return the seconds until the next call."""
        pause, self._watch_pause = self._watch_pause, SHORTEST_PAUSE
        try:
            self._step()
            self._say_lost("")
            return 0.0
        except UNUSABLE as error:
            if not self._stopped.is_set():  # else `leave` has closed the directory
                self._say_lost(str(error), "does not answer" if isinstance(error, DirectoryLost) else "cannot be used")
            self._watch_pause = min(2 * pause, LONGEST_PAUSE)
            return pause
        except DirectoryReset as error:
            self._end(f"worker {self._name!r} no longer has a group: {error}")
        except Exception:
            log.exception("telegrad: a change in the group's directory could not be handled")
        return LONGEST_PAUSE

    def _step(self) -> None:
        try:
            wait = 0.0 if self.is_lost else self._ttl / RENEWALS  # at once, to see if it answers again
            since, changes = self.registry.watch(self._since, wait)
        except Compacted:
            self._read_anew()
            return
        with self._applying:
            # Its own loss first: a worker that was cut off for long must not report the others as lost.
            for revision, change in sorted(changes, key=lambda each: not self._is_own_loss(each[1])):
                if self.over:
                    return
                if revision > self._since and not self._is_outdated(revision, change):
                    self._apply(change)
            self._since = max(self._since, since)

    def _is_own_loss(self, change: Change | Claimed) -> bool:
        me = self._me
        return isinstance(change, MemberGone) and me is not None and change.life == me.incarnation

    def _is_outdated(self, revision: int, change: Change | Claimed) -> bool:
        """Return True for an end of the group before this worker joined, or of an earlier attempt of a member."""
        if isinstance(change, Ended):
            return revision < self._epoch
        # An earlier attempt to join with the same incarnation may have ended: one that another worker has marked as
        # lost (`Registry._end_join`), or an earlier registration for published values (`publishing/registration.py`).
        # `join` reads the members before it publishes this worker, so the watch may report that end after the later
        # registration is known.
        known = self._known.get(change.life) if isinstance(change, MemberGone) else None
        return known is not None and revision < known.epoch

    def _read_anew(self) -> None:
        """Read all after missed changes: how members have gone meanwhile is not known."""
        roster, end = self.registry.roster(), self.registry.last_end()
        with self._applying:
            why = "it disappeared while this worker received no changes"
            known = self._known.copy().items()
            absent = {life: registered for life, registered in known if life not in roster.members}
            # While the roster was on its way, `refresh` may have added members of a later revision. The roster lacks
            # them, but they are not gone.
            gone = [MemberGone(life, LOST, why) for life, each in absent.items() if each.epoch <= roster.revision]
            for change in sorted(gone, key=lambda each: not self._is_own_loss(each)):
                if self.over:
                    return
                self._apply(change)
            self._take_in(roster)
            # The watch, which goes on at that revision, reports a later end.
            if end is not None and self._since < end[0] <= roster.revision and not self._is_outdated(*end):
                self._apply(end[1])
            self._since = roster.revision

    def refresh(self) -> None:
        """Add the members that have joined by now, unless the directory is known not to answer or this life is over.
        Raise DirectoryLost if it does not answer."""
        if self.is_lost or self.over:
            return
        roster = self.registry.roster()
        with self._applying:
            # An older roster would bring back members that the changes applied since have removed.
            if roster.revision >= self._since:
                self._take_in(roster)

    def _take_in(self, roster: Roster) -> None:
        for registered in roster.members.values():
            self._apply(MemberJoined(registered))
        owned = {name for name, claim in self.claims.items() if claim.life}
        for name in owned | roster.claims.keys():
            self._apply(Claimed(name, roster.claims.get(name, Claim("", roster.revision))))

    def _apply(self, change: Change | Claimed) -> None:
        if isinstance(change, Claimed):
            known = self.claims.get(change.name)
            if known is None or known.token < change.claim.token:  # else a later change was applied already
                self.claims[change.name] = change.claim
                self.on_claim(change.name)
            return
        if isinstance(change, MemberJoined):
            if change.registered.member.incarnation in self._known:
                return
            self._known[change.registered.member.incarnation] = change.registered
        elif isinstance(change, MemberGone):
            gone = self._known.pop(change.life, None)
            if gone is None:
                return
            self._gone.add(gone.member.name)
            if self._is_own_loss(change):
                self._declared_lost(change.why)
                return
        self._on_change(change)

    def _declared_lost(self, why: str) -> None:
        self._end(
            f"worker {self._name!r} was declared lost ({why}): it could not be reached, or did not run for a long "
            "time. Start it again",
            why,
        )

    def _end(self, over: str, why: str = "") -> None:
        """End this life once."""
        # Both threads may find the end at the same time. `_applying` cannot guard this, because the watching thread
        # holds it while it applies the loss of this worker.
        if not self._ending.acquire(blocking=False):
            return
        # Set first, because `on_change` reads it for the error of this worker.
        self.over = over
        me = self._me
        if me is not None:
            self._on_change(MemberGone(me.incarnation, LOST, why or over))

    def _say_lost(self, why: str, how: str = "") -> None:
        """Log once that the directory cannot be used, and once that it answers again."""
        if why and not self.is_lost:
            log.warning(
                "telegrad: the directory of the group %s (%s). Workers that know each other continue; new workers "
                "wait to join",
                how,
                why,
            )
        elif not why and self.is_lost:
            log.warning("telegrad: the directory of the group answers again")
        self.is_lost = bool(why)

    # Leaving

    def leave(self, lost: str = "") -> None:
        """Free the name and the rank. With the reason `lost`, the others count this worker as lost."""
        # A renewal that is under way may find the lease ended by this departure: that is no end of its own.
        is_first = self._ending.acquire(blocking=False)
        me, self._me = self._me, None
        self._stopped.set()
        if me is not None and is_first:
            self.over = HAS_LEFT
            # If the directory does not answer, the lease expires.
            run_in_thread("telegrad-leave", self._leave, me, lost, patience=PATIENCE)
        # Close it only after that: it makes waiting operations raise, among them the watch, and the departure if it is
        # still not answered.
        self.directory.close()
        self._thread.join(PATIENCE)
        self._renewing.join(PATIENCE)
        self._store, keeping, self._keeping = None, self._keeping, None
        if keeping is not None:
            keeping.leave()

    def _leave(self, me: Member, lost: str) -> None:
        # Workers that only serve end with the worker that has rank 0, or has made the group.
        ends = me.id == 0 and not lost if self._launched else me.id == 0 or self._founded
        with contextlib.suppress(TelegradError, RuntimeError):  # the directory is lost, or was lost with its store
            # Remove the pointer while the lease holds: an embedded directory may end once no lease is left, and then
            # cannot tell if others have joined.
            if self._store is not None and len(self._known) <= 1:
                remove_pointer(self._store, lambda: len(self.registry.roster().members) > 1)
            self.registry.leave(me, self._lease, lost, ends)
