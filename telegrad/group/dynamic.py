"""A group that workers join and leave at any time.

It keeps its store: names and ranks are claimed, looked up and freed there. A counter tells that something changed, so
that members who look now and then read no more than that. Whoever serves the store says when it leaves, and waits
until the others have seen it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from time import monotonic
from typing import Any

from telegrad.errors import RendezvousError, StoreLost
from telegrad.group.members import Member, listed, unknown
from telegrad.group.rendezvous import COMPLETE, LINGER, OPENED, ROUND, agree, first_of, taken
from telegrad.group.stores import Board

MOST_RANKS = 1 << 16
BOARD = "telegrad/dynamic"


class DynamicGroup:
    """One worker's part in it; the store must live as long as the group."""

    def __init__(self, store: Any, serves: bool = False) -> None:
        """`serves`: the store ends with this worker."""
        self._board = Board(store, BOARD)
        self._serves = serves
        self._me: Member | None = None
        self._place = ""  # where this worker's name is listed
        # No lock: these two are loaded and stored as wholes, by whichever thread looks at the store.
        self.over = ""  # why nobody can be looked up any more
        self.known: list[Member] = []  # who was there at the last look; they can be called without the store

    def join(
        self, me: Member, key: bytes | None, is_alive: Callable[[Member], bool] = lambda _: True
    ) -> tuple[Member, bytes]:
        """Claim a name and a rank, the lowest free one from 1 on where `me.id` is -1; what came of it, and the key.

        Who has a role and no name gets the lowest number with it that makes a free one.

        Rank 0 is for whoever asks for it, who need not be the first to come. A worker that crashed leaves its entries
        behind: they are taken over where `is_alive` denies that it lives.

        Raises:
            WorkerTaken: a member has that name or rank.
            AuthenticationFailed: this worker's key is not that of the group.
            RendezvousError: all ranks are taken.
        """
        shared = agree(self._board, me, -1, key)
        me, reserved = (me, "") if me.name else self._reserve_name(me)
        me = self._claim_rank(me, is_alive)
        try:
            self._claim(f"name/{me.name}", f"name {me.name!r}", me, is_alive, reserved)
        except BaseException:
            self._free(f"rank/{me.id}", me)
            raise
        self._place = f"listed/{self._board.count('listed')}"
        self._board.write(self._place, me.name)
        if self._serves:
            self._board.write("over", "")
            self._board.write("server", str(me))
        self._board.count("changes")
        self._me = me
        return me, shared

    def _reserve_name(self, me: Member) -> tuple[Member, str]:
        for number in range(MOST_RANKS):
            mine = me._replace(name=f"{me.role}{number}")
            entry = mine.to_json()
            if self._board.swap(f"name/{mine.name}", "", entry) == entry:
                return mine, entry
        raise RendezvousError(f"all {MOST_RANKS} names for the role {me.role!r} are taken")

    def _claim_rank(self, me: Member, is_alive: Callable[[Member], bool]) -> Member:
        if me.id >= 0:
            self._claim(f"rank/{me.id}", f"rank {me.id}", me, is_alive)
            return me
        for rank in range(1, MOST_RANKS):
            mine = me._replace(id=rank)
            entry = mine.to_json()
            if self._board.swap(f"rank/{rank}", "", entry) == entry:
                return mine
        raise RendezvousError(f"all {MOST_RANKS} ranks of the group are taken")

    def _claim(self, slot: str, what: str, me: Member, is_alive: Callable[[Member], bool], expected: str = "") -> None:
        entry = me.to_json()
        found = self._board.swap(slot, expected, entry)
        while found != entry:
            other = Member.from_json(found)
            if is_alive(other):
                raise taken(what, other, me)
            self.strike_out(other)
            found = self._board.swap(slot, "", entry)

    def _free(self, slot: str, member: Member) -> None:
        """Only where the slot is still that member's: swapped, since another may have it by now."""
        self._board.swap(slot, member.to_json(), "")

    def strike_out(self, member: Member) -> None:
        """A member has died: others can have its name and its rank."""
        self._board.write(f"lost/{member.incarnation}", OPENED)
        self._free(f"name/{member.name}", member)
        self._free(f"rank/{member.id}", member)
        self._board.count("changes")

    def was_lost(self, member: Member) -> bool:
        """Whether one who is no member any more has died, as far as anyone has noticed."""
        return bool(self._board.read(f"lost/{member.incarnation}"))

    def find(self, to: str | int) -> Member:
        """The member of that name or rank, as of now.

        Raises:
            UnknownWorker: there is none.
            StoreLost: the store has gone, and who served it.
        """
        try:
            found = self._read_member(to)
        except StoreLost as error:
            for member in self.known:
                if to in (member.name, member.id):
                    return member
            raise StoreLost(f"worker {to!r} cannot be looked up: {error}") from error
        if not found:
            advice = "; with wait_for_worker=True, a call waits until it has"
            raise unknown(to, [member.name for member in self.members()], advice)
        return Member.from_json(found)

    def _read_member(self, to: str | int) -> str:
        if self.over:
            raise StoreLost(self.over)
        return self._board.read(f"name/{to}" if isinstance(to, str) else f"rank/{to}")

    def members(self) -> list[Member]:
        """Who is in the group now, sorted by name."""
        listed = {self._board.read(f"listed/{place}") for place in range(1, self._board.count("listed", 0) + 1)}
        entries = [self._board.read(f"name/{name}") for name in sorted(listed) if name]
        return [Member.from_json(entry) for entry in entries if entry]

    # What changes

    def changes(self) -> int:
        """How often somebody came or went."""
        return self._board.count("changes", 0)

    def server(self) -> str:
        """The member with whom the store ends, or "" where it outlives them all."""
        return self._board.read("server")

    def ended(self) -> bool:
        """Whether who serves the store is leaving in order; it waits for this to be seen."""
        if not self._board.read("over"):
            return False
        self._board.count("seen")
        return True

    def leave(self) -> None:
        """Free the name and the rank."""
        me, self._me = self._me, None
        lost, self.over = self.over, self.over or "this worker has left the group"
        try:
            if me is not None and not lost:
                self._check_out(me)
        except StoreLost:
            pass  # the store has gone with the worker that served it
        self._board.close()

    def _check_out(self, me: Member) -> None:
        self._free(f"name/{me.name}", me)
        self._free(f"rank/{me.id}", me)
        self._board.write(self._place, "")
        self._board.count("changes")
        if self._serves:
            self.end()

    def kept_by(self, who: str) -> None:
        """Note that somebody who is no member serves the store, and will `end` the group."""
        self._board.write("over", "")
        self._board.write("server", who)

    def end(self) -> None:
        """Whoever serves the store: have the members know that it goes."""
        others = len(self.members()) + self._board.count("seen", 0)
        self._board.write("over", OPENED)
        self._board.count("changes")
        self._board.wait_for_count("seen", others, monotonic() + LINGER)

    def __repr__(self) -> str:
        state = f"over: {self.over}" if self.over else "lasts"
        return f"<DynamicGroup, {state}; last seen: {listed([member.name for member in self.known])}>"

    # After the store was lost

    def leave_word(self, store: Any, me: Member) -> str:
        """Let a group that meets in the lost one's place know of this worker; one of its members, if it has any."""
        board = Board(store, BOARD)
        entry = board.read("terms")
        if not entry:
            return ""
        board.write(f"orphan/{board.count('orphans')}", str(me))
        board.count("changes")
        return str(first_of(board))

    def orphans(self, seen: int) -> list[str]:
        """Workers of an earlier group in this place that are not in this one, but for those that were seen before."""
        return [self._board.read(f"orphan/{place}") for place in range(seen + 1, self._board.count("orphans", 0) + 1)]


def dynamic_group_lives(store: Any, is_alive: Callable[[Member], bool]) -> bool:
    """Whether a dynamic group with members meets in this store."""
    return bool(Board(store, BOARD).read("terms")) and any(map(is_alive, DynamicGroup(store).members()))


def fixed_group_lives(store: Any, is_alive: Callable[[Member], bool]) -> bool:
    """Whether a group of fixed size forms in this store, or has formed and runs."""
    number = Board(store).read(ROUND)
    board = Board(store, f"telegrad/{number}")
    terms = board.read("terms") if number else ""
    if not terms or board.read(COMPLETE) not in ("", OPENED):
        return False
    entries = [board.read(f"rank/{rank}") for rank in range(json.loads(terms)[0])]
    return any(is_alive(Member.from_json(entry)) for entry in entries if entry)
