"""Authenticates what a store holds: a store is a place that anyone on the network may read and write.

Each value is sealed with the group's key. The seal covers the group, the place in the store, the life of the process
that wrote it, a serial number that grows with each value at that place, and the value itself. So a value cannot be made
up, nor moved to another place or another group. A value that was replaced cannot be put back for a process that has
seen the newer one; nor can one be removed, since members remove by a sealed empty value.

A stranger who reaches the store can still stop a group from forming, by removing or spoiling values: whoever reads such
a value gets StoreUntrusted.

Counters (`hint`) are not sealed: a store adds to them in one step. Nothing may rely on them but when to look again.
A counter that is no number, or is lower than this process has seen it, raises StoreUntrusted too.
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
from telegrad.errors import StoreUntrusted

_FORMAT = "tg1"
_LONGEST_NUMBER = 20  # digits
TERMS = "terms"  # a list, of which the group's identity is the first; itself bound to no group
RENEW_AGAIN = 10.0  # seconds between two renewals of the whole store, while the file has two keys
_MOST_PLACES = 1 << 16  # of a store that is renewed as a whole: a stranger may have put any number of keys into it
_OWN = "telegrad/"  # with which the places of this package begin
_LONGEST_COUNT = 15  # digits: torch adds 64-bit integers, and one near their limit would become negative


class Opened(NamedTuple):
    """A value whose seal is right."""

    value: str
    serial: int
    is_current: bool  # it is sealed with the key that this process seals with


NOTHING = Opened("", 0, True)


class Sealer:
    """Seals and opens values. Pure, but for the keys, which may come from a file that changes."""

    def __init__(self, keys: Keyring, life: str) -> None:
        self._keys = keys
        self._life = life
        self._sealed = itertools.count()

    def seal(self, group: str, place: str, value: str, serial: int) -> str:
        """Return the value as it stands in the store."""
        life = (
            f"{self._life}-{next(self._sealed)}"  # so that no two writers seal the same, and each knows who was first
        )
        text = json.dumps([group, place, serial, life, value])
        return f"{_FORMAT} {serial} {life} {_macs(self._keys, text)[0]} {value}"

    def open(self, group: str, place: str, sealed: str) -> Opened:
        """Return the value.

        Raises:
            StoreUntrusted: no key of this process has sealed it, for this place of this group.
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
    """A store of torch, or one with its methods, whose values are sealed. For any thread, as far as the store is."""

    def __init__(self, store: Any, keys: Keyring) -> None:
        self.raw = store
        self.keys = keys
        self._sealer = Sealer(keys, secrets.token_hex(8))
        self._sealed_with = keys.secrets()[0]  # at the last renewal
        self._renew_at = 0.0  # when the next one is due, while there are two keys
        # The highest serial number seen, by group and place. No lock: where two threads store at once, the lower number
        # may stay, and one older value would be taken.
        self._seen: dict[tuple[str, str], int] = {}
        self._counted: dict[str, int] = {}  # the highest sum seen, by place; no lock, likewise

    def swap(self, group: str, place: str, expected: str, value: str) -> str:
        """Write `value` where `expected` is found ("" is nothing); return what is there now."""
        if not expected and (group, place) not in self._seen:
            found, raw = NOTHING, ""  # most claims are of places where nothing is
        else:
            found, raw = self._look_up(group, place)
        while found.value == expected:
            written, found, raw = self._replace(group, place, raw, value, found.serial + 1)
            if written:
                return value
        return found.value

    def read(self, group: str, place: str) -> str:
        """Return what is there, "" for nothing."""
        found, raw = self._look_up(group, place)
        if not found.is_current:  # the key is being replaced: the older one will be unknown soon
            self._replace(group, place, raw, found.value, found.serial + 1)
        return found.value

    def write(self, group: str, place: str, value: str) -> None:
        """Write, whatever is there; in a step that fails if another has written meanwhile, so no serial comes back."""
        found, raw = self._look_up(group, place)
        written = False
        while not written:
            written, found, raw = self._replace(group, place, raw, value, found.serial + 1)

    def read_all(self, group: str, places: list[str]) -> list[str]:
        """Return what is at places where something should be.

        Raises:
            StoreUntrusted: there is nothing at one of them.
        """
        if not self.raw.check(places):  # torch would wait for it, for minutes and deaf to Ctrl-C
            raise unauthenticated(next((each for each in places if not self.raw.check([each])), places[0]))
        newest = [self._seen.get((group, place), 0) for place in places]
        found = self.raw.multi_get(places)
        return [self._open(group, *each).value for each in zip(places, map(_text, found), newest, strict=True)]

    def has_all(self, places: list[str]) -> bool:
        """Return True if there is something at each of these places, by whoever wrote it."""
        return bool(self.raw.check(places))

    def add(self, place: str, more: int) -> int:
        """Add to a counter that is not sealed; return the sum.

        Raises:
            StoreUntrusted: it is no number, or lower than it was.
        """
        least = self.count(place) + more  # read first: torch's server hangs up on whoever adds to what is no number
        return self._checked(place, str(self.raw.add(place, more)), least)

    def count(self, place: str) -> int:
        """Return a counter that is not sealed; raises as `add`."""
        least = self._counted.get(place, 0)
        return self._checked(place, self._ask(place), least)

    def _checked(self, place: str, raw: str, least: int) -> int:
        """Return the sum that the store told; `least` is the lowest that it can be."""
        if raw and not (raw.isascii() and raw.isdecimal() and len(raw) <= _LONGEST_COUNT):
            raise spoiled(place, "is no number")
        count = int(raw or 0)
        if count < least:
            raise spoiled(place, f"is {count}, and was {least} before")
        if count > self._counted.get(place, 0):
            self._counted[place] = count
        return count

    def renew(self) -> None:
        """Seal each value in the store with the first key, where another one has become that.

        A value is read by workers that come once the older key is refused, and its writer may have left long before.
        So all places are gone through that the store lists, whoever wrote there. While the file has two keys this is
        repeated, since a worker on a host where it was replaced later may have sealed with the older one meanwhile.
        """
        first, *others = self.keys.secrets()
        if first == self._sealed_with and (not others or monotonic() < self._renew_at):
            return
        groups: dict[str, str] = {}  # the identities of those that meet in this store, by the prefix of their places
        for place in sorted(self._places(), key=lambda place: (place.count("/"), not place.endswith(f"/{TERMS}"))):
            above = place.rpartition("/")[0]
            if place.endswith(f"/{TERMS}"):
                with contextlib.suppress(StoreUntrusted):  # a worker's name may be that
                    if terms := self.read("", place):
                        groups[above] = str(json.loads(terms)[0])
                    continue
            while above and above not in groups:
                above = above.rpartition("/")[0]
            with contextlib.suppress(StoreUntrusted):  # it is a counter, or was spoiled: whoever needs it says so
                self.read(groups.get(above, ""), place)
        self._sealed_with, self._renew_at = first, monotonic() + RENEW_AGAIN

    def _places(self) -> Iterable[str]:
        """Return the places in the store; where it cannot list them, or has too many, those that were seen."""
        with contextlib.suppress(AttributeError, RuntimeError, UnicodeDecodeError):
            if self.raw.num_keys() <= _MOST_PLACES:
                return [place for place in self.raw.list_keys() if place.startswith(_OWN)]
        return [place for _, place in list(self._seen)]

    def _look_up(self, group: str, place: str) -> tuple[Opened, str]:
        """Return what is there, opened and as it stands."""
        newest = self._seen.get((group, place), 0)
        raw = self._ask(place)
        return self._open(group, place, raw, newest), raw

    def _ask(self, place: str) -> str:
        absent = secrets.token_hex(16)  # no value in the store: it gives this one back where it has none
        raw = _text(self.raw.compare_set(place, absent, absent))
        return "" if raw == absent else raw

    def _replace(self, group: str, place: str, raw: str, value: str, serial: int) -> tuple[bool, Opened, str]:
        """Write a value where `raw` stands; return whether it was written, and what is there now."""
        newest = self._seen.get((group, place), 0)
        sealed = self._sealer.seal(group, place, value, serial)
        now = _text(self.raw.compare_set(place, raw, sealed))
        return now == sealed, self._open(group, place, now, newest), now

    def _open(self, group: str, place: str, raw: str, newest: int) -> Opened:
        """Open what the store had after this process had seen the serial number `newest`."""
        found = self._sealer.open(group, place, raw)
        if found.serial < newest:
            raise StoreUntrusted(
                f"the group's store has an older value at {place!r} than it had before, or none: somebody without the "
                "group's key writes to it, or it was served anew"
            )
        self._note(group, place, found.serial)
        return found

    def _note(self, group: str, place: str, serial: int) -> None:
        if serial > self._seen.get((group, place), 0):
            self._seen[group, place] = serial

    def __repr__(self) -> str:
        return f"<SealedStore over {type(self.raw).__name__}>"


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")


def unauthenticated(place: str) -> StoreUntrusted:
    """Return the error for a value that no key of this process has sealed."""
    return StoreUntrusted(
        f"what stands in the group's store at {place!r} was not written with this worker's key. The workers have "
        "different keys, or the store is another program's. Give all workers the same key: TELEGRAD_KEY, "
        "TELEGRAD_KEY_FILE or key=... in the options; without any of these, workers of one user share the key in "
        "that user's state folder, which hosts without a shared home do not have in common. If the store is a file "
        "of an earlier run, remove it or name another"
    )


def spoiled(place: str, how: str) -> StoreUntrusted:
    """Return the error for a counter that the workers of the group cannot have brought to where it is."""
    return StoreUntrusted(
        f"the counter at {place!r} in the group's store {how}: somebody without the group's key writes to the store, "
        "or it is another program's. Keep others from its port or file, and begin the group anew in another one"
    )
