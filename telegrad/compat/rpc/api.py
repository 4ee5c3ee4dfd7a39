"""`torch.distributed.rpc.api`: the calls, and the barriers of a group.

Programs and tests replace some of these functions to observe calls, so the functions call each other through this
module.
"""

import contextlib
import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from time import monotonic
from typing import Any

import torch

from telegrad._core.calls.call_names import known_as, not_compiled
from telegrad._core.calls.futures import Future
from telegrad._core.forks import renewed
from telegrad._core.membership.members import WorkerInfo
from telegrad._core.pickling.remote_text import folded
from telegrad._core.rpc import life, rref
from telegrad._core.rpc.life import get_worker_info
from telegrad._core.texts import Wait, plural
from telegrad._core.worker import current
from telegrad.compat.rpc import calls
from telegrad.compat.rpc.backend_registry import DEFAULT_SHUTDOWN_TIMEOUT, UNSET_RPC_TIMEOUT, RpcAgent, TensorPipeAgent
from telegrad.compat.rpc.calls import remote, rpc_sync
from telegrad.compat.rpc.references import (  # noqa: F401 - programs look for some of them here
    PythonUDF,
    RPCExecMode,
    RRef,
    _build_rpc_profiling_key,
    _internal_rpc_pickler,
    _rref_typeof_on_owner,
    delete_users,
)
from telegrad.errors import CallTimeout, NotInitialized, PeerError, PeerLost, RRefError, UsageError

__all__ = ["AllGatherStates", "PyRRef", "RRef", "get_rpc_timeout", "get_worker_info", "method_factory", "new_method"]
__all__ += ["remote", "rpc_async", "rpc_sync", "shutdown"]

PING = 1.0  # seconds between checks that the awaited workers are alive
LEAK_CHECK = 20.0  # seconds to wait for the release of the last references

PyRRef = rref.RRef  # the type of every reference, including those made by the native API

logger = logging.getLogger("telegrad")

_ignore_rref_leak = True
_default_pickler: Any = _internal_rpc_pickler
_thread_local_var = threading.local()  # .future_list, inside of _wait_all
_ALL_WORKER_NAMES: set[str] = set()


@contextlib.contextmanager
def _use_rpc_pickler(rpc_pickler: Any) -> Iterator[None]:
    """Set another pickler's name. Calls still use Telegrad's pickler, which `_register_reducer` extends."""
    global _default_pickler
    _default_pickler = rpc_pickler
    try:
        yield
    finally:
        _default_pickler = _internal_rpc_pickler


# Calls


