"""Forms the generations of an elastic group, one after the other, in its directory: the I/O of `Quorum`.

The worker that came first decides, or the next if that one has died. A worker that finds itself among the members of a
generation is in it; all others wait for the next one. If a member dies before it has found that, the generation has
lost a member, as if it had died later.

A process keeps the directory from one generation to the next, and has a lease there, because an embedded directory ends
without leases. The key of a worker that waits for the next generation has that lease, so it is deleted if the process
dies.
"""

import contextlib
import logging
import os
import threading
from math import inf
from time import monotonic, sleep
from typing import NamedTuple

from telegrad._core.membership.dynamic import PATIENCE, RENEWALS
from telegrad._core.membership.generations import (
    COME,
    GENERATION,
    PREFIX,
    Arrival,
    Before,
    ElasticState,
    Formed,
    GroupSize,
    IsAlive,
    Quorum,
    end,
    look,
)
from telegrad._core.membership.members import Member
from telegrad._core.membership.registry import Registry
from telegrad._core.membership.suspects import remember
from telegrad._core.security.handshake import PROBE, Hello
from telegrad._core.security.keyring import Keyring
from telegrad._core.security.tls import TlsFiles
from telegrad._core.sockets import host_identity, is_here
from telegrad._core.stores.directory import (
    ABSENT,
    Compacted,
    Directory,
    DirectoryLost,
    DirectoryReset,
    Lease,
    LeaseLost,
)
from telegrad._core.stores.find_directory import (
    DirectoryMonitor,
    Found,
    note,
    remove_pointer,
    restore_pointer,
    write_pointer,
)
from telegrad._core.stores.sealed_store import GONE, read_server_mark
from telegrad._core.stores.stores import RendezvousStore, open_store, serve_or_join
from telegrad._core.texts import Wait
from telegrad._core.threads import LONGEST_WAIT, Background, run_in_thread
from telegrad._core.transport.connect import Target, connect, one_sided
from telegrad._core.transport.listener import Listener
from telegrad.errors import (
    GroupEnded,
    GroupIncomplete,
    HandshakeError,
    PeerUnreachable,
    RendezvousError,
    TelegradError,
    UsageError,
    WorkerTaken,
)

SERVE_AGAIN = 1.0  # seconds to replace a store that is gone
LAST_CALL = 3.0  # seconds without a new worker after which a first generation with enough workers is complete
PROBE_PAUSE = 0.5  # seconds between two probes of a worker that is awaited, or came first
ANSWERS = 2.0  # seconds for the connection of a probe, and as many for its handshake
LOOK = 1.0  # seconds between two checks of the arrivals, by workers that do not decide

log = logging.getLogger("telegrad")


