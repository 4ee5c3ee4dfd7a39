"""How the workers of an elastic group meet through a store, one generation after the other: the rim of quorum.py.

    terms      the group's identity and limits, by the first worker that came to this store
    running    the last generation that has formed; once it has ended in order, its number below 0
    round      the number of the round in which the next one forms; of each round:
        places     how many have come; entry/PLACE is who
        verdict    who is in it; whoever has come first decides, or the next where that one has died
        taken      how many of these have seen that, as a hint; the last opens `ready`, behind which they are a group

Who is not in a round's verdict goes to the next round, as all do where one of the chosen died before it had taken its
place. Nothing that the store knows is needed, since those who come bring what they know with them, and say first which
generation was the last: who has lost the store begins anew in the next one at its place.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable
from math import inf
from time import monotonic, sleep
from typing import NamedTuple

from telegrad.errors import GroupEnded, GroupIncomplete, RendezvousError, StoreLost, UsageError, WorkerTaken
from telegrad.group.board import Board
from telegrad.group.members import Member
from telegrad.group.places import is_here
from telegrad.group.quorum import Arrival, Before, Limits, Quorum, Verdict, members_of
from telegrad.group.rendezvous import LINGER, OPENED, VOID, Terms, agree, new_terms, terms_of
from telegrad.group.sealing import SealedStore
from telegrad.group.stores import Meeting, open_store
from telegrad.keyring import Keyring
from telegrad.progress import Wait

LAST_CALL = 3.0  # seconds without anybody new after which a first generation is complete that has enough
KNOCK_AGAIN = 0.5  # seconds between looks whether one who is awaited, or comes first, still lives
SEE = 1.0  # seconds between looks who is there, for those who do not decide
TAKE = 10.0  # seconds for the chosen to take their places
REMEMBER = 2.0  # seconds for the others to write into another store that a generation has formed
TRY_AGAIN = 0.05  # seconds until a store that was lost is looked for again
BOARD = "telegrad/elastic"

IsAlive = Callable[[Member], bool]


class Formed(NamedTuple):
    """A generation, as the store and its members know it."""

    number: int
    members: list[Member]
    survivors: int  # how many of these, by rank, were in the one before
    terms: str = ""  # of the group, as the store has them; not part of the JSON

    def to_json(self) -> str:
        return json.dumps(self[:3])

    @classmethod
    def from_json(cls, text: str) -> Formed:
        number, members, survivors, *_ = json.loads(text)
        return cls(number, [Member.of(each) for each in members], survivors)


class Ground:
    """Where the generations of a group meet: its store, which any worker of that host may serve."""

    def __init__(self, init_method: str, keys: Keyring) -> None:
        self._init_method = init_method
        self.keys = keys
        self.is_here = False  # a worker of this host serves it
        self._lock = threading.Lock()  # guards _meeting; held while the store is looked for
        self._meeting: Meeting | None = None

    @property
    def held(self) -> Meeting | None:
        """The store, if it is open."""
        return self._meeting

    def open(self, timeout: float) -> Meeting:
        """The store, found or served; it stays open.

        Raises:
            RendezvousError: there is none, and it cannot be served here.
        """
        with self._lock:
            meeting = self._meeting
            if meeting is None:
                meeting = open_store(self._init_method, -1, None, self.keys, timeout)
                if meeting.directory is not None:
                    raise UsageError(
                        f"an elastic group meets at tcp://HOST:PORT, env:// or file:///PATH, not in {meeting.where}: "
                        "leave min_workers and max_workers out for a dynamic group"
                    )
                self._meeting = meeting
                self.is_here = meeting.host is not None and meeting.port is not None and is_here(meeting.host)
            return meeting

    def forget(self, lost: Meeting | None) -> None:
        """That store was lost; another thread may have found, or serve, the next one already."""
        with self._lock:
            if self._meeting is lost:
                self._meeting = None

    def __repr__(self) -> str:
        return f"<Ground at {self._init_method}, {'found' if self._meeting is not None else 'to be found'}>"


class Coming(NamedTuple):
    """One worker on its way into the next generation."""

    ground: Ground | None  # None: a launcher says who is in it
    keys: Keyring
    limits: Limits
    before: Before  # the generation that it knows
    rank: int  # the one that it would like to have
    timeout: float  # seconds; who waits for a generation that runs has no limit, as a spare

    def meet(self, _: float) -> Meeting:
        """Find the store."""
        if self.ground is None:
            size = os.environ.get("WORLD_SIZE", "")
            return open_store("env://", -1, int(size), self.keys, self.timeout)._replace(coming=self)
        return self.ground.open(self.timeout)._replace(rank=self.rank, coming=self)

    def join(self, ground: Ground, me: Member, is_alive: IsAlive) -> Formed:
        """Become part of the next generation, as soon as there is one; return it.

        Raises:
            GroupIncomplete: too few came in time.
            GroupEnded: the group for which this worker has waited has ended.
            WorkerTaken: another has this worker's name.
            RendezvousError: the store was lost, or the group has other terms.
        """
        return _Joining(ground, self, me, is_alive).join()


class _Joining:
    """One worker that joins."""

    def __init__(self, ground: Ground, coming: Coming, me: Member, is_alive: IsAlive) -> None:
        self._ground = ground
        self._limits = coming.limits
        self._me = me
        self._before = coming.before
        self._timeout = coming.timeout
        self._is_alive = is_alive
        self._until = monotonic() + coming.timeout
        self._quorum = Quorum(coming.limits)
        self._place = 0  # in the round
        self._taken: Formed | None = None  # the generation in which it has a place
        self._dead: set[str] = set()
        self._knocked: dict[str, float] = {}  # when, by incarnation

    @property
    def _survives(self) -> bool:
        return bool(self._before.me)

    def join(self) -> Formed:
        with Wait("init_rpc", self._text, lambda: self._quorum.missing(), worker=self._me.name) as self._wait:
            while True:
                meeting = self._ground.open(max(0.0, self._until - monotonic()))
                self._wait.place = meeting.where
                try:
                    return self._join_at(meeting.store)
                except StoreLost:  # another may be served in its place, also by this worker
                    self._ground.forget(meeting)
                    if monotonic() > self._until:
                        raise
                sleep(TRY_AGAIN)

    def _join_at(self, store: SealedStore) -> Formed:
        self._root = Board(store, BOARD)
        terms = self._agree()
        self._tell()
        if self._taken is not None and self._has_formed():  # this store may be lost meanwhile, too
            return self._taken
        self._taken = None
        while True:
            number = self._root.swap("round", "", "1")
            self._board = Board(store, f"{BOARD}/{number}", group=terms.group)
            goes = not self._board.read("verdict") or self._has_come()
            generation = self._round(terms) if goes else None
            if generation is not None:
                return generation
            self._root.swap("round", number, str(int(number) + 1))

    def _tell(self) -> None:
        """Have those who come to a new store wait for the last generation, before this worker has a place there."""
        if self._before.number:
            last = Formed(self._before.number, list(self._before.members), 0)
            self._root.swap("running", "", last.to_json())

    def _agree(self) -> Terms:
        """Return the group's terms; those of an earlier run, of whom nobody lives, are replaced."""
        while True:
            terms = terms_of(self._root)
            try:
                return agree(self._root, self._me, str(self._limits))
            except StoreLost:
                raise
            except RendezvousError:
                if terms is None or any(map(self._is_alive, known_at(self._root, terms))):
                    raise
            # The identity stays, so that what is left of the earlier run can be read.
            mine = new_terms(str(self._limits), self._me, terms.group)
            self._root.claim_terms(mine.to_json(), expected=terms.to_json())

    # One round

    def _has_formed(self) -> bool:
        """Whether the generation in which this worker had taken its place when it lost the store is there."""
        until = monotonic() + REMEMBER
        while monotonic() < until:
            running = running_at(self._root)
            if running is not None and self._me.incarnation in {member.incarnation for member in running.members}:
                return True
            sleep(TRY_AGAIN)
        return False

    def _round(self, terms: Terms) -> Formed | None:
        """The generation that forms in it, where this worker is part of that."""
        if not self._has_come():
            self._place = self._board.increment("places")
            self._board.write(f"entry/{self._place}", Arrival(self._me, self._before).to_json())
        self._quorum = Quorum(self._limits)
        self._quorum.dead = self._dead  # also those that were found in another round, or store
        self._came, self._next_sight = monotonic(), 0.0
        found = self._board.wait("verdict", inf, self._look)
        if found == VOID:
            return None
        verdict = Verdict.from_json(found)
        refused = dict(verdict.refused).get(self._place)
        if refused is not None:
            self._refuse(refused)
        arrivals = [Arrival.from_json(entry) for entry in self._entries(verdict.places)]
        generation = Formed(verdict.number, members_of(arrivals), verdict.survivors, terms.to_json())
        if self._place not in verdict.places:
            if not self._survives:  # it may form any moment: those who are left must not be another one
                self._before = Before(generation.number, tuple(generation.members))
            return None
        self._taken = generation
        if self._take_place(generation):
            return generation
        self._taken = None
        return None

    def _has_come(self) -> bool:
        """Whether this worker has a place in this round already, and just its connection to the store was lost."""
        entry = self._board.read(f"entry/{self._place}")
        return bool(entry) and Arrival.from_json(entry).member.incarnation == self._me.incarnation

    def _entries(self, places: tuple[int, ...]) -> list[str]:
        return self._board.read_all([f"entry/{place}" for place in places])

    def _refuse(self, place: int) -> None:
        other = Arrival.from_json(self._board.read(f"entry/{place}")).member
        raise WorkerTaken(
            f"the name {self._me.name!r} is not unique, two workers claim it: {other} and {self._me}. Give each its "
            "own; or give a role and no name, and each gets one"
        )

    def _take_place(self, generation: Formed) -> bool:
        """Whether all have taken theirs, so that it has formed."""
        count = self._board.add_hint("taken")
        if count > len(generation.members):
            raise self._board.spoiled("taken", f"is {count}, in a generation of {len(generation.members)}")
        if count == len(generation.members):
            self._root.write("running", generation.to_json())  # before anyone goes, who may be lost at once
            self._board.swap("ready", "", OPENED)
        until = monotonic() + TAKE
        found = self._board.wait("ready", until, lambda: self._doubt(generation.members))
        if not found:
            self._board.hint("taken")  # raises where it was set back, so that nobody is the last
        return (found or self._board.swap("ready", "", VOID)) == OPENED

    def _doubt(self, members: list[Member]) -> None:
        """While the others take their places: the round is void where one has died."""
        others = [member for member in members if member.incarnation != self._me.incarnation]
        if any(not self._lives(member, fresh=False) for member in others):
            self._board.swap("ready", "", VOID)

    # Until there is a verdict

    def _look(self) -> None:
        late = monotonic() > self._until
        if late or self._decides():
            self._decide(late)
        elif monotonic() > self._next_sight:
            self._next_sight = monotonic() + SEE
            self._see()
        self._wait.look()

    def _decides(self) -> bool:
        """Whether this worker has come first, of those that live."""
        for place in range(1, self._place):
            arrival = self._arrival(place)
            if arrival is not None and self._lives(arrival.member, fresh=False):
                return False
        return True

    def _decide(self, late: bool) -> None:
        self._see()
        awaited = self._quorum.awaited()
        if awaited and not self._survives:
            self._until, late = monotonic() + self._timeout, False  # as long as that generation lives
        verdict = self._quorum.decide(monotonic() - self._came > LAST_CALL, late)
        if verdict is None:
            if late:
                raise GroupIncomplete(
                    f"{self._me} has waited {self._timeout:g} s for a group of {self._limits} workers: "
                    f"{self._quorum.lacks()}. Look at the logs of the others, or allow more time with rpc_timeout"
                )
            return
        chosen = [arrival.member for place in verdict.places if (arrival := self._quorum.at(place)) is not None]
        if all(self._lives(member, fresh=True) for member in chosen):
            self._board.swap("verdict", "", verdict.to_json())

    def _see(self) -> None:
        """Who has come, and which generation runs."""
        for place in range(1, self._board.number("places") + 1):
            self._arrival(place)
        running = running_at(self._root)
        if running is not None and -running.number >= max(self._quorum.running.number, self._before.number) > 0:
            self._root.add_hint("seen")
            raise GroupEnded(
                f"the group for which {self._me} has waited has ended in order, after generation {-running.number}"
            )
        if running is not None and running.number > 0:
            self._quorum.running = Before(running.number, tuple(running.members))
            if not self._survives:  # what is known, should the store be lost
                self._before = self._quorum.running
        for member in self._quorum.awaited():
            self._lives(member, fresh=False)

    def _arrival(self, place: int) -> Arrival | None:
        arrival = self._quorum.at(place)
        if arrival is None:
            entry = self._board.read(f"entry/{place}")
            if entry:
                arrival = Arrival.from_json(entry)
                self._quorum.come(place, arrival)
                self._came = monotonic()
        return arrival

    def _lives(self, member: Member, fresh: bool) -> bool:
        """Whether one answers; asked again now and then, or as `fresh` news. Who has died stays dead."""
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
        return f"{self._quorum.lacks()} ({me!r} joins an elastic group of {self._limits} workers)"

    def __repr__(self) -> str:
        return f"<Joining of {self._me}: {self._quorum!r}>"


