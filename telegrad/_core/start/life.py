"""The API for a worker's lifecycle in its group: `init_rpc`, `serve`, `shutdown`, `rendezvous_again`."""

from __future__ import annotations

import atexit
import importlib
import logging
import os
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from telegrad._core import checks, processes
from telegrad._core.calls.call_names import known_as, not_compiled
from telegrad._core.calls.cancelling import finishing
from telegrad._core.calls.settings import DEFAULT, check_timeout, limit_of
from telegrad._core.calls.unretrieved import log_held
from telegrad._core.forks import in_child, renewed
from telegrad._core.interrupts import install
from telegrad._core.membership.join import open_meeting
from telegrad._core.membership.members import WorkerInfo, check_name, check_role
from telegrad._core.pickling import main_program
from telegrad._core.pickling.main_modules import own_scope
from telegrad._core.pickling.remote_text import folded
from telegrad._core.rpc.conversion import several
from telegrad._core.rpc.rref import RRef
from telegrad._core.start.cluster import Elastic, Generation, limits_of, start
from telegrad._core.stores.launchers import own_name
from telegrad._core.stores.stores import RendezvousStore
from telegrad._core.threads import Exclusive
from telegrad._core.worker import current
from telegrad._core.worker.options import BackendType, RpcBackendOptions, TelegradOptions
from telegrad._core.worker.worker import Worker
from telegrad.errors import AlreadyInitialized, InvalidArgument, PeerLost, RendezvousError, StoreUntrusted, UsageError

MOST_WORKERS = 1 << 31  # some stores send a rank as an int of 32 bits

log = logging.getLogger("telegrad")

_lock = renewed(Exclusive("init_rpc"))  # only its holder sets current.worker, and only if that is None


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
    options = _options(rpc_backend_options)
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
        _enter(Elastic(name, role, rank, options, limits, RRef).begin, options)
        return
    enter_group(name, options, partial(open_meeting, options.init_method, rank, world_size, options.key), role=role)


def enter_group(
    name: str | None,
    options: TelegradOptions,
    meet: Callable[[float], RendezvousStore],
    kind: type[RRef[Any]] = RRef,
    role: str = "",
) -> None:
    """Make this process a worker; the arguments are as for `cluster.start`."""
    _enter(lambda: start(name, meet, options, current.enter, kind, role), options)


def _enter(begin: Callable[[], Worker], options: TelegradOptions) -> None:
    # First, since the start of a worker can be interrupted, too.
    install()
    main_program.check_not_imported("init_rpc")
    own_scope()  # before calls change the globals: it notes their first values
    what = "this worker could not join", RendezvousError
    with _lock, processes.translate_error(*what):
        check_free()
        current.ended_by = None
        worker = current.worker = begin()
        worker.at_declared_lost = partial(current.leave, worker)
        # If it was declared lost before it had that callback, it has ended all the same.
        if worker.agent.closed:
            current.leave(worker)
            worker.agent.check_open()
    if options.dashboard is not None:
        _show(worker, options.dashboard)


def _show(worker: Worker, port: int) -> None:
    """Show the group to browsers until this worker leaves. `telegrad.insight` is a layer above: import it late."""
    try:
        shown = importlib.import_module("telegrad.insight").dashboard(port=port)
    except OSError as error:  # the worker has joined its group, which must continue
        log.warning("telegrad: worker %r cannot serve the dashboard: %s", worker.me.name, error)
        return
    worker.at_end.append(shown.close)
    log.warning("telegrad: worker %r serves the dashboard at %s", worker.me.name, shown.url)


def check_free() -> None:
    """Raise AlreadyInitialized if this process is a worker."""
    if current.worker is not None:
        raise AlreadyInitialized(
            f"RPC is already initialized: this process is worker {current.worker.agent.name!r}; leave that group "
            "first, by rpc.shutdown() or by the shutdown() of the object that telegrad.local returned"
        )


def _options(given: RpcBackendOptions | None) -> TelegradOptions:
    if given is None:
        return TelegradOptions()
    if isinstance(given, TelegradOptions):
        return given
    if isinstance(given, RpcBackendOptions):
        return TelegradOptions(rpc_timeout=given.rpc_timeout, init_method=given.init_method)
    kind = type(given)
    hint = f" of the type {kind.__module__}.{kind.__qualname__}" if kind.__name__.endswith("Options") else ""
    options = "telegrad.rpc.TelegradOptions(...), or telegrad.rpc.TensorPipeRpcBackendOptions(...)"
    raise InvalidArgument(f"rpc_backend_options must be {options}, not {checks.short_repr(given)}{hint}")


@not_compiled
@folded
def shutdown(
    graceful: bool = True, timeout: float = 0, require: bool | Collection[str | int | WorkerInfo] = ()
) -> None:
    """Leave the group, without waiting for workers that died.

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
        PeerLost: a required worker died, or left without the others; this worker has left all the same. Or the
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
            worker.elastic.leave(worker)
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
    `shutdown`, and no launcher keeps the directory, that is a PeerLost. `stop_serving` ends it for one worker.
    Ctrl-C leaves at once.

    Args:
        require: workers whose loss ends this worker; `True` means all of a group of fixed size.

    Raises:
        NotInitialized: this process is in no group.
        UsageError: a remote call, or a callback of one, calls it.
        UnknownWorker: a worker in `require` is not in the group; this worker stays in it, and does not serve.
        PeerLost: a worker that is in `require` died, or left a group of fixed size early; or the directory of the
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
        ShutDown: another thread has called `shutdown`.

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
        _show(made, elastic.options.dashboard)
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


def _leave_at_exit() -> None:
    log_held()  # first: calls in flight may fail only because of this end
    if (worker := current.worker) is not None:
        worker.end_with_the_program()
        current.leave(worker)


in_child(current.forget)
# Functions of `atexit` run in reverse order, so those that the program adds after this import still have its worker.
atexit.register(_leave_at_exit)
