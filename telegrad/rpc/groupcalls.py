"""Calls to a group: one future of what all of its workers answer, in whatever order they do."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from telegrad import checks
from telegrad.agent import profiling
from telegrad.agent.agent import Agent
from telegrad.agent.awaiting import happening
from telegrad.agent.fanout import EachCall
from telegrad.agent.futures import Future, Helper, Signal
from telegrad.agent.naming import user_name
from telegrad.agent.scene import InTurn
from telegrad.errors import GroupError, PeerError, RRefError, UnknownWorker
from telegrad.group.members import WorkerInfo
from telegrad.rpc import current, persistence
from telegrad.rpc.conversion import Call
from telegrad.rpc.lobby import Manner
from telegrad.wire.failures import fresh, kept

GONE = (PeerError, UnknownWorker, RRefError)  # errors after which a worker, or its value, is not to be used any more

Key = Any  # a worker's name, or the number of an item


def begin(
    version: int, workers: Sequence[WorkerInfo], call: Call, timeout: float, manner: Manner | None = None
) -> GroupFuture:
    """Call each of these workers."""
    agent = current.agent()
    names = [worker.name for worker in workers]
    asked = call.function if call.asked is None else call.asked
    future = GroupFuture(agent, version, names, names, user_name(asked))
    shares = future._shares
    if profiling.wanted():
        for share, name in zip(shares, names, strict=True):
            try:
                begin_event(agent, share, name, call, timeout, manner)
            except GONE as error:
                share.set_exception(error)
        return future
    if manner is not None:
        return _begin_persistent(agent, future, call, timeout, manner)
    calls = [EachCall(share, name, call.keeps) for share, name in zip(shares, names, strict=True)]
    agent.call_each(calls, call.function, call.args, call.kwargs, timeout, call.asked)
    return future


def _begin_persistent(agent: Agent, future: GroupFuture, call: Call, timeout: float, manner: Manner) -> GroupFuture:
    """Call each worker so that the first time is one call to all; what is made once more is a call of its own."""
    number = persistence.number_of(manner)
    made = [persistence.made(share, manner, share.key, call, timeout, number) for share in future._shares]
    try:
        for each in made:
            each.admit()
        (function, args, kwargs, keeps, asked), *_ = [each.take_first() for each in made]
        own = [EachCall(each, each.to, keeps) for each in made]
        agent.call_each(own, function, args, kwargs, made[0].timeout, asked)
    except BaseException:
        for each in made:
            each.conclude()
        raise
    return future


def begin_event(
    agent: Agent, share: Share, name: str, call: Call, timeout: float, manner: Manner | None = None
) -> None:
    """One call, as an event."""
    asked = call.function if call.asked is None else call.asked
    event = profiling.Event(profiling.event_name("async", asked, agent.name, name), asked, agent.name, name)
    own: Callable[[], Future[Any]]
    if manner is None:
        own = partial(agent.call_async, name, call.function, call.args, call.kwargs, timeout, call.keeps, call.asked)
    else:
        own = partial(persistence.call_async, manner, name, call, timeout)
    follow(share, partial(profiling.called_async, event, own))


def follow(share: Share, begin: Callable[[], Future[Any]]) -> None:
    """Have a share end as a future does, which `begin` gives."""

    def pass_on(_: Any) -> None:
        try:
            share.set_result(future.value())
        except Exception as error:
            share.set_exception(error)

    future = begin()
    share.call = future.call
    future.add_done_callback(pass_on)


class Share:
    """What one worker, or one item, contributes: the outcome of a call."""

    __slots__ = ("about", "call", "ended", "error", "future", "key", "number", "value")

    quick = False
    about: str

    future: GroupFuture | None  # until it has ended: no circle stays behind

    def __init__(self, future: GroupFuture, number: int, key: Key) -> None:
        self.call: Any = None  # while it is under way
        self.future = future
        self.number = number
        self.key = key
        self.ended = False  # set before others are told
        self.value: Any = None
        self.error: BaseException | None = None

    def set_result(self, result: Any) -> None:
        self.value = result
        self._end()

    def set_exception(self, result: Any) -> None:
        self.error = kept(result)
        self._end()

    def _end(self) -> None:
        future, self.future, self.call = self.future, None, None
        assert future is not None
        future._tell(self)

    def outcome(self, agent: Agent) -> Any:
        """The value, or the error, for a thread that goes on with it."""
        if self.error is not None:
            return fresh(self.error)
        agent.streams.adopt(self.value)
        return self.value


class GroupFuture(Future[Any]):
    """A future of the list of what the workers of a group give; also told as they come, of the first few, or by worker.

    `workers` are the names of those that are called, as they were in that `version` of their group. Where some fail,
    `wait` raises a GroupError once all have ended.

    Example:
        >>> future = rpc.group(["worker0", "worker1"]).rpc_async(pow, (2, 3))
        >>> for name, value in sorted(future.as_completed()):
        ...     print(name, value)
        worker0 8
        worker1 8
        >>> future.wait()
        [8, 8]
    """

    def __init__(self, agent: Any, version: int, workers: Sequence[str], keys: Sequence[Key], about: str) -> None:
        super().__init__()
        self.version = version
        self.workers: list[str] = list(workers)
        self.about: str = f"{about} on a group"
        self._agent: Agent = agent  # whose type is no part of the interface
        self._function = about
        self._shares = [Share(self, number, key) for number, key in enumerate(keys)]
        self._lock = threading.Lock()  # guards both below
        self._come: list[Share] = []  # those that have ended, in that order
        self._listeners: list[Callable[[], None]] = []  # told once each, when the next one ends
        self._over = Signal()  # happens after this is done
        self.call: Helper | None = _Calls(agent, self._shares, self._over, about)

    def _another(self) -> Future[Any]:
        return Future()

    def _tell(self, share: Share) -> None:
        self._agent.streams.publish()
        share.ended = True
        with self._lock:
            self._come.append(share)
            over = len(self._come) == len(self._shares)
            listeners, self._listeners = self._listeners, []
        for listener in listeners:
            listener()
        if over:
            self._end()
            self._over.set_result()

    def _end(self) -> None:
        if any(share.error is not None for share in self._shares):
            self.set_exception(self._failure())
            return
        values = [share.value for share in self._shares]
        self._agent.streams.adopt(*values)
        self.set_result(values)

    def _failure(self) -> GroupError:
        """The error that tells of all."""
        errors = {share.key: share.error for share in self._shares if share.error is not None}
        results = {share.key: share.value for share in self._shares if share.ended and share.error is None}
        return group_error(self._function, errors, len(self._shares), results)

    # What users ask

    def as_completed(self) -> Completed:
        """Each worker's name with its value, or its error, in the order in which they come: `for`, or `async for`."""
        return Completed(self)

    def first(self, n: int = 1) -> dict[Key, Any]:
        """Wait for the first values. The other calls go on.

        Args:
            n: how many.

        Returns:
            The values by worker, in the order in which they came.

        Raises:
            GroupError: so many have failed that there are not `n` values.
        """
        checks.count("n", n, 1, len(self._shares), "a number of the calls")
        found: dict[Key, Any] = {}
        for share in Completed(self).shares():
            if share.error is None:
                found[share.key] = share.outcome(self._agent)
                if len(found) == n:
                    return found
        raise self._failure()

    def results(self) -> dict[Key, Any]:
        """The values of those that succeed, by worker; waits for all."""
        self._wait_for_all()
        return {share.key: share.outcome(self._agent) for share in self._shares if share.error is None}

    def errors(self) -> dict[Key, BaseException]:
        """The errors of those that fail, by worker; waits for all."""
        self._wait_for_all()
        return {share.key: share.outcome(self._agent) for share in self._shares if share.error is not None}

    def _wait_for_all(self) -> None:
        self.heed()
        if not self.done():
            assert self.call is not None
            self.call.help()

    def __repr__(self) -> str:
        there = len(self._come)
        failed = sum(share.error is not None for share in self._come)
        state = "done" if there == len(self._shares) else f"{there} of {len(self._shares)} are there"
        return f"<GroupFuture of {self._function}: {state}{f', {failed} failed' if failed else ''}>"


