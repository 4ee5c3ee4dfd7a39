"""Calls to groups: one future for the results of several workers, which arrive in any order; maps, whose items are
handed out to the workers one by one.

Each call has a `ResultSlot`. The thread that ends a call adds its slot to the future's list of arrivals, and the thread
that adds the last one completes the future. Slots are only ever added, in the order of arrival, so an iterator needs no
lock to read those before the length that it has seen, and any number of iterators may run at the same time.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack
from time import perf_counter
from typing import Any, TypeVar

from telegrad.errors import CallCancelled, GroupError, InvalidArgument, PeerError, RRefError, UnknownWorker
from telegrad.ext.calls import (
    Agent,
    CallerContext,
    EachCall,
    Future,
    Helper,
    NestedCall,
    PreparedCall,
    RetryPolicy,
    Signal,
    complete,
    completion_of,
    first_cause,
    folded,
    profiling,
    retry,
    summary,
    user_name,
)
from telegrad.ext.feedback import checks
from telegrad.ext.host import raised_by_handler
from telegrad.ext.values import fresh, without_frames
from telegrad.ext.workers import WorkerInfo, current

GONE = (PeerError, UnknownWorker, RRefError)  # errors after which a worker gets no more items

T = TypeVar("T")

Key = Any  # a worker's name, or the number of an item
Begin = Callable[["ResultSlot", int], object]  # a function of a slot and its number, or the index of its worker


def begin(
    version: int, workers: Sequence[WorkerInfo], call: PreparedCall, timeout: float, policy: RetryPolicy | None = None
) -> GroupFuture[list[Any]]:
    agent = current.agent()
    names = [worker.name for worker in workers]
    future: GroupFuture[list[Any]] = GroupFuture(agent, version, names, names, user_name(call.users))
    slots = future._slots
    if profiling.wanted():
        # Each call is an event of its own in the profile, so the calls are made one at a time.
        future._begin_each(lambda slot, _: begin_one(slot, slot.key, call, timeout, policy), GONE)
    elif policy is not None:
        retry.begin_many([(slot, slot.key) for slot in slots], policy, call, timeout)
    else:
        agent.call_each([EachCall(slot, slot.key) for slot in slots], call, timeout)
    return future


def begin_one(slot: ResultSlot, to: str, call: PreparedCall, timeout: float, policy: RetryPolicy | None) -> None:
    """Make a single call, which is an event in profiles."""
    agent = current.agent()

    def begin(outcome: Any) -> Any:
        if policy is not None:
            retry.begin(outcome, policy, to, call, timeout)
        else:
            agent.call_for(outcome, to, call, timeout)
        return outcome

    if not profiling.wanted():
        begin(slot)
        return
    name = profiling.event_name("async", call.users, agent.name, to)
    slot.follow(profiling.called_async(profiling.CallEvent(name, call.users, agent.name, to), begin, Future()))


class ResultSlot:
    __slots__ = ("about", "begun", "call", "error", "future", "is_gone", "key", "place", "value")

    quick = False
    about: str
    begun: float

    def __init__(self, future: GroupFuture[Any], key: Key) -> None:
        self.call: Any = None  # while it is pending
        self.future: GroupFuture[Any] | None = future  # None after the call has ended: avoids a reference cycle
        self.key = key
        self.value: Any = None
        self.error: BaseException | None = None
        self.place = -1  # the index of the worker, for an item of a map
        self.is_gone = False  # the worker gets no more items

    def follow(self, future: Future[Any]) -> None:
        """Complete when `future` completes, with its result."""
        self.call = future.call
        future.add_done_callback(lambda _: complete(self, future.value))

    def set_result(self, result: Any) -> None:
        self.value = result
        self._end()

    def set_exception(self, result: Any) -> None:
        self.error = without_frames(result)
        self._end()

    def _end(self) -> None:
        future, self.future, self.call = self.future, None, None
        assert future is not None
        future._tell(self)

    def outcome(self, agent: Agent) -> Any:
        """Return the value, or the error, for use by this thread."""
        if self.error is not None:
            return fresh(self.error)
        agent.streams.adopt(self.value)
        return self.value


class GroupFuture(Future[T]):
    """A future of the list of the results of a group's workers. Methods return the first ones, or results by worker.

    `workers` are the names of the called workers, as they were in that `version` of their group. If some fail, `wait`
    raises a GroupError once all have ended.

    Example:
        >>> future = rpc.group(["worker0", "worker1"]).rpc_async(pow, (2, 3))
        >>> for name, value in sorted(future.as_completed()):
        ...     print(name, value)
        worker0 8
        worker1 8
        >>> future.wait()
        [8, 8]
    """

    def __init__(self, agent: Any, version: int, workers: Sequence[str], keys: Iterable[Key], about: str) -> None:
        super().__init__()
        self.version = version
        self.workers: list[str] = list(workers)
        self.about: str = f"{about} on a group"
        self.begun: float = perf_counter()
        self._agent: Agent = agent  # its type is not part of the public API
        self._function = about
        self._slots = [ResultSlot(self, key) for key in keys]
        self._lock = threading.Lock()  # guards the two fields below
        self._come: list[ResultSlot] = []  # the slots that have ended, in that order
        self._news: Signal | None = None  # set when the next slot ends; made by a thread that waits for it
        self._over = Signal()  # set after the future is done
        self.call: Helper | None = _Calls(agent, self._slots, self._over)

    def _another(self) -> Future[Any]:
        return Future()

    def _begin_each(self, begin: Begin, told: tuple[type[BaseException], ...] = (Exception,)) -> None:
        """Call `begin` with each slot and its number. An error of the `told` types ends the slot."""
        for number, slot in enumerate(self._slots):
            try:
                begin(slot, number)
            except told as error:
                if raised_by_handler(error):
                    raise
                slot.set_exception(error)

    def _tell(self, slot: ResultSlot) -> None:
        self._agent.streams.publish()
        with self._lock:
            self._come.append(slot)
            over = len(self._come) == len(self._slots)
            # Take the signal in the same step as the arrival is added: see `_awaited`.
            news, self._news = self._news, None
        if news is not None:
            news.set_result()
        if over:
            self.call = None
            self._end()
            # After the future is done: a thread that waits for `_over` then reads the results.
            self._over.set_result()

    def _stop(self) -> bool:
        """Make no further calls, and end their slots. Return whether there were any."""
        return False

    def _end(self) -> None:
        if any(slot.error is not None for slot in self._slots):
            self.set_exception(self._failure())  # type: ignore[arg-type]
            return
        values = [slot.value for slot in self._slots]
        self._agent.streams.adopt(*values)
        self.set_result(values)  # type: ignore[arg-type]

    def _failure(self) -> GroupError:
        errors = {slot.key: slot.error for slot in self._slots if slot.error is not None}
        results = {slot.key: slot.value for slot in self._slots if slot.future is None and slot.error is None}
        return group_error(self._function, errors, len(self._slots), results)

    # Public API

    def as_completed(self) -> CompletionIterator:
        """Iterate over names and values, or errors, in the order of arrival: with `for`, or `async for`."""
        self._check_has_several()
        return CompletionIterator(self)

    @folded
    def first(self, n: int = 1) -> dict[Key, Any]:
        """Wait for the first values. The other calls continue.

        Args:
            n: the number of values.

        Returns:
            The values by worker, in the order of arrival.

        Raises:
            GroupError: too many calls failed, so there are fewer than `n` values.
        """
        self._check_has_several()
        checks.count("n", n, 1, len(self._slots), "a number of the calls")
        found: dict[Key, Any] = {}
        for slot in CompletionIterator(self).slots():
            if slot.error is None:
                found[slot.key] = slot.outcome(self._agent)
                if len(found) == n:
                    return found
        raise self._failure()

    def results(self) -> dict[Key, Any]:
        """Wait for all calls. Return the values of the successful ones, by worker."""
        self._check_has_several()
        self._wait_for_all()
        return {slot.key: slot.outcome(self._agent) for slot in self._slots if slot.error is None}

    def errors(self) -> dict[Key, BaseException]:
        """Wait for all calls. Return the errors of the failed ones, by worker."""
        self._wait_for_all()
        return {slot.key: slot.outcome(self._agent) for slot in self._slots if slot.error is not None}

    def _check_has_several(self) -> None:
        """Raise UsageError if the workers' values were reduced to one."""

    def _wait_for_all(self) -> None:
        self.heed()
        call = self.call  # loaded once: another thread clears it, and then completes this future
        if call is not None:
            call.help()
        elif not self.done():
            self._agent.wait_for(self._over)

    def __repr__(self) -> str:
        there = len(self._come)
        failed = sum(slot.error is not None for slot in self._come)
        state = "done" if there == len(self._slots) else f"{there} of {len(self._slots)} are there"
        return f"<GroupFuture of {self._function}: {state}{f', {failed} failed' if failed else ''}>"


