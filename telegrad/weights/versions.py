"""What a party has of a feed's versions, for those who fetch from it: what to answer, and what to keep.

A version is kept while it is not whole yet, while somebody reads its pieces, and as the newest whole one; and where
others rely on this party for all of them, from the oldest on that anybody may still want. All else is let go of.

A version that was lent to this party lies in memory that its user may write to, so it is never given to others. A party
that others come to rely on drops it, and fetches its pieces.
"""

from __future__ import annotations

from collections.abc import Iterator

from telegrad.weights.words import About, Ask, Fetch, Lent, Opened, Out, Party, Piece, Refused


class Shelf:
    """The versions that are here, whole or in part."""

    def __init__(self, keeps_all: bool) -> None:
        self.keeps_all = keeps_all  # from `oldest` on
        self.newest = self.oldest = 0  # that there are, here or not
        self.pinned = 0  # the version that its own user is about to take
        self.about: dict[int, About] = {}
        self._lent: set[int] = set()  # to this party, for its user alone
        self._missing: dict[int, set[int]] = {}  # pieces of those that are not whole
        self._wants: dict[Party, Fetch] = {}  # that cannot be answered yet
        self._asks: dict[tuple[int, int], list[tuple[Party, int]]] = {}  # likewise, by version and piece; with bases
        self._reads: dict[Party, int] = {}  # who is at the pieces of which version

    # What is here

    def is_whole(self, number: int) -> bool:
        return number in self.about and number not in self._missing

    def newest_whole(self) -> int:
        """Its number; 0 where there is none."""
        return max(filter(self.is_whole, self.about), default=0)

    def missing(self, number: int) -> list[int]:
        return sorted(self._missing.get(number, ()))

    def put(self, number: int, about: About, lent: bool = False) -> Out:
        """A whole version is here."""
        if number not in self.about:
            self.about[number] = about
            self._lent |= {number} if lent else set()
        return self._settle()

    def drop_lent(self) -> None:
        """Keep no version that was lent to this party."""
        for number in self._lent:
            self.about.pop(number, None)
        self._lent.clear()

    def begin(self, number: int, about: About) -> Out:
        """The pieces of a version will come."""
        self.about[number] = about
        if about.pieces:
            self._missing[number] = set(range(about.pieces))
        return self._settle()

    def arrived(self, number: int, piece: int) -> Out:
        missing = self._missing.get(number)
        if missing is None or piece not in missing:
            return []
        missing.remove(piece)
        out: Out = [(reader, Piece(number, piece, base)) for reader, base in self._asks.pop((number, piece), ())]
        if missing:
            return out
        del self._missing[number]
        return out + self._settle()

    def drop(self, number: int) -> Out:
        """The rest of a version does not come."""
        if number not in self._missing:
            return []
        del self._missing[number], self.about[number]
        out: Out = []
        for reader in [reader for reader, read in self._reads.items() if read == number]:
            self._end_read(reader)
            out.append((reader, Refused(number, self.newest, self.oldest)))
        return out

    def pin(self, number: int) -> Out:
        """Keep that version until another is pinned, if it is here or comes."""
        self.pinned = number
        return self._settle()

    def told(self, newest: int, oldest: int) -> Out:
        """Which versions there are."""
        self.newest, self.oldest = max(newest, self.newest), max(oldest, self.oldest)
        return self._settle()

    # Who wants what

    def fetch(self, reader: Party, want: Fetch) -> Out:
        self._end_read(reader)
        self._wants[reader] = want
        return self._settle()

    def ask(self, reader: Party, asked: Ask) -> Out:
        number, piece, base = asked
        if self._reads.get(reader) != number:
            return []  # it has asked before it heard that this version was dropped
        if piece in self._missing.get(number, ()):
            self._asks.setdefault((number, piece), []).append((reader, base))
            return []
        return [(reader, Piece(number, piece, base))]

    def done(self, reader: Party, number: int) -> Out:
        if self._reads.get(reader) == number:
            self._end_read(reader)
        want = self._wants.get(reader)
        if want is not None and want.least == number:
            del self._wants[reader]
        return self._settle()

    def readers(self) -> set[Party]:
        """Those who wait for something, or are at pieces."""
        return self._wants.keys() | self._reads.keys()

    def forget(self, reader: Party) -> Out:
        self._wants.pop(reader, None)
        self._end_read(reader)
        return self._settle()

    def _end_read(self, reader: Party) -> None:
        if self._reads.pop(reader, None) is not None:
            rest = {asked: [each for each in asks if each[0] != reader] for asked, asks in self._asks.items()}
            self._asks = {asked: asks for asked, asks in rest.items() if asks}

    # What follows

    def _settle(self) -> Out:
        out = [(reader, answer) for reader, want in [*self._wants.items()] for answer in self._answers(reader, want)]
        self._free()
        return out

    def _answers(self, reader: Party, want: Fetch) -> Iterator[Lent | Opened | Refused]:
        number = want.least if want.exact else self.newest_whole()
        is_here = number >= want.least and number in self.about and number not in self._lent
        if is_here and (self.is_whole(number) or not want.whole):
            del self._wants[reader]
            about = self.about[number].for_who_knows(want.layout)
            if want.whole:
                yield Lent(number, about)
            else:
                self._reads[reader] = number
                yield Opened(number, about)
        elif not want.patient or (want.exact and not is_here and want.least < self.oldest):
            del self._wants[reader]
            yield Refused(want.least, self.newest, self.oldest)

    def _free(self) -> None:
        kept = {self.newest_whole(), self.pinned, *self._reads.values()}
        for number in [*filter(self.is_whole, self.about)]:
            if number not in kept and not (self.keeps_all and number >= self.oldest):
                del self.about[number]
        self._lent &= self.about.keys()
