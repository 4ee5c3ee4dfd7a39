"""The state of the embedded directory, in an SQLite file: keys, leases, revisions, and changes for watches.

The time is an argument. The server calls `file.commit` before it sends replies, so a client never knows more than the
file. All but the changes is in memory as well. The ends of leases are only in memory: after a restart, each lease has
its whole ttl again, which is never too short.

The file has a write-ahead log and is not flushed to the disk: committed data survives any end of the process, but
perhaps not that of the host. Then revisions would decrease, and two owners could have the same token. Therefore the
file stores the boot id of the host, and is removed after another boot: the directory begins with a new identity, which
clients of the old one refuse (`directory_client.py`).

The file is locked while a server uses it: a second server on the same file cannot start.

Limits. Each resource is limited in total. The keys of each client are limited as well: a client that never stops
writing cannot block the others. A key counts for the client that wrote it last.
"""

import contextlib
import heapq
import json
import os
import secrets
import sqlite3
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

from telegrad._core.private_files import open_regular, private_folder
from telegrad._core.stores.directory import ABSENT, Compacted, Entry, Event, Events, LeaseLost, Listing, Swap
from telegrad.errors import LimitReached, UsageError

OVERHEAD = 200  # assumed bytes of a key or a change in addition to its text
LOG = ".log"  # the suffix of the server's log
SUFFIXES = ("", "-wal", "-journal", "-shm", LOG)  # of SQLite's files, and of the log
_BOOT = "/proc/sys/kernel/random/boot_id"
_FORMAT = "2"
_TABLES = """
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS entries (key TEXT PRIMARY KEY, value BLOB, revision, created, lease, client) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS entries_by_lease ON entries (lease);
CREATE TABLE IF NOT EXISTS leases (lease INTEGER PRIMARY KEY, ttl);
CREATE TABLE IF NOT EXISTS changes (number INTEGER PRIMARY KEY, revision, key, value BLOB, created, lease);
CREATE INDEX IF NOT EXISTS changes_by_revision ON changes (revision);
"""
_SIZE = f"length(CAST(key AS BLOB)) + coalesce(length(value), 0) + {OVERHEAD}"  # the same as `_size`


class Limits(NamedTuple):
    changes: int = 10_000  # for watches
    change_bytes: int = 32 << 20
    keys: int = 1 << 16
    keys_of_one: int = 1 << 13  # of one client
    leases: int = 1 << 15
    bytes: int = 256 << 20


DEFAULT = Limits()


class _File:
    """The database. One thread at a time."""

    def __init__(self, path: str) -> None:
        """Open or create the file, ":memory:" for none; raise UsageError if it cannot be used."""
        self._path = path
        try:
            self._open()
            if self.fact("boot", _boot()) != _boot() or self.fact("format", _FORMAT) != _FORMAT:
                self.close()
                remove(path)
                self._open()
                self.fact("boot", _boot())
                self.fact("format", _FORMAT)
        except sqlite3.Error as error:
            raise UsageError(
                f"the file of the directory, {path!r}, cannot be used: {error}. Another server may use it; if it is "
                "damaged, remove it and start the group again"
            ) from error

    def _open(self) -> None:
        # The serving thread may not be the one that opened it.
        self._database = sqlite3.connect(self._path, timeout=0.0, isolation_level=None, check_same_thread=False)
        for setting in ("locking_mode = EXCLUSIVE", "journal_mode = WAL", "synchronous = OFF"):
            self._database.execute(f"PRAGMA {setting}")
        self._database.executescript(_TABLES)

    def fact(self, name: str, default: str | int) -> str | int:
        """Return a stored fact; store `default` if there is none."""
        self._database.execute("INSERT OR IGNORE INTO facts VALUES (?, ?)", (name, default))
        found: str | int = self.one("SELECT value FROM facts WHERE name = ?", name)
        return found

    def rows(self, query: str, *values: object) -> Iterable[Any]:
        return self._database.execute(query, values)

    def one(self, query: str, *values: object) -> Any:
        return self._database.execute(query, values).fetchone()[0]

    def write(self, statement: str, *values: object) -> None:
        """Run a statement that `commit` will store. Raises UsageError."""
        try:
            if not self._database.in_transaction:
                self._database.execute("BEGIN")
            self._database.execute(statement, values)
        except sqlite3.Error as error:
            raise UsageError(
                f"the file of the directory, {self._path!r}, cannot be written: {error}. Free space on its disk, or "
                "check why it fails"
            ) from error

    def commit(self, revision: int) -> None:
        """Store all written data, or none. Raises UsageError."""
        if self._database.in_transaction:
            self.write("UPDATE facts SET value = ? WHERE name = 'revision'", revision)
            self.write("COMMIT")

    def close(self) -> None:
        """Close the file without removing it."""
        self._database.close()


