"""Who has a published value, where several workers could: decided among them, without a store.

Each that publishes a value under a name makes a bid for it. It asks all others for theirs, having looked who is there:
so of two workers at least one asks the other. Who asks while another has the value stands by; else, of all who want
it, the one of the lowest rank gets it. A worker that decides remembers who has asked it meanwhile, and may have been
told nothing to its own question before. Where that is one whom it has not asked, a newcomer or one that has died since,
it asks all once more.

    STANDS_BY --begin()--> ASKS --answered()--> OWNS, STANDS_BY, or ASKS once more

Who stands by begins again whenever a worker has gone. Events come one at a time; at most one question of a bid is
under way.
"""

from __future__ import annotations

from collections.abc import Mapping

Rank = tuple[int, str]  # a worker's rank, and its incarnation

NOTHING, STANDS_BY, ASKS, OWNS = "nothing", "stands by", "asks", "owns"


class Bid:
    """One worker's bid to one name."""

    def __init__(self, me: Rank) -> None:
        self.me = me
        self.state = STANDS_BY
        self._before: set[Rank] = set()  # who is of a lower rank, and has asked since this one began to

    def begin(self) -> bool:
        """Ask all others; whether there is anything to ask."""
        if self.state == OWNS:
            return False
        self.state, self._before = ASKS, set()
        return True

    def asked(self, who: Rank) -> str:
        """Another asks; what to answer."""
        if self.state == ASKS and who < self.me:
            self._before.add(who)
        return self.state

    def answered(self, answers: Mapping[Rank, str]) -> str:
        """What all said who are there; the state that follows."""
        wanted = any(state == OWNS or (state != NOTHING and who < self.me) for who, state in answers.items())
        if wanted or not self._before.isdisjoint(answers):
            self.state = STANDS_BY
        elif self._before:
            self.begin()
        else:
            self.state = OWNS
        return self.state

    def give_up(self) -> None:
        """The value could not be made."""
        self.state = STANDS_BY

    def __repr__(self) -> str:
        return f"<Bid of rank {self.me[0]}: {self.state}>"
