"""Whether a worker has died whose connection broke: it may live all the same."""

from __future__ import annotations

from time import monotonic
from typing import NamedTuple

from telegrad.errors import PeerError, PeerSilent
from telegrad.group.address import knock
from telegrad.group.members import Member

PATIENCE = 2.0  # seconds for a knock to be answered
KNOCKS = (0.0, 0.25, 1.0, 4.0)  # seconds before each; who is silent at the last is dead


class Doubt(NamedTuple):
    """A worker may have died; how often it was looked for, and when it is to be next."""

    who: Member
    knocks: int
    due: float
    why: PeerError  # it is doubted

    def has_died(self) -> bool | None:
        """Knock; None where that is not known yet."""
        if isinstance(self.why, PeerSilent):  # the kernel would answer in its place
            return True
        answer = knock(self.who.tcp, PATIENCE)
        if answer is False:
            return True
        return answer is not True if self.knocks + 1 == len(KNOCKS) else None

    def later(self) -> Doubt:
        """The same, for the next knock."""
        return self._replace(knocks=self.knocks + 1, due=monotonic() + KNOCKS[self.knocks + 1])
