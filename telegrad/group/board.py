"""A store as this package uses it: never asked to wait, and marked by whoever serves it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from time import monotonic, sleep
from typing import Any

import torch.distributed as dist

from telegrad.errors import RendezvousError, StoreLost
from telegrad.group.asking import AskedAside

SHORTEST_PAUSE, LONGEST_PAUSE = 5e-4, 5e-2  # seconds between two looks
SERVED, OPEN, OVER, SETTLING = "telegrad/served", "open", "over", "settling"
GONE = "gone"  # what stands for the mark where no store answers, or not yet
DYNAMIC = "telegrad/dynamic"  # where a dynamic group keeps its directory in a store
_ABSENT = "absent"  # no key has this value


class Board:
    """A store that is never asked to wait: torch's own waits cannot be interrupted, and report on stderr."""

    def __init__(self, store: Any, prefix: str = "", aside: bool = False) -> None:
        """`aside`: it is served elsewhere, for long; where it is silent, that is noticed."""
        self._prefix = prefix
        self._closed = ""
        self._store: Any = dist.PrefixStore(prefix, store) if prefix else store
        if aside:
            self._store = AskedAside(self._store)

    def close(self, why: str = "this worker has left the group") -> None:
        """Let go of the store: what this process serves goes, too; `why` is what those hear who ask it."""
        self._closed = why
        store, self._store = self._store, None
        if isinstance(store, AskedAside):
            store.close()

    @contextlib.contextmanager
    def _while_it_lasts(self) -> Iterator[Any]:
        store = self._store  # loaded once: another thread may close this board meanwhile
        if store is None:
            raise StoreLost(self._closed)
        try:
            yield store
        except RuntimeError as error:
            raise StoreLost(
                f"the store was lost ({short(error)}): "
                "the worker that serves it has ended or cannot be reached; see its log"
            ) from error

    def swap(self, key: str, expected: str, value: str) -> str:
        """Write `value` where `expected` is found ("" is nothing); what is there now."""
        with self._while_it_lasts() as store:
            return str(store.compare_set(key, expected, value).decode())

    def read(self, key: str) -> str:
        """What is there, "" for nothing."""
        found = self.swap(key, _ABSENT, _ABSENT)
        return "" if found == _ABSENT else found

    def write(self, key: str, value: str) -> None:
        """Seen by others before whatever this board does next, though not yet when this returns."""
        with self._while_it_lasts() as store:
            store.set(key, value)

    def count(self, key: str, more: int = 1) -> int:
        if not more:
            return int(self.read(key) or 0)  # a file would grow by what is added, nothing included
        with self._while_it_lasts() as store:
            return int(store.add(key, more))

    def read_all(self, keys: list[str]) -> list[str]:
        """What is there under keys that are known to be there."""
        with self._while_it_lasts() as store:
            return [value.decode() for value in store.multi_get(keys)]

    def wait(self, key: str, until: float, meanwhile: Callable[[], None] = lambda: None) -> str:
        """Look until something is there; "" when `until` came first."""
        for _ in looks(until):
            found = self.read(key)
            if found:
                return found
            meanwhile()
        return ""

    def wait_for_count(self, key: str, count: int, until: float) -> None:
        """Look until it has been counted so often, or until `until`."""
        for _ in looks(until):
            if self.count(key, 0) >= count:
                return

    def __repr__(self) -> str:
        kind = type(self._store).__name__ if self._store is not None else "closed"
        return f"<Board {self._prefix or 'without a prefix'}, {kind}>"


def mark_of(store: Any) -> str:
    """Who serves it says so; "" where that is no worker."""
    try:
        return Board(store).read(SERVED)
    except RendezvousError:  # it was taken away in this moment
        return GONE


def looks(until: float) -> Iterator[float]:
    """Times to look for something, at first in quick succession; yields the seconds left, at least once."""
    pause = SHORTEST_PAUSE
    while True:
        yield until - monotonic()
        left = until - monotonic()
        if left <= 0:
            return
        sleep(min(pause, left))
        pause = min(1.5 * pause, LONGEST_PAUSE)


def short(error: BaseException) -> str:
    """The first line of what torch says, without its C++ trace."""
    return str(error).partition("\n")[0].partition("Exception raised from")[0].strip()
