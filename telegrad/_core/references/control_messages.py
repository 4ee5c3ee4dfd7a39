"""Control messages of the reference protocol; reference_protocol.py defines when they are sent."""

from __future__ import annotations

from typing import NamedTuple

from telegrad._core.membership.members import Identity

Id = tuple[str, int]  # the worker that created it, and its number there

CONFIRM = "confirm"  # user to owner: I hold this fork
CONFIRMED = "confirmed"  # owner to user: I know it
SETTLED = "settled"  # child to parent: you need not keep your fork for this one any longer
DROPPED = "dropped"  # user to owner: this fork has ended
ASK = "ask"  # sender to receiver: the connection broke; did this fork arrive?
MISSING = "missing"  # receiver to sender: it did not, and I will refuse it
STILLBORN = "stillborn"  # creator to owner: the creating call will not arrive, if it has not
WANTED = "wanted"  # owner to creator: will the creating call arrive?
GONE = "gone"  # owner to user: this fork has no value
FORGOT = "forgot"  # I declared you dead and dropped all shared state; contains my last fork number before that

NOTHING: Id = ("", 0)  # in a message without a reference


def number(ref: Id) -> str:
    """Return a reference's id as shown to users."""
    return f"{ref[0].rpartition('#')[0]}/{ref[1]}"


class ControlMessage(NamedTuple):
    """A control message about one fork of one reference."""

    kind: str
    ref: Id
    fork: Id


def key_of(who: Identity) -> str:
    """Return a key for this incarnation of a worker: a later worker of the same name has another key."""
    return f"{who.name}#{who.incarnation}"
