"""What users call: the functions of `telegrad.rpc`."""

from __future__ import annotations

import atexit
import importlib
import logging
import os
import threading
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from telegrad.agent import profiling
from telegrad.agent.agent import DEFAULT
from telegrad.agent.compiling import not_compiled
from telegrad.agent.futures import Future
from telegrad.errors import AlreadyInitialized, UsageError
from telegrad.group.launched import open_meeting
from telegrad.group.members import WorkerInfo, info
from telegrad.group.stores import Meeting
from telegrad.group.supervised import own_name
from telegrad.rpc import current, persistence
from telegrad.rpc.cluster import start
from telegrad.rpc.conversion import Call, convert
from telegrad.rpc.elastic import Elastic, limits_of
from telegrad.rpc.functions import must_finish
from telegrad.rpc.lasting import Restore, check_restore, with_recipe
from telegrad.rpc.options import BackendType, RpcBackendOptions, TelegradOptions
from telegrad.rpc.references import RRef
from telegrad.rpc.streams import WINDOW, Stream
from telegrad.rpc.worker import Worker

UNSET_RPC_TIMEOUT = DEFAULT

log = logging.getLogger("telegrad")

_lock = threading.Lock()  # one init at a time: only that sets current.worker, and only where there is none


@not_compiled
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
    """Join the group under `name`; returns once every worker of it can be called.

    Workers of one `role` are a group of their own: `group("actor")`. Who gives a role and no name is named after it:
    actor0, actor1, ... by rank in a group of fixed size, else with the lowest number that is free.

    Where neither `rank`, `world_size` nor an `init_method` is given, the launcher is asked: torchrun, mpirun, srun and
    others tell the rank, the size and the place by variables.

    Else without `world_size` the group is dynamic: workers join and leave at any time and are found by name. With
    `min_workers` or `max_workers` it is elastic: of a size within these, which changes with `rendezvous_again`.

    A worker that `telegrad run` has started needs no argument: its environment has its name and its role.

    Raises:
        UsageError: the rank, the size or the address of the store cannot be, or a variable is missing.
        AlreadyInitialized: this process is in a group already.
        InvalidName: `name` or `role` has forbidden characters or is too long.
        RendezvousError: the group could not be formed; its subclasses say why.
    """
    if backend is not None and not isinstance(backend, BackendType):
        raise UsageError(f"backend must be a BackendType, such as BackendType.TENSORPIPE, not {backend!r}")
    name, role = own_name(name, role, os.environ)
    if name is None and not role:
        raise UsageError('init_rpc needs a name for this worker, or a role to name it after: init_rpc(role="actor")')
    options = _options(rpc_backend_options)
    if min_workers is not None or max_workers is not None:
        limits = limits_of(min_workers, max_workers, world_size)
        _enter(Elastic(name, role, rank, options, limits, RRef).begin, options)
        return
    enter_group(name, options, partial(open_meeting, options.init_method, rank, world_size), role=role)


def enter_group(
    name: str | None,
    options: TelegradOptions,
    meet: Callable[[float], Meeting],
    kind: type[RRef[Any]] = RRef,
    role: str = "",
) -> None:
    """Make this process a worker: `meet` opens the store within a time, references are of the class `kind`.

    Without a name it gets one from its role and a number.
    """
    _enter(lambda: start(name, meet, options, current.enter, kind, role), options)


def _enter(begin: Callable[[], Worker], options: TelegradOptions) -> None:
    with _lock:
        check_free()
        current.worker = begin()
    if options.dashboard is not None:
        show(current.worker, options.dashboard)


def show(worker: Worker, port: int) -> None:
    """Show the group to browsers until this worker leaves; by a layer above, which nothing else here knows of."""
    try:
        shown = importlib.import_module("telegrad.insight.api").dashboard(port=port)
    except OSError as error:  # it is in a group by now, which shall not suffer from that
        log.warning("telegrad: worker %r does not show the group: %s", worker.me.name, error)
        return
    worker.at_end.append(shown.close)
    log.warning("telegrad: worker %r shows the group at %s", worker.me.name, shown.url)


