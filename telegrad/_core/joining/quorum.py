"""Decides the members of the next generation of an elastic group, from the workers that have come to its directory.

A generation is a group of fixed size. The next one has its survivors, in the order of their ranks, and then new
workers, as long as there is room. So the worker of rank 0 was in the previous generation, unless no worker was.

It is complete once all living workers of the last one have come, and they are enough. A generation without survivors is
complete once it is full, or no worker has come for some time.

The keys in the directory are:

    elastic/generation  the last generation that has formed (`Formed`); whether the group has ended with it
    elastic/come/LIFE   a worker that wants to join the next one (`Arrival`); has the lease of its process

A generation forms by one compare-and-set of `elastic/generation`, with the previous number plus one. Therefore each
number has one generation, whichever worker decides, even if several do.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from telegrad._core.directory.directory import ABSENT, Directory
from telegrad._core.membership.members import Member, listed, named
from telegrad._core.texts import plural

PREFIX = "elastic/"
GENERATION, COME = PREFIX + "generation", PREFIX + "come/"

IsAlive = Callable[[Member], bool]


class Before(NamedTuple):
    """The generation from which a worker comes."""

    number: int = 0  # 0: it was in none
    group: str = ""  # the identity of the group
    without: tuple[str, ...] = ()  # the incarnations of its members that will not come, though they may be alive
    me: str = ""  # the incarnation that the worker had in it

    @classmethod
    def of(cls, told: list[Any]) -> Before:
        number, group, without, me, *_ = told
        return cls(number, group, tuple(without), me)


class Arrival(NamedTuple):
    """A worker that wants to join the next generation."""

    member: Member  # its rank is the wanted one, or -1
    before: Before = Before()
    limits: str = ""  # the configured limits of the group

    def to_json(self) -> str:
        return json.dumps(self)

    @classmethod
    def from_json(cls, text: str | bytes) -> Arrival:
        member, before, limits, *_ = json.loads(text)
        return cls(Member.of(member), Before.of(before), limits)


class Formed(NamedTuple):
    """A generation, as the directory and its members know it."""

    number: int = 0  # 0: none has formed yet
    members: tuple[Member, ...] = ()  # by rank
    survivors: int = 0  # how many of these, by rank, were in the previous one
    limits: str = ""  # of the group
    has_ended: bool = False  # the group has ended normally with this generation
    group: str = ""  # the identity of the group; not part of the JSON

    def to_json(self) -> str:
        return json.dumps(self[:-1])

    @classmethod
    def from_json(cls, text: str | bytes) -> Formed:
        number, members, survivors, limits, has_ended, *_ = json.loads(text)
        return cls(number, tuple(map(Member.of, members)), survivors, limits, has_ended)

    @property
    def lives(self) -> set[str]:
        return {member.incarnation for member in self.members}


NONE = Formed()


class GroupSize(NamedTuple):
    """The limits of the number of workers of a generation."""

    least: int
    most: int = 0  # 0: any number

    def __str__(self) -> str:
        if self.least == self.most:
            return str(self.least)
        return f"{self.least} to {self.most}" if self.most else f"{self.least} or more"

    @property
    def workers(self) -> str:
        return f"{self} {'worker' if self == (1, 1) else 'workers'}"


class Quorum:
    """The workers that have come, as one of them sees it."""

    def __init__(
        self, limits: GroupSize, running: Formed = NONE, arrivals: Sequence[Arrival] = (), dead: Collection[str] = ()
    ) -> None:
        """`running` is the last generation that has formed; `arrivals` are in the order in which the workers came.

        `dead`: the incarnations of workers that were found dead.
        """
        self._limits = limits
        self._running = running
        self._dead = dead
        self._come = [each for each in arrivals if each.limits == str(limits)]  # the others raise
        self._ranks = {} if running.has_ended else {each.incarnation: each.id for each in running.members}

    def awaited(self) -> list[Member]:
        """Return the members of the last generation that have not come, and may be alive."""
        here = self._here()
        # A process has another incarnation in each generation: a survivor comes with its new one, and `before.me` is
        # the one that it has in this generation.
        gone = {*self._dead, *(each.before.me for each in here)}
        for each in here:
            if self._rank(each) >= 0:
                # Only a member of this generation can say which of its members stay behind. The report of a worker from
                # an older generation is about that one.
                gone.update(each.before.without)
        return [each for each in self._running.members if each.incarnation in self._ranks.keys() - gone]

    def chosen(self) -> tuple[list[Member], int]:
        """Return the workers that could be in the next generation, by rank, and how many of them are survivors."""
        here = self._here()
        survivors = sorted((each for each in here if self._rank(each) >= 0), key=self._rank)
        # New workers with a wanted rank come first. The sort is stable, so the others stay in the order in which they
        # came.
        others = sorted(
            (each for each in here if self._rank(each) < 0), key=lambda each: (each.member.id < 0, each.member.id)
        )
        names: set[str] = set()
        members = []
        for member, *_ in (*survivors, *others):
            if member.name not in names:  # else the worker is refused when it finds its name among the members
                members.append(member)
            names |= {member.name} - {""}
        return members[: self._limits.most or None], len(survivors)

    def decide(self, quiet: bool, late: bool) -> Formed | None:
        """Return the next generation, if it is complete.

        `quiet`: no worker has come for some time. `late`: members of the last one are no longer awaited.
        """
        if self.awaited() and not late:
            return None
        members, survivors = self.chosen()
        if len(members) < self._limits.least:
            return None
        if not (survivors or quiet or late or len(members) == self._limits.most):
            return None
        ranked = named(member._replace(id=rank) for rank, member in enumerate(members))
        return Formed(self._running.number + 1, tuple(ranked), survivors, str(self._limits))

    def lacks(self) -> str:
        """Return what the generation waits for, as text."""
        awaited = self.awaited()
        if awaited:
            names = listed([repr(member.name) for member in awaited])
            what = "calls rendezvous_again(), or" if len(awaited) == 1 else "call rendezvous_again(), or one of them"
            return f"generation {self._running.number} is running until {names} {what} is lost"
        names = listed([repr(each.member.name or each.member.role) for each in self._here()])
        count = len(self.chosen()[0])
        more = "" if count < self._limits.least else "; more may join"
        return f"{plural(count, 'worker')} of {self._limits} joined: {names}{more}"

    def missing(self) -> list[str]:
        return [member.name for member in self.awaited()]

    def _here(self) -> list[Arrival]:
        """Return the living workers that have come, except those that do not know yet that they are members."""
        gone = {*self._dead, *self._ranks}
        return [each for each in self._come if each.member.incarnation not in gone]

    def _rank(self, arrival: Arrival) -> int:
        """Return the rank of a worker in the last generation, or -1 if it was not in that."""
        return self._ranks.get(arrival.before.me, -1)


class ElasticState(NamedTuple):
    """The content of the directory at one revision."""

    revision: int = 0
    running: Formed = NONE
    since: int = ABSENT  # the revision of `running`
    arrivals: tuple[Arrival, ...] = ()  # in order of arrival
    came: Mapping[str, int] = {}  # the revisions of the arrivals, by incarnation


def look(directory: Directory) -> ElasticState:
    revision, entries = directory.list(PREFIX)
    running = [(Formed.from_json(each.value), each.revision) for each in entries if each.key == GENERATION]
    come = sorted((each for each in entries if each.key.startswith(COME)), key=lambda each: each.created)
    arrivals = tuple(Arrival.from_json(each.value) for each in come)
    came = {each.key.removeprefix(COME): each.created for each in come}
    return ElasticState(revision, *(running or [(NONE, ABSENT)])[0], arrivals, came)


def arrivals_in(directory: Directory) -> list[Arrival]:
    return [Arrival.from_json(entry.value) for entry in directory.list(COME).entries]


def gone_on(arrivals: Iterable[Arrival], mine: Formed) -> list[int]:
    """Return the ranks of the workers that have left the generation `mine`, because they wait for the next one."""
    lives = {arrival.before.me for arrival in arrivals}
    return [member.id for member in mine.members if member.incarnation in lives]


def is_wanted(arrivals: Iterable[Arrival], mine: Formed, most: int, is_alive: IsAlive) -> bool:
    """Return True if a living worker waits that could join the generation after `mine`."""
    return any(_may_come(arrival, mine, most) and is_alive(arrival.member) for arrival in arrivals)


def _may_come(arrival: Arrival, mine: Formed, most: int) -> bool:
    if arrival.member.incarnation in mine.lives:
        return False
    if arrival.before.me in mine.lives:
        return True  # it has stopped waiting for the others
    has_room = not most or len(mine.members) < most
    return has_room and arrival.member.name not in {member.name for member in mine.members}


def lives_in(directory: Directory, is_alive: IsAlive) -> bool:
    """Return True if an elastic group runs, or forms, in this directory."""
    state = look(directory)
    running = () if state.running.has_ended else state.running.members
    return any(map(is_alive, (*running, *(each.member for each in state.arrivals))))


def end(directory: Directory, mine: Formed) -> bool:
    """Write that the group has ended normally with this generation; return False if another one has formed since."""
    state = look(directory)
    if state.running.number != mine.number:
        return False
    return directory.swap(GENERATION, mine._replace(has_ended=True).to_json().encode(), state.since).done
