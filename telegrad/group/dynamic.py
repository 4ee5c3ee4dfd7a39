"""A group that workers join and leave at any time.

It keeps its directory in a store: names and ranks are claimed, looked up and freed there. Whoever serves the store may
go: another serves one in its place (`takeover.py`), to which all go over. Who leaves in order waits until the others
have seen it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from time import monotonic
from typing import Any

from telegrad.errors import RendezvousError, StoreLost, StoreUntrusted
from telegrad.group.board import Board
from telegrad.group.directory import LEFT, LOST, Directory
from telegrad.group.members import Member, listed, unknown
from telegrad.group.places import Spot, is_here, stay_at
from telegrad.group.rendezvous import COMPLETE, LINGER, OPENED, ROUND, agree, taken, terms_of
from telegrad.group.sealing import SealedStore
from telegrad.group.stores import Place
from telegrad.group.succession import Seat

MOST_RANKS = 1 << 16
BETWEEN = 5.0  # seconds that a look-up waits for another store

log = logging.getLogger("telegrad")


class Moved(RendezvousError):
    """The group has another store now."""

    def __init__(self, store: Seat) -> None:
        super().__init__(f"the group's store is at {store.host}:{store.port} now")
        self.store = store


class DynamicGroup:
    """One worker's part in it."""

    def __init__(
        self, store: SealedStore, serves: bool = False, places: tuple[Spot, ...] = (), place: Place = (None, None)
    ) -> None:
        """`serves`: the store ends with this worker. `places` are where newcomers look for it, `place` where it is."""
        self.places = places
        self.keys = store.keys
        self.terms = ""
        self.store = Seat(1, -1, "", place[0] or "", place[1] or 0)  # as it was when this worker came
        self.over = ""  # why nobody can be looked up any more; stored once
        # No lock: these three are loaded and stored as wholes, by whichever thread looks at the store.
        self.known: list[Member] = []  # who was there at the last look; they can be called without the store
        self.awaited: list[Member] = []  # those of them that have not come over to this store yet
        self.homes: list[str] = []  # hosts at which newcomers look
        self.home: Spot | None = None  # where they do, if that is on this host
        self.serves = serves
        self._founded = serves  # or came first, where nobody serves the store
        self._launched = False  # a launcher keeps the store: it has begun the group
        self._ends = 0  # as seen so far
        self._acknowledged = False  # that the server leaves
        self._me: Member | None = None
        self._listed_at = ""  # where this worker's name stands
        self._sign: Any = None
        self._moving = threading.Condition()  # guards changes of `directory`, which is loaded without
        self.directory = Directory(store, aside=not serves and bool(place[0]))
        self._between = False  # the store was lost, and there is no other yet
        self._distrusted: set[str] = set()  # what was logged of values that are not authentic; any thread adds to it
        self._given_up: list[Directory] = []  # in stores of this member: who holds them for the group's is told better

    def join(self, me: Member, is_alive: Callable[[Member], bool] = lambda _: True) -> Member:
        """Claim a name and a rank, the lowest free one from 1 on where `me.id` is -1; return what came of it.

        Who has a role and no name gets the lowest number with it that makes a free one.

        Rank 0 is for whoever asks for it, who need not be the first to come. A worker that crashed leaves its entries
        behind: they are taken over where `is_alive` denies that it lives.

        Raises:
            WorkerTaken: a member has that name or rank.
            AuthenticationFailed: this worker's key is not that of the group.
            RendezvousError: all ranks are taken.
            Moved: this store was given up for another.
            StoreLost: it was lost.
        """
        board = self.directory.board
        moved = self.directory.moved() if board.terms() else None
        if moved is not None:
            raise Moved(moved)
        agree(board, me, -1)
        self.terms = board.terms()
        me, reserved = (me, "") if me.name else self._reserve_name(me)
        me = self._claim_rank(me, is_alive)
        try:
            self._claim(f"name/{me.name}", f"name {me.name!r}", me, is_alive, reserved)
        except BaseException:
            self.directory.free(f"rank/{me.id}", me)
            raise
        self._listed_at = self.directory.add_name(me.name)
        self._me = me
        self._settle_in(me)
        if self.store.id < 0:  # no worker serves it
            self._launched = bool(self.store.host)
            earlier = () if self._launched else self.directory.listed_before(self._listed_at, me)
            self._founded = not self._launched and not any(map(is_alive, earlier))
        board.add_hint("changes")
        return me

    def _settle_in(self, me: Member) -> None:
        """See, and say, who serves the store, and where it can be found."""
        if self.serves:
            self.store = self.store._replace(id=me.id, incarnation=me.incarnation)
            self.directory.note_served(self.store)
        self.store = self.directory.served() or self.store
        self.home = next((place for place in self.places if is_here(place[0])), None)
        if self.home is not None:
            self._sign = stay_at(self.home, me.incarnation)
            self.directory.add_home(me.host)
        self.homes = self.directory.homes()
        self.known = self.directory.members()  # else, were the store lost now, it would serve one for itself alone
        self._ends = self.directory.board.number("ends")

    def _reserve_name(self, me: Member) -> tuple[Member, str]:
        for number in range(MOST_RANKS):
            mine = me._replace(name=f"{me.role}{number}")
            entry = mine.to_json()
            if self.directory.board.swap(f"name/{mine.name}", "", entry) == entry:
                return mine, entry
        raise RendezvousError(f"all {MOST_RANKS} names for the role {me.role!r} are taken")

    def _claim_rank(self, me: Member, is_alive: Callable[[Member], bool]) -> Member:
        if me.id >= 0:
            self._claim(f"rank/{me.id}", f"rank {me.id}", me, is_alive)
            return me
        for rank in range(1, MOST_RANKS):
            mine = me._replace(id=rank)
            entry = mine.to_json()
            if self.directory.board.swap(f"rank/{rank}", "", entry) == entry:
                return mine
        raise RendezvousError(f"all {MOST_RANKS} ranks of the group are taken")

    def _claim(self, slot: str, what: str, me: Member, is_alive: Callable[[Member], bool], expected: str = "") -> None:
        entry = me.to_json()
        found = self.directory.board.swap(slot, expected, entry)
        while found != entry:
            other = Member.from_json(found)
            if is_alive(other):
                raise taken(what, other, me)
            self.strike_out(other)
            found = self.directory.board.swap(slot, "", entry)

    def strike_out(self, member: Member, how: str = LOST) -> None:
        """A member has died, or has left without a word: others can have its name and its rank."""
        self.directory.take_out(member, how)

    def note_gone(self, member: Member, how: str) -> None:
        """Do the same, if the store allows it: where it does not, this member knows of the other's end all the same."""
        try:
            self.strike_out(member, how)
        except StoreLost:
            pass
        except StoreUntrusted as error:
            self.distrust(error, f"the end of {member} cannot be noted in the group's store")

    def distrust(self, error: StoreUntrusted, what: str) -> None:
        """Log that the store was tampered with, once for each value of it."""
        if str(error) not in self._distrusted:
            self._distrusted.add(str(error))
            log.warning("telegrad: %s: %s", what, error)

    def find(self, to: str | int) -> Member:
        """The member of that name or rank, as of now; where the store was just lost, as of the next one.

        Raises:
            UnknownWorker: there is none.
            StoreLost: the store has gone, and nobody serves another.
        """
        until = monotonic() + BETWEEN
        while True:
            directory = self.directory
            try:
                found = self._read_member(directory, to)
                names = [] if found else [member.name for member in directory.members()]
            except StoreLost as error:
                for member in self.known:
                    if to in (member.name, member.id):
                        return member
                if self.over or not self._wait_for_another(directory, until):
                    raise StoreLost(f"worker {to!r} cannot be looked up: {error}") from error
                continue
            if found:
                return Member.from_json(found)
            for member in self.awaited:
                if to in (member.name, member.id):
                    return member
            advice = "; with wait_for_worker=True, a call waits until it has"
            raise unknown(to, names, advice)

    def _read_member(self, directory: Directory, to: str | int) -> str:
        if self.over:
            raise StoreLost(self.over)
        if self._between:
            raise StoreLost("the store was lost, and nobody serves another yet")
        return directory.read_member(to)

    def _wait_for_another(self, old: Directory, until: float) -> bool:
        with self._moving:
            return self._moving.wait_for(lambda: self.directory is not old or bool(self.over), until - monotonic())

    def members(self) -> list[Member]:
        """Who is in the group now, sorted by name."""
        return self.directory.members()

    # Where the store is another

    def lose(self) -> None:
        """It was lost: those who look up somebody wait for the next."""
        self._between = True

    def move(self, directory: Directory, store: Seat, serves: bool) -> None:
        """Go over to another; whoever asks at those that this member has served is led there."""
        self.awaited = self.known
        last, served = self.directory, self.serves
        if store != self.store:
            self._ends = 0  # all that were counted there are news to whoever comes over
        with self._moving:
            self.directory = directory
            self.serves, self.store = serves, store
            self._between = self._acknowledged = False
            self._listed_at = ""
            self._moving.notify_all()
        if served:
            self._given_up.append(last)
        else:
            last.close()
        for given in self._given_up:
            given.give_up(store)

    def has_left(self, member: Member) -> bool:
        """Whether it did so by a store that was given up here, of which it had not heard."""
        return any(given.how_gone(member.incarnation) == LEFT for given in self._given_up)

    def abandon(self) -> None:
        """Take away the stores that this member has served."""
        for given in self._given_up:
            given.close()
        self._given_up.clear()
        if self.serves:
            self.directory.board.close("it was given up")
            self.serves = False

    def renew(self) -> None:
        """Seal what is in the stores of this group anew, where its key is being replaced."""
        for directory in (self.directory, *self._given_up):  # those that were given up tell newcomers where to go
            directory.board.renew()

    def end(self, why: str) -> None:
        """Nobody can be looked up any more."""
        with self._moving:
            self.over = self.over or why
            self._moving.notify_all()

    # What changes

    def ended(self) -> bool:
        """Whether a worker has left since the last look with whom those end that only serve."""
        ends = self.directory.board.number("ends")
        before, self._ends = self._ends, ends
        return ends > before

    def server_leaves(self) -> bool:
        """Whether who serves the store is leaving in order; it waits for this to be seen."""
        if self.serves or not self.directory.board.read("leaving"):
            return False
        if not self._acknowledged:
            self._acknowledged = True
            self.directory.board.add_hint("seen")
        return True

    def leave(self, in_order: bool = True) -> None:
        """Free the name and the rank; not `in_order`: the program has ended without a word."""
        me, self._me = self._me, None
        lost = self.over
        self.end("this worker has left the group")
        try:
            if me is not None and not lost and not self._between:
                self._check_out(me, in_order)
        except StoreLost:  # it may have gone with the worker that served it
            pass
        except StoreUntrusted as error:  # its connections tell the others
            self.distrust(error, f"{me} has left, which cannot be noted in the group's store")
        self.abandon()  # only now: another may have to be where one of these is
        self.directory.close()
        if self._sign is not None:
            self._sign.close()

    def _check_out(self, me: Member, in_order: bool) -> None:
        board = self.directory.board
        if self._listed_at:
            board.write(self._listed_at, "")
        if self._ends_with(me, in_order):
            self.directory.end()
        self.directory.take_out(me, LEFT)
        if self.serves:
            self._end_store()

    def _ends_with(self, me: Member, in_order: bool) -> bool:
        """Return True if the workers that only serve end as `me` leaves: it has rank 0, or began the group.

        Where a launcher keeps the store, it has begun the group, and starts a program anew that has failed.
        """
        return me.id == 0 and in_order if self._launched else me.id == 0 or self._founded

    def _end_store(self) -> None:
        board = self.directory.board
        others = len(self.directory.members()) + board.hint("seen")
        board.write("leaving", OPENED)
        board.add_hint("changes")
        board.wait_for_hint("seen", others, monotonic() + LINGER)

    def __repr__(self) -> str:
        state = f"over: {self.over}" if self.over else f"term {self.store.term}"
        return f"<DynamicGroup: {state}; with {listed([member.name for member in self.known])}>"


def dynamic_group_lives(store: SealedStore, is_alive: Callable[[Member], bool]) -> bool:
    """Whether a dynamic group with members meets in this store."""
    directory = Directory(store)
    return bool(directory.board.terms()) and any(map(is_alive, directory.members()))


def fixed_group_lives(store: SealedStore, is_alive: Callable[[Member], bool]) -> bool:
    """Whether a group of fixed size forms in this store, or has formed and runs."""
    number = Board(store).read(ROUND)
    board = Board(store, f"telegrad/{number}")
    terms = terms_of(board) if number else None
    if terms is None or not isinstance(terms.size, int) or board.read(COMPLETE) not in ("", OPENED):
        return False
    entries = [board.read(f"rank/{rank}") for rank in range(terms.size)]
    return any(is_alive(Member.from_json(entry)) for entry in entries if entry)
