"""The rendezvous of a group of fixed size: its workers find each other through a store.

Each worker agrees to the group's terms, claims its rank and its name, and says that it has come. The last one finds
that all have, and opens the first gate, COMPLETE. All read the table, which gives names to workers without one, and the
last reader opens the second gate, READY. After that, no worker needs the store, so its server may end. The value of a
gate is OPENED, VOID or a fault, and is final: a waiting worker reads only one key.

A lasting store serves one group after the other. Each forms in its own round. The store contains the number of the
round, so earlier workers and new ones find the same one. A round is past once its first gate has a value: later workers
use the next. It is void if a worker with a place in it has died before it could form. Then the others use the next
round, too, where the replacement of the dead worker meets them.
"""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from time import monotonic, time
from typing import NamedTuple

from telegrad._core.membership.members import Member, Members, listed, named
from telegrad._core.sockets import means_loopback, split
from telegrad._core.stores.sealed_store import OVER, REFUSED, SERVED, KeyValueStore, SealedStore
from telegrad._core.texts import Times, Wait, plural, poll_intervals
from telegrad.errors import (
    AuthenticationFailed,
    GroupIncomplete,
    RendezvousError,
    StoreLost,
    StoreUntrusted,
    TelegradError,
    WorkerTaken,
)

# All workers of the group check ranks and probe workers at the same time. If each looked at all others, a group of n
# would cause n * n requests, and keep the store busy. The ranks begin behind the worker's own, so different workers
# check different ones.
MOST_ASKED = 32  # ranks per check, and workers that are probed
LINGER = 2.0  # seconds that the store's server waits for the others to leave first
LONGEST_LOOK = 2.0  # seconds to find the missing workers if a group of hundreds does not form
NEIGHBOURS = 4  # next workers by rank that each worker checks: the first dead one of each sequence is found
CHECK_AFTER = 1.0  # seconds at the second gate, which all should reach at once, until the others are checked
STALE = 60.0  # seconds after which a fault is an earlier run's
OPENED, VOID = "opened", "void"
COMPLETE, READY = "complete", "ready"
LAST_FAILED = "the last group in this store failed"
ROUND = "telegrad/round"
_FAULTS: dict[str, type[TelegradError]] = {
    fault.__name__: fault
    for fault in (WorkerTaken, StoreUntrusted, AuthenticationFailed, GroupIncomplete, RendezvousError)
}

log = logging.getLogger("telegrad")


class ArrivalTable:
    """Which workers have arrived, as far as this worker has checked.

    The waiting worker writes it. Its values are replaced as wholes, so other threads read them without a lock.
    """

    def __init__(self, size: int, me: int, names: Sequence[str] = ()) -> None:
        """`names` are those of all ranks, if known in advance."""
        self._names = names
        self._come: dict[int, Member] = {}
        self._absent = [(me + step) % size for step in range(1, size)] if me in range(size) else list(range(size))
        self._unasked = len(self._absent)  # how many of these, the first ones, were never checked
        self._silent: list[Member] = []  # workers that came and no longer answer

    def look(self, entry_of: Callable[[int], str]) -> None:
        """Check some ranks not known to have come; `entry_of` returns what a rank has published, or ""."""
        asked, others = self._absent[:MOST_ASKED], self._absent[MOST_ASKED:]
        entries = {rank: entry_of(rank) for rank in asked}
        self._come |= {rank: Member.from_json(entry) for rank, entry in entries.items() if entry}
        self._absent = others + [rank for rank, entry in entries.items() if not entry]
        self._unasked = max(0, self._unasked - len(asked))

    @property
    def is_complete(self) -> bool:
        return not self._unasked

    def check_alive(self, is_alive: Callable[[Member], bool]) -> None:
        """Probe the workers found last, and record those that do not answer."""
        self._silent = [member for member in list(self._come.values())[-MOST_ASKED:] if not is_alive(member)]

    def complete(self, members: Iterable[Member]) -> None:
        self._absent, self._unasked, self._come = [], 0, {member.id: member for member in members}

    def missing(self) -> list[str]:
        """Return the missing workers, by name, or as "rank 2"."""
        absent = sorted(self._absent)
        return [self._name(rank) or f"rank {rank}" for rank in absent] + [who.name for who in self._silent]

    def said(self) -> list[str]:
        """Return the missing workers as text for users."""
        said = []
        if absent := sorted(self._absent):
            ranks = listed([repr(self._name(rank)) if self._names else str(rank) for rank in absent])
            way = "not known to have joined yet" if self._unasked and self._come else "did not join"
            said.append(f"{'' if self._names else 'rank ' if len(absent) == 1 else 'ranks '}{ranks} {way}")
        if self._silent:
            said.append(f"{listed(list(map(str, self._silent)))} joined, then stopped answering")
        return said

    def _name(self, rank: int) -> str:
        return self._names[rank] if self._names else ""


