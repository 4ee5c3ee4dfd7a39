"""Actors: objects whose methods, called from elsewhere, run one after the other.

Whose turn it is is decided as calls are opened, which happens for each caller in the order in which its calls came. A
call that has to wait is a heap of opened arguments, and no thread. Of several callers, each in turn gets a call in.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from telegrad._core import checks
from telegrad._core.agent.agent import Agent
from telegrad._core.agent.incoming import Incoming
from telegrad._core.atfork import in_child, renewed
from telegrad._core.calls.call_context import Hops, Scene, Turn, entered, hops
from telegrad._core.calls.futures import Signal
from telegrad._core.references.box import Box
from telegrad._core.references.letters import Id
from telegrad._core.references.table import ReferenceTable
from telegrad._core.worker.batching import Batched
from telegrad._core.worker.values import METHODS, TURNS, Method, MethodOfEach, methods
from telegrad.errors import RRefError, UsageError

C = TypeVar("C", bound=type)

_MARK = "_telegrad_actor"

_lock = renewed(threading.Lock())  # guards both below
_used = False  # there is a class of actors in this process
_all: weakref.WeakSet[Actors] = weakref.WeakSet()
in_child(_all.clear)  # those of the parent's workers


def actor(cls: C) -> C:
    """Mark a class: methods of one object that are called through references run one after the other.

    Each caller's calls run in the order in which it made them; of several callers none waits for all calls of
    another. Calls that wait hold no thread. A method that is an `async def` has its turn until it ends. One that is
    marked with `functions.async_execution` has its turn until it returns its future, and one in batches has none.
    A method that yields (`rpc_stream`) has a turn for each item: others may run while it stands at a `yield`.

    A method must not wait for a call that comes back to its own object: that call is refused with a UsageError.

    Args:
        cls: the class; objects of it that nobody calls from elsewhere are as before.

    Returns:
        The same class.

    Raises:
        UsageError: it is no class, or one that cannot be changed, as those of Python itself.

    Example:
        >>> @rpc.actor
        ... class Counter:
        ...     value = 0
        ...     def add(self, number):
        ...         self.value += number
        ...         return self.value
        >>> counter = rpc.remote("worker1", Counter)
        >>> [future.wait() for future in [counter.rpc_async().add(1) for _ in range(3)]]
        [1, 2, 3]
    """
    if not isinstance(cls, type):
        raise UsageError(
            f"cls: @rpc.actor marks a class, not {checks.shown(cls)}: write it above `class {type(cls).__name__}:`"
        )
    try:
        setattr(cls, _MARK, _mark())
    except TypeError as error:  # a class of C
        raise UsageError(
            f"cls: {cls.__name__} cannot be changed, so not marked either: derive a class of your own from it"
        ) from error
    return cls


class _Mark:
    """Arms the process to which a class comes by value, too."""

    def __reduce__(self) -> Any:
        return _mark, ()


def _mark() -> _Mark:
    global _used
    with _lock:
        _used = True
        methods.may_take_turns()
        for each in _all:
            each.arm()
    return _Mark()


def steps_of(agent: Agent, value: Any, stream: Hashable, method: str) -> Callable[[], Step] | None:
    """What gives a stream of a method its turns, where the value is an actor."""
    if not hasattr(type(value), _MARK):
        return None
    with _lock:
        actors = next(each for each in _all if each.agent is agent)
    return lambda: actors.step(value, stream, method)


def serve(agent: Agent, references: ReferenceTable) -> None:
    """Have the actors of a worker take turns."""
    made = Actors(agent, references)
    with _lock:
        _all.add(made)
        if _used:
            made.arm()


class Step:
    """What a method that yields runs from one item to the next: it has turns as calls have, and waits in its thread."""

    def __init__(self, stream: Hashable, method: str) -> None:
        self.key = stream
        self.method = method
        self.hops: Hops = hops()
        self.scene: Scene | None = None
        self.on_end: Callable[[], None] = lambda: None
        self.begins = Signal()  # or is refused

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Inside, it runs; once it has begun."""
        self.begins.wait()
        try:
            with entered(self.scene):
                yield
        finally:
            self.on_end()


class _Queue:
    """The calls of one busy actor."""

    def __init__(self, value: Any) -> None:
        self.value = value  # so that its id remains its own
        self.turn: Turn | None = None  # of the method that runs
        self.method = ""
        self._waiting: dict[Hashable, deque[Incoming | Step]] = {}  # by caller; whose turn is next comes first

    def add(self, arrival: Incoming | Step) -> None:
        caller = arrival.key if isinstance(arrival, Step) else arrival.caller.identity
        self._waiting.setdefault(caller, deque()).append(arrival)

    def next(self) -> Incoming | Step | None:
        """The first call of the caller who has waited for longest."""
        caller = next(iter(self._waiting), None)
        if caller is None:
            return None
        calls = self._waiting.pop(caller)
        arrival = calls.popleft()
        if calls:
            self._waiting[caller] = calls
        return arrival

    def take_for(self, hop: tuple[str, int]) -> list[Incoming | Step]:
        """Those for the sake of a hop, which wait no longer."""
        found: list[Incoming | Step] = []
        for caller, calls in list(self._waiting.items()):
            found += [each for each in calls if hop in each.hops]
            kept = deque(each for each in calls if hop not in each.hops)
            if kept:
                self._waiting[caller] = kept
            else:
                del self._waiting[caller]
        return found


