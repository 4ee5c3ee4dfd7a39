"""The state machines of a publisher and of its subscribers: which versions each keeps, fetches and forwards.

A publisher knows the progress of its subscribers, and assigns the source of each. Hosts form a chain, in the order in
which their first subscribers joined.

    publisher ---> first of host B ---> first of host C ---> ...        in pieces, forwarded as each arrives
        |                |                    |
     others of A      others of B          others of C                  whole, in shared memory

A source that has gone, or that a reader has reported twice, is skipped: the reader gets the next source above. A host
that joins late is the last of the chain, and so gets versions from a neighbor. Each source is above its readers in this
order, so the routes that a publisher assigns have no cycle.

A subscriber on the host of its source gets whole versions in shared memory, which takes no time. It gets those that its
user wants, and one ahead after the user has read the last. It does not forward them, since its user may write to them.
The first subscriber of a host fetches all versions, in pieces and in order, since others depend on it. It requests a
few pieces at a time, and forwards each as it arrives.

At most one request is pending (`_request`): a request of the user for a whole version, or the fetch of a version in
pieces. A repeated request begins from the beginning, and only the missing pieces are requested again. So the answer to
any loss (a broken connection, a source that changes, an unknown layout, a wrong delta) is to send the request again.
"""

from collections import Counter
from itertools import islice
from typing import Any

from telegrad.weights import transfer
from telegrad.weights.transfer import EndpointAddress, Outgoing, TransferProgress, VersionInfo, VersionStore

MAX_REPORTS = 2  # a source with this many reports is no longer used
WINDOW = 4  # pieces requested at a time
# Ticks for which a publisher keeps versions for a lost subscriber that reads every one, and after which a subscriber
# without an answer reports its source.
PATIENCE = 10


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