class RankTable(NamedTuple):
    members: Members
    group: str  # its identity
    round: int  # in this store


class StoreOver(StoreLost):
    """The store closed with an earlier group: the next group meets in another store at the same place."""


class _Past(Exception):
    """This round will not form, or has formed without this worker."""


@dataclass
class StaticJoin:
    """How a worker joins a group of fixed size."""

    store: SealedStore
    me: Member
    size: int
    timeout: float
    is_alive: Callable[[Member], bool] = lambda _: True
    place: str = ""  # the location of the store, for messages
    names: Sequence[str] = ()  # of all ranks, if known in advance

    def __post_init__(self) -> None:
        self._root = KeyValueStore(self.store)
        self._until = monotonic() + self.timeout
        self._formed_before: KeyValueStore | None = None  # of a group that has formed in this store without this worker
        self._before = ""  # the outcome of the last group in this store, if it may explain a failure

    def join(self) -> RankTable:
        """Meet the other workers. An error of one worker is raised in all.

        Raises:
            WorkerTaken: two workers claim one name or one rank.
            GroupIncomplete: some did not come in time.
            AuthenticationFailed: not all have the same key.
            RendezvousError: a rank is out of range, the workers expect groups of different sizes, or the store was
                lost.
        """
        try:
            is_new = self._root.read(ROUND) in ("", "1")
            self._refused = 0 if is_new else self._root.hint(REFUSED)  # by earlier groups of this store
            while True:
                self._board = self._current_round()
                try:
                    roster = self._meet()
                except _Past:
                    continue
                self._look_for_the_last_group()
                return roster
        except AuthenticationFailed:
            self._root.add_hint(REFUSED)
            raise
        except StoreLost as error:
            if self._formed_before is not None:
                raise StoreOver(str(error)) from error
            raise

    def _current_round(self) -> KeyValueStore:
        """Return the round to meet in: the first that is not past, or one whose fault this worker must report, too."""
        while True:
            number = self._root.swap(ROUND, "", "1")
            self._round = int(number)
            board = KeyValueStore(self.store, f"telegrad/{number}")
            verdict = board.read(COMPLETE) if board.terms() else ""
            if not verdict or self._concerns(board, verdict):
                self._look_back(int(number) - 1)
                return board
            self._root.swap(ROUND, number, str(int(number) + 1))

    def _look_back(self, number: int) -> None:
        board = KeyValueStore(self.store, f"telegrad/{number}")
        verdict = board.read(COMPLETE) if number and board.terms() else VOID
        if verdict == OPENED:
            self._formed_before = board
            terms = terms_of(board)
            self._before = f"another group of {terms.size if terms else '?'} formed in this store before"
        elif verdict != VOID:
            text = json.loads(verdict)[1].partition(f"; {LAST_FAILED}")[0]  # not also of the groups before that one
            self._before = f"{LAST_FAILED}: {text}"

    def _concerns(self, board: KeyValueStore, verdict: str) -> bool:
        """Return True for a recent fault that this worker must report, too: its rank has no entry in that round."""
        if verdict in (OPENED, VOID):
            return False
        kind, _, since, *_ = json.loads(verdict)
        # A worker that comes late to a round with such a fault (a name that two workers claim, different sizes) belongs
        # to the same run, and must fail like the others. A worker whose rank has an entry there was restarted, and
        # needs the next round. So does a worker that comes after the others gave up waiting (GroupIncomplete).
        return kind != GroupIncomplete.__name__ and time() - since < STALE and not board.read(f"rank/{self.me.id}")

    def _meet(self) -> RankTable:
        self._attendance = ArrivalTable(self.size, self.me.id, self.names)
        gate = COMPLETE
        try:
            self._claim()
            # The last worker to write this opens the gate, and reads no claims. So it comes after the claims: otherwise
            # the gate could open although a claim is about to fail.
            self._board.swap(f"come/{self.me.id}", "", OPENED)
            self._open(COMPLETE)
            level = logging.INFO if self.names else logging.WARNING  # with known names, the launcher reports starts
            with Wait("init_rpc", self._awaited, self._attendance.missing, self.place, self.me.name, level) as wait:
                self._pass(COMPLETE, self._watch(wait))
                entries = self._board.read_all([f"rank/{rank}" for rank in range(self.size)])
                members = Members(named(map(Member.from_json, entries)))
                self._attendance.complete(members)
                gate = READY
                self._board.swap(f"read/{self.me.id}", "", OPENED)
                self._open(READY)
                self._pass(READY, self._check_others(members, wait))
        except BaseException as error:
            if not isinstance(error, _Past):
                self._tell(gate, error)
            raise
        self._leave(range(self.size))
        return RankTable(members, self._board.group, self._round)

    def _open(self, gate: str) -> None:
        """Open the gate if all ranks have come, or have read."""
        entry = "come" if gate == COMPLETE else "read"
        keys = [f"{entry}/{rank}" for rank in range(self.size)]
        # Each worker calls this after it has written its own entry, so at least the last one finds the entries of all.
        # Several may find them at once, but the compare-and-set below never changes a verdict.
        if self._board.has_all(keys):
            self._board.read_all(keys)  # raises if one is forged
            if gate == READY:
                # Write it before any worker can leave: a worker that leaves may call init_rpc again at once, and must
                # not take this store for that of the next group.
                self._root.write(SERVED, OVER)
            self._board.swap(gate, "", OPENED)

    def _claim(self) -> None:
        me, size = self.me, self.size
        self._agree()  # first, because faults are bound to the group, too
        if not 0 <= me.id < size:
            raise RendezvousError(
                f"worker {me.name!r} has rank {me.id}: in its group of {size}, ranks go from 0 to {size - 1}"
            )
        entry = me.to_json()
        slots = [(f"rank/{me.id}", f"rank {me.id}")]
        if me.name:
            slots.append((f"name/{me.name}", f"name {me.name!r}"))
        for slot, what in slots:
            found = self._board.swap(slot, "", entry)
            if found != entry:
                other = Member.from_json(found)
                self._check_present(other)
                raise WorkerTaken(
                    f"the {what} is not unique, two workers claim it: {other} and {me}. Give each its own, and use a "
                    "fresh store (another port or file) if one of them belongs to an earlier run"
                )

    def _agree(self) -> None:
        """Read the group's terms, or write them as the first worker, and bind the board to the group.

        Raises:
            AuthenticationFailed: the first worker has another key.
            RendezvousError: the workers expect groups of different sizes.
        """
        try:
            found = _claim_terms(self._board, self.size, self.me)
            if found.size != self.size:
                raise RendezvousError(
                    f"{self.me} expects a group of {plural(self.size, 'worker')}, but {found.first} expects one of "
                    f"{found.size}: give all workers the same world_size"
                )
        except TelegradError:
            terms = terms_of(self._board)
            if terms is not None and terms.first is not None:
                self._check_present(terms.first)
            raise

    def _check_present(self, other: Member) -> None:
        """Before reporting a conflict, check that the other worker is alive and still waits in the same round."""
        verdict = self._board.read(COMPLETE)
        if not verdict and not self.is_alive(other):
            verdict = self._board.swap(COMPLETE, "", VOID)
        if verdict in (OPENED, VOID) and monotonic() < self._until:
            raise _Past

    def _pass(self, gate: str, meanwhile: Callable[[], None]) -> None:
        found = self._board.wait(gate, self._until, meanwhile, self.size)
        # Too late: this worker gives up, and with it all others, since a verdict is final. But the last entry may have
        # arrived just now, so it tries to open the gate first.
        if not found:
            self._open(gate)
            found = self._board.read(gate) or self._board.swap(gate, "", _fault(self._incomplete(gate)))
        if found == VOID:
            raise _Past
        if found != OPENED:
            kind, text, *_ = json.loads(found)
            raise _FAULTS[kind](text)

    def _check_others(self, members: Members, wait: Wait) -> Callable[[], None]:
        """Return a function to call at the second gate, which makes the round void if a worker has died."""
        since = monotonic()

        def look() -> None:
            nonlocal since
            if monotonic() - since > CHECK_AFTER:
                since = monotonic()
                self._open(READY)
                # Not all others: n workers that probe each other make n * n connections. It is enough that some worker
                # finds a dead one, because VOID ends the round for all.
                count = min(NEIGHBOURS, self.size - 1)
                others = [members.find((self.me.id + step) % self.size) for step in range(1, count + 1)]
                if not all(map(self.is_alive, others)):
                    self._board.swap(READY, "", VOID)
            wait.look()

        return look

    def _tell(self, gate: str, error: BaseException) -> None:
        """Publish why this worker gives up, unless the gate is decided already."""
        if not isinstance(error, TelegradError):
            error = GroupIncomplete(f"{self.me} gave up while the group formed: {type(error).__name__}")
        try:
            if not self._board.group and not self._board.terms():
                return  # no worker has come
            self._root.write(SERVED, OVER)
            self._board.swap(gate, "", _fault(error))
            self._leave(rank for rank in range(self.size) if self._board.has_all([f"rank/{rank}"]))
        except RendezvousError:
            pass  # the store was lost, which waiting workers detect themselves

    def _leave(self, ranks: Iterable[int]) -> None:
        """Leave; the worker of rank 0, which may serve the store, leaves after these ranks."""
        with contextlib.suppress(RendezvousError):  # the server of the store did not wait any longer
            self._board.write(f"gone/{self.me.id}", OPENED)
            keys = [f"gone/{rank}" for rank in ranks] if self.me.id == 0 else []
            for _ in poll_intervals(monotonic() + LINGER):
                if not keys or self._board.has_all(keys):
                    break

    def _incomplete(self, gate: str) -> GroupIncomplete:
        limit = monotonic() + LONGEST_LOOK
        self._look()
        while not self._attendance.is_complete and monotonic() < limit:
            self._look()
        self._attendance.check_alive(self.is_alive)
        self._look_for_refused()
        who = self._absent() or "a worker joined, but ended before all had joined"
        return GroupIncomplete(
            f"the group of {plural(self.size, 'worker')} is not {gate} after {self.timeout:g} s: {who}. Check the "
            "logs of those workers, or allow more time with rpc_timeout"
        )

    def _watch(self, wait: Wait) -> Callable[[], None]:
        """Return a function to call while waiting, which updates the attendance and prints the missing workers."""
        times = Times(wait.begun, lined=True)

        def look() -> None:
            looks, checks = times.due(monotonic())
            if looks or checks:
                self._look()
                self._look_for_refused()
                self._open(COMPLETE)
            if checks:  # more rarely, because each worker probes all
                self._attendance.check_alive(self.is_alive)
            wait.look()

        return look

    def _look(self) -> None:
        self._attendance.look(lambda rank: self._board.read(f"rank/{rank}"))

    def _look_for_refused(self) -> None:
        """Note how many workers were refused for another key: only a hint, as an attacker can change the counter."""
        if refused := self._root.hint(REFUSED) - self._refused:
            self._before = f"{refused} tried to join with another key (an unverified count)"

    def _awaited(self) -> str:
        where = f" at {self.place}" if self.place else ""
        host = split(f"//{self.place}").hostname or ""
        if self.me.id == 0 and self._attendance.missing() and means_loopback(host):
            where += ", which other hosts cannot reach"
        me = repr(self.me.name) if self.me.name else f"rank {self.me.id}"
        return f"{self._absent() or 'all have joined'} ({me} joins a group of {self.size}{where})"

    def _absent(self) -> str:
        """Return which workers have not come, or have died since, and a possible cause."""
        said = self._attendance.said()
        return "; ".join([*said, self._before] if said and self._before else said)

    def _look_for_the_last_group(self) -> None:
        """Warn if the worker of the same rank still runs in the group that formed in this store before."""
        if self._formed_before is None:
            return
        entry = self._formed_before.read(f"rank/{self.me.id}")
        other = Member.from_json(entry) if entry else self.me
        if other.incarnation != self.me.incarnation and self.is_alive(other):
            log.warning(
                "telegrad: %s has joined a second group in the same store: %s still runs in the first. "
                "If that one belongs to another run, give each run a port or a file of its own",
                self.me,
                other,
            )


