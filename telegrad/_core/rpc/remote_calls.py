"""The functions of the API for remote calls."""

from collections.abc import AsyncIterable, Callable, Coroutine, Iterable, Mapping
from functools import partial
from typing import Any, TypeAlias, TypedDict, TypeVar, TypeVarTuple, Unpack, overload

import torch

from telegrad._core.agent.pending_call import PreparedCall
from telegrad._core.calls import profiling
from telegrad._core.calls.call_names import not_compiled
from telegrad._core.calls.futures import Future
from telegrad._core.calls.settings import DEFAULT
from telegrad._core.membership.members import WorkerInfo
from telegrad._core.pickling.remote_text import fold, folded
from telegrad._core.rpc import retry
from telegrad._core.rpc.conversion import convert, named, target
from telegrad._core.rpc.restorable import Restore, check_restore, make_restorable
from telegrad._core.rpc.rref import RRef
from telegrad._core.streams.streams import WINDOW, Stream
from telegrad._core.worker import current
from telegrad.errors import UnknownWorker

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

To: TypeAlias = str | int | WorkerInfo
Awaited: TypeAlias = Coroutine[Any, Any, T] | torch.futures.Future[T]  # the caller gets the T
Items: TypeAlias = Iterable[T] | AsyncIterable[T] | Coroutine[Any, Any, Iterable[T]]
NoArgs: TypeAlias = tuple[()] | None
AnyArgs: TypeAlias = tuple[Any, ...] | list[Any] | None
Async: TypeAlias = Callable[[*Ts], Awaited[T]]
# No type describes a list of arguments, or a reference in the place of its value: only the result is checked then.
Unchecked: TypeAlias = list[Any] | tuple[RRef[Any], *tuple[Any, ...]]


# The options of rpc_stream, rpc_sync and remote; the names are short, or each overload would take twice the lines.
class Waiting(TypedDict, total=False):
    wait_for_worker: bool | None


class How(Waiting, total=False):
    idempotent: bool


class Keep(Waiting, total=False):
    restore: Restore


UNSET_RPC_TIMEOUT = DEFAULT


