"""Who fetches from whom: hosts form a chain, in the order in which they came, and so do those of one host.

    publisher ---> first of host B ---> first of host C ---> ...        in pieces, each passed on as it has come
        |                |                    |
     others of A      others of B          others of C                  whole, in memory that they share

Who is gone, or is blamed twice by who fetches from it, is bridged: the next one above takes its place. A host that
comes late is the last, and so gets what there is from a neighbour.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from telegrad.weights.words import Out, Party, Route

STRIKES = 2  # after so many a source is no longer tried


class Chain:
    """The routes of one feed."""

    def __init__(self, publisher: Party, host: str) -> None:
        self._publisher = publisher
        self._host = host
        self._hosts: dict[str, list[Party]] = {}
        self._host_of: dict[Party, str] = {}
        self._blamed: dict[Party, Counter[Party]] = {}  # by who blames
        self._told: dict[Party, tuple[Party, bool]] = {}
        self._count = 0  # of routes

    def __contains__(self, party: Party) -> bool:
        return party in self._host_of

    @property
    def leaves_the_host(self) -> bool:
        """Whether anybody is on another."""
        return bool(self._hosts.keys() - {self._host})

    def __iter__(self) -> Iterator[Party]:
        return iter([*self._host_of])

    def add(self, party: Party, host: str) -> Out:
        """A subscriber has come, or says anew that it is there, and is to be told its route."""
        if party not in self:
            self._host_of[party] = host
            self._hosts.setdefault(host, []).append(party)
        self._told.pop(party, None)
        return self._changes()

    def remove(self, party: Party) -> Out:
        host = self._host_of.pop(party, None)
        if host is None:
            return []
        self._hosts[host].remove(party)
        if not self._hosts[host]:
            del self._hosts[host]
        self._told.pop(party, None)
        self._blamed.pop(party, None)
        for blamed in self._blamed.values():
            del blamed[party]
        return self._changes()

    def blame(self, party: Party, source: Party) -> Out:
        """Nothing comes to `party` from its source: it is told a route in any case, upon which it tries again."""
        if self._told.get(party, (None,))[0] == source:
            self._blamed.setdefault(party, Counter())[source] += 1
        self._told.pop(party, None)
        return self._changes()

    def serves(self, party: Party) -> None:
        """Something has come to it."""
        self._blamed.pop(party, None)

    def _changes(self) -> Out:
        out: Out = []
        for party in self._host_of:
            route = self._route(party)
            if self._told.get(party) != route:
                self._told[party] = route
                self._count += 1
                out.append((party, Route(self._count, *route)))
        return out

    def _route(self, party: Party) -> tuple[Party, bool]:
        host = self._host_of[party]
        blamed = self._blamed.get(party, Counter())
        source = next((source for source in self._above(party) if blamed[source] < STRIKES), self._publisher)
        return source, self._host_of.get(source, self._host) == host

    def _above(self, party: Party) -> Iterator[Party]:
        """Whom it may fetch from, the nearest first."""
        host = self._host_of[party]
        if host == self._host:
            return
        first = self._hosts[host][0]
        if first != party:
            yield first
        heads = [parties[0] for name, parties in self._hosts.items() if name != self._host]
        yield from reversed(heads[: heads.index(first)])
