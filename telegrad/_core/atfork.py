"""Reset locks and state in a forked child.

A forked child has one thread, the one that forked. A lock that another thread of the parent held at that moment is
never released in the child: the child would wait for it forever. Therefore a lock that belongs to a module or to an
object used by the whole process, and not to one worker, is created by `renewed(threading.Lock())`. State that belongs
to threads or calls of the parent is reset by a function that is marked with `in_child`.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

L = TypeVar("L")
F = TypeVar("F", bound=Callable[[], object])

_locks: weakref.WeakSet[Any] = weakref.WeakSet()


def renewed(lock: L) -> L:
    """Register a lock, condition or event for release in each forked child; return it.

    A reentrant lock that the forking thread itself holds stays held: that thread continues in the child, and releases
    it.
    """
    _locks.add(lock)
    return lock


def in_child(act: F) -> F:
    """Mark a function that each forked child calls at once, on the thread that forked, in the order of the marks."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=act)
    return act


@in_child  # registered first: the functions after this one can then take the locks
def _renew() -> None:
    for lock in list(_locks):
        if not (hasattr(lock, "_is_owned") and lock._is_owned()):
            lock._at_fork_reinit()
