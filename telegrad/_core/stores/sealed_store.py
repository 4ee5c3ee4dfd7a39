"""Authenticates the values in a store, which anyone on the network may read and write.

Each value is sealed with the group's key. The seal covers the group, the place in the store, the life of the process
that wrote it, a serial number that increases with each value at that place, and the value itself. So a value can be
neither forged nor moved to another place or group. For a process that has seen a newer value, an older one cannot be
restored, and a value cannot be removed, because members remove by writing a sealed empty value.

An attacker who reaches the store can still stop a group from forming, by removing or overwriting values: reading such a
value raises StoreUntrusted.

Counters are not sealed, because the store increments them atomically. They are only shown to users.
"""

from __future__ import annotations

import contextlib
import hmac
import itertools
import json
import secrets
from collections.abc import Iterable
from time import monotonic
from typing import Any, NamedTuple

from telegrad._core.security.keyring import Keyring
from telegrad.errors import StoreLost, StoreUntrusted, TelegradError

_FORMAT = "tg1"
_LONGEST_NUMBER = 20  # digits
TERMS = "terms"  # a list that begins with the group's identity; itself bound to no group
RENEW_AGAIN = 10.0  # seconds between two renewals of the whole store, while the file has two keys
_MOST_PLACES = 1 << 16  # of a store that is renewed as a whole: an attacker may add any number of keys
_OWN = "telegrad/"  # the prefix of this package's places


class Opened(NamedTuple):
    """A value with a valid seal."""

    value: str
    serial: int
    is_current: bool  # sealed with the key that this process seals with


NOTHING = Opened("", 0, True)


class Sealer:
    """Seals and opens values. Pure, except for the keys, which may come from a file that changes."""

    def __init__(self, keys: Keyring, life: str) -> None:
        self._keys = keys
        self._life = life
        self._sealed = itertools.count()

    def seal(self, group: str, place: str, value: str, serial: int) -> str:
        """Return the sealed form of a value."""
        life = f"{self._life}-{next(self._sealed)}"  # no two writers seal the same text, so each knows which was first
        text = json.dumps([group, place, serial, life, value])
        return f"{_FORMAT} {serial} {life} {_macs(self._keys, text)[0]} {value}"

    def open(self, group: str, place: str, sealed: str) -> Opened:
        """Return the value.

        Raises:
            StoreUntrusted: it was not sealed with a key of this process for this place of this group.
        """
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


def _macs(keys: Keyring, text: str) -> list[str]:
    return [hmac.digest(key, text.encode(), "sha256").hex() for key in keys.derive(b"store")]


class SealedStore:
    """A store of torch, or one with its methods, whose values are sealed. As thread-safe as that store."""

    def __init__(self, store: Any, keys: Keyring) -> None:
        self.raw = store
        self.keys = keys
        self._sealer = Sealer(keys, secrets.token_hex(8))
        self._sealed_with = keys.secrets()[0]  # at the last renewal
        self._renew_at = 0.0  # the time of the next one, while there are two keys
        # The highest serial number seen, by group and place. No lock: if two threads write concurrently, the lower
        # number may remain, and one older value would be accepted.
        self._seen: dict[tuple[str, str], int] = {}

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the store. Raises StoreLost if the store is gone."""
        try:
            return getattr(self.raw, method)(*args)
        except TelegradError:
            raise
        except RuntimeError as error:
            raise StoreLost(
                f"the store was lost ({short(error)}): the worker that serves it has ended or cannot be reached, see "
                "its log; or another program, without the group's key, has corrupted the content of the store"
            ) from error

    def ask(self, place: str) -> str:
        """Return the content at a place, authenticated or not; "" for none."""
        absent = secrets.token_hex(16)  # not in the store, which returns this text if it has no value
        raw = _text(self.call("compare_set", place, absent, absent))
        return "" if raw == absent else raw

    def swap(self, group: str, place: str, expected: str, value: str) -> str:
        """Write `value` if the current value is `expected` ("" for none); return the value after that."""
        if not expected and (group, place) not in self._seen:
            found, raw = NOTHING, ""  # most claims are for places without a value
        else:
            found, raw = self.look_up(group, place)
        while found.value == expected:
            written, found, raw = self.replace(group, place, raw, value, found.serial + 1)
            if written:
                return value
        return found.value

    def read(self, group: str, place: str) -> str:
        """Return the value, "" for none."""
        found, raw = self.look_up(group, place)
        if not found.is_current:  # the key is being replaced: the older one will be unknown soon
            self.replace(group, place, raw, found.value, found.serial + 1)
        return found.value

    def read_all(self, group: str, places: list[str]) -> list[str]:
        """Return the values at places that must have one.

        Raises:
            StoreUntrusted: one of them has none.
        """
        if not self.call("check", places):  # torch would wait for it for minutes, and ignore Ctrl-C
            raise unauthenticated(next((each for each in places if not self.call("check", [each])), places[0]))
        newest = [self._seen.get((group, place), 0) for place in places]
        found = self.call("multi_get", places)
        return [self._open(group, *each).value for each in zip(places, map(_text, found), newest, strict=True)]

    def renew(self) -> None:
        """Seal each value in the store with the first key, if another one was first before.

        Workers that join after the older key is dropped still read such values, whose writers may have left long
        before. Therefore this goes through all places in the store, of all writers. While the file has two keys, it is
        repeated: on a host where the file is replaced later, a worker may have sealed with the older key.
        """
        first, *others = self.keys.secrets()
        if first == self._sealed_with and (not others or monotonic() < self._renew_at):
            return
        groups: dict[str, str] = {}  # the identities of the groups in this store, by the prefix of their places
        for place in sorted(self._places(), key=lambda place: (place.count("/"), not place.endswith(f"/{TERMS}"))):
            above = place.rpartition("/")[0]
            if place.endswith(f"/{TERMS}"):
                with contextlib.suppress(StoreUntrusted):  # a worker may have that name
                    if terms := self.read("", place):
                        groups[above] = str(json.loads(terms)[0])
                    continue
            while above and above not in groups:
                above = above.rpartition("/")[0]
            with contextlib.suppress(StoreUntrusted):  # a counter, or an invalid value, which its reader will report
                self.read(groups.get(above, ""), place)
        self._sealed_with, self._renew_at = first, monotonic() + RENEW_AGAIN

    def _places(self) -> Iterable[str]:
        """Return the places in the store; only the seen ones if it cannot list them or has too many."""
        with contextlib.suppress(AttributeError, RuntimeError, UnicodeDecodeError):
            if self.raw.num_keys() <= _MOST_PLACES:
                return [place for place in self.raw.list_keys() if place.startswith(_OWN)]
        return [place for _, place in list(self._seen)]

    def look_up(self, group: str, place: str) -> tuple[Opened, str]:
        """Return the opened value and its sealed form."""
        newest = self._seen.get((group, place), 0)
        raw = self.ask(place)
        return self._open(group, place, raw, newest), raw

    def replace(self, group: str, place: str, raw: str, value: str, serial: int) -> tuple[bool, Opened, str]:
        """Write a value if the current sealed form is `raw`; return whether that was done, and the current value."""
        newest = self._seen.get((group, place), 0)
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
        if found.serial > self._seen.get((group, place), 0):
            self._seen[group, place] = found.serial
        return found

    def __repr__(self) -> str:
        return f"<SealedStore over {type(self.raw).__name__}>"


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
