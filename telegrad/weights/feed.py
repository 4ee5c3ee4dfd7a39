"""The publisher's side of a feed: who subscribes, how far each is, and what there is for them."""

from __future__ import annotations

from typing import Any

from telegrad.weights.chain import Chain
from telegrad.weights.versions import Shelf
from telegrad.weights.words import About, Ask, Blame, Done, Fetch, Forgot, Here, Leave, News, Out, Over, Party, Taken

PATIENCE = 10  # looks for which a lost subscriber that wants every version may come back


class Feed:
    """Versions are numbered from 1 on."""

    def __init__(self, me: Party, host: str, keep: int) -> None:
        """`keep`: so many versions at most for those who want every one."""
        self.shelf = Shelf(keeps_all=True)
        self.taken: dict[Party, int] = {}  # by all who subscribe: the last that its user has
        self._every: set[Party] = set()  # who wants every one
        self._absent: dict[Party, tuple[int, int]] = {}  # of these, who was lost: what it had taken, and looks since
        self._chain = Chain(me, host)
        self._keep = keep

    @property
    def leaves_the_host(self) -> bool:
        """Whether anybody subscribes on another."""
        return self._chain.leaves_the_host

    def publish(self, about: About) -> Out:
        """A version is here; its number is the shelf's newest."""
        number = self.shelf.newest + 1
        out = self.shelf.put(number, about)
        return out + self._moved(number)

    def receive(self, sender: Party, word: Any) -> Out:
        """A subscriber says something."""
        if sender not in self.taken:
            return [(sender, Forgot())] if not isinstance(word, Leave) else []
        if isinstance(word, Here):
            return []
        if isinstance(word, Leave):
            return self._remove(sender)
        if isinstance(word, Taken):
            return self._take(sender, word)
        if isinstance(word, Blame):
            return self._chain.blame(sender, word.source)
        if isinstance(word, Fetch):
            return self.shelf.fetch(sender, word)
        if isinstance(word, Ask):
            return self.shelf.ask(sender, word)
        assert isinstance(word, Done), word
        return self.shelf.done(sender, word.number)

    def join(self, party: Party, host: str, taken: int, every: bool) -> Out:
        """It subscribes, or does so again."""
        self.taken[party] = taken
        self._absent.pop(party, None)
        (self._every.add if every else self._every.discard)(party)
        news: Out = [(party, News(self.shelf.newest, self.shelf.oldest))]
        return news + self._chain.add(party, host)

    def lost(self, incarnation: str) -> Out:
        """A connection with that worker has ended: if it lives, its subscribers come again."""
        out: Out = []
        for party in [party for party in self.taken if party.incarnation == incarnation]:
            if party in self._every:
                self._absent[party] = self.taken[party], 0
            out += [*self._remove(party), (party, Forgot())]
        return out

    def look(self) -> Out:
        """Now and then: who was lost does not come back."""
        self._absent = {party: (taken, looks + 1) for party, (taken, looks) in self._absent.items() if looks < PATIENCE}
        return self._moved(self.shelf.newest)

    def close(self) -> Out:
        return [(party, Over()) for party in self.taken]

    def behind(self, number: int) -> list[Party]:
        """Those who have not taken that version yet, nor a later one."""
        return [party for party, taken in self.taken.items() if taken < number]

    def _take(self, party: Party, word: Taken) -> Out:
        self.taken[party] = max(word.number, self.taken[party])
        (self._every.add if word.every else self._every.discard)(party)
        self._chain.serves(party)
        return self._moved(self.shelf.newest)

    def _remove(self, party: Party) -> Out:
        del self.taken[party]
        self._every.discard(party)
        return self.shelf.forget(party) + self._chain.remove(party) + self._moved(self.shelf.newest)

    def _moved(self, newest: int) -> Out:
        """Tell all what there is, where that has changed."""
        last = [*(self.taken[party] for party in self._every), *(taken for taken, _ in self._absent.values())]
        wanted = min(last, default=newest - 1) + 1
        oldest = min(newest, max(wanted, newest - self._keep + 1))
        before = self.shelf.newest, self.shelf.oldest
        out = self.shelf.told(newest, oldest)
        now = News(self.shelf.newest, self.shelf.oldest)
        return out + [(party, now) for party in self.taken] if now != before else out