def group_error(function: str, errors: dict[Key, BaseException], asked: int, results: dict[Key, Any]) -> GroupError:
    error = GroupError(summary(f"{function} failed for {len(errors)} of {asked}:", errors), errors, results)
    error.__cause__ = first_cause(errors)
    return error


class _Calls:
    """The calls of a group's future, for a thread that waits for it. A reference to the future would make a cycle."""

    def __init__(self, agent: Agent, slots: Sequence[ResultSlot], over: Signal) -> None:
        self._agent = agent
        self._slots = slots
        self._over = over

    def help(self) -> None:
        """Wait for all calls. This thread reads from the connections where it can."""
        for slot in self._slots:
            call = slot.call
            if call is not None:
                call.help()
        self._agent.wait_for(self._over)

    def cancel(self) -> bool:
        future = next((future for slot in self._slots if (future := slot.future) is not None), None)
        # First: a call that ends during the cancel must not be followed by the worker's next item.
        stopped = future is not None and future._stop()
        calls = [slot.call for slot in self._slots]
        cancelled = [call.cancel() for call in calls if call is not None]
        return stopped or any(cancelled)

    @property
    def in_turn(self) -> _Calls | None:
        """Return self if a method of an actor made the calls, which `awaiting` takes into account."""
        return self if self._hops() else None

    def _hops(self) -> list[NestedCall]:
        made = [getattr(slot.call, "in_turn", None) for slot in self._slots]
        return [hop for hop in made if hop is not None]

    def awaiting(self, waiter: asyncio.Future[Any]) -> Generator[Any, None, Any]:
        with ExitStack() as stack:
            for hop in self._hops():
                stack.enter_context(hop.waited_for())
            return (yield from waiter.__await__())