class LeaseTable:
    """The directory. One thread at a time."""

    def __init__(self, path: str = ":memory:", limits: Limits = DEFAULT, now: float = 0.0) -> None:
        """Open the file. Raises UsageError if it cannot be used."""
        self.limits = limits
        self.file = _File(path)
        self.identity = str(self.file.fact("identity", secrets.token_hex(8)))
        self.load(now)

    def load(self, now: float) -> None:
        """Read the file; each lease begins again."""
        file, total = self.file, f"SELECT coalesce(sum({_SIZE}), 0) FROM"
        self.revision, self.compacted = int(file.fact("revision", 0)), int(file.fact("compacted", 0))
        self._entries = {
            key: (Entry(key, *parts), client) for key, *parts, client in file.rows("SELECT * FROM entries")
        }
        self._sorted = sorted(self._entries)
        self._clients = Counter(client for _, client in self._entries.values())
        self._bytes = file.one(f"{total} entries")
        self._changes, self._change_bytes = file.one("SELECT count(*) FROM changes"), file.one(f"{total} changes")
        # The ends and ttls of leases, by id.
        self.leases = {lease: (now + ttl, ttl) for lease, ttl in file.rows("SELECT lease, ttl FROM leases")}
        self._ends = [(end, lease) for lease, (end, _) in self.leases.items()]  # a heap; too early for renewed leases
        heapq.heapify(self._ends)

    # Leases

    def grant(self, ttl: float, now: float) -> int:
        """Begin a lease and return its id; raise LimitReached if there are too many."""
        if len(self.leases) >= self.limits.leases:
            raise LimitReached(f"the directory is full: it has {len(self.leases)} leases. End some leases first")
        self.revision += 1
        # No revision is ever repeated, so it also serves as the id of the lease.
        self.file.write("INSERT INTO leases VALUES (?, ?)", self.revision, ttl)
        self.leases[self.revision] = now + ttl, ttl
        heapq.heappush(self._ends, (now + ttl, self.revision))
        return self.revision

    def renew(self, lease: int, now: float) -> None:
        """Restart the ttl of a lease. Raises LeaseLost."""
        self._check_lease(lease)
        end, ttl = self.leases[lease]
        # `extend_leases` may have set a later end.
        self.leases[lease] = max(end, now + ttl), ttl

    def revoke(self, lease: int) -> None:
        """End a lease, unless it has ended."""
        if self.leases.pop(lease, None) is None:
            return
        keys = [key for (key,) in self.file.rows("SELECT key FROM entries WHERE lease = ? ORDER BY key", lease)]
        self.revision += bool(keys)
        for key in keys:
            self._delete(key)
        self.file.write("DELETE FROM leases WHERE lease = ?", lease)

    def expire(self, now: float) -> None:
        """End the leases that were not renewed in time."""
        while self._ends and self._ends[0][0] <= now:
            # The heap has one item for each lease, with the end that it had when the item was pushed. A lease that was
            # renewed since is pushed again with its present end; one that was revoked is only dropped.
            _, lease = heapq.heappop(self._ends)
            end, _ = self.leases.get(lease, (now, 0.0))
            if end > now:
                heapq.heappush(self._ends, (end, lease))
            else:
                self.revoke(lease)

    def next_end(self) -> float | None:
        """Return when to call `expire` next; None without leases."""
        return self._ends[0][0] if self._ends else None

    def extend_leases(self, seconds: float) -> None:
        """Extend all leases by the time in which the server did not run and took no renewals."""
        self.leases = {lease: (end + seconds, ttl) for lease, (end, ttl) in self.leases.items()}

    # Keys

    def swap(self, key: str, value: bytes | None, expected: int = ABSENT, lease: int = 0, client: str = "") -> Swap:
        """Write or delete a key if its revision is the expected one. Raise LeaseLost if the lease has ended, and
        LimitReached if the directory, or this client's share of it, is full."""
        if lease:
            self._check_lease(lease)
        found, owner = self._entries.get(key, (None, ""))
        if (found.revision if found else ABSENT) != expected:
            return Swap(False, found)
        if value is None:
            if found is not None:
                self.revision += 1
                self._delete(key)
            return Swap(True, None)
        more = _size(key, value) - (_size(key, found.value) if found else 0)
        self._check_room(client, found is None, found is None or owner != client, more)
        self.revision += 1
        entry = Entry(key, value, self.revision, found.created if found else self.revision, lease)
        self.file.write("REPLACE INTO entries VALUES (?, ?, ?, ?, ?, ?)", *entry, client)
        if found is None:
            insort(self._sorted, key)
        else:
            self._clients[owner] -= 1
        self._clients[client] += 1
        self._entries[key] = entry, client
        self._bytes += more
        self._log(key, value, entry.created, lease)
        return Swap(True, entry)

    def list(self, prefix: str) -> Listing:
        """Return all keys that begin with `prefix`."""
        found = []
        for position in range(bisect_left(self._sorted, prefix), len(self._sorted)):
            key = self._sorted[position]
            if not key.startswith(prefix):
                break
            found.append(self._entries[key][0])
        return Listing(self.revision, tuple(found))

    def changes(self, prefix: str, since: int, most: int = 1 << 20) -> tuple[int, Events]:
        """Return the changes under `prefix` after a revision, and the last revision that they cover. The changes of one
        revision are not separated; no further one is added to `most` bytes or more. Raise Compacted if some were
        forgotten, or if this directory has never had that revision."""
        if not self.compacted <= since <= self.revision:
            raise Compacted(
                f"the directory has changes after revision {self.compacted}, not after {since}: list the keys again"
            )
        found: Events = []
        size = 0
        for revision, key, value, created, lease in self.file.rows(
            "SELECT revision, key, value, created, lease FROM changes "
            "WHERE revision > ? AND key >= ? AND key < CAST(? AS TEXT) ORDER BY revision, number",
            since,
            prefix,
            # The end of the range is the prefix with byte 255, which is in no text in UTF-8. It is passed as bytes,
            # because a Python text cannot contain it.
            prefix.encode() + b"\xff",
        ):
            if size > most and revision != found[-1].revision:
                return found[-1].revision, found
            found.append(Event(revision, key, None if value is None else Entry(key, value, revision, created, lease)))
            size += _size(key, value)
        return self.revision, found

    def changed(self, since: int) -> set[str]:
        """Return the keys that have changed after a revision, except for forgotten changes."""
        return {key for (key,) in self.file.rows("SELECT DISTINCT key FROM changes WHERE revision > ?", since)}

    # Internal

    def _check_lease(self, lease: int) -> None:
        if lease not in self.leases:
            raise LeaseLost(
                "the lease has ended: it was revoked, or was not renewed in time. Its keys are deleted, and others "
                "may own them now: stop the work that needs them, and begin a new lease"
            )

    def _check_room(self, client: str, is_new: bool, is_more: bool, more: int) -> None:
        """Raise LimitReached if there is no room for a new key, one more key of this client, or more bytes."""
        limits, keys, own = self.limits, len(self._entries), self._clients[client]
        if is_new and keys >= limits.keys:
            full = f"all clients together have {keys} keys"
        elif is_more and own >= limits.keys_of_one:
            full = f"this client has {own} keys"
        elif more > 0 and self._bytes + more > limits.bytes:
            full = f"all clients together have {self._bytes} bytes"
        else:
            return
        raise LimitReached(
            f"the directory is full: {full}. Delete keys that are not needed, or put large values elsewhere"
        )

    def _delete(self, key: str) -> None:
        entry, client = self._entries.pop(key)
        del self._sorted[bisect_left(self._sorted, key)]
        self._clients[client] -= 1
        self._bytes -= _size(key, entry.value)
        self.file.write("DELETE FROM entries WHERE key = ?", key)
        self._log(key, None, 0, 0)

    def _log(self, key: str, value: bytes | None, created: int, lease: int) -> None:
        self.file.write("INSERT INTO changes VALUES (NULL, ?, ?, ?, ?, ?)", self.revision, key, value, created, lease)
        self._changes += 1
        self._change_bytes += _size(key, value)
        if self._changes > self.limits.changes or self._change_bytes > self.limits.change_bytes:
            self._forget()

    def _forget(self) -> None:
        """Forget the oldest changes, except the newest; an eighth more than necessary, to do this rarely."""
        last = 0
        count, size = self.limits.changes * 7 // 8, self.limits.change_bytes * 7 // 8
        for number, revision, bytes_ in self.file.rows(
            f"SELECT number, revision, {_SIZE} FROM changes ORDER BY number"
        ):
            if self._changes == 1 or (self._changes <= count and self._change_bytes <= size):
                break
            self._changes -= 1
            self._change_bytes -= bytes_
            last, self.compacted = number, revision  # others of that revision may remain, but cannot be requested
        self.file.write("DELETE FROM changes WHERE number <= ?", last)
        self.file.write("UPDATE facts SET value = ? WHERE name = 'compacted'", self.compacted)


def remove(path: str) -> None:
    """Remove the files of a directory that is no longer served."""
    for suffix in SUFFIXES:
        with contextlib.suppress(OSError):
            os.unlink(path + suffix)


def remove_all(path: str) -> None:
    """Remove the files of a directory that is over, and the notes by which workers find it (`find_directory.py`)."""
    with contextlib.suppress(OSError), private_folder("directory", stays=True) as folder:
        for name in (each for each in folder.names() if "." not in each):  # others are files of directories
            with contextlib.suppress(OSError), open_regular(folder.path / name) as file:
                if json.dumps(path).encode() in file.read():
                    folder.remove(name)
    remove(path)


def _size(key: str, value: bytes | None) -> int:
    return OVERHEAD + len(key.encode()) + len(value or b"")


def _boot() -> str:
    """Return an id that differs with each boot of this host, or "" if the platform has none."""
    try:
        with open(_BOOT) as file:
            return file.read().strip()
    except OSError:
        return ""
