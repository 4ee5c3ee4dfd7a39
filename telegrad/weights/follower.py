"""A subscriber's side of a feed: what it fetches, from whom, and what it passes on.

A subscriber on the host of its source is lent versions whole, which takes no time: those that its user wants, and one
ahead of that, where the user has taken the last. It passes none of these on, as its user may write there. The first
subscriber of a host fetches all versions, in pieces and in order, since others rely on it; it asks for a few pieces at
a time, and passes each on as soon as it has come.
"""

from __future__ import annotations

from typing import Any

from telegrad.weights.versions import Shelf
from telegrad.weights.words import (
    About,
    Ask,
    Blame,
    Done,
    Fetch,
    Forgot,
    Here,
    Leave,
    Lent,
    News,
    Opened,
    Out,
    Party,
    Piece,
    Refused,
    Route,
    Taken,
)

WINDOW = 4  # pieces that are asked for at a time
PATIENCE = 10  # looks without anything new, after which the source is blamed


class Follower:
    """The machine of one subscriber."""

    def __init__(self, publisher: Party | None = None) -> None:
        """The publisher is known at the latest when it has told something."""
        self.publisher = publisher
        self.shelf = Shelf(keeps_all=False)
        self.source: Party | None = None
        self.whole = True  # from the source's memory
        self._route = 0
        self._want: Fetch | None = None  # of the user, where versions are lent
        self._taken = 0  # by the user; unless it goes through all of them, one by one
        self._number = 0  # of the version whose pieces are being fetched, or 0
        self._asked: set[int] = set()
        self._distrusted = 0  # the version whose changes do not fit
        self._layouts: dict[int, bytes] = {}  # the last one's description, and those of what is here
        self._looks = 0  # since something came

    @property
    def waits(self) -> bool:
        """Whether the source owes an answer to the user."""
        return self._want is not None

    def receive(self, sender: Party, word: Any) -> Out:
        """Somebody says something: who fetches from here, the source, or the publisher."""
        if isinstance(word, Fetch):
            return self.shelf.fetch(sender, word)
        if isinstance(word, Ask):
            return self.shelf.ask(sender, word)
        if isinstance(word, Done):
            return self.shelf.done(sender, word.number)
        if isinstance(word, Leave):
            return self.shelf.forget(sender) + self._blame(sender)
        if isinstance(word, News):
            return self._told(word.newest, word.oldest)
        if isinstance(word, Route):
            return self._turn(word)
        self._looks = 0
        if isinstance(word, Lent):
            return self._lent(word)
        if isinstance(word, Opened):
            return self._opened(sender, word)
        if isinstance(word, Piece):
            return self._arrived(word)
        if isinstance(word, Refused):
            return self._refused(sender, word)
        assert isinstance(word, Forgot), word
        return self._again() if sender == self.source else []

    def expects(self, word: Piece) -> bool:
        """Whether the bytes of a piece are to be kept."""
        return word.piece in self.shelf.missing(word.number)

    def distrust(self, number: int) -> Out:
        """What has changed in a version does not fit what is here: let all of it come."""
        self._distrusted = number
        return self._again() if number == self._number else []

    def want(self, least: int, exact: bool, patient: bool) -> Out:
        """The user wants a version that is not here."""
        out = self.shelf.pin(least if exact else 0)
        want, before = Fetch(least, exact, patient, True, self._known()), self._want
        is_ahead = before is not None and not (before.patient or exact) and before.least <= least
        if not self.whole or want == before or is_ahead:  # whose answer says whether it was enough
            return out
        self._want = want
        return out + self._again()

    def taken(self, number: int, every: bool) -> Out:
        """The user has that version now."""
        assert self.publisher is not None
        self._taken = number if not every else 0
        return [(self.publisher, Taken(number, every)), *self.shelf.pin(0)]

    def lost(self, incarnation: str) -> Out:
        """A connection with that worker has ended."""
        out: Out = []
        for reader in [reader for reader in self.shelf.readers() if reader.incarnation == incarnation]:
            out += [*self.shelf.forget(reader), (reader, Forgot())]
        if self.source is not None and self.source.incarnation == incarnation:
            out += self._blame(self.source)
        return out

    def look(self) -> Out:
        """Now and then: where nothing comes, ask again; others may have forgotten this one, and could not say so."""
        out: Out = [(self.publisher, Here())] if self.publisher is not None else []
        if self.source is None or not (self._want or self._number):
            return out
        self._looks += 1
        if self._number and self._looks % PATIENCE == 0:
            return out + self._blame(self.source)
        return out + self._again() if self._looks > 1 else out

    def leave(self) -> Out:
        """No longer a source, nor a reader."""
        return self._stop() + ([(self.publisher, Leave())] if self.publisher is not None else [])

    def _stop(self) -> Out:
        """Want nothing more of the source."""
        number = self._number or (self._want.least if self._want is not None else 0)
        return [(self.source, Done(number))] if self.source is not None and number else []

    def _blame(self, source: Party) -> Out:
        """Where that is the publisher itself, there is nobody to tell."""
        if self.publisher is None or source != self.source or source == self.publisher:
            return []
        return [(self.publisher, Blame(source))]

    # What comes

    def _told(self, newest: int, oldest: int) -> Out:
        out = self.shelf.told(newest, oldest) + self._pursue()
        if self.whole and self._want is None and 0 < self._taken == self.shelf.newest_whole() < newest:
            out += self.want(self._taken + 1, exact=False, patient=False)
        return out

    def _turn(self, route: Route) -> Out:
        if route.number <= self._route:
            return []
        out = self._stop() if route.source != self.source else []
        self._route, self.source, self.whole = route
        self.shelf.keeps_all = not self.whole
        if self.whole:
            out += self._drop()
        else:
            self._want = None
            self.shelf.drop_lent()
        return out + self._again()

    def _lent(self, lent: Lent) -> Out:
        if not self.whole:  # it was on its way when the route changed; its pieces are fetched
            return []
        about = self._described(lent.about)
        if about is None:
            return self._again()
        out = self.shelf.put(lent.number, about, lent=True)
        if self._want is not None and lent.number >= self._want.least:
            self._want = None
        return out + self._pursue()

    def _opened(self, sender: Party, opened: Opened) -> Out:
        if sender != self.source or opened.number != self._number:
            return []
        about = self._described(opened.about)
        if about is None:
            return self._again()
        out = self.shelf.begin(opened.number, about) if opened.number not in self.shelf.about else []
        self._asked.clear()
        return out + self._ask()

    def _arrived(self, word: Piece) -> Out:
        out = self.shelf.arrived(word.number, word.piece)
        return out + self._ask() if word.number == self._number else out

    def _refused(self, sender: Party, refused: Refused) -> Out:
        out = self.shelf.told(refused.newest, refused.oldest)
        if sender == self.source:
            if self._want is not None and refused.least == self._want.least:
                self._want = None
            if refused.least == self._number:
                out += self._drop()
        return out + self._pursue()

    # What to do next

    def _pursue(self) -> Out:
        """Begin to fetch the next version, unless one is being fetched."""
        if self.source is None or self.whole or self._number:
            return []
        self._number = self._lacking()
        return self._again() if self._number else []

    def _lacking(self) -> int:
        """The first that is not here, of those that anybody may want; or 0."""
        numbers = range(max(1, self.shelf.oldest), self.shelf.newest + 1)
        return next((number for number in numbers if not self.shelf.is_whole(number)), 0)

    def _again(self) -> Out:
        """Say to the source, from the beginning, what is wanted."""
        if self.source is None:
            return []
        if self.whole:
            return [(self.source, self._want)] if self._want is not None else []
        if not self._number:
            return self._pursue()
        self._asked.clear()
        return [(self.source, Fetch(self._number, True, True, False, self._known()))]

    def _ask(self) -> Out:
        """Keep some pieces under way; or be done."""
        assert self.source is not None
        missing = self.shelf.missing(self._number)
        self._asked.intersection_update(missing)
        if not missing:
            out: Out = [(self.source, Done(self._number))]
            self._number = 0
            return out + self._pursue()
        fresh = [piece for piece in missing if piece not in self._asked][: WINDOW - len(self._asked)]
        self._asked.update(fresh)
        base = self._base()
        return [(self.source, Ask(self._number, piece, base)) for piece in fresh]

    def _base(self) -> int:
        """A version that is here, from which changes may lead to the one that is being fetched; or 0."""
        base, number, about = self.shelf.newest_whole(), self._number, self.shelf.about
        fits = 0 < base < number != self._distrusted and about[base].layout == about[number].layout
        return base if fits else 0

    def _drop(self) -> Out:
        number, self._number = self._number, 0
        self._asked.clear()
        return self.shelf.drop(number)

    # Layouts

    def _known(self) -> int:
        return max(self._layouts, default=0)

    def _described(self, about: About) -> About | None:
        """With its description; None where the source took it for known."""
        if about.description:
            here = {each.layout for each in self.shelf.about.values()}
            self._layouts = {number: text for number, text in self._layouts.items() if number in here}
            self._layouts[about.layout] = about.description
        elif about.layout not in self._layouts:
            self._layouts.clear()
            return None
        return about._replace(description=self._layouts[about.layout])
