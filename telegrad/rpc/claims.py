"""Who has a published value, where several workers could: decided among them, without a store.

Each that publishes a value under a name has a claim to it. It asks all others for theirs, having looked who is there:
so of two workers at least one asks the other. Who asks while another has the value stands by; else, of all who want
it, the one of the lowest rank gets it. A worker that decides remembers who has asked it meanwhile: had that one asked
earlier, it would have been told nothing, or have got the value itself.

    STANDS_BY --begin()--> ASKS --answered()--> OWNS, or STANDS_BY

Who stands by begins again whenever a worker has gone, and when one of a higher rank asks: that one will leave it the
value, unless somebody has it. Events come one at a time; at most one question of a claim is under way.
"""

from __future__ import annotations

from collections.abc import Iterable

Rank = tuple[int, str]  # a worker's rank, and its incarnation

NOTHING, STANDS_BY, ASKS, OWNS = "nothing", "stands by", "asks", "owns"


class Claim:
    """One worker's claim to one name."""

    def __init__(self, me: Rank) -> None:
        self.me = me
        self.state = STANDS_BY
        self._preceded = False  # one of a lower rank has asked since this one began to

    def begin(self) -> bool:
        """Ask all others; whether there is anything to ask."""
        if self.state == OWNS:
            return False
        self.state, self._preceded = ASKS, False
        return True

    def asked(self, who: Rank) -> tuple[str, bool]:
        """Another asks: what to answer, and whether this one is to begin."""
        if self.state == ASKS and who < self.me:
            self._preceded = True
        return self.state, self.state == STANDS_BY and self.me < who

    def answered(self, answers: Iterable[tuple[Rank, str]]) -> str:
        """All who are there have answered; the state that follows."""
        taken = self._preceded or any(state == OWNS or (state != NOTHING and who < self.me) for who, state in answers)
        self.state = STANDS_BY if taken else OWNS
        return self.state

    def give_up(self) -> None:
        """The value could not be made."""
        self.state = STANDS_BY

    def __repr__(self) -> str:
        return f"<Claim of rank {self.me[0]}: {self.state}>"
