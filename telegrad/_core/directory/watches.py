"""Watches of the embedded directory: requests that wait for a change under their prefix. Pure.

All watches of one prefix get the same bytes. To notify n watchers of a change costs n messages, and about 0.3 ms of
processor time for each watcher, so the cost of starting a group would grow with the square of its size. Therefore
changes are batched. The first change under a prefix is sent at once. The next ones are sent EACH seconds later for
every watcher that was notified, LONGEST_GATHERING at most. With one client, a prefix has almost no delay, whatever
others watch.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from typing import Generic, NamedTuple, TypeVar

from telegrad._core.directory import requests
from telegrad._core.directory.directory import Compacted
from telegrad._core.directory.lease_table import LeaseTable
from telegrad._core.directory.requests import LONGEST_WATCH, write_reply

EACH = 1e-3  # seconds: a notification takes a third of that, on the processors of watchers that share a host
LONGEST_GATHERING = 0.5  # seconds

C = TypeVar("C", bound=Hashable)  # a connection


class _Watch(NamedTuple):
    prefix: str
    since: int
    ends: float


class _Prefix(Generic[C]):
    """The watches of one prefix. No change lies between the `since` of a waiting watch and `notified`."""

    __slots__ = ("notified", "notify_at", "watchers")

    def __init__(self, notified: int) -> None:
        self.watchers: dict[C, _Watch] = {}
        self.notified = notified
        self.notify_at = 0.0  # the earliest time of the next notification; 0 before the first


class Watches(Generic[C]):
    """All watches of a table, one for each connection at most. One thread at a time."""

    def __init__(self, table: LeaseTable) -> None:
        self._table = table
        self._seen = table.revision  # changed prefixes are known up to this revision
        self._prefixes: dict[str, _Prefix[C]] = {}
        self._changed: dict[str, _Prefix[C]] = {}  # prefixes with changes after `notified`
        self._waiting: dict[C, _Watch] = {}
        self._timeouts: list[tuple[float, int, C]] = []  # a heap; may still contain answered watches

    def add(self, connection: C, prefix: str, since: int, seconds: float, now: float) -> bytes | None:
        """Begin a watch; return its reply if it is known; raise Compacted if changes after `since` are forgotten."""
        revision, changes = self._table.changes(prefix, since)
        watched = self._prefixes.get(prefix)
        notified = watched.notified if watched is not None else self._table.revision
        # A watcher that has missed an earlier notification gets its changes at once. Later changes are batched, and
        # sent to all watchers of the prefix together.
        if (changes and changes[0].revision <= notified) or not seconds > 0:
            return write_reply(requests.DONE, revision, changes)
        if watched is None:
            watched = self._prefixes[prefix] = _Prefix(notified)
        watch = _Watch(prefix, since, now + min(seconds, LONGEST_WATCH))
        watched.watchers[connection] = self._waiting[connection] = watch
        # The id decides between equal times, because connections have no order.
        heapq.heappush(self._timeouts, (watch.ends, id(connection), connection))
        # An answered watch stays in the heap until its time is over, up to LONGEST_WATCH: remove such items when they
        # are most of the heap.
        if len(self._timeouts) > 2 * len(self._waiting) + 1000:
            self._timeouts = [(watch.ends, id(each), each) for each, watch in self._waiting.items()]
            heapq.heapify(self._timeouts)
        return None

    def leave(self, connection: C) -> None:
        """Forget the watch of a connection. A notified prefix is kept for a while: its `notify_at` still applies."""
        watch = self._waiting.pop(connection, None)
        if watch is None:
            return
        watched = self._prefixes[watch.prefix]
        del watched.watchers[connection]
        if not (watched.watchers or watched.notify_at or watch.prefix in self._changed):
            del self._prefixes[watch.prefix]

    def collect(self, now: float) -> list[tuple[C, bytes]]:
        """Return the replies to watches that have waited long enough."""
        if self._table.revision > self._seen:
            self._find_changed(now)
        found: list[tuple[C, bytes]] = []
        for prefix in [each for each, watched in self._changed.items() if watched.notify_at <= now]:
            found += self._notify(prefix, self._changed.pop(prefix), now)
        while self._timeouts and self._timeouts[0][0] <= now:
            ends, _, connection = heapq.heappop(self._timeouts)
            watch = self._waiting.get(connection)
            if watch is not None and watch.ends == ends:
                start = max(watch.since, self._prefixes[watch.prefix].notified)
                self.leave(connection)
                reply = self._reply(watch.prefix, start) or write_reply(requests.DONE, self._table.revision)
                found.append((connection, reply))
        return found

    def next_at(self) -> float | None:
        """Return when to call `collect` next if no request arrives before, or None for never."""
        times = [each.notify_at for each in self._changed.values()]
        if self._timeouts:
            times.append(self._timeouts[0][0])
        return min(times, default=None)

    def _find_changed(self, now: float) -> None:
        """Find the prefixes with changes, and forget those without watches."""
        changed = self._table.changed(self._seen)
        is_all = self._table.compacted <= self._seen  # else some changes are forgotten
        self._seen = self._table.revision
        for prefix, watched in list(self._prefixes.items()):
            if prefix in self._changed:
                continue
            if not watched.watchers and watched.notify_at <= now:
                del self._prefixes[prefix]
            elif not is_all or any(key.startswith(prefix) for key in changed):
                self._changed[prefix] = watched
            else:
                watched.notified = self._seen

    def _notify(self, prefix: str, watched: _Prefix[C], now: float) -> list[tuple[C, bytes]]:
        found = []
        replies: dict[int, bytes | None] = {}
        for connection, watch in watched.watchers.items():
            start = max(watch.since, watched.notified)
            if start not in replies:
                replies[start] = self._reply(prefix, start)
            if (reply := replies[start]) is not None:
                found.append((connection, reply))
        watched.notified = self._seen
        watched.notify_at = now + min(EACH * len(found), LONGEST_GATHERING)
        for connection, _ in found:
            self.leave(connection)
        return found

    def _reply(self, prefix: str, since: int) -> bytes | None:
        """Return the changes as a reply, or None without any."""
        try:
            revision, changes = self._table.changes(prefix, since)
        except Compacted as error:
            return write_reply(requests.COMPACTED, text=str(error))
        return write_reply(requests.DONE, revision, changes) if changes else None