class DirectoryLease:
    """The directory and the lease of a process. Thread-safe."""

    def __init__(self, init_method: str, keys: Keyring, ttl: float) -> None:
        """Initialise without a directory. `ttl`: seconds after which the lease of a dead process ends."""
        self.keys = keys
        self._init_method = init_method
        self._ttl = ttl
        self._lock = threading.Lock()  # guards changes of these two; held while a store is opened
        self._meeting: RendezvousStore | None = None
        self.found: Found | None = None  # the directory
        self.lease = Lease(0, ttl, 0.0)  # no lock: replaced as a whole
        self.over = threading.Event()  # set by `close`
        self._thread = Background("telegrad-lease", self._main)

    def meet(self, timeout: float) -> RendezvousStore:
        """Return the store in which the group meets, opened or served; raise RendezvousError if there is none."""
        with self._lock:
            if self._meeting is None:
                self._meeting = open_store(self._init_method, -1, None, self.keys, timeout)
            return self._meeting

    @property
    def directory(self) -> Directory:
        """The current directory. Raises DirectoryLost if there is none."""
        found = self.found
        if found is None:
            raise DirectoryLost("this process has left the directory of its group")
        return found.directory

    def hold(self, meeting: RendezvousStore, found: Found) -> None:
        """Begin a lease in this directory, to which that store points. Raises DirectoryLost, and changes nothing."""
        # Before any other change: if it raises, this object must still be without a directory, so the caller can try
        # again.
        self.lease = found.directory.grant(self._ttl)
        self._thread.want()
        self._meeting, self.found = meeting, found

    def renew(self) -> None:
        """Renew the lease, or begin another one if it has ended. Raises DirectoryLost."""
        try:
            self.lease = self.directory.renew(self.lease)
        except LeaseLost:
            # The lease thread and a thread that joins may both do this. The lease that is not kept ends, and with it an
            # arrival that was written with it: `_join_in` writes it again.
            self.lease = self.directory.grant(self._ttl)

    def _main(self) -> None:
        while not self.over.wait(min(self._ttl / RENEWALS, LONGEST_WAIT)):
            try:
                self.renew()
            except TelegradError:  # retried later
                pass
            except Exception:
                # This thread must survive any error: without it, the lease ends.
                log.exception("telegrad: the lease in the group's directory could not be renewed")

    def restart(self) -> None:
        """Monitor and restart the directory's process, if it ran on this host and was killed with its keeper."""
        with self._lock:
            found = self.found
            if found is None or found.keeping is not None or found.pointer is None or found.launched:
                return
            if found.pointer.machine == host_identity():
                self.found = found._replace(
                    keeping=DirectoryMonitor(self.keys, found.pointer.host, found.pointer, True)
                )

    def serve_again(self) -> None:
        """Serve the store again if it is gone and was served on this host: new workers find the directory by it."""
        with self._lock, contextlib.suppress(TelegradError):
            meeting, found = self._meeting, self.found
            if meeting is None or found is None or found.pointer is None or found.launched or meeting.serves:
                return
            place = meeting.place
            if place is None or not is_here(place[0]) or read_server_mark(meeting.store) != GONE:
                return
            store, serves = serve_or_join(place, -1, self.keys, SERVE_AGAIN)
            if serves:
                write_pointer(store, found.pointer)
                note(place[1], found.pointer)
            self._meeting = meeting._replace(store=store, serves=serves)

    def restore_pointer(self) -> None:
        """Write the pointer to the directory again if it was removed; this process has arrived there."""
        with self._lock:
            meeting, found = self._meeting, self.found
        if meeting is not None and found is not None:
            restore_pointer(meeting.store, found)

    def close(self, ended: Formed | None = None) -> None:
        """Leave the directory. `ended`: the last generation, if the group ended normally; waiting workers see it."""
        with self._lock:
            meeting, self._meeting = self._meeting, None
            found, self.found = self.found, None
        self.over.set()
        if meeting is None or found is None:
            return
        # If the directory does not answer, the lease expires.
        run_in_thread("telegrad-leave", self._leave, meeting, found, ended, patience=PATIENCE)
        found.directory.close()
        self._thread.join(PATIENCE)
        if found.keeping is not None:
            found.keeping.leave()

    def _leave(self, meeting: RendezvousStore, found: Found, ended: Formed | None) -> None:
        with contextlib.suppress(TelegradError, RuntimeError):  # the directory is lost, or was lost with its store
            # Before the lease is revoked: an embedded directory may end once no lease is left, and then cannot tell if
            # others have come.
            if ended is not None and end(found.directory, ended) and found.pointer is not None:
                remove_pointer(meeting.store, lambda: bool(found.directory.list(COME).entries))
            found.directory.revoke(self.lease)


class Prober:
    """Checks which workers this one can connect to, before they are in one group."""

    def __init__(self, listener: Listener, tls: TlsFiles | None, transport: str, silence: float) -> None:
        self._listener, self._tls, self._transport, self._silence = listener, tls, transport, silence
        self._known: dict[str, HandshakeError | None] = {}  # the results, by incarnation

    def answer_probes(self, me: Member, keys: Keyring) -> None:
        """Let workers that join the group of these keys, too, `probe` this one before it has joined."""
        self._serves = keys, Hello(me.name, me.id, me.incarnation, me.program)
        self._known[me.incarnation] = None
        self._listener.serve(*self._serves)

    def probe(self, member: Member) -> HandshakeError | None:
        """Return why that worker and this one cannot connect to each other, and log it once.

        Return None also if that worker does not answer: its death is found in other ways.
        """
        if member.incarnation not in self._known:
            remember(self._known, member.incarnation, error := self._error_of(member))
            if error is not None:
                log.warning("telegrad: %s cannot be in a group with this worker: %s", member, error)
        return self._known[member.incarnation]

    def _error_of(self, member: Member) -> HandshakeError | None:
        target = Target(member.name or member.role, member.incarnation, "", member.tcp, PROBE)
        if member.uses_tls != (self._tls is not None):
            return one_sided(target.name)
        try:
            connect(target, *self._serves, self._tls, self._transport, ANSWERS, self._silence).sock.close()
        except (HandshakeError, PeerUnreachable) as error:
            return error if isinstance(error, HandshakeError) else None
        return None