class SubscriberProtocol:
    def __init__(self, publisher: EndpointAddress | None = None) -> None:
        """`publisher` must be set before the first message is processed."""
        self.publisher = publisher
        self.store = VersionStore(keeps_all=False)
        self.source: EndpointAddress | None = None
        self.whole = True  # True if the source shares its memory
        self._route = 0  # the number of the last FetchFrom
        # pending at the source: for the user if it shares versions whole, else for the version whose pieces are fetched
        self._request: transfer.VersionRequest | None = None
        self._taken = 0  # the last version that the user has read, unless it reads every one
        self._requested: set[int] = set()  # pieces
        self._distrusted = 0  # the version whose deltas do not match
        self._layouts: dict[int, bytes] = {}  # descriptions of the last layout, and of those of the versions here
        self._ticks = 0  # since the last answer

    @property
    def waits(self) -> bool:
        """True if a request for the user is pending at the source."""
        return self.whole and self._request is not None

    @property
    def _number(self) -> int:
        """The version whose pieces are being fetched, or 0."""
        return self._request.least if self._request is not None and not self.whole else 0

    def receive(self, sender: EndpointAddress, message: Any) -> Outgoing:
        """Process a message of a reader, of the source or of the publisher."""
        if isinstance(message, transfer.VersionRequest | transfer.PieceRequest | transfer.Finished):
            return self.store.receive(sender, message)
        if isinstance(message, transfer.Unsubscribe):
            return self.store.forget(sender) + self._report(sender)
        if isinstance(message, transfer.Available):
            return self._set_available(message.newest, message.oldest)
        if isinstance(message, transfer.FetchFrom):
            return self._set_source(message)
        self._ticks = 0
        # All messages below are answers of a source, even JoinAgain: it runs, so it is not reported.
        if isinstance(message, transfer.VersionOpened):
            return self._opened(sender, message)
        if isinstance(message, transfer.WeightPiece):
            return self._arrived(message)
        if isinstance(message, transfer.Refused):
            return self._refused(sender, message)
        assert isinstance(message, transfer.JoinAgain), message
        return self._again() if sender == self.source else []

    def expects(self, message: transfer.WeightPiece) -> bool:
        """Return True if the bytes of a piece must be stored."""
        return message.piece in self.store.missing(message.number)

    def distrust(self, number: int) -> Outgoing:
        """Fetch a version without deltas, since they do not match the version that is here."""
        self._distrusted = number
        return self._again() if number == self._number else []

    def want(self, least: int, exact: bool, patient: bool) -> Outgoing:
        """Request a version that is not here, for the user."""
        out = self.store.pin(least if exact else 0)
        # A request ahead of the user (`_set_available`) is answered at once. If it begins at this version or before, it
        # stays: its answer shows whether it was enough, and the waiting thread then calls this again.
        want, before = transfer.VersionRequest(least, exact, patient, True, 0), self._request
        is_ahead = before is not None and not (before.patient or exact) and before.least <= least
        # A source of pieces needs no request of the user: all versions are fetched in order (`_pursue`).
        if not self.whole or want == before or is_ahead:
            return out
        self._request = want
        return out + self._again()

    def taken(self, number: int, every: bool) -> Outgoing:
        """Report to the publisher that the user has read that version."""
        assert self.publisher is not None
        self._taken = number if not every else 0
        return [(self.publisher, transfer.TransferProgress(number, every)), *self.store.pin(0)]

    def lost(self, incarnation: str) -> Outgoing:
        """Drop the readers on a worker whose connection has ended, and report a source there."""
        out: Outgoing = []
        for reader in [reader for reader in self.store.readers() if reader.incarnation == incarnation]:
            out += [*self.store.forget(reader), (reader, transfer.JoinAgain())]
        if self.source is not None and self.source.incarnation == incarnation:
            out += self._report(self.source)
        return out

    def on_tick(self) -> Outgoing:
        """Repeat requests without an answer: other endpoints may have dropped this one and failed to notify it."""
        out: Outgoing = [(self.publisher, transfer.Alive())] if self.publisher is not None else []
        if self.source is None or self._request is None:
            return out
        self._ticks += 1
        if not self.whole and self._ticks % PATIENCE == 0:
            return out + self._report(self.source)
        # The first tick may follow the request at once, so only the second one repeats it.
        return out + self._again() if self._ticks > 1 else out

    def leave(self) -> Outgoing:
        return self._stop() + ([(self.publisher, transfer.Unsubscribe())] if self.publisher is not None else [])

    def _stop(self) -> Outgoing:
        return [(self.source, transfer.Finished())] if self.source is not None else []

    def _report(self, source: EndpointAddress) -> Outgoing:
        """Report the source, unless it is the publisher."""
        if self.publisher is None or source != self.source or source == self.publisher:
            return []
        return [(self.publisher, transfer.SourceFailed(source))]

    # Answers

    def _set_available(self, newest: int, oldest: int) -> Outgoing:
        out = self.store.set_available(newest, oldest) + self._pursue()
        if self.whole and self._request is None and 0 < self._taken == self.store.newest_complete() < newest:
            out += self.want(self._taken + 1, exact=False, patient=False)
        return out

    def _set_source(self, route: transfer.FetchFrom) -> Outgoing:
        if route.number <= self._route:
            return []
        # A source of whole versions and a source of pieces need different requests. If this endpoint fetches pieces,
        # others may rely on it: it keeps all versions that they may want, and drops those that were lent to it, since
        # its user may have written to them.
        out = self._stop() if route.source != self.source else []
        if route.whole != self.whole:
            out += self._drop()
        self._route, self.source, self.whole = route
        self.store.keeps_all = not self.whole
        if not self.whole:
            self.store.drop_lent()
        return out + self._again()

    def _opened(self, sender: EndpointAddress, opened: transfer.VersionOpened) -> Outgoing:
        is_expected = opened.whole or (sender == self.source and opened.number == self._number)
        # Ignore an answer from before the source changed, and to a request that was replaced. A whole version is
        # complete whichever source has sent it.
        if opened.whole != self.whole or not is_expected:
            return []
        info = self._described(opened.info)
        # The source took the layout for known, but it was dropped here meanwhile: the request now names no layout.
        if info is None:
            return self._again()
        if opened.whole:
            if self._request is not None and opened.number >= self._request.least:
                self._request = None
            return self.store.put(opened.number, info, lent=True)
        # The source has begun anew with this reader, and forgotten earlier requests of pieces.
        out = self.store.put(opened.number, info, pieces=info.pieces)
        self._requested.clear()
        return out + self._request_pieces()

    def _arrived(self, message: transfer.WeightPiece) -> Outgoing:
        out = self.store.add_piece(message.number, message.piece)
        return out + self._request_pieces() if message.number == self._number else out

    def _refused(self, sender: EndpointAddress, refused: transfer.Refused) -> Outgoing:
        out = self.store.set_available(refused.newest, refused.oldest)
        # A late refusal of another request must not end this one.
        if sender == self.source and self._request is not None and refused.least == self._request.least:
            out += self._drop()
        return out + self._pursue()

    # Requests

    def _pursue(self) -> Outgoing:
        """Begin to fetch the first missing version that may be wanted, unless one is being fetched."""
        if self.source is None or self.whole or self._request is not None:
            return []
        numbers = range(max(1, self.store.oldest), self.store.newest + 1)
        number = next((number for number in numbers if not self.store.is_complete(number)), 0)
        # Exact: the pieces of one version are forwarded to readers that rely on its number. Patient: the source itself
        # may not have the version yet.
        self._request = transfer.VersionRequest(number, True, True, False, 0) if number else None
        return self._again() if number else []

    def _again(self) -> Outgoing:
        """Send the current request to the source again, from the beginning."""
        if self.source is None or self._request is None:
            return self._pursue()
        self._requested.clear()
        return [(self.source, self._request._replace(layout=max(self._layouts, default=0)))]

    def _request_pieces(self) -> Outgoing:
        """Request the next pieces, or begin with the next version."""
        assert self.source is not None
        missing = self.store.missing(self._number)
        self._requested &= missing
        if not missing:
            self._request = None
            return self._pursue()
        unasked = (piece for piece in missing if piece not in self._requested)
        fresh = [*islice(unasked, WINDOW - len(self._requested))]
        self._requested.update(fresh)
        base = self._base()
        return [(self.source, transfer.PieceRequest(self._number, piece, base)) for piece in fresh]

    def _base(self) -> int:
        """Return a version that is here and may be the base of deltas for the one being fetched, or 0."""
        base, number, info = self.store.newest_complete(), self._number, self.store.info
        # Deltas lead from a complete older version of the same layout. A version whose deltas did not match is fetched
        # without.
        fits = 0 < base < number != self._distrusted and info[base].layout == info[number].layout
        return base if fits else 0

    def _drop(self) -> Outgoing:
        number, self._request = self._number, None
        self._requested.clear()
        return self.store.drop_incomplete(number)

    # Layouts

    def _described(self, info: VersionInfo) -> VersionInfo | None:
        """Add the description of the layout. Return None if the source omitted it, but it is not known here."""
        if info.description:
            # A description has an entry for each tensor, so only those of the versions here are kept, and the new one.
            # `_again` names the highest to the source, which then omits its description.
            here = {each.layout for each in self.store.info.values()}
            self._layouts = {number: text for number, text in self._layouts.items() if number in here}
            self._layouts[info.layout] = info.description
        elif info.layout not in self._layouts:
            self._layouts.clear()
            return None
        return info._replace(description=self._layouts[info.layout])
