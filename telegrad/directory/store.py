"""The file of an embedded directory: what a server that was killed finds again when it is started anew.

SQLite with a write-ahead log, without waiting for the disk: what was committed survives the end of the process, however
it ends. It may not survive the end of the host. Then revisions would go backwards, and two owners could have one token.
So the file remembers the boot of the host, and after another boot it is refused: a directory that lost its state begins
under a new identity, which clients of the old one refuse (`client.py`).

The file is locked as long as a server uses it: a second server on the same file cannot start.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sqlite3
from collections.abc import Iterable

from telegrad.directory.protocol import Entry, Event
from telegrad.directory.table import Ended, Granted, Saved, Written
from telegrad.errors import UsageError

LOG = ".log"  # the suffix of the file into which the server logs
SUFFIXES = ("", "-wal", "-journal", "-shm", LOG)  # of SQLite's files, and that one
_BOOT = "/proc/sys/kernel/random/boot_id"
_FORMAT = "1"
_TABLES = """
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS entries (key TEXT PRIMARY KEY, value BLOB, revision, created, lease, client) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS leases (lease INTEGER PRIMARY KEY, ttl, client);
CREATE TABLE IF NOT EXISTS changes (number INTEGER PRIMARY KEY, revision, key, value BLOB, created, lease);
CREATE INDEX IF NOT EXISTS changes_by_revision ON changes (revision);
"""


class Store:
    """The open file. One thread at a time."""

    def __init__(self, path: str) -> None:
        """Open the file, or make it; ":memory:" for none.

        Raises:
            UsageError: it cannot be used.
        """
        self._path = path
        try:
            self._open()
            if self._fact("boot", _boot()) != _boot() or self._fact("format", _FORMAT) != _FORMAT:
                self._database.close()
                remove(path)
                self._open()
            self.identity = str(self._fact("identity", secrets.token_hex(8)))
            self._fact("boot", _boot())
            self._fact("format", _FORMAT)
        except sqlite3.Error as error:
            raise UsageError(
                f"the file of the directory, {path!r}, cannot be used: {error}. Another server may use it; a file that "
                "is damaged has to be removed, and the group started anew"
            ) from error
        self._compacted = 0  # of which the changes were deleted from the file

    def load(self) -> Saved:
        """Return what was saved."""
        rows = self._database.execute
        entries = rows("SELECT key, value, revision, created, lease, client FROM entries")
        changes = rows("SELECT revision, key, value, created, lease FROM changes ORDER BY number")
        compacted = int(self._fact("compacted", 0))
        return Saved(
            int(self._fact("revision", 0)),
            compacted,
            tuple((Entry(*fields), client) for *fields, client in entries),
            tuple(Granted(*fields) for fields in rows("SELECT lease, ttl, client FROM leases")),
            tuple(_event(*fields) for fields in changes if fields[0] > compacted),
        )

    def save(self, journal: Iterable[Granted | Ended | Written], revision: int, compacted: int) -> None:
        """Store what has happened, all or nothing; it outlives this process from the return on.

        Raises:
            UsageError: the file cannot be written.
        """
        try:
            self._save(journal, revision, compacted)
        except sqlite3.Error as error:
            raise UsageError(
                f"the file of the directory, {self._path!r}, cannot be written: {error}. Make room on its disk, or see "
                "why it fails"
            ) from error

    def _save(self, journal: Iterable[Granted | Ended | Written], revision: int, compacted: int) -> None:
        do = self._database.execute
        do("BEGIN")
        for change in journal:
            match change:
                case Written(Event(at, key, entry), client):
                    if entry is None:
                        do("DELETE FROM entries WHERE key = ?", (key,))
                        do("INSERT INTO changes VALUES (NULL, ?, ?, NULL, 0, 0)", (at, key))
                    else:
                        value, created, lease = entry.value, entry.created, entry.lease
                        do("REPLACE INTO entries VALUES (?, ?, ?, ?, ?, ?)", (key, value, at, created, lease, client))
                        do("INSERT INTO changes VALUES (NULL, ?, ?, ?, ?, ?)", (at, key, value, created, lease))
                case Granted():
                    do("INSERT INTO leases VALUES (?, ?, ?)", change)
                case Ended(lease):
                    do("DELETE FROM leases WHERE lease = ?", (lease,))
        do("REPLACE INTO facts VALUES ('revision', ?)", (revision,))
        if compacted != self._compacted:
            do("REPLACE INTO facts VALUES ('compacted', ?)", (compacted,))
            do("DELETE FROM changes WHERE revision <= ?", (compacted,))
            self._compacted = compacted
        do("COMMIT")

    def close(self) -> None:
        """Close the file, which stays."""
        self._database.close()

    def _open(self) -> None:
        # Used by the thread that serves, which may not be the one that has opened it.
        self._database = sqlite3.connect(self._path, timeout=0.0, isolation_level=None, check_same_thread=False)
        for setting in ("locking_mode = EXCLUSIVE", "journal_mode = WAL", "synchronous = OFF"):
            self._database.execute(f"PRAGMA {setting}")
        self._database.executescript(_TABLES)

    def _fact(self, name: str, default: str | int) -> str | int:
        """Return what the file says, and have it say `default` where it says nothing."""
        self._database.execute("INSERT OR IGNORE INTO facts VALUES (?, ?)", (name, default))
        found: str | int = self._database.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()[0]
        return found


def remove(path: str) -> None:
    """Remove the file of a directory that nobody serves any more, and those beside it."""
    for suffix in SUFFIXES:
        with contextlib.suppress(OSError):
            os.unlink(path + suffix)


def _event(revision: int, key: str, value: bytes | None, created: int, lease: int) -> Event:
    return Event(revision, key, None if value is None else Entry(key, value, revision, created, lease))


def _boot() -> str:
    """Return what differs with each boot of this host; "" where the platform does not say."""
    try:
        with open(_BOOT) as file:
            return file.read().strip()
    except OSError:
        return ""
