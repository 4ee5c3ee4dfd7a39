"""Whether a worker has died whose connection broke: it may live all the same."""

from __future__ import annotations

from typing import Any, NamedTuple

from telegrad.errors import PeerError, PeerSilent
from telegrad.group.address import knock
from telegrad.group.members import Member

PATIENCE = 2.0  # seconds for a knock to be answered
REMEMBERED = 1024  # workers of which something is kept that are no members
KNOCKS = (0.0, 0.25, 1.0, 4.0)  # seconds before each; who is silent at the last is dead


class Doubt(NamedTuple):
    """A worker may have died; how often it was looked for, and when it is to be next."""

    who: Member
    knocks: int
    due: float
    why: PeerError  # it is doubted

    def knock(self) -> bool | None:
        """Return True if the worker listens, False if nobody does; None where its host is silent."""
        if isinstance(self.why, PeerSilent):  # the kernel would answer in its place
            return False
        return knock(self.who.tcp, PATIENCE)

    def after(self, answer: bool | None, now: float) -> Doubt | bool:
        """Return whether the worker has died, given what a knock was answered; the next doubt if that is not known."""
        if answer is False:
            return True
        knocks = self.knocks + 1
        if knocks >= len(KNOCKS):
            return answer is None
        return self._replace(knocks=knocks, due=now + KNOCKS[knocks])


def remember(table: dict[str, Any], incarnation: str, told: Any) -> None:
    """Note something of a worker that is no member; only the newest are kept."""
    table[incarnation] = told
    if len(table) > REMEMBERED:
        del table[next(iter(table))]
