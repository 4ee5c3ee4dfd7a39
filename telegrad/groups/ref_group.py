"""Groups of references: one on each worker of a group, used together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar, overload

from telegrad.errors import InvalidArgument, UnknownWorker
from telegrad.ext.calls import (
    DEFAULT,
    EachCall,
    Future,
    PreparedCall,
    RetryPolicy,
    await_workers,
    check_timeout,
    folded,
    known_as,
    not_compiled,
    profiling,
    wait_or_cancel,
)
from telegrad.ext.feedback import checks
from telegrad.ext.host import raised_by_handler
from telegrad.ext.values import EACH, Proxy, RRef, created, fetch, methods
from telegrad.ext.workers import Identity, WorkerInfo, current, listed
from telegrad.groups.group_calls import GroupFuture, MapFuture, ResultSlot, group_error, zipped

T = TypeVar("T")


@known_as("broadcast")
def kept_value(value: T) -> T:
    """Return the value. As a remote call, this stores the value on the called worker."""
    return value


def create(
    workers: Sequence[WorkerInfo], call: PreparedCall, timeout: float, policy: RetryPolicy | None = None
) -> RefGroup:
    """Create a value on each of these workers; raise GroupError, without any call, if some workers are gone."""
    timeout = await_workers(policy, [worker.name for worker in workers], call, timeout)
    table = current.references()
    owners = _identified([worker.name for worker in workers], table.agent.identify)
    return RefGroup(table.create_each(owners, call, timeout))


def _identified(names: Sequence[str], identify: Callable[[str], Identity]) -> list[Identity]:
    """Return the identities of these workers. Raise GroupError if some cannot be called."""
    found: list[Identity] = []
    errors: dict[str, BaseException] = {}
    for name in names:
        try:
            found.append(identify(name))
        except Exception as error:
            if raised_by_handler(error):
                raise
            errors[name] = error
    if errors:
        raise group_error("a remote call", errors, len(names), {})
    return found


@folded
class RefGroup:
    """References, one to a value on each worker of a group; made by `Group.remote`. It can be sent like a reference.

    `refs["worker1"]` and `refs[0]` are single references.

    Example:
        >>> lists = rpc.group(["worker0", "worker1"]).remote(list, ("ab",))
        >>> lists.rpc_sync().index("b")
        [1, 1]
    """

    __slots__ = ("_references",)

    def __init__(self, references: Sequence[RRef[Any]]) -> None:
        self._references = tuple(references)

    # Members

    @property
    def names(self) -> list[str]:
        """The names of the workers that own the values."""
        return [each.owner_name() for each in self]

    def __iter__(self) -> Iterator[RRef[Any]]:
        return iter(self._references)

    def __len__(self) -> int:
        return len(self._references)

    @overload
    def __getitem__(self, which: int | str | WorkerInfo) -> RRef[Any]: ...

    @overload
    def __getitem__(self, which: slice) -> RefGroup: ...

    def __getitem__(self, which: int | str | WorkerInfo | slice) -> RRef[Any] | RefGroup:
        if isinstance(which, slice):
            return RefGroup(self._references[which])
        if checks.is_whole(which):
            return self._references[which]
        name = which.name if isinstance(which, WorkerInfo) else which
        for each in self:
            if each.owner_name() == name:
                return each
        raise UnknownWorker(
            f"none of these references is to a value of worker {checks.short_repr(name)}; their owners: "
            f"{self._owners()}"
        )

    def __contains__(self, worker: str | WorkerInfo) -> bool:
        return (worker.name if isinstance(worker, WorkerInfo) else worker) in self.names

    def __reduce__(self) -> tuple[Any, ...]:
        return RefGroup, (self._references,)

    def __repr__(self) -> str:
        return f"<RefGroup of {len(self)}, on {self._owners()}>"

    def _owners(self) -> str:
        return listed([repr(name) for name in self.names])

    # Calling methods of the values

    @not_compiled
    def rpc_sync(self, timeout: float = DEFAULT) -> Proxy[list[Any]]:
        """`refs.rpc_sync().method(*args)` runs a method of each value at its owner and waits.

        The timeout is as for `rpc.rpc_sync`.

        Returns:
            A `Proxy`, whose methods return the list of results.

        Raises:
            GroupError: some calls failed.
        """
        check_timeout(timeout)
        return Proxy(lambda *call: wait_or_cancel(self._call(*call)), timeout)

    @not_compiled
    def rpc_async(self, timeout: float = DEFAULT) -> Proxy[GroupFuture[list[Any]]]:
        """Call methods as `rpc_sync` does, but return a future, like calls to groups.

        Returns:
            A `Proxy`, whose methods return a `GroupFuture`.
        """
        check_timeout(timeout)
        return Proxy(self._call, timeout)

    @not_compiled
    def remote(self, timeout: float = DEFAULT) -> Proxy[RefGroup]:
        """Call methods as `rpc_sync` does, but return references to the results, which stay at the owners.

        Returns:
            A `Proxy`, whose methods return a `RefGroup`.
        """
        check_timeout(timeout)
        return Proxy(self._create, timeout)

    @not_compiled
    def to_here(self, timeout: float = DEFAULT) -> list[Any]:
        """Wait for all values. Return copies of them, or the values themselves if this worker owns them.

        The timeout is as for `rpc.rpc_sync`.

        Returns:
            The values, in the order of the references.

        Raises:
            GroupError: some values are not available.
        """
        check_timeout(timeout)
        return list(self._each("to_here()", lambda each: _fetched(each, timeout)).wait())

    @not_compiled
    def future(self) -> GroupFuture[list[Any]]:
        """Return a future of a list of None, which is done once all values exist."""
        return self._each("future()", lambda each: each.future())

    @not_compiled
    def map(self, method: str, *items: Iterable[Any], timeout: float = DEFAULT) -> GroupFuture[list[Any]]:
        """Run `value.method(item)` for each item.

        The first value gets the first item, and so on. If there are more items than values, each value gets the next
        item when its call has ended. With several lists, a call takes one item of each.

        Args:
            method: the name of a method.
            *items: one list of items, or several of equal length.
            timeout: seconds for each call; 0 for no limit, default: the timeout in the options.

        Returns:
            A `GroupFuture` of all results, in the order of the items.
        """
        checks.text("method", method, "the name of a method")
        check_timeout(timeout)
        self._check()
        calls = dict(enumerate(zipped(items)))

        def call(slot: ResultSlot, place: int) -> None:
            each, args = self._references[place], calls.pop(slot.key)
            try:
                each._reach()
            except Exception as error:  # any error of the function that made the value: the value gets no items
                slot.is_gone = True
                if raised_by_handler(error):
                    raise
                slot.set_exception(error)
            else:
                slot.follow(each._call_async(method, timeout, args, {}))

        return MapFuture(current.agent(), 0, self.names, len(calls), method, call).begin()

    def _call(self, method: str, timeout: float, args: Any, kwargs: Any) -> GroupFuture[list[Any]]:
        if profiling.wanted():
            return self._each(method or "__call__", lambda each: each._call_async(method, timeout, args, kwargs))
        future, callees = self._future(method or "__call__"), []

        def reach(slot: ResultSlot, number: int) -> None:
            callees.append(EachCall(slot, self._references[number]._reach()))

        future._begin_each(reach)
        current.agent().call_each(callees, self._prepared(method, args, kwargs), timeout)
        return future

    def _each(self, about: str, begin: Callable[[RRef[Any]], Future[Any]]) -> GroupFuture[list[Any]]:
        """Start an operation on each reference. Return a future of the list of their results."""
        future = self._future(about)
        future._begin_each(lambda slot, number: slot.follow(begin(self._references[number])))
        return future

    def _create(self, method: str, timeout: float, args: Any, kwargs: Any) -> RefGroup:
        self._check()
        by_name = {each.owner_name(): each for each in self}
        owners = _identified(list(by_name), lambda name: by_name[name]._reach())
        return RefGroup(current.references().create_each(owners, self._prepared(method, args, kwargs), timeout))

    def _prepared(self, method: str, args: Any, kwargs: Any) -> PreparedCall:
        # All owners get the same arguments, which are encoded once. Each finds the id of its own value by its name.
        ids = {each.owner_name(): each._handle.id for each in self}
        return PreparedCall(methods.of(EACH + method), (ids, *args), kwargs, self)

    def _future(self, about: str) -> GroupFuture[list[Any]]:
        self._check()
        return GroupFuture(current.agent(), 0, self.names, self.names, f"{about} of the values of references")

    def _check(self) -> None:
        if not self._references:
            raise InvalidArgument("there are no references in this group")


def _fetched(reference: RRef[Any], timeout: float) -> Future[Any]:
    agent, slot = reference._table.agent, reference._handle.slot
    if slot is not None and slot.full:
        return reference.future().then(lambda _: reference.local_value())
    owner = reference._reach(timeout)
    if slot is None:
        return agent.call_async(owner, fetch, reference._handle.id, None, timeout, reference)
    # A call, for its timeout. Its error, other than that, is the error of the value, which is raised as it is.
    exists = agent.call_async(owner, created, reference._handle.id, None, timeout, reference)
    return exists.then(lambda done: reference.local_value() if slot.full else done.value())
