"""The source of each subscriber. Hosts form a chain, in the order in which they joined, as do subscribers of one host.

    publisher ---> first of host B ---> first of host C ---> ...        in pieces, forwarded as each arrives
        |                |                    |
     others of A      others of B          others of C                  whole, in shared memory

A source that has gone, or that a reader has reported twice, is skipped: the reader gets the next source above. A host
that joins late is the last of the chain, and so gets versions from a neighbor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from telegrad.weights.transfer.weight_messages import EndpointAddress, FetchFrom, Outgoing

MAX_REPORTS = 2  # a source with this many reports is no longer used


class RelayChain:
    """The sources of the subscribers of one publisher."""

    def __init__(self, publisher: EndpointAddress, host: str) -> None:
        self._publisher = publisher
        self._host = host
        self._hosts: dict[str, list[EndpointAddress]] = {}
        self._host_of: dict[EndpointAddress, str] = {}
        self._reported: dict[EndpointAddress, Counter[EndpointAddress]] = {}  # by reader: reports per source
        self._told: dict[EndpointAddress, tuple[EndpointAddress, bool]] = {}  # by reader: its current source
        self._count = 0  # number of messages

    def __contains__(self, party: EndpointAddress) -> bool:
        return party in self._host_of

    @property
    def leaves_the_host(self) -> bool:
        """True if a subscriber is on another host."""
        return bool(self._hosts.keys() - {self._host})

    def add(self, party: EndpointAddress, host: str) -> Outgoing:
        """Add a subscriber, or send its source to one that joins again."""
        if party not in self:
            self._host_of[party] = host
            self._hosts.setdefault(host, []).append(party)
        self._told.pop(party, None)
        return self._changes()

    def remove(self, party: EndpointAddress) -> Outgoing:
        host = self._host_of.pop(party, None)
        if host is None:
            return []
        self._hosts[host].remove(party)
        if not self._hosts[host]:
            del self._hosts[host]
        self._told.pop(party, None)
        self._reported.pop(party, None)
        for reports in self._reported.values():
            del reports[party]
        return self._changes()

    def report_source(self, party: EndpointAddress, source: EndpointAddress) -> Outgoing:
        """Count a report that `party` gets no data from `source`. Send it a source, which makes it try again."""
        if self._told.get(party, (None,))[0] == source:
            self._reported.setdefault(party, Counter())[source] += 1
        self._told.pop(party, None)
        return self._changes()

    def mark_working(self, party: EndpointAddress) -> None:
        """Reset the reports of a subscriber that has received a version."""
        self._reported.pop(party, None)

    def _changes(self) -> Outgoing:
        out: Outgoing = []
        for party in self._host_of:
            route = self._route(party)
            if self._told.get(party) != route:
                self._told[party] = route
                self._count += 1
                out.append((party, FetchFrom(self._count, *route)))
        return out

    def _route(self, party: EndpointAddress) -> tuple[EndpointAddress, bool]:
        host = self._host_of[party]
        reports = self._reported.get(party, Counter())
        source = next((source for source in self._above(party) if reports[source] < MAX_REPORTS), self._publisher)
        return source, self._host_of.get(source, self._host) == host

    def _above(self, party: EndpointAddress) -> Iterator[EndpointAddress]:
        """Yield the sources of a subscriber, the nearest first."""
        host = self._host_of[party]
        if host == self._host:
            return
        first = self._hosts[host][0]
        if first != party:
            yield first
        heads = [parties[0] for name, parties in self._hosts.items() if name != self._host]
        yield from reversed(heads[: heads.index(first)])
