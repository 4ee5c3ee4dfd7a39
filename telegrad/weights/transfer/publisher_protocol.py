"""The publisher's state machine: its subscribers, their progress, and the versions that are kept for them."""

from __future__ import annotations

from typing import Any

from telegrad.weights.transfer.chain import RelayChain
from telegrad.weights.transfer.version_store import VersionStore
from telegrad.weights.transfer.weight_messages import (
    Alive,
    Available,
    Closed,
    EndpointAddress,
    Finished,
    JoinAgain,
    Leave,
    Outgoing,
    PieceRequest,
    Progress,
    SourceFailed,
    VersionInfo,
    VersionRequest,
)

PATIENCE = 10  # ticks for which versions are kept for a lost subscriber that reads every one


class PublisherProtocol:
    """The versions of one publisher, numbered from 1."""

    def __init__(self, me: EndpointAddress, host: str, keep: int) -> None:
        """`keep`: the maximum number of versions for subscribers that read every one."""
        self.store = VersionStore(keeps_all=True)
        self.taken: dict[EndpointAddress, int] = {}  # by subscriber: the last version that its user has read
        self._every: set[EndpointAddress] = set()  # subscribers that read every version
        # lost subscribers of `_every`: their last version, and ticks since
        self._absent: dict[EndpointAddress, tuple[int, int]] = {}
        self._chain = RelayChain(me, host)
        self._keep = keep

    @property
    def leaves_the_host(self) -> bool:
        """True if a subscriber is on another host."""
        return self._chain.leaves_the_host

    def publish(self, info: VersionInfo) -> Outgoing:
        """Add a version. Its number is then `store.newest`."""
        number = self.store.newest + 1
        out = self.store.put(number, info)
        return out + self._announce(number)

    def receive(self, sender: EndpointAddress, message: Any) -> Outgoing:
        if sender not in self.taken:
            return [(sender, JoinAgain())] if not isinstance(message, Leave) else []
        if isinstance(message, Alive):
            return []
        if isinstance(message, Leave):
            return self._remove(sender)
        if isinstance(message, Progress):
            self._set_progress(sender, max(message.number, self.taken[sender]), message.every)
            self._chain.mark_working(sender)
            return self._announce(self.store.newest)
        if isinstance(message, SourceFailed):
            return self._chain.report_source(sender, message.source)
        if isinstance(message, VersionRequest):
            return self.store.request_version(sender, message)
        if isinstance(message, PieceRequest):
            return self.store.request_piece(sender, message)
        assert isinstance(message, Finished), message
        return self.store.finish(sender, message.number)

    def join(self, party: EndpointAddress, host: str, taken: int, every: bool) -> Outgoing:
        """Add a subscriber, new or joining again."""
        self._set_progress(party, taken, every)
        self._absent.pop(party, None)
        available: Outgoing = [(party, Available(self.store.newest, self.store.oldest))]
        return available + self._chain.add(party, host)

    def lost(self, incarnation: str) -> Outgoing:
        """Remove the subscribers of a worker whose connection has ended. If they are alive, they join again."""
        out: Outgoing = []
        for party in [party for party in self.taken if party.incarnation == incarnation]:
            if party in self._every:
                self._absent[party] = self.taken[party], 0
            out += [*self._remove(party), (party, JoinAgain())]
        return out

    def on_tick(self) -> Outgoing:
        """Drop lost subscribers that do not join again."""
        self._absent = {party: (taken, ticks + 1) for party, (taken, ticks) in self._absent.items() if ticks < PATIENCE}
        return self._announce(self.store.newest)

    def close(self) -> Outgoing:
        return [(party, Closed()) for party in self.taken]

    def behind(self, number: int) -> list[EndpointAddress]:
        """Return the subscribers whose users have read neither that version nor a later one."""
        return [party for party, taken in self.taken.items() if taken < number]

    def _set_progress(self, party: EndpointAddress, taken: int, every: bool) -> None:
        self.taken[party] = taken
        (self._every.add if every else self._every.discard)(party)

    def _remove(self, party: EndpointAddress) -> Outgoing:
        del self.taken[party]
        self._every.discard(party)
        return self.store.forget(party) + self._chain.remove(party) + self._announce(self.store.newest)

    def _announce(self, newest: int) -> Outgoing:
        """Send the range of available versions to all subscribers, if it has changed."""
        last = [*(self.taken[party] for party in self._every), *(taken for taken, _ in self._absent.values())]
        wanted = min(last, default=newest - 1) + 1
        oldest = min(newest, max(wanted, newest - self._keep + 1))
        before = self.store.newest, self.store.oldest
        out = self.store.set_available(newest, oldest)
        now = Available(self.store.newest, self.store.oldest)
        return out + [(party, now) for party in self.taken] if now != before else out