def _fault(error: BaseException) -> str:
    kind = next(kind for kind, fault in _FAULTS.items() if isinstance(error, fault) or fault is RendezvousError)
    return json.dumps([kind, str(error), time()])


class Terms(NamedTuple):
    """The terms of a group, written by its first worker for all later ones."""

    group: str  # its identity
    size: int
    first: Member | None  # None if the group was cancelled before any worker came

    @classmethod
    def from_json(cls, text: str) -> Terms:
        group, size, first, *_ = json.loads(text)
        return cls(group, size, Member.of(first) if first else None)


def _claim_terms(board: KeyValueStore, size: int, first: Member | None) -> Terms:
    """Return the terms of the group that meets on a board; write new ones if there are none."""
    new = Terms(secrets.token_hex(16), size, first)
    return Terms.from_json(board.claim_terms(json.dumps(new)))


def terms_of(board: KeyValueStore) -> Terms | None:
    """Return the terms of the group that meets on a board, or None."""
    terms = board.terms()
    return Terms.from_json(terms) if terms else None


def call_off(store: SealedStore, size: int, why: str) -> None:
    """Make the group of that size that forms in this store fail, for all its workers."""
    board = KeyValueStore(store, f"telegrad/{KeyValueStore(store).swap(ROUND, '', '1')}")
    _claim_terms(board, size, None)
    board.swap(COMPLETE, "", _fault(RendezvousError(why)))
