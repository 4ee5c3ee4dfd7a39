"""The calls to a group of workers, and its collective operations."""

import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias, TypeVar, TypeVarTuple, Unpack, overload

from telegrad.errors import UsageError
from telegrad.ext.calls import (
    DEFAULT,
    Async,
    How,
    NoArgs,
    RetryPolicy,
    Unchecked,
    check_timeout,
    convert,
    folded,
    not_compiled,
    retry,
    user_name,
)
from telegrad.ext.workers import WorkerInfo, current
from telegrad.groups import collectives, group_calls, ref_group
from telegrad.groups.collectives import Participants
from telegrad.groups.group_calls import GroupFuture, MapFuture, ResultSlot, begin_one, zipped
from telegrad.groups.ref_group import RefGroup

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
Function: TypeAlias = Callable[..., Any]


class Each(How, total=False):
    reduce: None  # of a call without a reduction


def _policy(timeout: float, wait_for_worker: bool | None, idempotent: bool) -> RetryPolicy | None:
    check_timeout(timeout)
    is_plain = wait_for_worker is None and idempotent is False and not retry.by_default
    return None if is_plain else retry.policy_of(wait_for_worker, idempotent)


@folded
class GroupCalls(Participants):
    """The base class of `Group`, which knows its members."""

    __slots__ = ()

    @property
    def version(self) -> int:
        raise NotImplementedError

    def _members(self) -> tuple[WorkerInfo, ...]:
        raise NotImplementedError

    @overload
    def rpc_async(
        self, func: Async[*Ts, T], args: tuple[*Ts] = ..., kwargs: None = ..., timeout: float = ..., **how: Unpack[Each]
    ) -> GroupFuture[list[T]]: ...
    @overload
    def rpc_async(
        self, func: Callable[[], T], args: NoArgs = ..., kwargs: None = ..., timeout: float = ..., **how: Unpack[Each]
    ) -> GroupFuture[list[T]]: ...
    @overload
    def rpc_async(
        self, func: Callable[[*Ts], T], args: tuple[*Ts], kwargs: None = ..., timeout: float = ..., **how: Unpack[Each]
    ) -> GroupFuture[list[T]]: ...
    @overload
    def rpc_async(
        self, func: Callable[..., T], args: Unchecked, kwargs: None = ..., timeout: float = ..., **how: Unpack[Each]
    ) -> GroupFuture[list[T]]: ...
    @overload
    def rpc_async(
        self, func: Callable[..., T], args: Any, kwargs: Mapping[str, Any], timeout: float = ..., **how: Unpack[Each]
    ) -> GroupFuture[list[T]]: ...
    @overload
    def rpc_async(
        self, func: Callable[..., T], *, kwargs: Mapping[str, Any], timeout: float = ..., **how: Unpack[Each]
    ) -> GroupFuture[list[T]]: ...
    @overload
    def rpc_async(
        self,
        func: Function,
        args: Any = ...,
        kwargs: Any = ...,
        timeout: float = ...,
        *,
        reduce: Callable[[Any, Any], T],
        **how: Unpack[How],
    ) -> GroupFuture[T]: ...
    @not_compiled
    def rpc_async(
        self,
        func: Callable[..., Any],
        args: Any = None,
        kwargs: Any = None,
        timeout: float = DEFAULT,
        *,
        reduce: Callable[[Any, Any], Any] | None = None,
        wait_for_worker: bool | None = None,
        idempotent: bool = False,
    ) -> GroupFuture[Any]:
        """Start `func(*args, **kwargs)` on each worker. Return a future of the list of values, in the workers' order.

        Args:
            func: any function.
            args: positional arguments, a tuple.
            kwargs: keyword arguments, a dict.
            timeout: seconds for each call; 0 for no limit, default: the timeout in the options.
            reduce: a function of two values such as `torch.add`: workers combine their values along a tree, in their
                order, and the caller gets one value.
            wait_for_worker: as for `rpc.rpc_sync`, for each worker.
            idempotent: as for `rpc.rpc_sync`.

        Returns:
            A `GroupFuture`.

        Raises:
            UnknownWorker: the group is empty.
            UsageError: a reduction cannot wait for workers, or be repeated.
            CannotEncode: an argument cannot be sent; no worker was called.
        """
        members = self._members()
        call = convert(func, args, kwargs)
        if reduce is None:
            policy = _policy(timeout, wait_for_worker, idempotent)
            return group_calls.begin(self.version, members, call, timeout, policy)
        if wait_for_worker or idempotent:
            raise UsageError(
                "a reduction runs from worker to worker, so it cannot wait for a missing worker or be repeated: "
                "call rpc.wait_for_workers first, or call without reduce= and combine the results here"
            )
        return collectives.begin_reduction(self.version, members, call, timeout, reduce)

    @overload
    def rpc_sync(
        self, func: Async[*Ts, T], args: tuple[*Ts] = ..., kwargs: None = ..., timeout: float = ..., **how: Unpack[Each]
    ) -> list[T]: ...
    @overload
    def rpc_sync(
        self, func: Callable[[], T], args: NoArgs = ..., kwargs: None = ..., timeout: float = ..., **how: Unpack[Each]
    ) -> list[T]: ...
    @overload
    def rpc_sync(
        self, func: Callable[[*Ts], T], args: tuple[*Ts], kwargs: None = ..., timeout: float = ..., **how: Unpack[Each]
    ) -> list[T]: ...
    @overload
    def rpc_sync(
        self, func: Callable[..., T], args: Unchecked, kwargs: None = ..., timeout: float = ..., **how: Unpack[Each]
    ) -> list[T]: ...
    @overload
    def rpc_sync(
        self, func: Callable[..., T], args: Any, kwargs: Mapping[str, Any], timeout: float = ..., **how: Unpack[Each]
    ) -> list[T]: ...
    @overload
    def rpc_sync(
        self, func: Callable[..., T], *, kwargs: Mapping[str, Any], timeout: float = ..., **how: Unpack[Each]
    ) -> list[T]: ...
    @overload
    def rpc_sync(
        self,
        func: Function,
        args: Any = ...,
        kwargs: Any = ...,
        timeout: float = ...,
        *,
        reduce: Callable[[Any, Any], T],
        **how: Unpack[How],
    ) -> T: ...
    @not_compiled
    def rpc_sync(
        self,
        func: Callable[..., Any],
        args: Any = None,
        kwargs: Any = None,
        timeout: float = DEFAULT,
        *,
        reduce: Callable[[Any, Any], Any] | None = None,
        wait_for_worker: bool | None = None,
        idempotent: bool = False,
    ) -> Any:
        """Call the workers as `rpc_async` does, and wait.

        Returns:
            The list of values, in the order of the workers, or the reduced value.

        Raises:
            GroupError: some workers failed; it has their errors, and the values of the others.
        """
        future = self.rpc_async(
            func, args, kwargs, timeout, reduce=reduce, wait_for_worker=wait_for_worker, idempotent=idempotent
        )
        return retry.wait_or_cancel(future)

    @not_compiled
    def map(
        self,
        func: Callable[..., T],
        *items: Iterable[Any],
        timeout: float = DEFAULT,
        wait_for_worker: bool | None = None,
        idempotent: bool = False,
    ) -> GroupFuture[list[T]]:
        """Run `func(item)` for each item, or `func(*each)` for the items of several lists of equal length.

        The first worker gets the first item, the second worker the second, and so on. If there are more items than
        workers, each worker gets the next item when it has finished one. If a worker dies, its current item fails, and
        the other workers process the remaining items.

        The other arguments are as for `rpc_async`. With `wait_for_worker`, an item waits for its worker.

        Args:
            *items: one list of items, or several; iterators are read to their end first.

        Returns:
            A `GroupFuture` of all values, in the order of the items.
        """
        policy = _policy(timeout, wait_for_worker, idempotent)
        names = [worker.name for worker in self._members()]
        calls = {number: convert(func, args, None) for number, args in enumerate(zipped(items))}

        def call(slot: ResultSlot, place: int) -> None:
            begin_one(slot, names[place], calls.pop(slot.key), timeout, policy)

        return MapFuture(current.agent(), self.version, names, len(calls), user_name(func), call).begin()

    @not_compiled
    def remote(
        self,
        func: Callable[..., Any],
        args: Any = None,
        kwargs: Any = None,
        timeout: float = DEFAULT,
        *,
        wait_for_worker: bool | None = None,
    ) -> RefGroup:
        """Call the workers as `rpc_async` does, but keep each value on its worker.

        Args:
            wait_for_worker: block, up to the timeout, until all workers can be called.

        Returns:
            A `RefGroup`.
        """
        policy = _policy(timeout, wait_for_worker, False)
        return ref_group.create(self._members(), convert(func, args, kwargs), timeout, policy)

    # Collective operations

    @not_compiled
    def broadcast(self, value: Any, timeout: float = DEFAULT, *, wait_for_worker: bool | None = None) -> RefGroup:
        """Send a value to each worker, which keeps it, as `remote` does for a function that returns it.

        The other arguments are as for `rpc.rpc_sync`.

        Args:
            value: any value that can be sent.

        Returns:
            A `RefGroup` of the copies.
        """
        call = convert(ref_group.kept_value, (value,), None)
        return ref_group.create(self._members(), call, timeout, _policy(timeout, wait_for_worker, False))

    @not_compiled
    def gather(
        self,
        func: Callable[..., T],
        args: Any = None,
        kwargs: Any = None,
        timeout: float = DEFAULT,
        *,
        wait_for_worker: bool | None = None,
        idempotent: bool = False,
    ) -> dict[str, T]:
        """Call the workers as `rpc_async` does, and wait.

        Returns:
            The values, by worker name.

        Raises:
            GroupError: some workers failed.
        """
        future = self.rpc_async(func, args, kwargs, timeout, wait_for_worker=wait_for_worker, idempotent=idempotent)
        return dict(zip(future.workers, retry.wait_or_cancel(future), strict=True))

    @not_compiled
    def barrier(self, name: str = "", timeout: float = DEFAULT) -> None:
        """Block until each worker of the group has called this method.

        Args:
            name: distinguishes barriers of several threads.
            timeout: seconds; 0 for no limit, default: the timeout in the options.

        Raises:
            UsageError: this worker is not in the group.
            CallTimeout: some workers did not arrive in time; the message names them.
            PeerLost: a worker was lost, or left, before it arrived; or, in an elastic group, has called shutdown.
        """
        collectives.meet("barrier", self, name, None, timeout)

    @not_compiled
    def all_reduce(
        self, value: T, op: Callable[[T, T], T] | None = None, name: str = "", timeout: float = DEFAULT
    ) -> T:
        """Combine one value of each worker into one. Each worker of the group must call this method.

        One worker receives all values. The other arguments, and the errors, are as for `barrier`.

        Args:
            value: this worker's value.
            op: a function of two values; default: `torch.add`.

        Returns:
            The combined value, on each worker.
        """
        combined: T = collectives.meet("all_reduce", self, name, value, timeout, operator.add if op is None else op)
        return combined