class CompletionIterator:
    """The results of the calls to a group, in the order of arrival. Each loop begins with the first."""

    def __init__(self, future: GroupFuture[Any]) -> None:
        self._future = future
        future.heed()

    def __iter__(self) -> Iterator[tuple[Key, Any]]:
        return ((slot.key, slot.outcome(self._future._agent)) for slot in self.slots())

    def slots(self) -> Iterator[ResultSlot]:
        future = self._future
        for number in range(len(future._slots)):
            while (news := self._awaited(number)) is not None:
                future._agent.wait_for(news)
            yield future._come[number]
        future._wait_for_all()  # the thread that brought the last result may not have completed the future yet

    async def __aiter__(self) -> AsyncIterator[tuple[Key, Any]]:
        future = self._future
        for number in range(len(future._slots)):
            while (news := self._awaited(number)) is not None:
                await completion_of(news)
            slot = future._come[number]
            yield slot.key, slot.outcome(future._agent)
        if not future.done():
            await completion_of(future)

    def _awaited(self, number: int) -> Signal | None:
        """Return a signal for the end of the next call, or None if more than `number` calls have ended."""
        future = self._future
        # Compare and make the signal in one step. Otherwise the call could end between the two: the ending thread would
        # find no signal to set, and this thread would wait for one that is never set.
        with future._lock:
            if number < len(future._come):
                return None
            if future._news is None:
                future._news = Signal()
            return future._news


# Maps


def zipped(items: Sequence[Iterable[Any]]) -> list[tuple[Any, ...]]:
    """Return the arguments of each call of a map; raise InvalidArgument if there are no items, or the lists have
    different lengths."""
    for each in items:
        if not checks.is_iterable(each):
            raise InvalidArgument(f"map takes lists of items, not {checks.short_repr(each)}")
    try:
        calls = list(zip(*items, strict=True))
    except ValueError as error:
        raise InvalidArgument("map got lists of different lengths: each call uses one item of each list") from error
    if not calls:
        raise InvalidArgument("map has no items: give it at least one")
    return calls


