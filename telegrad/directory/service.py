"""The behaviour of the embedded directory: requests in, replies out. Pure: no sockets, and the time is an argument.

A watch waits here until something under its prefix changes. All watches of one prefix get the same bytes. To tell n
watchers costs n messages for each change, so with many watchers changes are gathered: they are told at most so often
that telling takes about half of the time (`EACH`). With few watchers a change is told at once.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

from telegrad.directory import messages
from telegrad.directory.messages import Request, write_changes, write_reply
from telegrad.directory.protocol import Compacted, Event, LeaseLost, check_key, check_ttl, check_value
from telegrad.directory.table import Table
from telegrad.errors import InvalidArgument, LimitReached

EACH = (
    30e-6  # seconds between two times of telling, for each watcher that was told; twice what telling takes (measured)
)
MOST_WATCHES = 64  # of one connection
LONGEST_WATCH = 3_600.0


class _Watch(NamedTuple):
    """A request that waits."""

    since: int
    ends: float


class _Answer(NamedTuple):
    """The parts of a reply that all watches of one prefix share."""

    outcome: int
    revision: int
    changes: int
    end: bytes


class Service:
    """The directory's behaviour over a table. One thread at a time.

    A connection is a number here. `answer` returns the reply to a request of it, `collect` those to requests that have
    waited.
    """

    def __init__(self, table: Table) -> None:
        self.table = table
        self._watches: dict[str, dict[tuple[int, int], _Watch]] = {}  # by prefix, then by connection and number
        self._waiting: dict[int, dict[int, str]] = {}  # by connection and number, the prefix
        self._timeouts: list[tuple[float, int, int]] = []  # a heap; watches that were answered are still in it
        self._waits = 0  # watches
        self._told = table.revision  # until here each watch that waits was told
        self._tell_at = 0.0

    def answer(self, connection: int, client: str, data: bytes, now: float) -> bytes | None:
        """Return the reply to a request; None where it waits.

        Raises:
            ProtocolViolation: it is no request.
        """
        number, request = messages.read_request(data)
        try:
            if request.operation == messages.WATCH:
                return self._watch(connection, number, request, now)
            return self._do(number, client, request, now)
        except LeaseLost as error:
            outcome, text = messages.LEASE_LOST, str(error)
        except Compacted as error:
            outcome, text = messages.COMPACTED, str(error)
        except LimitReached as error:
            outcome, text = messages.FULL, str(error)
        except InvalidArgument as error:
            outcome, text = messages.REFUSED, str(error)
        return write_reply(number, outcome, 0, 0, text.encode())

    def leave(self, connection: int) -> None:
        """Forget the watches of a connection."""
        for number in list(self._waiting.get(connection, ())):
            self._stop(connection, number)

    def collect(self, now: float) -> list[tuple[int, bytes]]:
        """End leases; return the replies to watches, each with its connection."""
        self.table.expire(now)
        found: list[tuple[int, bytes]] = []
        if self.table.revision > self._told and now >= self._tell_at:
            found = self._tell()
            self._tell_at = now + EACH * len(found)
        found += self._end_watches(now)
        return found

    def next_at(self) -> float | None:
        """Return when to call `collect` next, if nothing comes before; None for never."""
        times = [self.table.next_end(), self._timeouts[0][0] if self._timeouts else None]
        if self.table.revision > self._told:
            times.append(self._tell_at)
        return min((each for each in times if each is not None), default=None)

    def _do(self, number: int, client: str, request: Request, now: float) -> bytes:
        table = self.table
        operation, key, value, revision, lease, seconds = request
        if operation == messages.SWAP:
            check_key(key)
            check_value(key, value or b"")
            done, entry = table.swap(key, value, revision, lease, client)
            end = write_changes([Event(entry.revision, key, entry)] if entry else [])
            return write_reply(number, messages.DONE if done else messages.NOT_DONE, 0, entry is not None, end)
        if operation == messages.LIST:
            listing = table.list(key)
            end = write_changes(Event(entry.revision, entry.key, entry) for entry in listing.entries)
            return write_reply(number, messages.DONE, listing.revision, len(listing.entries), end)
        result = 0
        if operation == messages.GRANT:
            check_ttl(seconds)
            result = table.grant(seconds, now, client)
        elif operation == messages.RENEW:
            table.renew(lease, now)
        elif operation == messages.REVOKE:
            table.revoke(lease)
        else:
            raise InvalidArgument(f"this directory has no operation {operation}: install one version on all hosts")
        return write_reply(number, messages.DONE, result, 0, b"")

    def _watch(self, connection: int, number: int, request: Request, now: float) -> bytes | None:
        prefix, since = request.key, request.revision
        waiting = self._waiting.get(connection, {})
        if len(waiting) >= MOST_WATCHES or number in waiting:
            raise LimitReached(f"a client watches at most {MOST_WATCHES} prefixes of the directory at once")
        revision, changes = self.table.changes(prefix, since)
        seconds = min(request.seconds, LONGEST_WATCH)
        # Changes that nobody was told of yet are told to all together.
        if (changes and changes[0].revision <= self._told) or not seconds > 0:
            return write_reply(number, messages.DONE, revision, len(changes), write_changes(changes))
        self._watches.setdefault(prefix, {})[connection, number] = _Watch(since, now + seconds)
        self._waiting.setdefault(connection, waiting)[number] = prefix
        heapq.heappush(self._timeouts, (now + seconds, connection, number))
        self._waits += 1
        if len(self._timeouts) > 2 * self._waits + 1000:  # most belong to watches that were answered in time
            live = self._watches.values()
            self._timeouts = [(watch.ends, *key) for watches in live for key, watch in watches.items()]
            heapq.heapify(self._timeouts)
        return None

    def _tell(self) -> list[tuple[int, bytes]]:
        """Answer the watches under whose prefix something has changed."""
        since, self._told = self._told, self.table.revision
        changed = self.table.changed(since)
        forgotten = self.table.compacted > since  # then `changed` does not have all
        found: list[tuple[int, bytes]] = []
        for prefix in list(self._watches):
            if not (forgotten or any(key.startswith(prefix) for key in changed)):
                continue
            answers: dict[int, _Answer] = {}
            for (connection, number), watch in list(self._watches[prefix].items()):
                start = max(watch.since, since)  # nothing has changed between the two: else it would not have waited
                if start not in answers:
                    answers[start] = self._answer(prefix, start)
                outcome, revision, count, end = answers[start]
                if count or outcome != messages.DONE:
                    self._stop(connection, number)
                    found.append((connection, write_reply(number, outcome, revision, count, end)))
        return found

    def _answer(self, prefix: str, since: int) -> _Answer:
        """Return the changes under a prefix as parts of a reply."""
        try:
            revision, changes = self.table.changes(prefix, since)
        except Compacted as error:
            return _Answer(messages.COMPACTED, 0, 0, str(error).encode())
        return _Answer(messages.DONE, revision, len(changes), write_changes(changes))

    def _end_watches(self, now: float) -> list[tuple[int, bytes]]:
        """Answer the watches that are out of time."""
        found = []
        while self._timeouts and self._timeouts[0][0] <= now:
            ends, connection, number = heapq.heappop(self._timeouts)
            prefix = self._waiting.get(connection, {}).get(number)
            if prefix is not None and self._watches[prefix][connection, number].ends == ends:
                watch = self._stop(connection, number)
                answer = self._answer(prefix, max(watch.since, self._told))
                found.append((connection, write_reply(number, *answer)))
        return found

    def _stop(self, connection: int, number: int) -> _Watch:
        waiting = self._waiting[connection]
        prefix = waiting.pop(number)
        if not waiting:
            del self._waiting[connection]
        watches = self._watches[prefix]
        watch = watches.pop((connection, number))
        self._waits -= 1
        if not watches:
            del self._watches[prefix]
        return watch
