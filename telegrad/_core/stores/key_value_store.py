"""A store as this package uses it: polled instead of waited on, and marked by the process that serves it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from time import monotonic, sleep

from telegrad._core.stores.sealed_store import TERMS, SealedStore
from telegrad.errors import StoreLost, TelegradError

SHORTEST_PAUSE, LONGEST_PAUSE = 5e-4, 5e-2  # seconds between two polls
FEW = 64  # workers that may poll at that rate
SERVED, OPEN, OVER = "telegrad/served", "open", "over"
REFUSED = "telegrad/refused"  # a hint: the number of workers refused because of another key
GONE = "gone"  # returned instead of the mark if no store answers


class KeyValueStore:
    """The keys of a store under a prefix. Polls, because torch's own waits cannot be interrupted."""

    def __init__(self, store: SealedStore, prefix: str = "") -> None:
        self._prefix = prefix
        self.group = ""  # the group's identity, bound to all values but the terms; set by `terms` and `claim_terms`
        self._store = store

    @contextlib.contextmanager
    def _while_it_lasts(self) -> Iterator[SealedStore]:
        try:
            yield self._store
        except TelegradError:
            raise
        except RuntimeError as error:
            raise StoreLost(
                f"the store was lost ({short(error)}): the worker that serves it has ended or cannot be reached, "
                "see its log; or another program, without the group's key, has spoiled what is in the store"
            ) from error

    def _place(self, key: str) -> str:
        return f"{self._prefix}/{key}" if self._prefix else key

    def swap(self, key: str, expected: str, value: str) -> str:
        """Write `value` if the current value is `expected` ("" for none); return the value after that.

        Raises:
            StoreLost: the store is gone.
            StoreUntrusted: the current value was not written with the group's key.
        """
        with self._while_it_lasts() as store:
            return store.swap(self.group, self._place(key), expected, value)

    def read(self, key: str) -> str:
        """Return the value, "" for none. Raises the same errors as `swap`."""
        with self._while_it_lasts() as store:
            return store.read(self.group, self._place(key))

    def write(self, key: str, value: str) -> None:
        """Write unconditionally. Others see it before any later write of this board."""
        with self._while_it_lasts() as store:
            store.write(self.group, self._place(key), value)

    def terms(self) -> str:
        """Return the terms of the group that meets here, "" for none; bind this board to that group."""
        with self._while_it_lasts() as store:
            return self._bind(store.read("", self._place(TERMS)))

    def claim_terms(self, terms: str, expected: str = "") -> str:
        """Write terms if the current ones are `expected`; return the valid terms and bind this board to their group."""
        with self._while_it_lasts() as store:
            return self._bind(store.swap("", self._place(TERMS), expected, terms))

    def _bind(self, terms: str) -> str:
        if terms:
            self.group = str(json.loads(terms)[0])
        return terms

    def add_hint(self, key: str) -> None:
        """Increment a counter. It is not authenticated: do not rely on it."""
        with self._while_it_lasts() as store:
            store.add(self._place(key))

    def hint(self, key: str) -> int:
        """Return a counter that `add_hint` increments; 0 if it is not a number."""
        with self._while_it_lasts() as store:
            return store.count(self._place(key))

    def has_all(self, keys: list[str]) -> bool:
        """Return True if each of these keys has a value, authenticated or not."""
        with self._while_it_lasts() as store:
            return store.has_all([self._place(key) for key in keys])

    def read_all(self, keys: list[str]) -> list[str]:
        """Return the values of keys that are known to exist. Raises the same errors as `swap`."""
        with self._while_it_lasts() as store:
            return store.read_all(self.group, [self._place(key) for key in keys])

    def wait(self, key: str, until: float, meanwhile: Callable[[], None] = lambda: None, waiting: int = 1) -> str:
        """Poll until the key has a value, or return "" at `until`. `waiting`: the number of workers that poll."""
        for _ in poll_intervals(until, waiting):
            found = self.read(key)
            if found:
                return found
            meanwhile()
        return ""

    def __repr__(self) -> str:
        return f"<KeyValueStore {self._prefix or 'without a prefix'}, {self._store!r}>"


def read_server_mark(store: SealedStore) -> str:
    """Return the mark set by the worker that serves the store, or "" if no worker does."""
    try:
        return KeyValueStore(store).read(SERVED)
    except StoreLost:  # it was removed at this moment
        return GONE


def poll_intervals(until: float, waiting: int = 1) -> Iterator[float]:
    """Pace the polling of a store, fast at first; yield the seconds left, at least once.

    With many waiting workers, each polls more rarely: otherwise they would keep the store and all processors busy.
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
    """Return the first line of torch's message, without its C++ trace."""
    return str(error).partition("\n")[0].partition("Exception raised from")[0].strip()
