"""A store as this package uses it: never asked to wait, and marked by the process that serves it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from time import monotonic, sleep

from telegrad._core.stores.sealed_store import TERMS, SealedStore, spoiled
from telegrad.errors import StoreLost, StoreUntrusted, TelegradError

SHORTEST_PAUSE, LONGEST_PAUSE = 5e-4, 5e-2  # seconds between two looks
FEW = 64  # workers that may look as often as that
SERVED, OPEN, OVER = "telegrad/served", "open", "over"
REFUSED = "telegrad/refused"  # a hint: how many have come with another key
GONE = "gone"  # what stands for the mark where no store answers, or not yet


class Board:
    """Part of a store: the keys behind a prefix. Never asked to wait: torch's own waits cannot be interrupted."""

    def __init__(self, store: SealedStore, prefix: str = "") -> None:
        self._prefix = prefix
        self.group = ""  # to whose identity all values but the terms are bound; `terms` and `claim_terms` find it
        self._store = store

    @contextlib.contextmanager
    def _while_it_lasts(self) -> Iterator[SealedStore]:
        try:
            yield self._store
        except TelegradError:
            raise
        except RuntimeError as error:
            raise StoreLost(
                f"the store was lost ({short(error)}): "
                "the worker that serves it has ended or cannot be reached; see its log"
            ) from error

    def _place(self, key: str) -> str:
        return f"{self._prefix}/{key}" if self._prefix else key

    def swap(self, key: str, expected: str, value: str) -> str:
        """Write `value` where `expected` is found ("" is nothing); return what is there now.

        Raises:
            StoreLost: the store has gone.
            StoreUntrusted: what is there was not written with the group's key.
        """
        with self._while_it_lasts() as store:
            return store.swap(self.group, self._place(key), expected, value)

    def read(self, key: str) -> str:
        """Return what is there, "" for nothing; raises as `swap`."""
        with self._while_it_lasts() as store:
            return store.read(self.group, self._place(key))

    def write(self, key: str, value: str) -> None:
        """Write, whatever is there. Seen by others before whatever this board does next."""
        with self._while_it_lasts() as store:
            store.write(self.group, self._place(key), value)

    def terms(self) -> str:
        """Return the terms of the group that meets here, "" where there are none; binds this board to that group."""
        with self._while_it_lasts() as store:
            return self._bind(store.read("", self._place(TERMS)))

    def claim_terms(self, terms: str, expected: str = "") -> str:
        """Lay down terms where `expected` stands; return those that hold, and bind this board to their group."""
        with self._while_it_lasts() as store:
            return self._bind(store.swap("", self._place(TERMS), expected, terms))

    def _bind(self, terms: str) -> str:
        if terms:
            self.group = str(json.loads(terms)[0])
        return terms

    def add_hint(self, key: str) -> int:
        """Add one to a counter in one step; return the sum. It is not authenticated: nothing may rely on it."""
        with self._while_it_lasts() as store:
            return store.add(self._place(key), 1)

    def hint(self, key: str) -> int:
        """Return a counter that `add_hint` adds to."""
        with self._while_it_lasts() as store:
            return store.count(self._place(key))

    def has_all(self, keys: list[str]) -> bool:
        """Return True if there is something under each of these keys, whoever has written it."""
        with self._while_it_lasts() as store:
            return store.has_all([self._place(key) for key in keys])

    def spoiled(self, key: str, how: str) -> StoreUntrusted:
        """Return the error for a counter that cannot be what it is."""
        return spoiled(self._place(key), how)

    def renew(self) -> None:
        """Seal what is in the store anew, where the group's key is being replaced."""
        with self._while_it_lasts() as store:
            store.renew()

    def read_all(self, keys: list[str]) -> list[str]:
        """Return what is there under keys that are known to be there; raises as `swap`."""
        with self._while_it_lasts() as store:
            return store.read_all(self.group, [self._place(key) for key in keys])

    def wait(self, key: str, until: float, meanwhile: Callable[[], None] = lambda: None, waiting: int = 1) -> str:
        """Look until something is there; return "" when `until` came first. `waiting`: how many workers do so."""
        for _ in looks(until, waiting):
            found = self.read(key)
            if found:
                return found
            meanwhile()
        return ""

    def __repr__(self) -> str:
        return f"<Board {self._prefix or 'without a prefix'}, {self._store!r}>"


def mark_of(store: SealedStore) -> str:
    """Who serves it says so; "" where that is no worker."""
    try:
        return Board(store).read(SERVED)
    except StoreLost:  # it was taken away in this moment
        return GONE


def looks(until: float, waiting: int = 1) -> Iterator[float]:
    """Times to look for something, at first in quick succession; yields the seconds left, at least once.

    Where many workers wait, each looks more rarely: together they would keep the store and all processors busy.
    """
    pause, longest = SHORTEST_PAUSE, LONGEST_PAUSE * max(1, waiting / FEW)
    while True:
        yield until - monotonic()
        left = until - monotonic()
        if left <= 0:
            return
        sleep(min(pause, left))
        pause = min(1.5 * pause, longest)


def short(error: BaseException) -> str:
    """The first line of what torch says, without its C++ trace."""
    return str(error).partition("\n")[0].partition("Exception raised from")[0].strip()