@not_compiled
def rpc_async(
    to: str | int | WorkerInfo,
    func: Callable[..., Any],
    args: Any = None,
    kwargs: Any = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Future[Any]:
    """Start `func(*args, **kwargs)` on the worker `to`; return a future of its value."""
    future = calls.rpc_async(to, func, args, kwargs, timeout)
    futures = _thread_local_var.__dict__.get("future_list")
    if futures is not None:
        futures.append(future)
    return future


@contextlib.contextmanager
def _wait_all() -> Iterator[None]:
    """Wait, at the end, for all calls that this thread started in the block by `rpc_async`."""
    _thread_local_var.future_list = []
    try:
        yield
    finally:
        try:
            torch.futures.wait_all(_thread_local_var.future_list)
        finally:
            del _thread_local_var.future_list


def method_factory(method_name: str, docstring: str | None) -> Callable[..., Any]:
    """Return a method for RRef that calls the method of that name of the base class."""

    def method(self: RRef[Any], *args: Any, **kwargs: Any) -> Any:
        return getattr(super(RRef, self), method_name)(*args, **kwargs)

    method.__name__, method.__doc__ = method_name, docstring
    return method


new_method = method_factory("to_here", rref.RRef.to_here.__doc__)  # public in torch: the last method made there


def RRefProxy(rref: RRef[Any], rpc_api: Callable[..., Any], timeout: float = UNSET_RPC_TIMEOUT) -> Any:  # noqa: N802
    """Return a proxy whose `proxy.method(*args)` calls that method at the owner, by one of the three call functions."""
    ways: dict[Any, Any] = {rpc_sync: rref.rpc_sync, rpc_async: rref.rpc_async, remote: rref.remote}
    return ways[rpc_api](timeout)


# The agent


def _is_current_rpc_agent_set() -> bool:
    return current.worker is not None


def _get_current_rpc_agent() -> TensorPipeAgent:
    return TensorPipeAgent(current.joined())


def _set_and_start_rpc_agent(agent: Any) -> None:
    """Accept the agent that a backend made; Telegrad's agent has already joined its group."""
    if not isinstance(agent, RpcAgent):
        raise UsageError(f"a backend must give an agent of Telegrad's, not {type(agent).__name__}")


def _init_rpc_states(agent: Any) -> None:
    _ALL_WORKER_NAMES.clear()
    _ALL_WORKER_NAMES.update(worker.name for worker in agent.get_worker_infos())
    if not _is_current_rpc_agent_set():
        _set_and_start_rpc_agent(agent)


def get_rpc_timeout() -> float:
    """Return the seconds that a call may take if it sets no timeout itself; 0 for no limit."""
    return current.agent().timeout


def _set_rpc_timeout(timeout: float) -> None:
    current.agent().timeout = float(timeout)


# Barriers: all workers gather one object of each, through a leader


class AllGatherStates:
    """A gathering, on one worker. Programs create instances for their own gatherings, too."""

    def __init__(self) -> None:
        # At the leader the objects received so far, at the others the leader's result.
        self.gathered_objects: dict[str, Any] = {}
        self.proceed_signal = threading.Event()  # set when all objects are there


class Round(AllGatherStates):
    """A gathering of Telegrad's own functions."""

    def __init__(self) -> None:
        super().__init__()
        self.expected: set[str] | None = None  # set at the leader once it has begun this round itself
        self.error: Exception | None = None

    def missing(self) -> list[str]:
        with _rounds_lock:
            return sorted((self.expected or set()) - self.gathered_objects.keys())


# A round is one gathering of one set of workers. Each worker counts the rounds of a set by itself. All of the set make
# the same gatherings in the same order, so they arrive at the same key without a message. An object may arrive before
# this worker begins the round, so either of the two makes the entry.
_rounds_lock = renewed(threading.Lock())  # guards the next two, and the rounds
_begun: defaultdict[str, int] = defaultdict(int)  # the rounds that this worker has begun, by the names of the set
_rounds: dict[str, Round] = {}


def _forget_rounds() -> None:
    with _rounds_lock:
        _begun.clear()
        _rounds.clear()


def _round_of(key: str) -> Round:
    """Return the round for an object that has arrived. Called with the lock held."""
    names, _, number = key.rpartition("#")
    # The round of an object that arrives late has failed and ended here, and no call would remove another entry.
    has_ended = number.isdecimal() and int(number) < _begun[names] and key not in _rounds
    return Round() if has_ended else _rounds.setdefault(key, Round())


@known_as("_all_gather")
def _gather_to_leader(sequence_id: str, worker_name: str, obj: Any, worker_names: set[str] | None = None) -> None:
    """Store an object at the leader; the leader's own object comes with the names that are expected."""
    with _rounds_lock:
        round_ = _round_of(sequence_id)
        round_.gathered_objects[worker_name] = obj
        round_.expected = worker_names or round_.expected
        if round_.expected is not None and round_.expected <= round_.gathered_objects.keys():
            round_.proceed_signal.set()


@known_as("_all_gather")
def _broadcast_to_followers(sequence_id: str, objects_map: dict[str, Any], error: Exception | None = None) -> None:
    """Store the result, or the error, that the leader broadcast."""
    with _rounds_lock:
        round_ = _round_of(sequence_id)
        round_.gathered_objects, round_.error = objects_map, error
        round_.proceed_signal.set()


def _all_gather(obj: Any, worker_names: set[str] | None = None, timeout: float = UNSET_RPC_TIMEOUT) -> dict[str, Any]:
    """Gather the objects of all those workers, by name. Block until each has sent its own."""
    names = set(worker_names or _ALL_WORKER_NAMES)
    me, leader = current.agent().name, min(names)
    limit = get_rpc_timeout() if timeout == UNSET_RPC_TIMEOUT else timeout
    who = ",".join(sorted(names))
    with _rounds_lock:
        key = f"{who}#{_begun[who]}"  # equal on all of these workers
        round_ = _round_of(key)
        _begun[who] += 1
    try:
        if me == leader:
            _gather_to_leader(key, me, obj, names)
            error = _await_followers(round_, limit)
            _tell_followers(key, round_.gathered_objects, error, names - {me}, limit)
        else:
            _ask(leader, _gather_to_leader, (key, me, obj), limit)
            with Wait(
                "_all_gather",
                lambda: f"worker {me!r} in _all_gather, for what {leader!r} gathers from {sorted(names)}",
                lambda: [leader],
                worker=me,
                level=logging.INFO,
            ) as wait:
                # The result comes by a call from the leader. If the leader dies, that call never comes, and this one
                # fails and ends the wait.
                while not round_.proceed_signal.wait(PING):
                    wait.look()
                    _ask(leader, _ping)
            if round_.error is not None:
                raise round_.error
        return round_.gathered_objects
    finally:
        with _rounds_lock:
            _rounds.pop(key, None)


def _await_followers(round_: Round, limit: float) -> Exception | None:
    """Wait until all workers have sent their objects; return the error if some will not."""
    until = monotonic() + limit if limit else float("inf")
    with Wait(
        "_all_gather",
        lambda: f"_all_gather (shutdown calls it, too), for {', '.join(round_.missing())}",
        round_.missing,
        worker=current.agent().name,
        level=logging.INFO,
    ) as wait:
        while not round_.proceed_signal.wait(min(PING, max(until - monotonic(), 0))):
            wait.look()
            missing = round_.missing()
            if monotonic() >= until:
                return CallTimeout(f"{', '.join(missing)} timed out in _all_gather after {limit:.2f} seconds")
            for name in missing:
                try:
                    _ask(name, _ping, timeout=PING)
                except CallTimeout:
                    pass  # it is busy
                except PeerLost as lost:
                    return lost
    return None


def _ask(
    name: str, function: Callable[..., None], args: tuple[Any, ...] = (), timeout: float = UNSET_RPC_TIMEOUT
) -> None:
    """Call a worker of a round. Raise PeerLost if it cannot be called any more, and CallTimeout if it is busy."""
    try:
        rpc_sync(name, function, args, timeout=timeout)
    except PeerError as error:
        # With this cause, the worker was too busy to accept the connection in time.
        if isinstance(error.__cause__, TimeoutError):
            raise CallTimeout(str(error)) from error
        raise PeerLost(f"worker {name!r} was lost before it called shutdown(): {error}") from error


def _tell_followers(
    key: str, objects: dict[str, Any], error: Exception | None, followers: set[str], limit: float
) -> None:
    args = (key, objects) if error is None else (key, {}, error)
    # The followers are told of an error, too: otherwise they would wait until the leader has ended.
    told = {name: rpc_async(name, _broadcast_to_followers, args, timeout=limit) for name in sorted(followers)}
    failed: dict[str, Exception] = {}
    for name, future in told.items():
        try:
            future.wait()
        except Exception as failure:
            failed[name] = failure
    if error is not None:
        raise error
    if failed:
        first = next(iter(failed.values()))
        raise CallTimeout(
            f"{', '.join(failed)} failed or timed out in _all_gather after {limit:.2f} seconds. "
            f"The first error: {first}"
        )


@known_as("_all_gather")
def _ping() -> None:
    """Do nothing. A response shows that the worker is alive."""


def _barrier(worker_names: set[str]) -> None:
    """Wait until all those workers have called this."""
    _all_gather(None, set(worker_names))


def _wait_all_workers(timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """Wait until all workers of the group have called this."""
    _all_gather(None, timeout=timeout)


def _delete_all_user_and_unforked_owner_rrefs(timeout: float = UNSET_RPC_TIMEOUT) -> None:
    """Release every reference of this worker to values of others."""
    delete_users()
    current.references().flush()


# Shutdown


@not_compiled
@folded
def shutdown(graceful: bool = True, timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """Leave the group. A graceful shutdown first waits until all workers have called this and nothing is in flight.

    Raises:
        NotInitialized: this process is in no group.
        UsageError: a remote call, or a callback of one, called this; it would wait for itself.
        CallTimeout: the others did not call this in time; this worker has left all the same.
        PeerLost: another worker died, or ended without calling this; this worker has left all the same.
        RRefError: other workers still hold references to values of this worker; it has left all the same.
    """
    worker = current.joined()
    if graceful:
        life.check_may_wait(worker, "shutdown")
    together = graceful and _get_current_rpc_agent().is_static_group
    lost: PeerError | None = None
    leaks, ready = 0, False
    try:
        if together:
            try:
                _wait_all_workers(timeout)
            except PeerError as error:  # one worker has died; the others still leave normally
                lost = None if worker.agent.closed else error
            _delete_all_user_and_unforked_owner_rrefs()
            if not (_ignore_rref_leak or lost):
                leaks = _count_leaks()
                # All must count before any worker leaves, because the references that it holds end with it.
                _wait_all_workers(timeout)
        ready = True
    except (NotInitialized, PeerError):
        if not worker.agent.closed:  # else another thread, or a signal handler, has left the group
            raise
    finally:
        if current.worker is worker:
            life.shutdown(graceful and ready, timeout)
    if lost is not None:
        raise lost
    if leaks:
        raise RRefError(f"Leaking RRef: {plural(leaks, 'value')} of this worker still held by others")


def _count_leaks() -> int:
    """Return the number of values that others still hold after all have released their references."""
    until = monotonic() + LEAK_CHECK
    pause = threading.Event()
    while True:
        held = current.references().counts()["shared_owners"]
        if not held or monotonic() > until:
            return held
        pause.wait(1e-2)