def check_free() -> None:
    """Raise AlreadyInitialized where this process is a worker."""
    if current.worker is not None:
        raise AlreadyInitialized(
            f"RPC is already initialized: this process is worker {current.worker.agent.name!r}; end that group first, "
            "by rpc.shutdown() or by the shutdown() of what telegrad.local gave"
        )


def _options(given: RpcBackendOptions | None) -> TelegradOptions:
    if given is None:
        return TelegradOptions()
    if isinstance(given, TelegradOptions):
        return given
    if isinstance(given, RpcBackendOptions):
        return TelegradOptions(rpc_timeout=given.rpc_timeout, init_method=given.init_method)
    raise UsageError(f"rpc_backend_options must be TensorPipeRpcBackendOptions, not {type(given).__name__}")


@not_compiled
def shutdown(
    graceful: bool = True, timeout: float = 0, require: bool | Collection[str | int | WorkerInfo] = ()
) -> None:
    """Leave the group.

    Graceful: wait until every worker has called it and no call is in flight anywhere (at most `timeout` seconds; 0 for
    no limit). Else leave at once; the calls of others to this worker fail. Workers that died are not waited for;
    where one of those in `require` did (True stands for all), or left early, that is an error in the end.

    Raises:
        NotInitialized: this process is in no group.
        UsageError: a remote call, or a callback of one, calls it: it would wait for itself.
        CallTimeout: the others did not come in time; this worker has left all the same.
        PeerLost: a required worker died, or left without the others; this worker has left all the same.
    """
    worker = current.joined()
    if graceful:
        check_may_wait(worker, "shutdown")
    if graceful and worker.elastic is not None:
        worker.elastic.leave(worker)
    try:
        worker.shutdown(graceful, timeout, _names(require))
    finally:
        current.leave(worker)
    if worker.elastic is not None:
        worker.elastic.ended(worker)


def check_may_wait(worker: Worker, what: str) -> None:
    """Raise UsageError on a thread that serves calls: it must not wait for the end of all of them."""
    if worker.agent.serves_here():
        raise UsageError(
            f"rpc.{what}() was called on worker {worker.agent.name!r} by a remote call or by a callback, and would "
            "wait for itself. Let each worker call it at the end of its own main program: it serves calls there until "
            "all others have called it, too. rpc.shutdown(graceful=False) leaves at once, without the others; "
            "rpc.stop_serving() ends the rpc.serve() of a worker of a dynamic group"
        )


def _names(workers: bool | Collection[str | int | WorkerInfo]) -> bool | list[str | int]:
    return workers if isinstance(workers, bool) else [_name(worker) for worker in workers]


def serve(require: bool | Collection[str | int | WorkerInfo] = ()) -> None:
    """Serve calls until the group ends, then leave: the whole program of a worker after `init_rpc`.

    A group of fixed size ends when all workers have called this or `shutdown`. A dynamic one ends for those who only
    serve when rank 0, or the worker that began it, leaves in order; `stop_serving` ends it for one worker. Ctrl-C
    leaves at once.

    Raises:
        NotInitialized: this process is in no group.
        UsageError: a remote call, or a callback of one, calls it.
        UnknownWorker: a worker in `require` is not there.
        PeerLost: a worker that is in `require` died, or left a group of fixed size early. True stands for all of such a
            group; in a dynamic one only those count that are named, and this worker, where others took it for dead.
    """
    worker = current.joined()
    check_may_wait(worker, "serve")
    try:
        if worker.elastic is not None:
            worker = worker.elastic.serve(worker)
        worker.serve(_names(require))
    finally:
        current.leave(worker)
    if worker.elastic is not None:
        worker.elastic.ended(worker)


