"""Seals a group's values in a directory that other programs can write to, too, such as etcd or Redis.

The MAC of a value covers its key and the place of the directory, so a value can be neither forged nor moved to another
key or group. A program that can write there can restore a value that was replaced.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
from time import monotonic

from telegrad._core.directory.directory import (
    ABSENT,
    Directory,
    DirectoryLost,
    DirectoryRefused,
    Entry,
    Event,
    Events,
    Lease,
    LeaseLost,
    Listing,
    Swap,
)
from telegrad._core.security.keyring import Keyring
from telegrad._core.stores.sealed_store import RENEW_AGAIN, Opened, Sealer
from telegrad.errors import StoreUntrusted

log = logging.getLogger("telegrad")


class SealedDirectory:
    """A `Directory` whose values carry a MAC under the group's key, which covers their keys as well.

    Reading a value that another program has written raises StoreUntrusted. A watch skips it with a warning: it must not
    stop there, because later changes are authentic.
    """

    def __init__(self, directory: Directory, keys: Keyring, place: str) -> None:
        """`place` distinguishes this directory from those of other groups on the same servers."""
        self._directory, self._keys, self._place = directory, keys, place
        self._sealed_with = keys.secrets()[0]  # at the last renewal of all seals
        self._renew_at = 0.0  # the time of the next one, while there are two keys
        self._sealer = Sealer(keys, secrets.token_hex(8))
        self._told: set[str] = set()  # keys with a logged warning; any thread adds to it

    def grant(self, ttl: float) -> Lease:
        return self._directory.grant(ttl)

    def renew(self, lease: Lease) -> Lease:
        return self._directory.renew(lease)

    def revoke(self, lease: Lease) -> None:
        self._directory.revoke(lease)

    def swap(self, key: str, value: bytes | None, expected: int = ABSENT, lease: Lease | None = None) -> Swap:
        sealed = value if value is None else self._sealer.seal(self._place, key, value.decode(), 0).encode()
        done, entry = self._directory.swap(key, sealed, expected, lease)
        return Swap(done, entry and self._opened(entry))

    def list(self, prefix: str) -> Listing:
        revision, entries = self._directory.list(prefix)
        return Listing(revision, tuple(map(self._opened, entries)))

    def watch(self, prefix: str, since: int, timeout: float) -> tuple[int, Events]:
        revision, events = self._directory.watch(prefix, since, timeout)
        opened = []
        for event in events:
            try:
                opened.append(Event(event.revision, event.key, event.entry and self._opened(event.entry)))
            except StoreUntrusted as error:
                if event.key not in self._told:
                    self._told.add(event.key)
                    log.warning("telegrad: a change in the group's directory is ignored: %s", error)
        return revision, opened

    def renew_seals(self) -> None:
        """Seal each value with the first key, if another one was first before: later workers have only that one.

        While the file has two keys, this is repeated, as for a store (`SealedStore.renew`).
        """
        first, *others = self._keys.secrets()
        if first == self._sealed_with and (not others or monotonic() < self._renew_at):
            return
        with contextlib.suppress(DirectoryLost, DirectoryRefused, StoreUntrusted):  # retried later
            for entry in self._directory.list("").entries:
                with contextlib.suppress(StoreUntrusted, LeaseLost):  # another program's, or of a member that is gone
                    opened = self._open(entry)
                    if not opened.is_current:
                        sealed = self._sealer.seal(self._place, entry.key, opened.value, 0).encode()
                        lease = Lease(entry.lease, 0.0, 0.0) if entry.lease else None
                        self._directory.swap(entry.key, sealed, entry.revision, lease)
            self._sealed_with, self._renew_at = first, monotonic() + RENEW_AGAIN

    def close(self) -> None:
        self._directory.close()

    def _opened(self, entry: Entry) -> Entry:
        return entry._replace(value=self._open(entry).value.encode())

    def _open(self, entry: Entry) -> Opened:
        return self._sealer.open(self._place, entry.key, entry.value.decode("utf-8", "replace"))
