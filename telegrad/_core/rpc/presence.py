"""The functions of the API that tell about the workers of the group, and about this worker."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from telegrad._core import checks
from telegrad._core.membership.members import WorkerInfo, info
from telegrad._core.pickling.remote_text import folded
from telegrad._core.rpc.conversion import target
from telegrad._core.worker import current
from telegrad.errors import InvalidArgument

_WANTED = "a number of workers, or a list of their names"


@folded
def get_worker_info(worker_name: str | None = None) -> WorkerInfo:
    """Return the worker of that name, or this one.

    Args:
        worker_name: a worker's name; left out, this worker.

    Returns:
        Its `WorkerInfo`, which calls accept instead of a name.

    Raises:
        UnknownWorker: there is none of that name.
        NotInitialized: this process is in no group.

    Example:
        >>> rpc.get_worker_info("worker1")
        WorkerInfo(name='worker1', id=2)
    """
    agent = current.agent()
    member = agent.me if worker_name is None else agent.find(target(worker_name, "worker_name"))
    return info(member)


def debug_info() -> dict[str, int]:
    """Return counts of this worker's references and of their pending operations.

    `owners` have their values here (`shared_owners`: also held by others, in so many `forks`); `users` refer to values
    of other workers. Pending are: users that their owner does not know so far, forks sent to others that have not
    settled, users that end as soon as they may, creating calls without an answer, and control messages without a
    receipt.

    Raises:
        NotInitialized: this process is in no group.

    Example:
        >>> mine = rpc.RRef(5)
        >>> rpc.debug_info()["owners"] > 0
        True
    """
    return current.references().counts()


def _rref_context_get_debug_info() -> dict[str, str]:
    """Return the part of `debug_info` that `torch.distributed.rpc` has, under its names."""
    counts = debug_info()
    return {
        "num_owner_rrefs": str(counts["shared_owners"]),
        "num_forks": str(counts["forks"]),
        "num_pending_users": str(counts["pending_users"]),
        "num_pending_futures": str(counts["pending_creations"]),
    }


def workers() -> list[WorkerInfo]:
    """Return the current workers of the group, including this one, by rank.

    Example:
        >>> [worker.name for worker in rpc.workers()]
        ['driver', 'worker0', 'worker1']
    """
    return current.here().membership.workers()


@folded
def wait_for_workers(wanted: int | Collection[str], timeout: float = 0, *, role: str = "") -> list[WorkerInfo]:
    """Wait until a dynamic or elastic group has workers; a fixed group has all of them after `init_rpc`.

    A worker counts from the time it joins until it ends, even before it serves calls.

    Args:
        wanted: the number of workers in the group, this one included, or the names of some, as a list or one str.
        timeout: seconds to wait; 0 for no limit.
        role: with a number, count only the workers of this role, this one included if it has that role.

    Returns:
        All workers of the group, as `workers()` does.

    Raises:
        CallTimeout: the workers have not joined in time; the message lists the missing ones.
        PeerLost: no worker can join any more: the group is of fixed size, has ended, or its store is gone.
        UsageError: an argument is wrong; or both a role and names are given.
        NotInitialized: this process is in no group.

    Example:
        >>> len(rpc.wait_for_workers(3, timeout=10))
        3
    """
    membership = current.here().membership
    if isinstance(wanted, int):
        checks.count("wanted", wanted, what="a number of workers")
    else:
        names = [wanted] if isinstance(wanted, str) else checks.several("wanted", wanted, _WANTED)
        wanted = [checks.text("wanted", name, _WANTED) for name in names]
    checks.seconds("timeout", timeout)
    checks.text("role", role, "the role of workers", empty=True)
    if role and not isinstance(wanted, int):
        raise InvalidArgument("role needs a number of workers in `wanted`, not their names")
    return membership.wait_for(wanted, timeout, role)


@folded
def on_join(callback: Callable[[WorkerInfo], Any]) -> None:
    """Register `callback(worker)` for each other worker: for current members now, and for later ones when they join.

    Callbacks run on a separate thread, and may make remote calls. They end with the group.

    Args:
        callback: a function of a `WorkerInfo`.

    Example:
        >>> import queue
        >>> there = queue.Queue()
        >>> rpc.on_join(there.put)
        >>> sorted(there.get(timeout=10).name for _ in range(2))
        ['worker0', 'worker1']
    """
    checks.function("callback", callback)
    current.here().membership.on_join(callback)


@folded
def on_leave(callback: Callable[[WorkerInfo, str], Any]) -> None:
    """Register `callback(worker, how)` for each worker that leaves: `how` is "left", or "lost" if it died.

    The thread and the end of callbacks are as for `on_join`.

    Args:
        callback: a function of a `WorkerInfo` and a text.

    Example:
        >>> rpc.on_leave(lambda worker, how: print(f"{worker.name} has {how}"))
    """
    checks.function("callback", callback)
    current.here().membership.on_leave(callback)


@folded
def on_lost(callback: Callable[[WorkerInfo, Exception], Any]) -> None:
    """Register `callback(worker, reason)` for each lost worker: it died, is silent, or left too early.

    The thread and the end of callbacks are as for `on_join`. Callbacks of `on_leave` are called, too.

    Args:
        callback: a function of a `WorkerInfo` and of an exception, such as `PeerLost` or `PeerSilent`.

    Example:
        >>> rpc.on_lost(lambda worker, reason: print(f"{worker.name}: {reason}"))
    """
    checks.function("callback", callback)
    current.here().membership.on_lost(callback)
