"""The functions of the API about the group: how a worker joins, serves and leaves; the workers of the group."""

import os
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from telegrad._core import checks
from telegrad._core.calls.call_names import known_as, not_compiled
from telegrad._core.calls.cancelling import finishing
from telegrad._core.calls.settings import (
    DEFAULT,
    BackendType,
    RpcBackendOptions,
    check_timeout,
    limit_of,
    options_of,
)
from telegrad._core.membership.join import open_meeting
from telegrad._core.membership.members import WorkerInfo, check_name, check_role, info
from telegrad._core.pickling.remote_text import folded
from telegrad._core.rpc.cluster import Elastic, Generation, enter, enter_group, limits_of, show
from telegrad._core.rpc.conversion import several, target
from telegrad._core.rpc.rref import RRef
from telegrad._core.stores.launchers import own_name
from telegrad._core.worker import current
from telegrad._core.worker.current import Worker
from telegrad.errors import InvalidArgument, PeerLost, StoreUntrusted, UsageError

MOST_WORKERS = 1 << 31  # some stores send a rank as an int of 32 bits

_WANTED = "a number of workers, or a list of their names"


@not_compiled
@folded
def init_rpc(
    name: str | None = None,
    backend: BackendType | None = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: RpcBackendOptions | None = None,
    *,
    role: str = "",
    min_workers: int | None = None,
    max_workers: int | None = None,
) -> None:
    """Join the group under `name`; return once every worker of it can be called.

    There are groups of three kinds. With `world_size` the group has a fixed size. Without, it is dynamic: workers join
    and leave at any time and are found by name. With `min_workers` or `max_workers` it is elastic: its size stays
    within these limits and changes with `rendezvous_again`.

    If neither `rank`, `world_size` nor an `init_method` is given, they come from the launcher: torchrun, mpirun, srun
    and others set the rank, the size and the place as environment variables. A worker started by `telegrad run` needs
    no arguments.

    Args:
        name: this worker's name, unique in the group: letters, digits, `_`, `:` and `-`. Optional with a role.
        backend: accepted for programs that give it; there is one, `BackendType.TENSORPIPE`.
        rank: this worker's number in a group of fixed size, starting at 0; rank 0 serves the store where they meet.
        world_size: the number of workers; left out in a dynamic or elastic group.
        rpc_backend_options: `TelegradOptions`, unless the defaults suffice.
        role: workers of one role are a group of their own, `group("actor")`. A worker with a role and no name is named
            after the role: actor0, actor1, ... by rank in a group of fixed size, else with the lowest free number.
        min_workers: the minimal size of an elastic group.
        max_workers: the maximal size of an elastic group.

    Raises:
        UsageError: the rank, the size or the address of the store is impossible, or a variable is missing.
        AlreadyInitialized: this process is in a group already.
        InvalidName: `name` or `role` has forbidden characters or is too long.
        RendezvousError: the group could not be formed; its subclasses say why. Or this process may open too few files.
        AuthenticationFailed: the workers have different keys; or in an elastic group, TLS files that do not match.
        PeerLost: the directory of the dynamic group has already declared this worker lost.

    Example:
        >>> options = rpc.TelegradOptions(init_method="env://")  # MASTER_ADDR and MASTER_PORT say where they meet
        >>> rpc.init_rpc("trainer", rank=0, world_size=1, rpc_backend_options=options)
        >>> rpc.workers()
        [WorkerInfo(name='trainer', id=0)]
        >>> rpc.shutdown()
    """
    if backend is not None and not isinstance(backend, BackendType):
        raise UsageError(
            f"backend must be a BackendType, such as BackendType.TENSORPIPE, not {checks.short_repr(backend)}"
        )
    options = options_of(rpc_backend_options)
    if name is not None:
        check_name(name)
    check_role(role)
    if type(rank) is not int or rank != -1:
        checks.count("rank", rank, 0, MOST_WORKERS, "this worker's rank")
    sizes = {"world_size": world_size, "min_workers": min_workers, "max_workers": max_workers}
    for parameter, size in sizes.items():
        if size is not None:
            checks.count(parameter, size, 1, MOST_WORKERS, "a number of workers")
    name, role = own_name(name, role, os.environ)
    if name is None and not role:
        raise UsageError('init_rpc needs a name for this worker, or a role to name it after: init_rpc(role="actor")')
    if min_workers is not None or max_workers is not None:
        limits = limits_of(min_workers, max_workers, world_size)
        enter(Elastic(name, role, rank, options, limits, RRef).begin, options)
        return
    enter_group(name, options, partial(open_meeting, options.init_method, rank, world_size, options.key), role=role)


