"""The keys of an elastic group in its directory.

    elastic/generation  the last generation that has formed (`Formed`); whether the group has ended with it
    elastic/come/LIFE   a worker that wants to join the next one (`Arrival`); has the lease of its process

A generation forms by one compare-and-set of `elastic/generation`, with the previous number plus one. Therefore each
number has one generation, whichever worker decides, even if several do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from telegrad._core.directory.directory import ABSENT, Directory
from telegrad._core.joining.quorum import NONE, Arrival, Formed
from telegrad._core.membership.members import Member

PREFIX = "elastic/"
GENERATION, COME = PREFIX + "generation", PREFIX + "come/"

IsAlive = Callable[[Member], bool]


class ElasticState(NamedTuple):
    """The content of the directory at one revision."""

    revision: int = 0
    running: Formed = NONE
    since: int = ABSENT  # the revision of `running`
    arrivals: tuple[Arrival, ...] = ()  # in order of arrival
    came: tuple[int, ...] = ()  # the revisions of the arrivals


def look(directory: Directory) -> ElasticState:
    """Read the current generation and the arrivals."""
    revision, entries = directory.list(PREFIX)
    running = [(Formed.from_json(each.value), each.revision) for each in entries if each.key == GENERATION]
    come = sorted((each for each in entries if each.key.startswith(COME)), key=lambda each: each.created)
    arrivals = tuple(Arrival.from_json(each.value) for each in come)
    return ElasticState(revision, *(running or [(NONE, ABSENT)])[0], arrivals, tuple(each.created for each in come))


def arrivals_in(directory: Directory) -> list[Arrival]:
    """Read which workers wait for the next generation."""
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
