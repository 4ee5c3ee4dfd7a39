"""What workers write to one another about references: see protocol.py, which says when."""

from __future__ import annotations

from typing import NamedTuple

from telegrad._core.membership.members import Identity

Id = tuple[str, int]  # who made it, and that worker's number for it

CONFIRM = "confirm"  # user to owner: I hold this fork
CONFIRMED = "confirmed"  # owner to user: I know it
SETTLED = "settled"  # child to parent: you need not hold on for this fork any longer
DROPPED = "dropped"  # user to owner: this fork has ended
ASK = "ask"  # sender to receiver: the connection broke; did this fork come?
MISSING = "missing"  # receiver to sender: it did not, and will be refused
STILLBORN = "stillborn"  # creator to owner: the creating call will not come, if it has not
WANTED = "wanted"  # owner to creator: does the creating call come?
GONE = "gone"  # owner to user: there is no value for this fork
FORGOT = "forgot"  # I took you for dead, and let go of all that there was between us; with my last fork before that

NOTHING: Id = ("", 0)  # in a letter that is about no reference


def number(ref: Id) -> str:
    """A reference as people read it."""
    return f"{ref[0].rpartition('#')[0]}/{ref[1]}"


class Letter(NamedTuple):
    """A control message about one fork of one reference."""

    kind: str
    ref: Id
    fork: Id


def key_of(who: Identity) -> str:
    """A worker in this life: one of its name that comes later has another."""
    return f"{who.name}#{who.incarnation}"