@not_compiled
@folded
def shutdown(
    graceful: bool = True, timeout: float = 0, require: bool | Collection[str | int | WorkerInfo] = ()
) -> None:
    """Leave the group, without waiting for workers that died.

    If another thread or a signal handler calls this meanwhile, all return once this worker has left.

    Args:
        graceful: wait until every worker has called this and no call is in flight in the group. Otherwise leave at
            once; calls of others to this worker fail.
        timeout: seconds that this may take; 0 for no limit.
        require: workers whose death or early leaving raises an error in the end; `True` means all.

    Raises:
        NotInitialized: this process is in no group.
        UsageError: a remote call, or a callback of one, calls it: it would wait for itself.
        UnknownWorker: a worker in `require` was never in this group of fixed size; this worker stays in it.
        CallTimeout: the others did not call this in time; this worker has left all the same.
        PeerLost: a required worker was lost, or left without the others; this worker has left all the same. Or the
            directory of the dynamic group has declared this worker lost.
        StoreUntrusted: the process left its elastic group before, because the group's store was tampered with.

    Example:
        >>> rpc.init_rpc("trainer", rank=0, world_size=1)
        >>> rpc.shutdown(timeout=60, require=True)
    """
    try:
        worker = current.joined()
    except (StoreUntrusted, PeerLost):
        current.ended_by = None  # the program has now ended the group as well: later calls raise NotInitialized
        raise
    checks.flag("graceful", graceful)
    checks.seconds("timeout", timeout)
    required = worker.required(require if isinstance(require, bool) else several(require, "require"))
    if graceful:
        check_may_wait(worker, "shutdown")
    if worker.elastic is not None:
        worker = worker.elastic.leave(graceful)
    try:
        worker.shutdown(graceful, timeout, required)
    finally:
        current.leave(worker)


def check_may_wait(worker: Worker, what: str) -> None:
    """Raise UsageError on a thread that serves calls: it must not wait for the end of all calls."""
    if worker.agent.serves_here():
        raise UsageError(
            f"rpc.{what}() was called on worker {worker.agent.name!r} by a remote call or by a callback, and would "
            "wait for itself. Call it at the end of the main program of each worker. rpc.shutdown(graceful=False) "
            "leaves at once, without waiting for the others; rpc.stop_serving() ends the rpc.serve() of a worker of a "
            "dynamic group"
        )


@folded
def serve(require: bool | Collection[str | int | WorkerInfo] = ()) -> None:
    """Serve calls until the group ends, then leave: the whole program of a worker after `init_rpc`.

    A group of fixed size ends when all workers have called this or `shutdown`. A dynamic group ends for workers in
    `serve` when rank 0, or the worker that started the group, leaves in order; if its program ends without
    `shutdown`, and no launcher keeps the directory, that is a PeerLost. `stop_serving` ends it for one worker, and so
    does `shutdown` in a signal handler or on another thread of the worker. Ctrl-C leaves at once.

    Args:
        require: workers whose loss ends this worker; `True` means all of a group of fixed size.

    Raises:
        NotInitialized: this process is in no group.
        UsageError: a remote call, or a callback of one, calls it.
        UnknownWorker: a worker in `require` is not in the group; this worker stays in it, and does not serve.
        PeerLost: a worker that is in `require` was lost, or left a group of fixed size early; or the directory of the
            dynamic group has declared this worker lost.

    Example:
        >>> rpc.init_rpc("worker", rank=0, world_size=1)
        >>> rpc.serve()  # others would call it meanwhile; alone in its group, it ends at once
    """
    worker = current.joined()
    wanted = require if isinstance(require, bool) else several(require, "require")
    required = worker.required(wanted, serving=True)
    check_may_wait(worker, "serve")
    try:
        if worker.elastic is not None:
            worker = worker.elastic.serve(worker)
            required = worker.required(wanted, serving=True)  # of its last generation
        worker.serve(required)
    finally:
        current.leave(worker)