class Actors:
    """Those of one worker."""

    def __init__(self, agent: Agent, references: ReferenceTable) -> None:
        self.agent = agent
        self._references = references
        self._numbers = itertools.count()
        self._lock = threading.Lock()  # guards both below, and the queues in them
        self._queues: dict[int, _Queue] = {}  # of actors that are busy, by the ids of the objects
        self._coming: dict[Id, deque[Incoming]] = {}  # calls of values that are not made yet
        self._heeded = TURNS
        self._server = agent.keep_door(self)

    def arm(self) -> None:
        """There are actors in this process: heed also the calls of those who know of none."""
        self._heeded = METHODS
        self._server.orders = True

    # What the server asks

    def heeds(self, name: bytes) -> bool:
        return name.startswith(self._heeded)

    def admit(self, arrival: Incoming) -> bool:
        if isinstance(arrival.function, MethodOfEach):
            ids, *args = arrival.args
            arrival.function, arrival.args = arrival.function.one, (*ids[self.agent.name], *args)
        maker, number = arrival.args[:2]
        try:
            box = self._references.box((maker, number))
        except RRefError:
            return True  # and fails
        return not self._waits_for_value((maker, number), box, arrival) and self._may_run(box.value, arrival)

    def _waits_for_value(self, ref: Id, box: Box, arrival: Incoming) -> bool:
        with self._lock:
            coming = self._coming.get(ref)
            first = coming is None
            if coming is None:
                if box.full:
                    return False
                coming = self._coming[ref] = deque()
            coming.append(arrival)
        if first:
            self.agent.later(lambda _: box.opening().add_done_callback(lambda _: self._has_come(ref, box)), None)
        return True

    def _may_run(self, value: Any, arrival: Incoming) -> bool:
        """Whether a call may run now; else its turn will come."""
        if not _takes_turns(value, arrival):
            return True
        with self._lock:
            return self._enqueue(value, arrival)

    def step(self, value: Any, stream: Hashable, method: str) -> Step:
        """The next of a stream of an actor's method."""
        step = Step(stream, method)
        try:
            with self._lock:
                begins = self._enqueue(value, step)
        except UsageError as fault:
            step.begins.set_exception(fault)
        else:
            if begins:
                step.begins.set_result()
        return step

    # With the lock held

    def _enqueue(self, value: Any, arrival: Incoming | Step) -> bool:
        queue = self._queues.get(id(value))
        if queue is None:
            queue = self._queues[id(value)] = _Queue(value)
            self._begin(queue, arrival)
            return True
        if queue.turn is not None and queue.turn.awaited.intersection(arrival.hops):
            raise _deadlock(queue, arrival)
        queue.add(arrival)
        return False

    def _begin(self, queue: _Queue, arrival: Incoming | Step) -> None:
        key = f"{self.agent.incarnation}:{next(self._numbers)}"
        queue.turn = Turn(key, lambda turn, hop: self._refuse(queue, turn, hop))
        queue.method = _name_of(arrival)
        arrival.scene = Scene(arrival.hops, queue.turn)
        arrival.on_end = lambda: self._end(queue)

    # As things happen

    def _has_come(self, ref: Id, box: Box) -> None:
        """The value of a reference was made, or failed: who waited for it goes on, before others that still come."""
        while (arrival := self._next_coming(ref)) is not None:
            try:
                if self._may_run(box.value, arrival):
                    self._server.perform(arrival)
            except UsageError as fault:
                self._server.refuse(arrival, fault)

    def _next_coming(self, ref: Id) -> Incoming | None:
        with self._lock:
            coming = self._coming[ref]
            if coming:
                return coming.popleft()
            del self._coming[ref]
            return None

    def _end(self, queue: _Queue) -> None:
        """A turn is over: the next."""
        with self._lock:
            queue.turn = None
            arrival = queue.next()
            if arrival is None:
                del self._queues[id(queue.value)]
                return
            self._begin(queue, arrival)
        if isinstance(arrival, Step):
            arrival.begins.set_result()
        else:
            self._server.perform(arrival)

    def _refuse(self, queue: _Queue, turn: Turn, hop: tuple[str, int]) -> None:
        """A method begins to wait for a hop: what waits for that method for the sake of the hop would never run."""
        with self._lock:
            still = queue.turn is turn  # else what it left behind, such as a callback, waits
            refused = [(each, _deadlock(queue, each)) for each in queue.take_for(hop)] if still else []
        for arrival, error in refused:
            if isinstance(arrival, Step):
                arrival.begins.set_exception(error)
            else:
                self._server.refuse(arrival, error)


def _takes_turns(value: Any, arrival: Incoming) -> bool:
    kind = type(value)
    return hasattr(kind, _MARK) and not isinstance(getattr(kind, _name_of(arrival), None), Batched)


def _name_of(arrival: Incoming | Step) -> str:
    if isinstance(arrival, Step):
        return arrival.method
    function = arrival.function
    assert isinstance(function, Method)
    return function.__name__


def _deadlock(queue: _Queue, arrival: Incoming | Step) -> UsageError:
    kind = type(queue.value).__qualname__
    return UsageError(
        f"{kind}.{queue.method} waits for a call that calls {kind}.{_name_of(arrival)} of the same object, and an "
        "actor runs one method at a time: neither would ever end. Call the other method in place (self.method()), or "
        "do not wait for that call inside of a method"
    )
