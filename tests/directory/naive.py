"""A directory in few lines, which are plainly right: the model that engines are compared with."""

import threading
import time
from typing import NamedTuple

from telegrad._core.stores.directory import (
    ABSENT,
    Compacted,
    DirectoryLost,
    Entry,
    Event,
    Events,
    Lease,
    LeaseLost,
    Listing,
    Swap,
    check_key,
    check_ttl,
    check_value,
)


class Held(NamedTuple):
    """A lease as the engine keeps it."""

    ttl: float
    ends: float


class Naive:
    """A directory that keeps all that was ever written, and searches it from the start each time."""

    def __init__(self) -> None:
        self.revision = 0
        self.entries: dict[str, Entry] = {}
        self.events: list[Event] = []
        self.leases: dict[int, Held] = {}
        self.forgotten = 0  # changes until this revision are not kept

    def grant(self, ttl: float, now: float) -> int:
        self.revision += 1
        self.leases[self.revision] = Held(ttl, now + ttl)
        return self.revision

    def renew(self, lease: int, now: float) -> bool:
        if lease not in self.leases:
            return False
        ttl = self.leases[lease].ttl
        self.leases[lease] = Held(ttl, now + ttl)
        return True

    def revoke(self, lease: int) -> None:
        if self.leases.pop(lease, None) is None:
            return
        owned = sorted(key for key, entry in self.entries.items() if entry.lease == lease)
        if owned:
            self.revision += 1
        for key in owned:
            del self.entries[key]
            self.events.append(Event(self.revision, key, None))

    def swap(self, key: str, value: bytes | None, expected: int, lease: int) -> Swap | None:
        """Return None if the lease has ended."""
        if lease and lease not in self.leases:
            return None
        found = self.entries.get(key)
        if (found.revision if found else ABSENT) != expected:
            return Swap(False, found)
        if value is None and found is None:
            return Swap(True, None)
        self.revision += 1
        if value is None:
            del self.entries[key]
            self.events.append(Event(self.revision, key, None))
            return Swap(True, None)
        entry = Entry(key, value, self.revision, found.created if found else self.revision, lease)
        self.entries[key] = entry
        self.events.append(Event(self.revision, key, entry))
        return Swap(True, entry)

    def list(self, prefix: str) -> Listing:
        return Listing(
            self.revision, tuple(entry for key, entry in sorted(self.entries.items()) if key.startswith(prefix))
        )

    def changes(self, prefix: str, since: int) -> Events:
        return [event for event in self.events if event.revision > since and event.key.startswith(prefix)]

    def expire(self, now: float) -> None:
        for ends, lease in sorted((held.ends, lease) for lease, held in self.leases.items()):
            if ends <= now:
                self.revoke(lease)

    def postpone(self, seconds: float) -> None:
        for lease, held in self.leases.items():
            self.leases[lease] = Held(held.ttl, held.ends + seconds)


class NaiveEngine:
    """A naive directory that threads share; it tests the contract itself."""

    ttl, slack = 0.3, 0.5

    def __init__(self) -> None:
        self.state, self.changed = Naive(), threading.Condition()
        self.is_up = True

    def client(self, patience: float = 10.0) -> "NaiveClient":
        return NaiveClient(self, patience)

    def kill(self) -> None:
        self._switch(False)

    def start(self) -> None:
        self._switch(True)

    pause, resume = kill, start

    def forget(self) -> None:
        self.state.forgotten = self.state.revision

    def _switch(self, is_up: bool) -> None:
        with self.changed:
            self.is_up = is_up
            self.changed.notify_all()


class NaiveClient:
    def __init__(self, engine: NaiveEngine, patience: float) -> None:
        self._engine, self._patience, self._closed = engine, patience, False
        self._state, self._changed = engine.state, engine.changed

    def _enter(self, patience: float) -> None:
        """Wait until the server runs."""
        self._changed.wait_for(lambda: self._engine.is_up or self._closed, patience)
        if not self._engine.is_up or self._closed:
            raise DirectoryLost("the naive server is down, or its client was closed")
        before = self._state.revision
        self._state.expire(time.monotonic())
        if self._state.revision != before:
            self._changed.notify_all()

    def grant(self, ttl: float) -> Lease:
        check_ttl(ttl)
        sent = time.monotonic()
        with self._changed:
            self._enter(self._patience)
            return Lease(self._state.grant(ttl, time.monotonic()), ttl, sent + ttl)

    def renew(self, lease: Lease) -> Lease:
        sent = time.monotonic()
        with self._changed:
            self._enter(self._patience)
            if not self._state.renew(lease.id, time.monotonic()):
                raise LeaseLost("it has ended")
            return lease._replace(ends=sent + lease.ttl)

    def revoke(self, lease: Lease) -> None:
        with self._changed:
            self._enter(self._patience)
            self._state.revoke(lease.id)
            self._changed.notify_all()

    def swap(self, key: str, value: bytes | None, expected: int = ABSENT, lease: Lease | None = None) -> Swap:
        check_key(key)
        check_value(key, value or b"")
        with self._changed:
            self._enter(self._patience)
            swap = self._state.swap(key, value, expected, lease.id if lease else 0)
            self._changed.notify_all()
        if swap is None:
            raise LeaseLost("it has ended")
        return swap

    def list(self, prefix: str) -> Listing:
        with self._changed:
            self._enter(self._patience)
            return self._state.list(prefix)

    def watch(self, prefix: str, since: int, timeout: float) -> tuple[int, Events]:
        ends = time.monotonic() + timeout
        with self._changed:
            while True:
                self._enter(self._patience)
                if since < self._state.forgotten:
                    raise Compacted("it was forgotten")
                events = self._state.changes(prefix, since)
                if events or (left := ends - time.monotonic()) <= 0:
                    return self._state.revision, events
                self._changed.wait(min(left, 0.02))

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