class MapFuture(GroupFuture[list[Any]]):
    """A future of a map. Each worker has one item at a time, and gets the next when it has finished one."""

    def __init__(self, agent: Agent, version: int, workers: Sequence[str], items: int, about: str, call: Begin) -> None:
        """`call(slot, place)` sends an item to the worker at that index."""
        super().__init__(agent, version, workers, range(items), about)
        self._call = call
        self._left = deque(self._slots)  # items not assigned yet; guarded by the lock, as is
        self._living = min(items, len(workers))  # the number of workers that have an item, or had one and may get more
        self._is_stopped = False  # stored before the calls to cancel are read
        self._turn = threading.local()  # `ended`: the slots that the loop of `_tell` on this thread goes on with
        self._context = CallerContext()  # other threads start later calls in the context of the current code

    def begin(self) -> MapFuture:
        try:
            # Take all first items before any call: else a fast worker could get an item meant for the next worker.
            for place, slot in enumerate([self._left.popleft() for _ in range(self._living)]):
                self._give(slot, place)
        except BaseException:
            self.heed()
            self.cancel()
            raise
        return self

    def _give(self, slot: ResultSlot, place: int) -> None:
        slot.place = place
        try:
            self._call(slot, place)
        except BaseException as error:
            # An error of the first item is raised to the caller of `map`: it is most likely an error of the program,
            # and no call was made yet. Later items end with their error like those that failed at a worker.
            if slot.key == 0 and not isinstance(error, GONE):
                raise
            interrupted = raised_by_handler(error)
            # A handler of a signal has raised this error, and it is raised again below. No further item must be sent
            # before that.
            slot.is_gone = slot.is_gone or interrupted
            slot.set_exception(error)
            if interrupted:
                raise
        # `cancel` stores the flag, then reads the calls in flight. It may have missed this one.
        if self._is_stopped and (call := slot.call) is not None:
            call.cancel()

    def _stop(self) -> bool:
        with self._lock:
            self._is_stopped = True
            left = list(self._left)
            self._left.clear()
        for slot in left:
            slot.set_exception(CallCancelled(f"{self.about} was cancelled before this item was sent"))
        return bool(left)

    def _tell(self, slot: ResultSlot) -> None:
        """Send the worker its next item before anything else, to keep it busy."""
        ended: deque[ResultSlot] | None = getattr(self._turn, "ended", None)
        if ended is not None:
            # A call below in this thread ended the slot. The loop there goes on with it: a recursion would be too deep
            # for many items that end at once, such as those that cannot be pickled.
            ended.append(slot)
            return
        self._turn.ended = ended = deque([slot])
        try:
            while ended:
                slot = ended.popleft()
                try:
                    self._hand_on(slot)
                finally:
                    super()._tell(slot)
        finally:
            del self._turn.ended
            # Some are left only if a handler of a signal has raised an error.
            for each in ended:
                self._tell(each)

    def _hand_on(self, slot: ResultSlot) -> None:
        """Give the next item to the worker of an ended one. If no worker is left, end the remaining items."""
        lost: list[ResultSlot] = []
        upcoming = None
        # A slot without a place was never given to a worker, so none is free for the next item: see `lost`.
        if slot.place >= 0:
            with self._lock:
                # A worker whose call was cancelled gets no more items, either: `cancel` cancels the calls in flight,
                # and must not be followed by the remaining items.
                if slot.is_gone or isinstance(slot.error, (*GONE, CallCancelled)):
                    self._living -= 1
                    if not self._living:  # no worker is left for the remaining items
                        lost = list(self._left)
                        self._left.clear()
                elif self._left:
                    upcoming = self._left.popleft()
        for each in lost:
            each.set_exception(slot.error)
        if upcoming is not None:
            # Not under the lock: this sends a call, and may end the slot at once with an error.
            self._context.run(self._give, upcoming, slot.place)