@finishing
@known_as("rpc.stop_serving")
def stop_serving() -> None:
    """End `serve` on this worker of a dynamic group. Other workers call it: `rpc_sync(name, rpc.stop_serving)`.

    Raises:
        UsageError: the group is of fixed size, whose workers leave together.
        NotInitialized: this process is in no group.

    Example:
        >>> rpc.init_rpc("worker")  # without a size: a dynamic group
        >>> rpc.rpc_sync("worker", rpc.stop_serving)
        >>> rpc.serve()  # ends at once
    """
    current.here().stop_serving()


# Elastic groups


@folded
def rendezvous_again(timeout: float = DEFAULT) -> Generation:
    """Let an elastic group change between two steps of its program: all workers call this before each step.

    Return once all workers have called this, except those in `serve`. If no worker has died, left, or waits to join,
    the generation and its objects stay as they are. Otherwise this worker is in the next generation, and may have
    another rank there; calls and references of the last one end with `GenerationOver`, contexts with `ContextEnded`.

    The first call after `init_rpc` returns at once: the new worker is then at the same point as the others.

    Args:
        timeout: seconds until workers that have not called this are left out; then wait as long again for
            `min_workers`. 0 for no limit. The default is in the options.

    Returns:
        The current `Generation` of this worker.

    Raises:
        NotInitialized: this process is in no group.
        UsageError: the group is not elastic; a remote call, or a callback of one, calls this; or two threads do.
        GroupIncomplete: too few workers came; this worker is in no group any more.
        ShutDown: another thread, or a signal handler, has called `shutdown`.

    Example:
        >>> rpc.init_rpc("trainer", min_workers=1)
        >>> for step in range(2):
        ...     generation = rpc.rendezvous_again()  # then the step, by its rank and size
        >>> generation.rank, generation.size
        (0, 1)
        >>> rpc.shutdown()
    """
    worker = current.joined()
    check_timeout(timeout)
    check_may_wait(worker, "rendezvous_again")
    elastic = _elastic(worker)
    limit = limit_of(timeout, elastic.options.rpc_timeout)
    made = elastic.again(worker, limit)
    if made is not worker and elastic.options.dashboard is not None:
        show(made, elastic.options.dashboard)
    return elastic.generation_of(made)


def generation() -> Generation:
    """Return the current generation of this worker's elastic group.

    Raises:
        NotInitialized: this process is in no group.
        UsageError: the group is not elastic.

    Example:
        >>> rpc.init_rpc("trainer", min_workers=1)
        >>> rpc.generation().size
        1
        >>> rpc.shutdown()
    """
    worker = current.joined()
    return _elastic(worker).generation_of(worker)


def _elastic(worker: Worker) -> Elastic:
    elastic: Elastic | None = worker.elastic
    if elastic is None:
        raise UsageError(
            f"worker {worker.agent.name!r} is in a group that has no generations: give min_workers or max_workers to "
            "init_rpc, instead of world_size"
        )
    return elastic


# The workers of the group


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
        ShutDown: another thread, or a signal handler, has called `shutdown`.
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
    """Register `callback(worker, how)` for each worker that leaves: `how` is "left", or "lost", as for `on_lost`.

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