@must_finish
def stop_serving() -> None:
    """Have `serve` end on this worker of a dynamic group: for a call by another, `rpc_sync(name, rpc.stop_serving)`.

    Raises:
        UsageError: the group is of fixed size, whose workers leave together.
    """
    current.joined().stop_serving()


@not_compiled
def rpc_sync(
    to: str | int | WorkerInfo,
    func: Callable[..., Any],
    args: Any = None,
    kwargs: Any = None,
    timeout: float = UNSET_RPC_TIMEOUT,
    *,
    wait_for_worker: bool | None = None,
    idempotent: bool = False,
) -> Any:
    """Run `func(*args, **kwargs)` on the worker `to` and return its value.

    With `wait_for_worker` the call waits while no worker of that name can be called, up to its timeout. With
    `idempotent` it is made once more where it may have run: a worker that has begun it gives the same answer again, and
    one that came back runs it anew. Left out, `wait_for_worker` is what the options say.

    Raises what the function raised there; a subclass of `TelegradError` where the call itself failed.
    """
    call = convert(func, args, kwargs)
    begin: Callable[..., Any] = call_sync
    if wait_for_worker or idempotent or persistence.by_default:
        begin = _persistent(persistence.call_sync, wait_for_worker, idempotent) or call_sync
    if profiling.wanted():
        return profiling.called(event_of("sync", to, func), begin, to, call, timeout)
    return begin(to, call, timeout)


@not_compiled
def rpc_async(
    to: str | int | WorkerInfo,
    func: Callable[..., Any],
    args: Any = None,
    kwargs: Any = None,
    timeout: float = UNSET_RPC_TIMEOUT,
    *,
    wait_for_worker: bool | None = None,
    idempotent: bool = False,
) -> Future[Any]:
    """Begin to run `func(*args, **kwargs)` on the worker `to`; a future of its value.

    The tensors among the arguments must not be written to until the future is done. `wait_for_worker` and `idempotent`
    are as for `rpc_sync`, and hold nobody up here.
    """
    call = convert(func, args, kwargs)
    begin: Callable[..., Future[Any]] = call_async
    if wait_for_worker or idempotent or persistence.by_default:
        begin = _persistent(persistence.call_async, wait_for_worker, idempotent) or call_async
    if profiling.wanted():
        return profiling.called_async(event_of("async", to, func), begin, to, call, timeout)
    return begin(to, call, timeout)


@not_compiled
def remote(
    to: str | int | WorkerInfo,
    func: Callable[..., Any],
    args: Any = None,
    kwargs: Any = None,
    timeout: float = UNSET_RPC_TIMEOUT,
    *,
    wait_for_worker: bool | None = None,
    restore: Restore = False,
) -> RRef[Any]:
    """Begin to run `func(*args, **kwargs)` on the worker `to`, where its value stays; a reference to that.

    Returns at once. Where the function fails, or does not end within `timeout`, uses of the reference raise that. With
    `wait_for_worker`, it is first waited here until a worker of that name can be called, up to the timeout.

    With `restore`, the value comes back with its owner: where that was lost, the next use of the reference waits for a
    worker of the same name, and has the value made anew there by the same call, and `restore(value)` called, which
    brings it to the state of a checkpoint, say. `restore=True` leaves it as it was made.
    """
    call = convert(func, args, kwargs)
    check_restore(restore)
    if wait_for_worker or persistence.by_default:
        timeout = _await_worker(to, call, timeout, wait_for_worker)
    if profiling.wanted():
        made: RRef[Any] = profiling.called_creation(event_of("remote", to, func), create, to, call, timeout)
    else:
        made = create(to, call, timeout)
    return made if restore is False else with_recipe(made, func, args, kwargs, restore)


