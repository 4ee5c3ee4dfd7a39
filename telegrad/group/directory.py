"""What a dynamic group keeps in its store: who has which name and rank, who has gone and how, and who serves the store.

terms               the first worker's, with the identity of the group: see `rendezvous.Terms`
name/N, rank/R      the entry of the member that has it
listed/1, 2, ...    names that members have, or had; how many there are is counted
gone/I              how the member of that incarnation went: LEFT or LOST
back/I              in a store that took the place of another: that it has listed itself again
changes             is counted, as a hint, so that those who look now and then read no more than that
served, moved       the store, as a `Seat`; the one that holds in its stead
homes               the hosts of the places where newcomers look
ends                is counted: a worker has left with whom the others end that only serve
leaving, seen       whoever serves the store is about to leave; how many others have seen that, as a hint
orphans, orphan/1   who is in an earlier group at this place
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable

from telegrad.group.board import DYNAMIC, Board
from telegrad.group.members import Member
from telegrad.group.rendezvous import OPENED, terms_of
from telegrad.group.sealing import SealedStore
from telegrad.group.succession import Seat

LEFT, LOST = "left", "lost"


class Directory:
    """That of one store."""

    def __init__(self, store: SealedStore, aside: bool = False) -> None:
        """`aside`: it is served elsewhere, for long. Its terms must be read, or claimed, before all else."""
        self.board = Board(store, DYNAMIC, aside)

    def close(self) -> None:
        self.board.close()

    # Members

    def read_member(self, to: str | int) -> str:
        """The entry of that name or rank, or ""."""
        return self.board.read(f"name/{to}" if isinstance(to, str) else f"rank/{to}")

    def members(self) -> list[Member]:
        """Who is in the group now, sorted by name."""
        listed = {self.board.read(f"listed/{place}") for place in range(1, self.board.number("listed") + 1)}
        entries = [self.board.read(f"name/{name}") for name in sorted(listed) if name]
        return [Member.from_json(entry) for entry in entries if entry]

    def add_name(self, name: str) -> str:
        """Have it found by `members`; where it stands."""
        place = f"listed/{self.board.increment('listed')}"
        self.board.write(place, name)
        return place

    def listed_before(self, place: str, me: Member) -> list[Member]:
        """Return the members that were listed before this one, which stands at that place; the newest first."""
        earlier = range(int(place.rpartition("/")[2]) - 1, 0, -1)
        names = dict.fromkeys(self.board.read(f"listed/{number}") for number in earlier)
        entries = [self.read_member(name) for name in names if name and name != me.name]
        return [Member.from_json(entry) for entry in entries if entry]

    def free(self, slot: str, member: Member) -> None:
        """Only where the slot is still that member's: swapped, since another may have it by now."""
        self.board.swap(slot, member.to_json(), "")

    def take_out(self, member: Member, how: str) -> None:
        """It has gone: others can have its name and its rank."""
        self.board.write(f"gone/{member.incarnation}", how)
        self.free(f"name/{member.name}", member)
        self.free(f"rank/{member.id}", member)
        self.board.add_hint("changes")

    def how_gone(self, incarnation: str) -> str:
        """How it went, as far as anyone has noticed: LEFT, LOST or ""."""
        return self.board.read(f"gone/{incarnation}")

    def changes(self) -> int:
        """How often somebody came or went."""
        return self.board.hint("changes")

    def end(self) -> None:
        """Have those end who only serve."""
        self.board.increment("ends")
        self.board.add_hint("changes")

    # Who serves it

    def served(self) -> Seat | None:
        return self._read_store("served")

    def moved(self) -> Seat | None:
        """The store that holds in its stead, where this one was given up."""
        return self._read_store("moved")

    def _read_store(self, key: str) -> Seat | None:
        text = self.board.read(key)
        return Seat(*json.loads(text)[: len(Seat._fields)]) if text else None

    def note_served(self, store: Seat) -> None:
        self.board.write("served", json.dumps(store))

    def give_up(self, store: Seat) -> None:
        """That one holds."""
        self.board.write("moved", json.dumps(store))
        self.board.add_hint("changes")

    def homes(self) -> list[str]:
        """The hosts where the store can be found by those who come."""
        return list(json.loads(self.board.read("homes") or "[]"))

    def add_home(self, host: str) -> None:
        while host not in (found := self.homes()):
            self.board.swap("homes", json.dumps(found) if found else "", json.dumps([*found, host]))

    def seed(
        self, terms: str, store: Seat, members: Iterable[Member], homes: Collection[str], lost: Iterable[str]
    ) -> bool:
        """Write down what was in a store that was lost; False where others have made use of this one already."""
        if self.board.claim_terms(terms) != terms:
            return False
        self.note_served(store)
        self.board.write("homes", json.dumps(list(homes)))
        for incarnation in lost:
            self.board.write(f"gone/{incarnation}", LOST)
        for member in members:
            entry = member.to_json()
            self.board.write(f"name/{member.name}", entry)
            self.board.write(f"rank/{member.id}", entry)
            self.add_name(member.name)
        self.board.add_hint("changes")
        return True

    def list_again(self, me: Member, lost: Iterable[str]) -> Member | None:
        """A member has come over, and tells who was lost; another that has its name or its rank now, if so."""
        entry = me.to_json()
        seeded = self.board.read(f"name/{me.name}") == entry
        found = [self.board.swap(slot, "", entry) for slot in (f"name/{me.name}", f"rank/{me.id}")]
        for incarnation in lost:
            self.board.write(f"gone/{incarnation}", LOST)
        self.board.write(f"back/{me.incarnation}", OPENED)
        if not seeded and found[0] == entry:
            self.add_name(me.name)
        self.board.add_hint("changes")
        return next((Member.from_json(other) for other in found if other != entry), None)

    def is_back(self, member: Member) -> bool:
        return bool(self.board.read(f"back/{member.incarnation}"))

    # Another group

    def leave_word(self, me: Member) -> str:
        """Let a group that meets in the place of another know of a worker of that; one of its members, if any."""
        terms = terms_of(self.board)
        if terms is None:
            return ""
        self.board.write(f"orphan/{self.board.increment('orphans')}", str(me))
        self.board.add_hint("changes")
        return str(terms.first)

    def orphans(self, seen: int) -> list[str]:
        """Workers of an earlier group in this place that are not in this one, but for those that were seen before."""
        return [self.board.read(f"orphan/{place}") for place in range(seen + 1, self.board.number("orphans") + 1)]

    def __repr__(self) -> str:
        return f"<Directory on {self.board!r}>"