class JoinRequest(NamedTuple):
    """A worker's request to join the next generation."""

    held: DirectoryLease | None  # None: a launcher decides the members
    keys: Keyring
    limits: GroupSize
    before: Before  # the generation that it was in
    rank: int  # the preferred one
    timeout: float  # seconds; without limit for a spare worker while a generation runs

    def meet(self, _: float) -> RendezvousStore:
        if self.held is None:
            if not (size := os.environ.get("WORLD_SIZE", "")).isdecimal():
                raise UsageError(
                    f"torchrun has started this process (TORCHELASTIC_RUN_ID is set), but WORLD_SIZE is {size!r}: "
                    "set it as torchrun does, or unset both to form a group without torchrun"
                )
            return open_store("env://", -1, int(size), self.keys, self.timeout)._replace(coming=self)
        return self.held.meet(self.timeout)._replace(rank=self.rank, coming=self)

    def join(self, held: DirectoryLease, me: Member, is_alive: IsAlive, prober: Prober) -> Formed:
        """Join the next generation, as soon as there is one; return it.

        Raises:
            GroupIncomplete: too few workers came in time.
            GroupEnded: the group for which this worker has waited has ended.
            WorkerTaken: another worker has this one's name.
            DirectoryLost: the directory did not answer in time.
            DirectoryReset: it is another one than that of the last generation.
            RendezvousError: the group has other limits.
            HandshakeError: this worker and those of the group cannot connect to each other, as with other TLS files.
        """
        return _Joining(held, self, me, is_alive, prober).join()