# What those see who are in one


def running_at(board: Board) -> Formed | None:
    """The generation that the store tells of."""
    found = board.read("running")
    return Formed.from_json(found) if found else None


def known_at(board: Board, terms: Terms) -> list[Member]:
    """The workers that the store tells of: the first that came, and those of the running generation."""
    running = running_at(board)
    return [*([terms.first] if terms.first is not None else []), *(running.members if running else [])]


def waiting_at(store: SealedStore, mine: Formed, most: int, is_alive: IsAlive) -> bool:
    """Whether somebody waits at the store who could come into the generation after this one; tells of it there."""
    root = Board(store, BOARD)
    root.renew()
    root.claim_terms(mine.terms)  # where the store is a new one, nobody may have come to it yet
    running = running_at(root)
    if running is None or abs(running.number) < mine.number:
        root.write("running", mine.to_json())
    number = root.read("round")
    if not number:
        return False
    board = Board(store, f"{BOARD}/{number}", group=root.group)
    if board.read("verdict"):
        return False
    entries = [board.read(f"entry/{place}") for place in range(1, board.number("places") + 1)]
    arrivals = [Arrival.from_json(entry) for entry in entries if entry]
    return any(_may_come(arrival, mine, most) and is_alive(arrival.member) for arrival in arrivals)


def _may_come(arrival: Arrival, mine: Formed, most: int) -> bool:
    if arrival.before.me in {member.incarnation for member in mine.members}:
        return True  # it has not waited for the others
    has_room = not most or len(mine.members) < most
    return has_room and arrival.member.name not in {member.name for member in mine.members}


def lives_at(store: SealedStore, is_alive: IsAlive) -> bool:
    """Whether an elastic group runs, or forms, at this store."""
    root = Board(store, BOARD)
    terms = terms_of(root)
    return terms is not None and any(map(is_alive, known_at(root, terms)))


def end_at(meeting: Meeting, mine: Formed) -> None:
    """The group has ended in order: let those know who wait for it."""
    root = Board(meeting.store, BOARD)
    with contextlib.suppress(RendezvousError):  # the store has gone before
        root.claim_terms(mine.terms)
        board = Board(meeting.store, f"{BOARD}/{root.read('round')}", group=root.group)
        waiting = 0 if board.read("verdict") else board.number("places")
        root.write("running", mine._replace(number=-mine.number).to_json())
        if meeting.serves:
            root.wait_for_hint("seen", waiting, monotonic() + (LINGER if waiting else 0))
