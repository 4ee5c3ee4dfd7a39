"""The publisher's state machine: its subscribers, their progress, and the versions that are kept for them.

The source of each subscriber. Hosts form a chain, in the order in which their first subscribers joined.

    publisher ---> first of host B ---> first of host C ---> ...        in pieces, forwarded as each arrives
        |                |                    |
     others of A      others of B          others of C                  whole, in shared memory

A source that has gone, or that a reader has reported twice, is skipped: the reader gets the next source above. A host
that joins late is the last of the chain, and so gets versions from a neighbor. Each source is above its readers in this
order, so the routes that a publisher assigns have no cycle.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from telegrad.weights import transfer
from telegrad.weights.transfer import EndpointAddress, Outgoing, TransferProgress, VersionInfo, VersionStore

MAX_REPORTS = 2  # a source with this many reports is no longer used
PATIENCE = 10  # ticks for which versions are kept for a lost subscriber that reads every one


class PublisherProtocol:
    """The versions of one publisher, numbered from 1."""

    def __init__(self, me: EndpointAddress, host: str, keep: int) -> None:
        """`keep`: the maximum number of versions for subscribers that read every one."""
        self.store = VersionStore(keeps_all=True)
        self.taken: dict[EndpointAddress, TransferProgress] = {}  # of the user of each subscriber
        # lost subscribers that read every version: their last version, and ticks since
        self._absent: dict[EndpointAddress, tuple[int, int]] = {}
        self.chain = RelayChain(me, host)
        self._keep = keep
        self._closed = False

    def publish(self, info: VersionInfo) -> Outgoing:
        """Add a version. Its number is then `store.newest`."""
        number = self.store.newest + 1
        out = self.store.put(number, info)
        return out + self._announce(number)

    def receive(self, sender: EndpointAddress, message: Any) -> Outgoing:
        if sender not in self.taken:
            # The subscriber was dropped when a connection broke, and cannot know that. Unsubscribe is not answered,
            # since no endpoint is left there.
            return [(sender, transfer.JoinAgain())] if not isinstance(message, transfer.Unsubscribe) else []
        if isinstance(message, transfer.Alive):
            return []
        if isinstance(message, transfer.Unsubscribe):
            return self._remove(sender)
        if isinstance(message, TransferProgress):
            # Two reports of one subscriber may overtake each other.
            number = max(message.number, self.taken[sender].number)
            self.taken[sender] = TransferProgress(number, message.every)
            self.chain.mark_working(sender)
            return self._announce(self.store.newest)
        if isinstance(message, transfer.SourceFailed):
            return self.chain.report_source(sender, message.source)
        return self.store.receive(sender, message)

    def join(self, party: EndpointAddress, host: str, taken: int, every: bool) -> Outgoing:
        """Add a subscriber, new or joining again."""
        # Its call found this publisher before the name was removed, and the others have been told of the end.
        if self._closed:
            return [(party, transfer.Closed())]
        self.taken[party] = TransferProgress(taken, every)
        self._absent.pop(party, None)
        available: Outgoing = [(party, transfer.Available(self.store.newest, self.store.oldest))]
        return available + self.chain.add(party, host)

    def lost(self, incarnation: str) -> Outgoing:
        """Remove the subscribers of a worker whose connection has ended. If they are alive, they join again."""
        out: Outgoing = []
        for party in [party for party in self.taken if party.incarnation == incarnation]:
            # A reader of every version would miss some if they were dropped while it joins again. So its position
            # counts for the oldest kept version for PATIENCE more ticks.
            if self.taken[party].every:
                self._absent[party] = self.taken[party].number, 0
            out += [*self._remove(party), (party, transfer.JoinAgain())]
        return out

    def on_tick(self) -> Outgoing:
        """Drop lost subscribers that do not join again."""
        self._absent = {party: (taken, ticks + 1) for party, (taken, ticks) in self._absent.items() if ticks < PATIENCE}
        return self._announce(self.store.newest)

    def close(self) -> Outgoing:
        self._closed = True
        return [(party, transfer.Closed()) for party in self.taken]

    def behind(self, number: int) -> list[EndpointAddress]:
        """Return the subscribers whose users have read neither that version nor a later one."""
        return [party for party, taken in self.taken.items() if taken.number < number]

    def _remove(self, party: EndpointAddress) -> Outgoing:
        del self.taken[party]
        return self.store.forget(party) + self.chain.remove(party) + self._announce(self.store.newest)

    def _announce(self, newest: int) -> Outgoing:
        """Send the range of available versions to all subscribers, if it has changed."""
        # The oldest version to keep is the one after the lowest that a reader of every version has read, but at most
        # `keep` versions are kept: a slow reader skips some, and the publisher never waits for it. Without such readers
        # it is the newest version.
        last = [each.number for each in self.taken.values() if each.every]
        last += [taken for taken, _ in self._absent.values()]
        wanted = min(last, default=newest - 1) + 1
        oldest = min(newest, max(wanted, newest - self._keep + 1))
        before = self.store.newest, self.store.oldest
        out = self.store.set_available(newest, oldest)
        now = transfer.Available(self.store.newest, self.store.oldest)
        return out + [(party, now) for party in self.taken] if now != before else out


class RelayChain:
    """The sources of the subscribers of one publisher."""

    def __init__(self, publisher: EndpointAddress, host: str) -> None:
        self._publisher = publisher
        self._host = host
        self._host_of: dict[EndpointAddress, str] = {}  # in the order in which the subscribers joined
        self._reported: dict[EndpointAddress, Counter[EndpointAddress]] = {}  # by reader: reports per source
        self._told: dict[EndpointAddress, tuple[EndpointAddress, bool]] = {}  # by reader: its current source
        self._count = 0  # number of messages

    @property
    def leaves_the_host(self) -> bool:
        """True if a subscriber is on another host."""
        return any(host != self._host for host in self._host_of.values())

    def add(self, party: EndpointAddress, host: str) -> Outgoing:
        """Add a subscriber, or send its source to one that joins again."""
        self._host_of.setdefault(party, host)
        # Without this entry, `_changes` sends a subscriber that joins again its source even if that is the same:
        # earlier messages to it may be lost.
        self._told.pop(party, None)
        return self._changes()

    def remove(self, party: EndpointAddress) -> Outgoing:
        if self._host_of.pop(party, None) is None:
            return []
        self._told.pop(party, None)
        self._reported.pop(party, None)
        for reports in self._reported.values():
            # If the subscriber joins again, it is a source without reports. (`del` of a Counter ignores a key that is
            # not there.)
            del reports[party]
        return self._changes()

    def report_source(self, party: EndpointAddress, source: EndpointAddress) -> Outgoing:
        """Count a report that `party` gets no data from `source`. Send it a source, which makes it try again."""
        # A report about an earlier source arrives late, and does not count. One report about the current source has it
        # tried once more, since the cause may have been the connection and not the source.
        if self._told.get(party, (None,))[0] == source:
            self._reported.setdefault(party, Counter())[source] += 1
        self._told.pop(party, None)
        return self._changes()

    def mark_working(self, party: EndpointAddress) -> None:
        """Reset the reports of a subscriber that has received a version."""
        self._reported.pop(party, None)

    def _changes(self) -> Outgoing:
        out: Outgoing = []
        heads: dict[str, EndpointAddress] = {}  # the first subscriber of each host
        for party, host in self._host_of.items():
            heads.setdefault(host, party)
        for party in self._host_of:
            route = self._route(party, heads)
            if self._told.get(party) != route:
                self._told[party] = route
                self._count += 1
                out.append((party, transfer.FetchFrom(self._count, *route)))
        return out

    def _route(self, party: EndpointAddress, heads: dict[str, EndpointAddress]) -> tuple[EndpointAddress, bool]:
        host = self._host_of[party]
        # The publisher serves the first host of the chain. The subscribers of its own host are not part of the chain:
        # they map its memory, and a subscriber never passes on memory that was lent to it.
        chain = [name for name in heads if name != self._host]
        above = [heads[name] for name in chain[: chain.index(host) + 1]] if host != self._host else []
        reports = self._reported.get(party, Counter())
        usable = (source for source in reversed(above) if source != party and reports[source] < MAX_REPORTS)
        # The publisher is the last resort, and reports about it do not count.
        source = next(usable, self._publisher)
        return source, self._host_of.get(source, self._host) == host