class _Joining:
    def __init__(
        self, held: DirectoryLease, coming: JoinRequest, me: Member, is_alive: IsAlive, prober: Prober
    ) -> None:
        self._held, self._me, self._is_alive, self._prober = held, me, is_alive, prober
        self._coming, self._limits = coming, coming.limits
        self._what = "move to the next generation" if coming.before.number else "init_rpc"  # of `Wait`
        self._until = monotonic() + coming.timeout
        self._state = ElasticState()
        self._quorum = Quorum(coming.limits)
        self._came = monotonic()  # the time of the last arrival, as this worker saw it
        self._waits_for = coming.before.number  # the last generation that ran while this worker waited for the next
        self._lost = ""  # why the directory does not answer
        self._dead: set[str] = set()
        self._probed: dict[str, float] = {}  # the time, by incarnation

    def join(self) -> Formed:
        with Wait(self._what, self._text, lambda: self._quorum.missing(), worker=self._me.name) as self._wait:
            self._wait.place = self._held.meet(0).where
            while True:
                try:
                    return self._join_in(self._held.directory)
                except LeaseLost:
                    with contextlib.suppress(DirectoryLost):
                        self._held.renew()
                except DirectoryLost as error:
                    self._wait.what, self._lost = self._what, f"the directory of the group does not answer: {error}"
                    if monotonic() > self._until or self._held.over.is_set():
                        raise
                    self._held.restart()
                    sleep(PROBE_PAUSE)
                self._wait.look()

    def _join_in(self, directory: Directory) -> Formed:
        group, _ = Registry(directory).identify()
        if self._coming.before.group not in ("", group):
            raise DirectoryReset("the directory of the group was restarted without its data: start the group again")
        self._prober.answer_probes(self._me, self._coming.keys.within(group))
        arrival = Arrival(self._me, self._coming.before, str(self._limits))
        while True:
            self._look(directory)
            if self._quorum.awaited():
                self._wait.group = group
            mine = self._state.came.get(self._me.incarnation, ABSENT)
            if self._me.incarnation in self._state.running.lives:
                if mine != ABSENT:
                    directory.swap(COME + self._me.incarnation, None, mine)
                return self._state.running._replace(group=group)
            first = next((each for each in self._state.arrivals if self._lives(each.member)), arrival)
            # Before the arrival is written: a generation that continues does not end for a worker that cannot join.
            self._check(mine, first)
            if mine == ABSENT:
                directory.swap(COME + self._me.incarnation, arrival.to_json().encode(), ABSENT, self._held.lease)
                # Only after that: the worker that ends the group removes the pointer, and looks for arrivals after that
                # (`remove_pointer`). So it finds this worker, or this worker finds no pointer and restores it. A worker
                # that was in a generation does not wait once the group has ended, and its store may be gone by now.
                if self._coming.before.number == 0:
                    self._held.restore_pointer()
                continue
            decides = first.member.incarnation == self._me.incarnation
            late = monotonic() > self._until
            if (decides or late) and self._decide(directory, late):
                continue
            self._wait.look()
            with contextlib.suppress(Compacted):  # too many changes: read all again
                # Only the deciding worker watches the arrivals: with n waiting workers, n * n events would be sent
                # otherwise. It also wakes when LAST_CALL is over, since no event reports that.
                quiet = self._came + LAST_CALL - monotonic()
                pause = min(PROBE_PAUSE, quiet if quiet > 0 else inf) if decides else LOOK
                pause = max(0.0, min(pause, self._until - monotonic()))
                directory.watch(PREFIX if decides else GENERATION, self._state.revision, pause)

    def _look(self, directory: Directory) -> None:
        """Read the arrivals, and probe the awaited members of the last generation."""
        known, self._state = self._state, look(directory)
        self._lost = ""
        if max(self._state.came.values(), default=0) > max(known.came.values(), default=0):
            self._came = monotonic()
        running = self._state.running
        quorum = Quorum(self._limits, running, self._state.arrivals, self._dead)
        if running.has_ended and running.number >= self._waits_for > 0:
            raise GroupEnded(
                f"the group that {self._me} waited for has ended normally, after generation {running.number}"
            )
        awaited = [member for member in quorum.awaited() if self._lives(member)]
        is_spare = bool(awaited) and self._coming.before.me not in running.lives
        self._quorum, self._wait.what = quorum, "next generation" if is_spare else self._what
        if awaited:
            self._waits_for = running.number
        # A spare worker waits as long as that generation lives; its timeout begins only after that.
        if is_spare:
            self._until = monotonic() + self._coming.timeout

    def _check(self, mine: int, first: Arrival) -> None:
        """Raise an error if this worker, which came at the revision `mine` if it has come, cannot join the group."""
        running = self._state.running
        for other in running.members:
            # The generation formed after this worker had come, with another worker of its name: `Quorum.chosen` takes
            # only the first of two.
            if other.name == self._me.name and self._state.since > mine != ABSENT and not running.has_ended:
                raise WorkerTaken(
                    f"the name {self._me.name!r} is not unique, two workers claim it: {other} and {self._me}. Give "
                    "each its own name; or give a role and no name, and names are assigned"
                )
        told = [(first.member, first.limits), *((each, running.limits) for each in self._quorum.awaited())]
        for other, limits in told:
            if limits != str(self._limits):
                raise RendezvousError(
                    f"{self._me} expects a group of {self._limits.workers}, but {other} expects one of {limits}: "
                    "give all workers the same min_workers and max_workers"
                )
        # Members of a generation can connect to each other. So it suffices to probe one, and the worker that decides,
        # which in turn probes all new ones.
        if self._coming.before.me not in running.lives:
            for other in (*self._quorum.awaited()[:1], first.member):
                if error := self._prober.probe(other):
                    raise type(error)(f"{self._me} cannot join the group of {other}: {error}") from error

    def _decide(self, directory: Directory, late: bool) -> bool:
        """Return True if a generation has formed, or members of it were found dead."""
        formed = self._quorum.decide(monotonic() - self._came > LAST_CALL, late)
        if formed is not None:
            # Probe all members again right before the decision: a generation with a dead member would end at its next
            # step. The compare-and-set does nothing if another worker has decided meanwhile; the caller reads the
            # result in any case.
            new = formed.members[formed.survivors :]
            refused = {each.incarnation for each in new if self._prober.probe(each)}
            self._dead |= refused
            if not refused and all(self._lives(member, fresh=True) for member in formed.members):
                directory.swap(GENERATION, formed.to_json().encode(), self._state.since)
            return True
        if late:
            raise GroupIncomplete(
                f"{self._me} has waited {self._coming.timeout:g} s for a group of {self._limits.workers}: "
                f"{self._quorum.lacks()}. Check the logs of the other workers, or allow more time with rpc_timeout"
            )
        return False

    def _lives(self, member: Member, fresh: bool = False) -> bool:
        """Return True if a worker answers, probed at intervals, or now if `fresh`. A dead worker stays dead."""
        if member.incarnation in self._dead or member.incarnation == self._me.incarnation:
            return member.incarnation not in self._dead
        now = monotonic()
        if fresh or now - self._probed.get(member.incarnation, -inf) > PROBE_PAUSE:
            if not self._is_alive(member):
                self._dead.add(member.incarnation)
                return False
            self._probed[member.incarnation] = monotonic()
        return True

    def _text(self) -> str:
        me = self._me.name or self._me.role
        return f"{self._lost or self._quorum.lacks()} ({me!r} joins an elastic group of {self._limits.workers})"
