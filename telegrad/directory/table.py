"""The state of the embedded directory: keys, leases, revisions, and the changes that watches may still ask for.

Pure: the time is an argument, and nothing is written anywhere. What must outlive the process is appended to `journal`,
which the server stores before it answers. The ends of leases are not among that: after a restart each lease has its
whole ttl, which is never too short.

Limits. The directory is kept in memory, so all that grows is limited: in total, and for each client, so that one client
that never stops to write does not keep the others from doing so. A key counts for the client that wrote it last.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from operator import attrgetter
from typing import NamedTuple

from telegrad.directory.protocol import ABSENT, Compacted, Entry, Event, Events, LeaseLost, Listing, Swap
from telegrad.errors import LimitReached

OVERHEAD = 200  # bytes that a key, a change or a lease is taken to need beside its text
_revision = attrgetter("revision")


class Limits(NamedTuple):
    """How much is kept."""

    changes: int = 10_000  # that watches may ask for
    change_bytes: int = 32 << 20
    keys: int = 1 << 16
    leases: int = 1 << 15
    bytes: int = 256 << 20
    share: int = 8  # one client may have this part of the keys, leases and bytes: an eighth


class Granted(NamedTuple):
    """A lease has begun."""

    lease: int
    ttl: float
    client: str


class Ended(NamedTuple):
    """A lease has ended."""

    lease: int


class Written(NamedTuple):
    """A key was written or deleted."""

    event: Event
    client: str


class Saved(NamedTuple):
    """The content from which a directory is restored."""

    revision: int = 0
    compacted: int = 0  # the newest revision of which the changes are forgotten
    entries: tuple[tuple[Entry, str], ...] = ()  # with the client of each
    leases: tuple[Granted, ...] = ()
    changes: tuple[Event, ...] = ()


DEFAULT, NOTHING = Limits(), Saved()


class _Held:
    """A lease that has not ended."""

    __slots__ = ("client", "ends", "keys", "ttl")

    def __init__(self, ttl: float, ends: float, client: str) -> None:
        self.ttl, self.ends, self.client = ttl, ends, client
        self.keys: set[str] = set()


class _Used:
    """How much there is of one client, or of all."""

    __slots__ = ("bytes", "keys", "leases")

    def __init__(self) -> None:
        self.keys = self.leases = self.bytes = 0

    def add(self, keys: int, leases: int, size: int) -> None:
        self.keys += keys
        self.leases += leases
        self.bytes += size


class Table:
    """The directory. One thread at a time."""

    def __init__(self, limits: Limits = DEFAULT, saved: Saved = NOTHING, now: float = 0.0) -> None:
        self.limits = limits
        self.revision = saved.revision
        self.compacted = saved.compacted
        self.journal: list[Granted | Ended | Written] = []  # since the server has stored it
        self._entries: dict[str, Entry] = {}
        self._keys: list[str] = []  # in their order
        self._writers: dict[str, str] = {}  # the client that wrote a key last
        self._leases: dict[int, _Held] = {}
        self._ends: list[
            tuple[float, int]
        ] = []  # a heap; one item for each lease, earlier than its end if it was renewed
        self._used: dict[str, _Used] = {}
        self._total = _Used()
        self._changes: Events = list(saved.changes)
        self._change_bytes = sum(map(_change_size, saved.changes))
        for lease in saved.leases:
            self._hold(lease, now)
        for entry, client in saved.entries:
            self._put(entry, client)

    # Leases

    def grant(self, ttl: float, now: float, client: str = "") -> int:
        """Begin a lease; return its id.

        Raises:
            LimitReached: there are too many.
        """
        self._check_room(client, (0, 1, OVERHEAD), (0, 1, OVERHEAD))
        self.revision += 1
        granted = Granted(self.revision, ttl, client)
        self._hold(granted, now)
        self.journal.append(granted)
        return granted.lease

    def renew(self, lease: int, now: float) -> None:
        """Begin the ttl of a lease anew. Raises LeaseLost."""
        held = self._held(lease)
        held.ends = max(held.ends, now + held.ttl)

    def revoke(self, lease: int) -> None:
        """End a lease, unless it has ended."""
        held = self._leases.pop(lease, None)
        if held is None:
            return
        self._count(held.client, 0, -1, -OVERHEAD)
        if held.keys:
            self.revision += 1
        for key in sorted(held.keys):
            self._delete(key)
        self.journal.append(Ended(lease))

    def expire(self, now: float) -> None:
        """End the leases that were not renewed in time."""
        while self._ends and self._ends[0][0] <= now:
            _, lease = heapq.heappop(self._ends)
            held = self._leases.get(lease)
            if held is None:
                continue
            if held.ends > now:
                heapq.heappush(self._ends, (held.ends, lease))
            else:
                self.revoke(lease)

    def next_end(self) -> float | None:
        """Return when to call `expire` next; None without leases."""
        return self._ends[0][0] if self._ends else None

    @property
    def has_leases(self) -> bool:
        """Return True if some lease has not ended."""
        return bool(self._leases)

    def postpone(self, seconds: float) -> None:
        """Let all leases end later: for so long the server did not run, and took no renewals."""
        for held in self._leases.values():
            held.ends += seconds

    # Keys

    def swap(self, key: str, value: bytes | None, expected: int = ABSENT, lease: int = 0, client: str = "") -> Swap:
        """Write a key, or delete it, where its revision is the expected one.

        Raises:
            LeaseLost: the lease has ended.
            LimitReached: the directory, or this client's share of it, is full.
        """
        if lease:
            self._held(lease)
        found = self._entries.get(key)
        if (found.revision if found else ABSENT) != expected:
            return Swap(False, found)
        if value is None:
            if found is not None:
                self.revision += 1
                self._delete(key)
            return Swap(True, None)
        size = _size(key, value)
        more = (found is None, 0, size - (_size(key, found.value) if found else 0))
        is_own = found is not None and self._writers[key] == client
        self._check_room(client, more if is_own else (1, 0, size), more)
        self.revision += 1
        entry = Entry(key, value, self.revision, found.created if found else self.revision, lease)
        self._put(entry, client)
        self._log(Event(self.revision, key, entry), client)
        return Swap(True, entry)

    def list(self, prefix: str) -> Listing:
        """Return all keys that begin with `prefix`."""
        found = []
        for position in range(bisect_left(self._keys, prefix), len(self._keys)):
            key = self._keys[position]
            if not key.startswith(prefix):
                break
            found.append(self._entries[key])
        return Listing(self.revision, tuple(found))

    def changes(self, prefix: str, since: int, most: int = 1 << 20) -> tuple[int, Events]:
        """Return the changes under `prefix` after a revision, and the revision until which these are all.

        The changes of one revision are not parted; no more are begun once those found have `most` bytes.

        Raises:
            Compacted: some were forgotten, or this directory has never had that revision.
        """
        if not self.compacted <= since <= self.revision:
            raise Compacted(
                f"the directory has the changes after revision {self.compacted}, not those after {since}: list again"
            )
        found: Events = []
        size = 0
        for position in range(self._position(since), len(self._changes)):
            event = self._changes[position]
            if size > most and event.revision != found[-1].revision:
                return event.revision - 1, found
            if event.key.startswith(prefix):
                found.append(event)
                size += _change_size(event)
        return self.revision, found

    def changed(self, since: int) -> set[str]:
        """Return the keys that have changed after a revision, as far as these changes are not forgotten."""
        return {event.key for event in self._changes[self._position(since) :]}

    # Internal

    def _position(self, since: int) -> int:
        return bisect_right(self._changes, since, key=_revision)

    def _held(self, lease: int) -> _Held:
        held = self._leases.get(lease)
        if held is None:
            raise LeaseLost(
                "the lease has ended: it was revoked, or was not renewed in time. Its keys are deleted, and others may "
                "own them: stop what needs them, and begin a new lease"
            )
        return held

    def _hold(self, granted: Granted, now: float) -> None:
        lease, ttl, client = granted
        self._leases[lease] = _Held(ttl, now + ttl, client)
        heapq.heappush(self._ends, (now + ttl, lease))
        self._count(client, 0, 1, OVERHEAD)

    def _put(self, entry: Entry, client: str) -> None:
        key = entry.key
        if key in self._entries:
            self._remove(key)
        else:
            insort(self._keys, key)
        self._entries[key] = entry
        self._writers[key] = client
        self._count(client, 1, 0, _size(key, entry.value))
        if entry.lease:
            self._leases[entry.lease].keys.add(key)

    def _delete(self, key: str) -> None:
        client = self._writers[key]
        self._remove(key)
        del self._keys[bisect_left(self._keys, key)]
        self._log(Event(self.revision, key, None), client)

    def _remove(self, key: str) -> None:
        """Take an entry out, and let its name stand in `_keys`."""
        entry = self._entries.pop(key)
        self._count(self._writers.pop(key), -1, 0, -_size(key, entry.value))
        held = self._leases.get(entry.lease)
        if held is not None:
            held.keys.discard(key)

    def _log(self, event: Event, client: str) -> None:
        self.journal.append(Written(event, client))
        self._changes.append(event)
        self._change_bytes += _change_size(event)
        if len(self._changes) > self.limits.changes or self._change_bytes > self.limits.change_bytes:
            self._forget()

    def _forget(self) -> None:
        """Forget the oldest changes: an eighth more than must be, so that the list is seldom moved."""
        changes, size = self.limits.changes * 7 // 8, self.limits.change_bytes * 7 // 8
        count = 0
        while count < len(self._changes) - 1 and (len(self._changes) - count > changes or self._change_bytes > size):
            event = self._changes[count]
            self._change_bytes -= _change_size(event)
            self.compacted = event.revision  # other changes of that revision may be left, which nobody can ask for
            count += 1
        del self._changes[:count]

    def _count(self, client: str, keys: int, leases: int, size: int) -> None:
        used = self._used.setdefault(client, _Used())
        used.add(keys, leases, size)
        self._total.add(keys, leases, size)
        if not (used.keys or used.leases):
            del self._used[client]

    def _check_room(self, client: str, own: tuple[int, int, int], all_: tuple[int, int, int]) -> None:
        """Refuse what would be `own` more keys, leases and bytes of a client, and `all_` more in total."""
        used = self._used.get(client, _Used())
        limits = self.limits
        for more, name, have, most, total in (
            (own[0], "keys", used.keys, limits.keys // limits.share, False),
            (own[1], "leases", used.leases, limits.leases // limits.share, False),
            (own[2], "bytes", used.bytes, limits.bytes // limits.share, False),
            (all_[0], "keys", self._total.keys, limits.keys, True),
            (all_[1], "leases", self._total.leases, limits.leases, True),
            (all_[2], "bytes", self._total.bytes, limits.bytes, True),
        ):
            if more > 0 and have + more > most:
                raise LimitReached(
                    f"the directory takes no more: {'all clients together have' if total else 'this client has'} "
                    f"{have} {name}, of {most}. Delete keys that are not needed, and end leases, or put large values "
                    "elsewhere"
                )


def _size(key: str, value: bytes) -> int:
    return OVERHEAD + len(key) + len(value)


def _change_size(event: Event) -> int:
    return _size(event.key, event.entry.value if event.entry else b"")