def group_error(function: str, errors: dict[Key, BaseException], asked: int, results: dict[Key, Any]) -> GroupError:
    told = [(key, type(error).__name__, str(error).partition("\n")[0]) for key, error in errors.items()]
    lines = [f"  {key if isinstance(key, str) else f'item {key}'}: {kind}: {said}" for key, kind, said in told]
    first = "\n".join([f"{function} failed for {len(errors)} of {asked}:", *lines])
    error = GroupError(first, errors, results)
    error.__cause__ = next(iter(errors.values()))
    return error


class _Calls:
    """The calls of a group's future, for who waits for it; without the future, so that there is no circle."""

    def __init__(self, agent: Agent, shares: Sequence[Share], over: Signal, about: str) -> None:
        self._agent = agent
        self._shares = shares
        self._over = over
        self._about = about

    def help(self) -> None:
        """Wait for all, reading what comes by this thread where it can."""
        for share in self._shares:
            call = share.call
            if call is not None:
                call.help()
        self._agent.wait_for(self._over)

    def cancel(self) -> bool:
        """Cancel all that are under way."""
        calls = [share.call for share in self._shares]
        cancelled = [call.cancel() for call in calls if call is not None]
        return any(cancelled)

    @property
    def in_turn(self) -> _InTurns | None:
        """By which method of an actor they were made."""
        made = [getattr(share.call, "in_turn", None) for share in self._shares]
        hops = [each for each in made if each is not None]
        return _InTurns(hops) if hops else None

    def __repr__(self) -> str:
        return f"calls of {self._about}"


class _InTurns:
    """Several calls that one method of an actor waits for."""

    def __init__(self, hops: Sequence[InTurn]) -> None:
        self._hops = hops

    def awaiting(self, waiter: asyncio.Future[Any]) -> Generator[Any, None, Any]:
        with ExitStack() as stack:
            for hop in self._hops:
                stack.enter_context(hop.waited_for())
            return (yield from waiter.__await__())


class Completed:
    """What comes of the calls to a group, as it comes; each loop begins with the first."""

    def __init__(self, future: GroupFuture) -> None:
        self._future = future
        future.heed()

    def __iter__(self) -> Iterator[tuple[Key, Any]]:
        return ((share.key, share.outcome(self._future._agent)) for share in self.shares())

    def shares(self) -> Iterator[Share]:
        future = self._future
        for number in range(len(future._shares)):
            news = Signal()
            if not self._is_there(number, news.set_result):
                future._agent.wait_for(news)
            yield future._come[number]

    async def __aiter__(self) -> AsyncIterator[tuple[Key, Any]]:
        future = self._future
        for number in range(len(future._shares)):
            news = Signal()
            if not self._is_there(number, news.set_result):
                await happening(news)
            share = future._come[number]
            yield share.key, share.outcome(future._agent)

    def _is_there(self, number: int, listener: Callable[[], Any]) -> bool:
        """Whether so many have ended; else `listener` is told of the next one."""
        future = self._future
        with future._lock:
            if number < len(future._come):
                return True
            future._listeners.append(listener)
        return False
