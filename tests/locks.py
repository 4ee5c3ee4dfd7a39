"""Locks that know their holder, and objects that assert their lock, for all agents of test processes."""

import threading
from collections.abc import Callable
from typing import Any

from telegrad._core.agent import peer
from telegrad._core.reactor import reactor

_here = threading.local()  # .latest: the latest lock of this thread


class CheckedLock:
    """A lock that knows its holder."""

    at_edge: Callable[[], None] | None = None  # called before an acquisition and after a release

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder = 0  # ident of a thread; written by the holder only
        _here.latest = self

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


class Guarded:
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


def _check(module: Any, name: str, *peeks: str) -> None:
    """Check the lock that a constructor of a module makes, and the guarded object that it makes next.

    The object may be used only with the lock held, except for the single atomic reads in `peeks`.
    """
    kind = getattr(module, name)
    module.Lock = CheckedLock

    def make(*args: Any) -> Any:
        made = kind(*args)
        return Guarded(made, _here.latest, peeks) if module.Lock is CheckedLock else made

    setattr(module, name, make)


_check(reactor, "Scheduler", "ready", "waiting", "held_up", "busy", "count")
_check(peer, "CallTable", "begun", "in_flight", "is_full", "next_due")


# Signal handlers raise at once in user code, but not in the package. The locks here replace some of the package.
__name__ = "telegrad.tests.locks"