@not_compiled
def rpc_stream(
    to: str | int | WorkerInfo,
    func: Callable[..., Any],
    args: Any = None,
    kwargs: Any = None,
    timeout: float = UNSET_RPC_TIMEOUT,
    window: int = WINDOW,
    *,
    wait_for_worker: bool | None = None,
) -> Stream[Any]:
    """Begin to run `func(*args, **kwargs)` on the worker `to`; what it yields, item by item, as a `Stream`.

    `func` is a generator function, also an `async def`, or returns anything that can be iterated over. It runs at most
    `window` items and 64 MB ahead of its reader. `timeout` is for each item that is waited for; with `wait_for_worker`,
    also for the worker, for which it is first waited here.
    """
    call = convert(func, args, kwargs)
    if wait_for_worker or persistence.by_default:
        _await_worker(to, call, timeout, wait_for_worker)
    asked = call.function if call.asked is None else call.asked
    return Stream(_name(to), *call[:3], timeout, window, call.keeps, asked)


def _persistent(make: Callable[..., Any], wait_for_worker: bool | None, idempotent: bool) -> Callable[..., Any] | None:
    """How to make a call that shall not fail at once; None: as ever."""
    manner = persistence.manner(wait_for_worker, idempotent)
    return None if manner is None else lambda to, call, timeout: make(manner, _name(to), call, timeout)


def _await_worker(to: str | int | WorkerInfo, call: Call, timeout: float, wait_for_worker: bool | None) -> float:
    """Wait here until a worker can be called; the time that is left."""
    return persistence.await_workers(persistence.manner(wait_for_worker, False), [_name(to)], call, timeout)


def call_sync(to: str | int | WorkerInfo, call: Call, timeout: float) -> Any:
    return current.agent().call(_name(to), call.function, call.args, call.kwargs, timeout, call.asked)


def call_async(to: str | int | WorkerInfo, call: Call, timeout: float, kind: type[Future[Any]] = Future) -> Future[Any]:
    future = kind()
    current.agent().call_for(
        future, _name(to), call.function, call.args, call.kwargs, timeout, call.keeps, asked=call.asked
    )
    return future


def create(to: str | int | WorkerInfo, call: Call, timeout: float) -> RRef[Any]:
    made: RRef[Any] = current.references().create(_name(to), *call[:3], timeout, call.keeps, call.asked)
    return made


def event_of(kind: str, to: str | int | WorkerInfo, function: Any) -> profiling.Event:
    """A call as an event."""
    agent, there = current.agent(), _name(to)
    here, there = agent.name, there if isinstance(there, str) else agent.identify(there).name
    return profiling.Event(profiling.event_name(kind, function, here, there), function, here, there)


def _name(to: str | int | WorkerInfo) -> str | int:
    return to.name if isinstance(to, WorkerInfo) else to


def get_worker_info(worker_name: str | None = None) -> WorkerInfo:
    """The worker of that name, or this one."""
    agent = current.agent()
    member = agent.me if worker_name is None else agent.find(worker_name)
    return info(member)


def debug_info() -> dict[str, int]:
    """How many references there are on this worker, and what is under way about them.

    `owners` are those whose values live here (`shared_owners`: held by others, in so many `forks`), `users` those of
    other workers' values. Pending are users that their owner does not know yet, forks sent on that have not settled,
    users that end as soon as they may, creating calls without an answer, and letters without a receipt.
    """
    return current.references().counts()


def _rref_context_get_debug_info() -> dict[str, str]:
    """The same, as far as `torch.distributed.rpc` tells of it, under its names."""
    counts = debug_info()
    return {
        "num_owner_rrefs": str(counts["shared_owners"]),
        "num_forks": str(counts["forks"]),
        "num_pending_users": str(counts["pending_users"]),
        "num_pending_futures": str(counts["pending_creations"]),
    }


def _leave_at_exit() -> None:
    """A program that forgot `shutdown` ends without it."""
    if current.worker is not None:
        current.worker.end_with_the_program()


def _forget_after_fork() -> None:
    """A forked child is not the worker that its parent is."""
    global _lock
    _lock = threading.Lock()
    current.forget()


atexit.register(_leave_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_after_fork)