@overload
def rpc_sync(
    to: To, func: Async[*Ts, T], args: tuple[*Ts] = ..., kwargs: None = ..., timeout: float = ..., **how: Unpack[How]
) -> T: ...
@overload
def rpc_sync(
    to: To, func: Callable[[], T], args: NoArgs = ..., kwargs: None = ..., timeout: float = ..., **how: Unpack[How]
) -> T: ...
@overload
def rpc_sync(
    to: To, func: Callable[[*Ts], T], args: tuple[*Ts], kwargs: None = ..., timeout: float = ..., **how: Unpack[How]
) -> T: ...
@overload
def rpc_sync(
    to: To, func: Callable[..., T], args: Unchecked, kwargs: None = ..., timeout: float = ..., **how: Unpack[How]
) -> T: ...
@overload
def rpc_sync(
    to: To, func: Callable[..., T], args: AnyArgs, kwargs: Mapping[str, Any], timeout: float = ..., **how: Unpack[How]
) -> T: ...
@overload
def rpc_sync(
    to: To, func: Callable[..., T], *, kwargs: Mapping[str, Any], timeout: float = ..., **how: Unpack[How]
) -> T: ...
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

    The function is sent by name if the worker can import it, otherwise by value. Tensors, references (`RRef`) and any
    picklable objects may be anywhere in the arguments and in the result. The function sees copies.

    Args:
        to: the worker's name, its rank, or its `WorkerInfo`; this worker, too, can be called.
        func: any function, class or builtin; an `async def` is awaited there.
        args: positional arguments, a tuple; none if left out.
        kwargs: arguments by name, a dict.
        timeout: seconds until `CallTimeout`; 0 for no limit. The default is the `rpc_timeout` of the options.
        wait_for_worker: wait, up to the timeout, while no worker of that name can be called. The default is in the
            options.
        idempotent: repeat the call if it may have run. A worker that has begun it gives the same answer again; a
            restarted worker runs it again.

    Returns:
        The return value of the function, its tensors on this worker.

    Raises:
        Exception: the exception of the function, with its remote traceback.
        CallTimeout: there was no answer in time; the function may still run.
        PeerUnreachable: the worker cannot be reached; the function has not run.
        PeerLost: the worker died, or the connection broke; the function may have run.
        UnknownWorker: there is no worker `to`, or the rank of that `WorkerInfo` is another's.
        InvalidArgument: an argument is of another type, or out of range; nothing was sent.
        CannotEncode: an argument or the result cannot be pickled.
        FunctionNotFound: the worker does not have the function.
        NotInitialized: this process is in no group.

    Example:
        >>> rpc.rpc_sync("worker1", torch.add, (torch.ones(2), 1))
        tensor([2., 2.])
        >>> rpc.rpc_sync("worker1", sorted, ([3, 1, 2],), {"reverse": True}, timeout=5)
        [3, 2, 1]
        >>> rpc.rpc_sync("worker1", lambda: 1 / 0)
        Traceback (most recent call last):
            ...
        ZeroDivisionError: ...
    """
    try:
        call = convert(func, args, kwargs)
        policy = None
        if wait_for_worker is not None or idempotent is not False or retry.by_default:
            policy = retry.policy_of(wait_for_worker, idempotent)
        there = to if type(to) is str else target(to) if policy is None else named(to)
        perform: Any = current.agent().perform if policy is None else partial(retry.call_sync, policy)
        if profiling.wanted():
            return profiling.called(event_of("sync", to, func), perform, there, call, timeout)
        return perform(there, call, timeout)
    except BaseException as error:
        fold(error)
        raise


@overload
def rpc_async(
    to: To, func: Async[*Ts, T], args: tuple[*Ts] = ..., kwargs: None = ..., timeout: float = ..., **how: Unpack[How]
) -> Future[T]: ...
@overload
def rpc_async(
    to: To, func: Callable[[], T], args: NoArgs = ..., kwargs: None = ..., timeout: float = ..., **how: Unpack[How]
) -> Future[T]: ...
@overload
def rpc_async(
    to: To, func: Callable[[*Ts], T], args: tuple[*Ts], kwargs: None = ..., timeout: float = ..., **how: Unpack[How]
) -> Future[T]: ...
@overload
def rpc_async(
    to: To, func: Callable[..., T], args: Unchecked, kwargs: None = ..., timeout: float = ..., **how: Unpack[How]
) -> Future[T]: ...
@overload
def rpc_async(
    to: To, func: Callable[..., T], args: AnyArgs, kwargs: Mapping[str, Any], timeout: float = ..., **how: Unpack[How]
) -> Future[T]: ...
@overload
def rpc_async(
    to: To, func: Callable[..., T], *, kwargs: Mapping[str, Any], timeout: float = ..., **how: Unpack[How]
) -> Future[T]: ...
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
    """Start `func(*args, **kwargs)` on the worker `to`; return a future of its value.

    The tensors among the arguments must not be written to until the future is done. The arguments are as for
    `rpc_sync`; this function does not block.

    Returns:
        A `Future`: `wait()` returns the value or raises as `rpc_sync` does, `await` does so in asyncio, `cancel()`
        cancels the call.

    Raises:
        InvalidArgument: the call makes no sense, and nothing was sent; likewise `UnknownWorker` and `CannotEncode`.

    Example:
        >>> futures = [rpc.rpc_async(name, pow, (number, 2)) for number, name in enumerate(["worker0", "worker1"])]
        >>> [future.wait() for future in futures]
        [0, 1]
    """
    try:
        call = convert(func, args, kwargs)
        policy = None
        if wait_for_worker is not None or idempotent is not False or retry.by_default:
            policy = retry.policy_of(wait_for_worker, idempotent)
        there = to if type(to) is str else target(to) if policy is None else named(to)
        begin: Any = current.agent().begin if policy is None else partial(retry.call_async, policy)
        if profiling.wanted():
            return profiling.called_async(event_of("async", to, func), begin, there, call, timeout)
        return begin(there, call, timeout)  # type: ignore[no-any-return]
    except BaseException as error:
        fold(error)
        raise


@overload
def remote(
    to: To, func: Async[*Ts, T], args: tuple[*Ts] = ..., kwargs: None = ..., timeout: float = ..., **how: Unpack[Keep]
) -> RRef[T]: ...
@overload
def remote(
    to: To, func: Callable[[], T], args: NoArgs = ..., kwargs: None = ..., timeout: float = ..., **how: Unpack[Keep]
) -> RRef[T]: ...
@overload
def remote(
    to: To, func: Callable[[*Ts], T], args: tuple[*Ts], kwargs: None = ..., timeout: float = ..., **how: Unpack[Keep]
) -> RRef[T]: ...
@overload
def remote(
    to: To, func: Callable[..., T], args: Unchecked, kwargs: None = ..., timeout: float = ..., **how: Unpack[Keep]
) -> RRef[T]: ...
@overload
def remote(
    to: To, func: Callable[..., T], args: AnyArgs, kwargs: Mapping[str, Any], timeout: float = ..., **how: Unpack[Keep]
) -> RRef[T]: ...
@overload
def remote(
    to: To, func: Callable[..., T], *, kwargs: Mapping[str, Any], timeout: float = ..., **how: Unpack[Keep]
) -> RRef[T]: ...
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
    """Start `func(*args, **kwargs)` on the worker `to`, where its value stays; return a reference to the value.

    Do not wait for the function. If it fails, or does not end within `timeout`, uses of the reference raise the error.
    The other arguments are as for `rpc_sync`. With `wait_for_worker`, block until a worker of that name can be called.

    Args:
        restore: recreate the value if its owner is lost. The next use then waits for a worker of the same name, creates
            the value there with the same call, and calls `restore(value)`, which can load a checkpoint, for example.
            With `True` the value stays as it was created.

    Returns:
        An `RRef`; the value lives as long as any reference to it.

    Raises:
        UnknownWorker: there is no worker `to`; likewise `InvalidArgument` and `CannotEncode`, as for `rpc_sync`.

    Example:
        >>> from collections import Counter
        >>> counter = rpc.remote("worker1", Counter, ("abba",))
        >>> counter.rpc_sync().most_common(1)
        [('a', 2)]
    """
    try:
        call = convert(func, args, kwargs)
        if restore is not False:
            check_restore(restore)
        make: Callable[..., RRef[Any]] = create
        if profiling.wanted():
            make = partial(profiling.called_creation, event_of("remote", to, func), create)
        if wait_for_worker is not None or retry.by_default:
            made = _once_there(lambda to, left: make(to, call, left), to, call, timeout, wait_for_worker)
        else:
            made = make(to, call, timeout)
        return made if restore is False else make_restorable(made, func, args, kwargs, restore)
    except BaseException as error:
        fold(error)
        raise


@overload
def rpc_stream(
    to: To,
    func: Callable[[], Items[T]],
    args: NoArgs = ...,
    kwargs: None = ...,
    timeout: float = ...,
    window: int = ...,
    **how: Unpack[Waiting],
) -> Stream[T]: ...
@overload
def rpc_stream(
    to: To,
    func: Callable[[*Ts], Items[T]],
    args: tuple[*Ts],
    kwargs: None = ...,
    timeout: float = ...,
    window: int = ...,
    **how: Unpack[Waiting],
) -> Stream[T]: ...
@overload
def rpc_stream(
    to: To,
    func: Callable[..., Items[T]],
    args: Unchecked,
    kwargs: None = ...,
    timeout: float = ...,
    window: int = ...,
    **how: Unpack[Waiting],
) -> Stream[T]: ...
@overload
def rpc_stream(
    to: To,
    func: Callable[..., Items[T]],
    args: AnyArgs,
    kwargs: Mapping[str, Any],
    timeout: float = ...,
    window: int = ...,
    **how: Unpack[Waiting],
) -> Stream[T]: ...
@overload
def rpc_stream(
    to: To,
    func: Callable[..., Items[T]],
    *,
    kwargs: Mapping[str, Any],
    timeout: float = ...,
    window: int = ...,
    **how: Unpack[Waiting],
) -> Stream[T]: ...
@not_compiled
@folded
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
    """Start `func(*args, **kwargs)` on the worker `to`; return a `Stream` of the items that it yields.

    The function runs at most `window` items and 64 MB ahead of its reader. The other arguments are as for
    `rpc_sync`. With `wait_for_worker`, block until a worker of that name can be called.

    Args:
        func: a generator function, also an `async def`, or one that returns an iterable.
        timeout: seconds to wait for each item; 0 for no limit. The default is in the options.
        window: how many items the function may be ahead.

    Returns:
        A `Stream`, to be read with `for` or `async for`.

    Raises:
        InvalidArgument: the call or the window makes no sense; likewise `UnknownWorker`, as for `rpc_sync`.

    Example:
        >>> with rpc.rpc_stream("worker1", range, (3,)) as items:
        ...     print(list(items))
        [0, 1, 2]
    """
    call = convert(func, args, kwargs)

    def make(to: str | int | WorkerInfo, _: float) -> Stream[Any]:
        return Stream(target(to), call, timeout, window)

    if wait_for_worker is not None or retry.by_default:
        return _once_there(make, to, call, timeout, wait_for_worker)
    return make(to, timeout)


def _once_there(
    make: Callable[[Any, float], T],
    to: str | int | WorkerInfo,
    call: PreparedCall,
    timeout: float,
    wait_for_worker: bool | None,
) -> T:
    """Wait until a worker can be called, and make a value there in the time left; repeat if the worker goes."""
    # A reference or a stream belongs to one life of its worker, so it cannot be queued like a call until some worker
    # has that name. The worker may leave after the wait, and before the value is made there.
    policy = retry.policy_of(wait_for_worker, False)
    there = target(to) if policy is None else named(to)
    while True:
        timeout = retry.await_workers(policy, [there], call, timeout)
        try:
            return make(there, timeout)
        except UnknownWorker:
            if policy is None:
                raise


def create(to: str | int | WorkerInfo, call: PreparedCall, timeout: float) -> RRef[Any]:
    made: RRef[Any] = current.references().create(to if type(to) is str else target(to), call, timeout)
    return made


def event_of(kind: str, to: str | int | WorkerInfo, function: Any) -> profiling.CallEvent:
    agent, there = current.agent(), named(to)
    here = agent.name
    if isinstance(there, int):
        try:
            there = agent.identify(there).name
        except UnknownWorker:  # the call waits for that worker, or fails by itself
            there = f"rank {there}"
    return profiling.CallEvent(profiling.event_name(kind, function, here, there), function, here, there)
