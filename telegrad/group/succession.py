"""Who serves the store of a dynamic group once its server has gone, and how all come to use the same one.

Of the members who are there the first serves: those at the place where newcomers look go before others, then the rank
counts. Each store has a term, higher than that of the one before. Whoever has lost the store asks the first:

    orphan                     the first                    others
      | -- Orphaned(term) ------> |                            |     it looks whether it has lost the store, too
      |                           |     if so, it serves one in a higher term
      | <------------------ Seat -| -- Seat ---------------> |     all list themselves there

If the store answers the first, it sends the `Seat` of that one, and the orphan tries again. Who is silent is passed
over: the next serves, in a term higher by one more for each that was passed over. So of two stores that of the higher
term holds (of the same term, that of the lower rank); whoever speaks of another is told, and moves. That ends what
several have begun who did not see the same members, and the store of a server who was only out of reach.

Where the first had to serve at another place than that where newcomers look, it moves there later: it serves a store in
the next term, and says so to all.

A majority is not asked for: of two members, the one that is left must go on. Where a network parts a group for so long
that both sides take each other for dead, there are two groups, until they hear of each other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

PATIENCE = 5.0  # seconds for the first to say something, which may have to find out first that its store is silent
AGAIN = 0.5  # seconds until it is asked again, since words can be lost with a connection

Entry = TypeVar("Entry")


class Seat(NamedTuple):
    """A store, and so what is said of it to all."""

    term: int
    id: int  # of who serves it; -1 where that is no member
    incarnation: str
    host: str
    port: int

    def beats(self, other: Seat) -> bool:
        """Whether this is the one to use, of two."""
        return (self.term, -self.id, self.incarnation) > (other.term, -other.id, other.incarnation)


class Orphaned(NamedTuple):
    """The sender has lost the store of this term."""

    term: int
    entry: str  # what it publishes of itself, for those who do not know it yet


Word = Seat | Orphaned


class Serve(NamedTuple):
    """Serve a store of that term; `served` must follow."""

    term: int


class Use(NamedTuple):
    """Go over to that store; `lost` must follow where it cannot be reached."""

    store: Seat


class Look(NamedTuple):
    """See whether the store answers: `answers` or `lost` must follow."""


class Tell(NamedTuple):
    """Send that word to the member of this incarnation."""

    to: str
    word: Word


Act = Serve | Use | Look | Tell


class Succession:
    """One member's part. Feed it what happens; it says what to do. Members go by their incarnations."""

    def __init__(self, me: str, entry: str, store: Seat) -> None:
        self._me = me
        self._entry = entry
        self.store = store  # the one to use, as far as this member knows
        self.orphaned = False  # it does not answer
        self._passed: set[str] = set()  # who was silent
        self._asked = ""  # the first
        self._since = self._last = 0.0  # when it was asked, first and last
        self._askers: dict[str, None] = {}  # who wants to know, in order

    def __repr__(self) -> str:
        return f"<Succession: term {self.store.term}{', orphaned' * self.orphaned}>"

    @property
    def serves(self) -> bool:
        """Whether this member does."""
        return self.store.incarnation == self._me

    def lost(self, silent: bool = False) -> None:
        """The store does not answer this member; `silent`: nor does its host refuse, so the server is not asked."""
        if not self.orphaned:
            self.orphaned = True
            self._passed = {self.store.incarnation} if silent else set()
            self._asked = ""

    def answers(self) -> list[Act]:
        """The store does."""
        self.orphaned = False
        askers, self._askers = self._askers, {}
        return [Tell(asker, self.store) for asker in askers]

    def move(self) -> list[Act]:
        """The store answers, and shall be at another place, which is this member's."""
        return [] if self.orphaned else [Serve(self.store.term + 1)]

    def step(self, now: float, candidates: Sequence[str]) -> list[Act]:
        """Time has passed; those who are there, this one among them, in the order in which they should serve."""
        if not self.orphaned:
            return []
        first = next(each for each in candidates if each == self._me or each not in self._passed)
        if first == self._me:
            return [Serve(self.store.term + 1 + len(self._passed))]
        if first != self._asked:
            self._asked, self._since, self._last = first, now, now
        elif now - self._since >= PATIENCE:
            self._passed.add(first)
            return self.step(now, candidates)
        elif now - self._last >= AGAIN:
            self._last = now
        else:
            return []
        return [Tell(first, Orphaned(self.store.term, self._entry))]

    def served(self, store: Seat, others: Iterable[str]) -> list[Act]:
        """This member serves now."""
        self.store = store
        told = dict.fromkeys([*others, *self._askers])
        self._askers.clear()
        self.orphaned = False
        return [Tell(other, store) for other in told if other != self._me]

    def receive(self, sender: str, word: Word) -> list[Act]:
        """Somebody has said something."""
        if isinstance(word, Orphaned):
            return self._on_orphaned(sender, word)
        if word == self.store:
            return self._use() if self.orphaned else []
        if not word.beats(self.store):
            return [Tell(sender, self.store)]
        self.store = word
        return self._use()

    def _on_orphaned(self, sender: str, word: Orphaned) -> list[Act]:
        if word.term < self.store.term:
            return [Tell(sender, self.store)]
        self._askers[sender] = None
        return [] if self.orphaned else [Look()]

    def _use(self) -> list[Act]:
        self.orphaned = False
        askers, self._askers = self._askers, {}
        return [Use(self.store), *(Tell(asker, self.store) for asker in askers)]


class Changes(NamedTuple):
    """What a look at the store has shown, by incarnation."""

    new: list[str]
    gone: list[str]  # they were listed in this store, and are not any more
    missing: list[str]  # they never were, though they were members before: they may be about to come
    ghosts: list[str]  # listed by who did not know yet that they have gone


def compared(
    present: Mapping[str, Entry], listed: Mapping[str, Entry], met: Collection[str], gone: Collection[str]
) -> Changes:
    """`present` are the members so far, `met` those that were seen in this store, `gone` those that were members once.

    Nobody comes back under an incarnation that has gone. So nobody is seen to come or to go since the store is another.
    """
    absent = [each for each in present if each not in listed]
    return Changes(
        [each for each in listed if each not in present and each not in gone],
        [each for each in absent if each in met],
        [each for each in absent if each not in met],
        [each for each in listed if each in gone],
    )
