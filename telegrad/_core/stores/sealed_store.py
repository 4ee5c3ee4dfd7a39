"""Authenticates the values in a store or directory, which other programs may read and write.

Each value is sealed with the group's key. The seal covers the group, the place in the store, the life of the process
that wrote it, a serial number that increases with each value at that place, and the value itself. So a value can be
neither forged nor moved to another place or group. For a process that has seen a newer value, an older one cannot be
restored, and a value cannot be removed, because members remove by writing a sealed empty value.

An attacker who reaches the store can still stop a group from forming, by removing or overwriting values: reading such a
value raises StoreUntrusted.

Counters are not sealed, because the store increments them atomically. They are only shown to users.

In a directory such as etcd or Redis, the seal has no serial number: a program that can write there can restore a value
that was replaced.
"""

import contextlib
import hmac
import itertools
import json
import logging
import secrets
import threading
from collections.abc import Callable, Iterable
from time import monotonic
from typing import Any, NamedTuple

from telegrad._core.security.keyring import Keyring
from telegrad._core.stores.directory import (
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
from telegrad._core.texts import poll_intervals
from telegrad._core.threads import Background, wait_for_torch
from telegrad.errors import StoreLost, StoreUntrusted, TelegradError

_FORMAT = "tg1"
_LONGEST_NUMBER = 20  # digits
TERMS = "terms"  # a list that begins with the group's identity; itself bound to no group
RENEW_AGAIN = 10.0  # seconds between two renewals of the whole store, while the file has two keys
_MOST_PLACES = 1 << 16  # of a store that is renewed as a whole: an attacker may add any number of keys
_OWN = "telegrad/"  # the prefix of this package's places
LONGEST_HINT = 6  # digits
SERVED, OPEN, OVER = "telegrad/served", "open", "over"
REFUSED = "telegrad/refused"  # a hint: the number of workers refused because of another key
GONE = "gone"  # returned instead of the mark if no store answers
ANSWER = 10.0  # seconds for an answer of the store
LOOK = 1.0  # seconds between checks of the key file
PATIENCE = 1.0  # seconds for the thread to end

log = logging.getLogger("telegrad")


class Opened(NamedTuple):
    """A value with a valid seal."""

    value: str
    serial: int
    is_current: bool  # sealed with the key that this process seals with


NOTHING = Opened("", 0, True)


class Sealer:
    """Seals and opens values. The keys may come from a file that changes."""

    def __init__(self, keys: Keyring, life: str) -> None:
        self._keys = keys
        self._life = life
        self._sealed = itertools.count()
        self._renewed_with = keys.secrets()[0]  # the first key at the last renewal
        self._renew_at = 0.0  # the time of the next renewal, while there are two keys

    def seal(self, group: str, place: str, value: str, serial: int) -> str:
        # No two writers may seal the same text: a writer knows that its compare-and-set was done only because the store
        # has the text that it sealed.
        life = f"{self._life}-{next(self._sealed)}"
        text = json.dumps([group, place, serial, life, value])
        return f"{_FORMAT} {serial} {life} {_macs(self._keys, text)[0]} {value}"

    def open(self, group: str, place: str, sealed: str) -> Opened:
        """Return the value; raise StoreUntrusted if no key of this process sealed it for this place of this group."""
        if not sealed:
            return NOTHING
        kind, _, rest = sealed.partition(" ")
        number, _, rest = rest.partition(" ")
        life, _, rest = rest.partition(" ")
        mac, space, value = rest.partition(" ")
        if space and kind == _FORMAT and number.isdecimal() and len(number) < _LONGEST_NUMBER and mac.isascii():
            text = json.dumps([group, place, int(number), life, value])
            for position, expected in enumerate(_macs(self._keys, text)):
                if hmac.compare_digest(mac, expected):
                    return Opened(value, int(number), position == 0)
        raise unauthenticated(place)

    def renew(self, seal_all: Callable[[], None]) -> None:
        """Call `seal_all` if another key was first at the last renewal: later workers have only the first key. While
        the file has two keys, this is repeated: on a host where it is replaced later, the older may be in use."""
        first, *others = self._keys.secrets()
        if first != self._renewed_with or (others and monotonic() >= self._renew_at):
            seal_all()
            self._renewed_with, self._renew_at = first, monotonic() + RENEW_AGAIN


def _macs(keys: Keyring, text: str) -> list[str]:
    return [hmac.digest(key, text.encode(), "sha256").hex() for key in keys.derive(b"store")]


class SealedStore:
    """A store of torch, or one with its methods, whose values are sealed. As thread-safe as that store."""

    def __init__(self, store: Any, keys: Keyring) -> None:
        self.raw = store
        self.keys = keys
        self._sealer = Sealer(keys, secrets.token_hex(8))
        # A thread that was not answered stays in torch's client, where later calls would wait behind it.
        self._is_silent = False  # a call was not answered in time
        # The highest serial number seen, by group and place. No lock: if two threads write concurrently, the lower
        # number may remain, and one older value would be accepted.
        self.seen: dict[tuple[str, str], int] = {}

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the store. Raises StoreLost if the store is gone, or does not answer."""
        try:
            if self._is_silent:
                raise TimeoutError("it does not answer")
            return wait_for_torch(ANSWER, getattr(self.raw, method), *args)
        except TelegradError:
            raise
        except (RuntimeError, OSError) as error:
            self._is_silent = isinstance(error, TimeoutError)
            raise StoreLost(
                f"the store was lost ({short(error)}): the worker that serves it has ended or cannot be reached, see "
                "its log; or another program, without the group's key, has corrupted the content of the store"
            ) from error

    def ask(self, place: str) -> str:
        """Return the content at a place, authenticated or not; "" for none."""
        # A compare-and-set that cannot change anything reads without waiting: torch's `get` waits for a missing key.
        # For a missing key, a store returns the expected text, here a random one, so no other program can write it as a
        # value.
        absent = secrets.token_hex(16)
        raw = _text(self.call("compare_set", place, absent, absent))
        return "" if raw == absent else raw

    def read_all(self, group: str, places: list[str]) -> list[str]:
        """Return the values at places that must have one; raise StoreUntrusted if one of them has none."""
        if not self.call("check", places):  # torch would wait for it for minutes, and ignore Ctrl-C
            raise unauthenticated(next((each for each in places if not self.call("check", [each])), places[0]))
        newest = [self.seen.get((group, place), 0) for place in places]
        found = self.call("multi_get", places)
        return [self._open(group, *each).value for each in zip(places, map(_text, found), newest, strict=True)]

    def renew(self) -> None:
        """Seal each value in the store, of all writers, with the first key, if another one was first before. Workers
        that join after the older key is dropped still read such values, whose writers may have left long before."""
        self._sealer.renew(self._seal_all)

    def _seal_all(self) -> None:
        groups: dict[str, str] = {}  # the identities of the groups in this store, by the prefix of their places
        # The terms under a prefix come before all other places under it, because they name the group to which the
        # values there are bound.
        for place in sorted(self._places(), key=lambda place: (place.count("/"), not place.endswith(f"/{TERMS}"))):
            above = place.rpartition("/")[0]
            if place.endswith(f"/{TERMS}"):
                # A place may end like that because a worker has that name.
                with contextlib.suppress(StoreUntrusted):
                    if terms := KeyValueStore(self).read(place):
                        groups[above] = str(json.loads(terms)[0])
                    continue
            while above and above not in groups:
                above = above.rpartition("/")[0]
            # Reading seals the value again if it has the older key. A counter is not sealed, and an invalid value is
            # reported by its reader.
            with contextlib.suppress(StoreUntrusted):
                KeyValueStore(self, group=groups.get(above, "")).read(place)

    def _places(self) -> Iterable[str]:
        """Return the places in the store; only the seen ones if it cannot list them or has too many."""
        with contextlib.suppress(AttributeError, StoreLost, UnicodeDecodeError):
            if self.call("num_keys") <= _MOST_PLACES:
                return [place for place in self.call("list_keys") if place.startswith(_OWN)]
        return [place for _, place in list(self.seen)]

    def look_up(self, group: str, place: str) -> tuple[Opened, str]:
        newest = self.seen.get((group, place), 0)
        raw = self.ask(place)
        return self._open(group, place, raw, newest), raw

    def replace(self, group: str, place: str, raw: str, value: str, serial: int) -> tuple[bool, Opened, str]:
        """Write a value if the current sealed form is `raw`; return whether that was done, and the current value."""
        newest = self.seen.get((group, place), 0)
        sealed = self._sealer.seal(group, place, value, serial)
        now = _text(self.call("compare_set", place, raw, sealed))
        return now == sealed, self._open(group, place, now, newest), now

    def _open(self, group: str, place: str, raw: str, newest: int) -> Opened:
        """Open a value that was read after this process had seen the serial number `newest`."""
        found = self._sealer.open(group, place, raw)
        if found.serial < newest:
            raise StoreUntrusted(
                f"the group's store has an older value at {place!r} than it had before, or none: a program without the "
                "group's key writes to it, or it was restarted"
            )
        if found.serial > self.seen.get((group, place), 0):
            self.seen[group, place] = found.serial
        return found


def short(error: BaseException) -> str:
    """Return the first line of torch's message, without its C++ trace."""
    return str(error).partition("\n")[0].partition("Exception raised from")[0].strip()


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")


def unauthenticated(place: str) -> StoreUntrusted:
    """Return the error for a value that was not sealed with a key of this process."""
    return StoreUntrusted(
        f"the value in the group's store at {place!r} was not written with this worker's key. The workers have "
        "different keys, or the store is another program's. Give all workers the same key: TELEGRAD_KEY, "
        "TELEGRAD_KEY_FILE or key=... in the options; without any of these, workers of one user share the key in "
        "that user's state folder, which hosts without a shared home do not have in common. If the store is a file "
        "of an earlier run, remove it or name another"
    )


class KeyValueStore:
    """The keys of a store under a prefix. Polls, because torch's own waits cannot be interrupted."""

    def __init__(self, store: SealedStore, prefix: str = "", group: str = "") -> None:
        self._store, self._prefix = store, prefix
        # The group's identity, bound to all values but the terms. `terms` and `claim_terms` set it.
        self.group = group

    def _place(self, key: str) -> str:
        return f"{self._prefix}/{key}" if self._prefix else key

    def swap(self, key: str, expected: str, value: str) -> str:
        """Write `value` if the current value is `expected` ("" for none); return the value after that. Raise StoreLost
        if the store is gone, and StoreUntrusted if the current value was not written with the group's key."""
        place = self._place(key)
        if not expected and (self.group, place) not in self._store.seen:
            # Most claims are for places without a value, so try without reading first. If there is a value, `replace`
            # returns it.
            found, raw = NOTHING, ""
        else:
            found, raw = self._store.look_up(self.group, place)
        while found.value == expected:
            written, found, raw = self._store.replace(self.group, place, raw, value, found.serial + 1)
            if written:
                return value
        return found.value

    def read(self, key: str) -> str:
        """Return the value, "" for none. Raises the same errors as `swap`."""
        place = self._place(key)
        found, raw = self._store.look_up(self.group, place)
        # The key is being replaced: workers that have only the new one could not read this value. If another worker
        # writes meanwhile, this compare-and-set does nothing.
        if not found.is_current:
            self._store.replace(self.group, place, raw, found.value, found.serial + 1)
        return found.value

    def write(self, key: str, value: str) -> None:
        """Write unconditionally. Others see it before any later write of this board. A retried compare-and-set ensures
        that no serial number is repeated."""
        place = self._place(key)
        found, raw = self._store.look_up(self.group, place)
        written = False
        while not written:
            written, found, raw = self._store.replace(self.group, place, raw, value, found.serial + 1)

    def terms(self) -> str:
        """Return the terms of the group that meets here, "" for none; bind this board to that group."""
        return self._bind(KeyValueStore(self._store, self._prefix).read(TERMS))

    def claim_terms(self, terms: str) -> str:
        """Write terms if there are none; return the valid terms and bind this board to their group."""
        return self._bind(KeyValueStore(self._store, self._prefix).swap(TERMS, "", terms))

    def _bind(self, terms: str) -> str:
        if terms:
            self.group = str(json.loads(terms)[0])
        return terms

    def add_hint(self, key: str) -> None:
        """Increment a counter, unless it is not a number: then torch's server would close the connection."""
        if self.hint(key) or not self._store.ask(self._place(key)):
            self._store.call("add", self._place(key), 1)

    def hint(self, key: str) -> int:
        """Return a counter, 0 if it is not a number. It is not authenticated: do not rely on it."""
        raw = self._store.ask(self._place(key))
        return int(raw) if raw.isascii() and raw.isdecimal() and len(raw) <= LONGEST_HINT else 0

    def has_all(self, keys: list[str]) -> bool:
        """Return True if each of these keys has a value, authenticated or not."""
        return bool(self._store.call("check", [self._place(key) for key in keys]))

    def read_all(self, keys: list[str]) -> list[str]:
        """Return the values of keys that are known to exist. Raises the same errors as `swap`."""
        return self._store.read_all(self.group, [self._place(key) for key in keys])

    def wait(self, key: str, until: float, meanwhile: Callable[[], None] = lambda: None, waiting: int = 1) -> str:
        """Poll until the key has a value, or return "" at `until`. `waiting`: the number of workers that poll."""
        for _ in poll_intervals(until, waiting):
            found = self.read(key)
            if found:
                return found
            meanwhile()
        return ""


def read_server_mark(store: SealedStore) -> str:
    """Return the mark set by the worker that serves the store, or "" if no worker does."""
    try:
        return KeyValueStore(store).read(SERVED)
    except StoreLost:  # it was removed at this moment
        return GONE


class SealedDirectory:
    """A `Directory` whose values carry a MAC under the group's key, which covers their keys as well. Reading a value of
    another program raises StoreUntrusted. A watch skips it with a warning, because later changes are authentic."""

    def __init__(self, directory: Directory, keys: Keyring, place: str) -> None:
        """`place` distinguishes this directory from those of other groups on the same servers."""
        self._directory, self._place = directory, place
        self.grant, self.renew, self.revoke = directory.grant, directory.renew, directory.revoke
        self.close = directory.close
        self._sealer = Sealer(keys, secrets.token_hex(8))
        self._told: set[str] = set()  # keys with a logged warning; any thread adds to it

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
        """Seal each value with the first key, if another one was first before."""
        with contextlib.suppress(DirectoryLost, DirectoryRefused, StoreUntrusted):  # retried later
            self._sealer.renew(self._seal_all)

    def _seal_all(self) -> None:
        for entry in self._directory.list("").entries:
            with contextlib.suppress(StoreUntrusted, LeaseLost):  # another program's, or of a member that is gone
                opened = self._open(entry)
                if not opened.is_current:
                    sealed = self._sealer.seal(self._place, entry.key, opened.value, 0).encode()
                    lease = Lease(entry.lease, 0.0, 0.0) if entry.lease else None
                    self._directory.swap(entry.key, sealed, entry.revision, lease)

    def _opened(self, entry: Entry) -> Entry:
        return entry._replace(value=self._open(entry).value.encode())

    def _open(self, entry: Entry) -> Opened:
        return self._sealer.open(self._place, entry.key, entry.value.decode("utf-8", "replace"))


class SealRenewal:
    """A thread that seals one store or directory again while the group's key is being replaced.

    Some stores are read rarely, and also by workers that only have the new key: the store that points to the directory
    of a dynamic or elastic group, and such a directory if its values are sealed; the store of a group of fixed size
    that no worker serves (a file, or torchrun's), which restarted workers read again; and that of `telegrad run`.
    """

    def __init__(self, renew: Callable[[], None]) -> None:
        """`renew` seals the values again if the key was replaced; it is called once a second."""
        self._renew = renew
        self._over = threading.Event()
        self._thread = Background("telegrad-renewal", self._main)

    def begin(self) -> None:
        self._thread.want()

    def close(self) -> None:
        self._over.set()
        self._thread.join(PATIENCE)

    def _main(self) -> None:
        while not self._over.wait(LOOK):
            try:
                self._renew()
            except (TelegradError, RuntimeError) as error:
                log.debug("telegrad: the store cannot be sealed again yet: %s", error)
