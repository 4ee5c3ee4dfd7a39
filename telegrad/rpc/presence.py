"""Who is in the group, and who comes and goes: what users ask."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from telegrad.group.members import WorkerInfo
from telegrad.rpc import current


def workers() -> list[WorkerInfo]:
    """The workers that are in the group now, this one included, by rank.

    Raises:
        NotInitialized: this process is in no group.
    """
    return current.joined().membership.workers()


def wait_for_workers(wanted: int | Collection[str], timeout: float = 0, *, role: str = "") -> list[WorkerInfo]:
    """Wait until the group has so many workers, this one included, or those of these names; `workers()` then.

    With a `role`, so many workers of that role.

    Raises:
        CallTimeout: they were not there within `timeout` seconds (0 for no limit).
        PeerLost: they cannot come: the group is of fixed size and has lost them, or its store has gone.
    """
    return current.joined().membership.wait_for([wanted] if isinstance(wanted, str) else wanted, timeout, role)


def on_join(callback: Callable[[WorkerInfo], Any]) -> None:
    """Have `callback(worker)` called for each other worker: those that are there already, and those that join.

    It runs on a thread of its own, and may make remote calls. Ends with the group.
    """
    current.joined().membership.on_join(callback)


def on_leave(callback: Callable[[WorkerInfo, str], Any]) -> None:
    """Have `callback(worker, how)` called for each worker that goes: `how` is "left", or "lost" where it died.

    It runs on a thread of its own, and may make remote calls. Ends with the group.
    """
    current.joined().membership.on_leave(callback)


def on_lost(callback: Callable[[WorkerInfo, Exception], Any]) -> None:
    """Have `callback(worker, reason)` called for each worker that is lost: it died, is silent, or left too early.

    The reason is an exception, such as PeerLost or PeerSilent; `on_leave` is told, too. It runs on a thread of its own,
    and may make remote calls. Ends with the group.
    """
    current.joined().membership.on_lost(callback)
