"""Watches of the embedded directory: requests that wait for a change under their prefix. Pure.

All watches of one prefix get the same bytes. To notify n watchers of a change costs n messages, and about 0.3 ms of
processor time for each watcher, so the cost of starting a group would grow with the square of its size. Therefore
changes are batched. The first change under a prefix is sent at once. The next ones are sent EACH seconds later for
every watcher that was notified, LONGEST_GATHERING at most. With one client, a prefix has almost no delay, whatever
others watch.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

from telegrad._core.directory import requests
from telegrad._core.directory.directory import Compacted
from telegrad._core.directory.lease_table import Table
from telegrad._core.directory.requests import write_changes, write_reply
from telegrad.errors import LimitReached

EACH = 1e-3  # seconds: a notification takes a third of that, on the processors of watchers that share a host
LONGEST_GATHERING = 0.5  # seconds
MOST_WATCHES = 64  # of one connection
LONGEST_WATCH = 3_600.0  # seconds

Replies = list[tuple[int, bytes]]  # each with its connection


class _Watch(NamedTuple):
    """A waiting request."""

    since: int
    ends: float


class _Answer(NamedTuple):
    """The parts of a reply that all watches of one prefix share."""

    outcome: int
    revision: int
    changes: int
    end: bytes


class _Prefix:
    """The watches of one prefix. No change lies between the `since` of a waiting watch and `notified`."""

    __slots__ = ("notified", "notify_at", "watches")

    def __init__(self, notified: int) -> None:
        self.watches: dict[tuple[int, int], _Watch] = {}  # by connection and number
        self.notified = notified
        self.notify_at = 0.0  # the earliest time of the next notification; 0 before the first


class Watches:
    """All watches of a table. One thread at a time. A connection is a number here."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._seen = table.revision  # changed prefixes are known up to this revision
        self._prefixes: dict[str, _Prefix] = {}
        self._changed: dict[str, _Prefix] = {}  # prefixes with changes after `notified`
        self._waiting: dict[int, dict[int, str]] = {}  # by connection and number, the prefix
        self._count = 0
        self._timeouts: list[tuple[float, int, int]] = []  # a heap; may still contain answered watches

    def add(self, connection: int, number: int, prefix: str, since: int, seconds: float, now: float) -> bytes | None:
        """Begin a watch; return its reply if it is known now.

        Raises:
            Compacted: changes after `since` are forgotten.
            LimitReached: the connection has too many.
        """
        waiting = self._waiting.get(connection, {})
        if len(waiting) >= MOST_WATCHES or number in waiting:
            raise LimitReached(f"a client watches at most {MOST_WATCHES} prefixes of the directory at once")
        revision, changes = self._table.changes(prefix, since)
        watched = self._prefixes.get(prefix)
        notified = watched.notified if watched is not None else self._table.revision
        # Changes after `notified` are batched, and sent to all watchers at once.
        if (changes and changes[0].revision <= notified) or not seconds > 0:
            return write_reply(number, requests.DONE, revision, len(changes), write_changes(changes))
        if watched is None:
            watched = self._prefixes[prefix] = _Prefix(notified)
        ends = now + min(seconds, LONGEST_WATCH)
        watched.watches[connection, number] = _Watch(since, ends)
        self._waiting.setdefault(connection, waiting)[number] = prefix
        self._count += 1
        heapq.heappush(self._timeouts, (ends, connection, number))
        if len(self._timeouts) > 2 * self._count + 1000:
            live = [each.watches for each in self._prefixes.values()]
            self._timeouts = [(watch.ends, *key) for watches in live for key, watch in watches.items()]
            heapq.heapify(self._timeouts)
        return None

    def leave(self, connection: int) -> None:
        """Forget the watches of a connection."""
        for number in list(self._waiting.get(connection, ())):
            self._stop(connection, number)

    def collect(self, now: float) -> Replies:
        """Return the replies to watches that have waited long enough."""
        if self._table.revision > self._seen:
            self._find_changed(now)
        found: Replies = []
        for prefix in [each for each, watched in self._changed.items() if watched.notify_at <= now]:
            found += self._notify(prefix, self._changed[prefix], now)
            del self._changed[prefix]
        return found + self._end_late(now)

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
            if not watched.watches and watched.notify_at <= now:
                del self._prefixes[prefix]
            elif not is_all or any(key.startswith(prefix) for key in changed):
                self._changed[prefix] = watched
            else:
                watched.notified = self._seen

    def _notify(self, prefix: str, watched: _Prefix, now: float) -> Replies:
        """Answer the watches of a prefix."""
        found: Replies = []
        answers: dict[int, _Answer] = {}
        for (connection, number), watch in list(watched.watches.items()):
            start = max(watch.since, watched.notified)
            if start not in answers:
                answers[start] = self._answer(prefix, start)
            answer = answers[start]
            if answer.changes or answer.outcome != requests.DONE:
                self._stop(connection, number)
                found.append((connection, write_reply(number, *answer)))
        watched.notified = self._seen
        watched.notify_at = now + min(EACH * len(found), LONGEST_GATHERING)
        return found

    def _end_late(self, now: float) -> Replies:
        """Answer the watches whose time is over."""
        found = []
        while self._timeouts and self._timeouts[0][0] <= now:
            ends, connection, number = heapq.heappop(self._timeouts)
            prefix = self._waiting.get(connection, {}).get(number)
            if prefix is None or self._prefixes[prefix].watches[connection, number].ends != ends:
                continue
            watched = self._prefixes[prefix]
            answer = self._answer(prefix, max(self._stop(connection, number).since, watched.notified))
            found.append((connection, write_reply(number, *answer)))
        return found

    def _answer(self, prefix: str, since: int) -> _Answer:
        try:
            revision, changes = self._table.changes(prefix, since)
        except Compacted as error:
            return _Answer(requests.COMPACTED, 0, 0, str(error).encode())
        return _Answer(requests.DONE, revision, len(changes), write_changes(changes))

    def _stop(self, connection: int, number: int) -> _Watch:
        """Remove a watch. A notified prefix is kept for a while, because its `notify_at` still applies."""
        waiting = self._waiting[connection]
        prefix = waiting.pop(number)
        if not waiting:
            del self._waiting[connection]
        self._count -= 1
        watched = self._prefixes[prefix]
        watch = watched.watches.pop((connection, number))
        if not (watched.watches or watched.notify_at or prefix in self._changed):
            del self._prefixes[prefix]
        return watch
