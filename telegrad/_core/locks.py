"""Locks that assert in debug runs what they guard: with TELEGRAD_CHECK_LOCKS=1 in the environment.

In other runs locks are those of `threading`, and guarded objects are used directly, without wrappers.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, TypeVar

VARIABLE = "TELEGRAD_CHECK_LOCKS"
CHECKED = os.environ.get(VARIABLE) == "1"

T = TypeVar("T")


class CheckedLock:
    """A lock that knows its holder."""

    at_edge: Callable[[], None] | None = None  # for tests: called before a lock is acquired and after it was released

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder = 0  # ident of a thread; written by the holder only

    @property
    def held(self) -> bool:
        """Return True if this thread holds the lock."""
        return self._holder == threading.get_ident()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        assert not (blocking and self.held), "a thread would wait for itself"
        self._edge()
        got = self._lock.acquire(blocking, timeout)
        if got:
            self._holder = threading.get_ident()
        return got

    def release(self) -> None:
        assert self.held, "given back by a thread that does not hold it"
        self._holder = 0
        self._lock.release()
        self._edge()

    def _edge(self) -> None:
        at_edge = CheckedLock.at_edge
        if at_edge is not None:
            at_edge()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def _is_owned(self) -> bool:
        """Return True if this thread holds the lock; called by `threading.Condition`."""
        return self.held


class _Guarded:
    """Proxy of a guarded object; asserts at each use that the lock is held."""

    def __init__(self, thing: Any, lock: CheckedLock, peeks: tuple[str, ...]) -> None:
        vars(self).update(_thing=thing, _lock=lock, _peeks=peeks)

    def __getattr__(self, name: str) -> Any:
        assert name in self._peeks or self._lock.held, f"{self._thing!r}.{name} is used without its lock"
        return getattr(self._thing, name)

    def __setattr__(self, name: str, value: Any) -> None:
        assert self._lock.held, f"{self._thing!r}.{name} is changed without its lock"
        setattr(self._thing, name, value)

    def __repr__(self) -> str:
        return repr(self._thing)


def new_lock() -> Any:
    """Return a lock; in debug runs one that `guarded` can check."""
    return CheckedLock() if CHECKED else threading.Lock()


def guarded(thing: T, lock: Any, peeks: tuple[str, ...] = ()) -> T:
    """Return `thing`, which may be used only with the lock held, except for the single atomic reads in `peeks`."""
    return _Guarded(thing, lock, peeks) if isinstance(lock, CheckedLock) else thing  # type: ignore[return-value]
