"""Who is in the next generation of an elastic group: decided from those who have come to where it meets.

A generation is a group of fixed size. The next one has its survivors, in the order of their ranks, and then those who
are new, as long as there is room. So whoever has rank 0 was in the generation before, unless nobody was.

It is complete once all have come who were in the last one and live, and they are enough. Where nobody was in one, it is
once nobody else may come, or nobody has for some time. Whoever decides writes it down where only one can; so it does no
harm that several may come to decide, each by what it has seen.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

from telegrad.group.members import Member, listed, named


class Before(NamedTuple):
    """A generation, as one who comes to the next knows it."""

    number: int = 0  # 0: of none
    members: tuple[Member, ...] = ()  # those that live, as far as is known
    without: tuple[str, ...] = ()  # the incarnations of those that will not come, though they may live
    me: str = ""  # the incarnation that who comes had in it; "" where it was not in it

    @classmethod
    def of(cls, told: list[Any]) -> Before:
        number, members, without, me, *_ = told
        return cls(number, tuple(map(Member.of, members)), tuple(without), me)


class Arrival(NamedTuple):
    """One who has come."""

    member: Member  # its rank is the one that it wants, or -1
    before: Before = Before()

    def to_json(self) -> str:
        return json.dumps(self)

    @classmethod
    def from_json(cls, text: str) -> Arrival:
        member, before, *_ = json.loads(text)
        return cls(Member.of(member), Before.of(before))


class Limits(NamedTuple):
    """How many workers a generation has."""

    least: int
    most: int = 0  # 0: any number

    def __str__(self) -> str:
        if self.least == self.most:
            return str(self.least)
        return f"{self.least} to {self.most}" if self.most else f"{self.least} or more"


class Verdict(NamedTuple):
    """What was decided: the next generation, and of whom it consists, by the places in which they have come."""

    number: int
    places: tuple[int, ...]  # by rank
    survivors: int = 0  # how many of these were in the last one: the first
    refused: tuple[tuple[int, int], ...] = ()  # who has the name of another, and whose

    def to_json(self) -> str:
        return json.dumps(self)

    @classmethod
    def from_json(cls, text: str) -> Verdict:
        number, places, survivors, refused, *_ = json.loads(text)
        return cls(number, tuple(places), survivors, tuple((place, other) for place, other in refused))


class Quorum:
    """Those who have come, as one of them sees it. Places count from 1 on."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._come: dict[int, Arrival] = {}
        self.running = Before()  # the generation that runs, as the store says
        self.dead: Collection[str] = ()  # the incarnations of those of whom it was found

    def come(self, place: int, arrival: Arrival) -> None:
        self._come[place] = arrival

    def at(self, place: int) -> Arrival | None:
        """Who has come to that place, if it was seen."""
        return self._come.get(place)

    @property
    def last(self) -> int:
        """The number of the last generation of which anybody here knows."""
        return max([self.running.number, *(each.before.number for _, each in self._here())])

    def awaited(self) -> list[Member]:
        """Those of the last generation that have not come, and may live."""
        last = self.last
        told = (self.running, *(each.before for _, each in self._here()))
        known = [before for before in told if before.number == last]
        gone = {each.before.me for _, each in self._here()} | set(self.dead)
        gone |= {each.member.incarnation for _, each in self._here()}  # it does not know that it was in it
        gone |= {incarnation for before in known for incarnation in before.without}
        members = {member.incarnation: member for before in known for member in before.members}
        return sorted((each for each in members.values() if each.incarnation not in gone), key=lambda each: each.id)

    def chosen(self) -> tuple[list[int], int, list[tuple[int, int]]]:
        """Who could be in it, by rank, how many of them are survivors, and who is refused for its name."""
        last = self.last
        survivors = sorted((rank, place) for place, each in self._here() if (rank := _rank(each, last)) >= 0)
        others = sorted((each.member.id < 0, each.member.id, place) for place, each in self._here())
        order = [place for _, place in survivors]
        order += [place for *_, place in others if place not in set(order)]
        names: dict[str, int] = {}
        refused = []
        for place in order:
            name = self._come[place].member.name
            if name and names.setdefault(name, place) != place:
                refused.append((place, names[name]))
        places = [place for place in order if place not in dict(refused)]
        return places[: self._limits.most or None], len(survivors), refused

    def decide(self, quiet: bool, late: bool) -> Verdict | None:
        """The next generation, if it is complete.

        `quiet`: nobody has come for some time. `late`: who was awaited is not waited for any longer.
        """
        if self.awaited() and not late:
            return None
        places, survivors, refused = self.chosen()
        if len(places) < self._limits.least:
            return None
        if not (survivors or quiet or late or len(places) == self._limits.most):
            return None
        return Verdict(self.last + 1, tuple(places), survivors, tuple(refused))

    def lacks(self) -> str:
        """For what it waits, for people."""
        awaited = self.awaited()
        count = len(self.chosen()[0])
        if awaited:
            names = listed([repr(member.name) for member in awaited])
            return f"generation {self.last} runs: {names} did not come to the next, with rendezvous_again()"
        if count < self._limits.least:
            return f"{_workers(count)} of {self._limits} came: {self._names() or 'nobody'}"
        return f"{_workers(count)} of {self._limits} came: {self._names()}; more may come"

    def missing(self) -> list[str]:
        """For whom, by name."""
        return [member.name for member in self.awaited()]

    def _names(self) -> str:
        return listed([repr(each.member.name or each.member.role) for _, each in self._here()])

    def _here(self) -> Iterable[tuple[int, Arrival]]:
        return [(place, each) for place, each in sorted(self._come.items()) if each.member.incarnation not in self.dead]

    def __repr__(self) -> str:
        return f"<Quorum of {self._limits}: {self.lacks()}>"


def _rank(arrival: Arrival, last: int) -> int:
    """The rank of one who comes in the last generation, -1 where it was not in that."""
    before = arrival.before
    mine = before.me if before.number == last else ""
    return next((member.id for member in before.members if member.incarnation == mine), -1)


def _workers(count: int) -> str:
    return "1 worker" if count == 1 else f"{count} workers"


def members_of(arrivals: Sequence[Arrival]) -> list[Member]:
    """They as the members of a generation, by rank."""
    return named(each.member._replace(id=rank) for rank, each in enumerate(arrivals))
